"""A minibatch step of PPO with small networks in three launches: from the packed rollout and the
weights to the gradient, then its sum and norm, then Adam.

The policy's loss reads only the actor, the value's only the critic, so a program computes one of
the two networks for some rows: it gathers them in the random order of the epoch, runs the network,
the loss and both backwards, and keeps the gradients of all weights in registers. Its result is one
row of `partial`, laid out as FlatAdam's parameters. The sums over programs have a fixed order.

The specification is `gpurl.algorithms.ppo.PPO.learn`; the formulas are those of
`gpurl.kernels.ppo_loss`, `gpurl.nn.distributions` and `gpurl.kernels.adam`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.adam import (
    BLOCK_PARTIAL,
    AdamOptions,
    AdamState,
    begin_arguments,
    begin_step,
    finish_step,
    is_last_program,
)
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.permutation import permutation_network, permuted
from gpurl.kernels.ppo_loss import (
    LOG_2PI,
    METRICS,
    PpoOptions,
    clip,
    log_softmax,
    surrogate_and_slope,
    value_error,
)
from gpurl.kernels.random import RandomStreams
from gpurl.kernels.rollout_policy import ACTIVATIONS, run_layer

# rows of a tile, by the precision of products and the widest layer. On an H200 a minibatch of
# 32,768 rows of Chasing takes 116 us in tf32x3 and 49 us in tf32, the fastest that were tried
TILE_ROWS = {
    "tf32x3": {16: 32, 32: 32, 64: 16},
    "tf32": {16: 64, 32: 32, 64: 32},
}
# of a program. With 8 each half takes 8 of the heads' 16 columns, by an instruction of Hopper that
# reads behind its operand in shared memory, which Triton does not pad for it (triton issue 10629):
# programs with 16 rows a tile read wrong addresses under Triton 3.6
NUM_WARPS = 4
MAX_OUTPUTS = 31  # with the value, a row of the heads has 32 numbers at most
MAX_INPUTS = 64
# of every program, after its gradients: surrogate, value error, KL divergence, clip fraction,
# entropy, number of valid rows
NUM_SUMS = len(METRICS) + 1
# then the gradient by log_std
LOG_STDS_AT, SUMS = 8, 48  # where it begins, and the place of all
# results of a step: METRICS and the loss, then, from SCALARS on, the scalars of Adam with the norm
NUM_RESULTS, SCALARS, NORM = 16, 8, 11
PROCESSORS = 132  # of an H100, where there is no GPU to ask
# numbers of `partial`, columns of it, and rows of the sums that a program of the second launch adds
# at once
REDUCE_NUMBERS, REDUCE_COLUMNS, SUM_ROWS = 2048, 64, 64
GAUSSIAN = tl.constexpr(0)
SQUASHED = tl.constexpr(1)
CATEGORICAL = tl.constexpr(2)
HEADS = {"gaussian": 0, "squashed": 1, "categorical": 2}


class UpdateShape(NamedTuple):
    """Constants of the networks and of the flat parameters."""

    inputs: int  # numbers of an observation
    sizes: tuple[int, ...]  # of the hidden layers
    activation: str
    num_outputs: int  # of the actor
    head: str  # one of HEADS
    shared: bool  # one trunk for both
    # first number of each in the flat parameters
    weights: tuple[int, ...]  # of the hidden layers, [E, out, in]
    biases: tuple[int, ...]
    heads: tuple[int, int, int, int]  # actor's weight and bias, critic's weight and bias
    log_std: int  # -1 if there is none
    precision: str = "tf32x3"  # of the products, see `gpurl.kernels.rollout`


class Columns(NamedTuple):
    """First column of each in a packed row."""

    obs: int
    action: int
    log_prob: int
    value: int
    advantage: int
    returns: int
    valid: int = -1  # there is none


@triton.jit
def activation_slope(h, ACTIVATION: tl.constexpr):
    """Derivative of the activation, from its result."""
    if ACTIVATION == 0:
        return 1.0 - h * h
    elif ACTIVATION == 1:
        return tl.where(h > 0.0, 1.0, h + 1.0)
    else:
        return tl.where(h > 0.0, 1.0, 0.0)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _weight_ptrs(weight_ptr, tower, OUT: tl.constexpr, IN: tl.constexpr):
    """[OUT, IN] of one tower."""
    unit = tower * OUT + tl.arange(0, OUT)
    return weight_ptr + unit[:, None] * IN + tl.arange(0, IN)[None, :]


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _of_squash(u):
    """(log tanh'(u), its derivative by u), see `TanhGaussian`."""
    decay = tl.exp(-2.0 * tl.abs(u))
    tanh = (1.0 - decay) / (1.0 + decay)
    return (
        2.0 * (0.6931471805599453 - u - _softplus(-2.0 * u)),
        -2.0 * tl.where(u < 0.0, -tanh, tanh),
    )


@triton.jit
def actor_loss(
    output, action_ptrs, old_log_prob, advantage, valid, log_std, clip_range, entropy_coef, used,
    HEAD: tl.constexpr, NUM_OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(gradient of the policy's loss, summed over rows, by the actor's outputs [BLOCK, WIDTH]; by
    log_std [WIDTH]; surrogate, KL divergence, clip fraction and entropy of each row).

    action_ptrs: of the first action of each row; used: columns of the actor.
    """
    column = tl.arange(0, WIDTH)
    of_log_std = tl.zeros((WIDTH,), tl.float32)
    mask = (valid != 0.0)[:, None] & used[None, :]
    if HEAD == CATEGORICAL:
        log_probs, probability = log_softmax(output, used[None, :])
        entropy = -tl.sum(tl.where(used[None, :], probability * log_probs, 0.0), axis=1)
        # whole numbers, stored as float32
        action = tl.load(action_ptrs, mask=valid != 0.0, other=0.0)
        is_taken = column[None, :].to(tl.float32) == action[:, None]
        log_prob = tl.sum(tl.where(is_taken, log_probs, 0.0), axis=1)
    else:
        action = tl.load(action_ptrs[:, None] + column[None, :], mask=mask, other=0.0)
        inv_std = tl.exp(-log_std)[None, :]
        z = tl.where(mask, (action - output) * inv_std, 0.0)
        log_volume = tl.sum(tl.where(used, log_std, 0.0), axis=0) + 0.5 * LOG_2PI * NUM_OUTPUTS
        log_prob = -0.5 * tl.sum(z * z, axis=1) - log_volume
        entropy = tl.zeros((BLOCK,), tl.float32) + (log_volume + 0.5 * NUM_OUTPUTS)
        if HEAD == SQUASHED:
            log_derivative, of_action = _of_squash(action)
            squash = tl.sum(tl.where(mask, log_derivative, 0.0), axis=1)
            log_prob -= squash
            entropy += squash
    surrogate, slope, kl, clipped = surrogate_and_slope(
        log_prob, old_log_prob, advantage, clip_range
    )
    slope = -slope[:, None]
    if HEAD == CATEGORICAL:
        gradient = slope * (is_taken.to(tl.float32) - probability)
        gradient += entropy_coef * probability * (log_probs + entropy[:, None])
    else:
        gradient = slope * z * inv_std
        by_log_std = slope * (z * z - 1.0)
        if HEAD == SQUASHED:
            # the sampled action moves with output and std: u = output + std z
            gradient -= entropy_coef * of_action
            by_log_std -= entropy_coef * (1.0 + of_action * (action - output))
        of_log_std = tl.sum(tl.where(mask, by_log_std, 0.0), axis=0)
    return tl.where(mask, gradient, 0.0), of_log_std, surrogate, kl, clipped, entropy


@triton.jit
def sum_of_valid(x, valid):
    """By selection: 0 times infinity is NaN."""
    return tl.sum(tl.where(valid != 0.0, x, 0.0), axis=0)


@triton.jit(do_not_specialize=["first", "count", "size", "a", "b"])
def ppo_gradient_kernel(
    parameters_ptr, packed_ptr, key_ptr, gamma_ptr, step_ptr, clip_range_ptr, entropy_coef_ptr,
    partial_ptr,
    first, count, size, a, b, partial_width,
    value_coef, clip_range_value, min_log_std, max_log_std,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, SIZES: tl.constexpr, LAST: tl.constexpr,
    FAN_IN: tl.constexpr, ROWS_IN: tl.constexpr, ACTIVATION: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, HEAD: tl.constexpr, CLIP_VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, ROW_WIDTH: tl.constexpr,
    WEIGHTS: tl.constexpr, BIASES: tl.constexpr, HEADS_AT: tl.constexpr, LOG_STD: tl.constexpr,
    NUM_PARAMETERS: tl.constexpr, LOG_STDS: tl.constexpr,
    ROUNDS: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (g, e) adds the gradients of network e, over every G-th tile of the minibatch, into
    row g of partial [G, partial_width]; network 0 is the actor, 1 the critic, or 0 both.

    The minibatch is positions first .. first + count - 1 of the epoch's order. Gradients and sums
    are not divided by the number of rows.
    """
    tower = tl.program_id(1)
    is_actor = tower == 0
    is_critic = tower == tl.num_programs(1) - 1
    # heads: columns 0 .. A - 1 belong to the actor, column A to the critic
    column = tl.arange(0, WIDTH)
    of_actor = (column < NUM_OUTPUTS) & is_actor
    of_critic = (column == NUM_OUTPUTS) & is_critic
    k = tl.arange(0, LAST)
    head_at = tl.where(of_critic, HEADS_AT[2], HEADS_AT[0] + column * LAST)
    head_bias_at = tl.where(of_critic, HEADS_AT[3], HEADS_AT[1] + column)
    in_head = of_actor | of_critic
    log_std = tl.zeros((WIDTH,), tl.float32)
    if HEAD != CATEGORICAL:
        log_std = tl.load(parameters_ptr + LOG_STD + column, mask=column < NUM_OUTPUTS, other=0.0)
        log_std = clip(log_std, min_log_std, max_log_std)
    clip_range = tl.load(clip_range_ptr)
    entropy_coef = tl.load(entropy_coef_ptr)

    # sums over tiles; those of weights are transposed, [in, out]
    weight_sums = ()
    bias_sums = ()
    for layer in tl.static_range(len(SIZES)):
        zeros = _zeros(ROWS_IN[layer], SIZES[layer])
        weight_sums = weight_sums + (zeros,)
        bias_sums = bias_sums + (tl.sum(zeros, axis=0),)
    head_sum = tl.zeros((LAST, WIDTH), tl.float32)
    head_bias_sum = tl.zeros((WIDTH,), tl.float32)
    log_std_sum = tl.zeros((WIDTH,), tl.float32)
    surrogate_sum = tl.zeros((), tl.float32)
    value_sum = tl.zeros((), tl.float32)
    kl_sum = tl.zeros((), tl.float32)
    clipped_sum = tl.zeros((), tl.float32)
    entropy_sum = tl.zeros((), tl.float32)
    valid_sum = tl.zeros((), tl.float32)

    # without `disable_licm` the weights would stay in registers from tile to tile
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0), num_stages=1, disable_licm=True
    ):
        # the rows of this tile, in the order of the epoch
        lane = tile * BLOCK + tl.arange(0, BLOCK)
        inside = lane < count
        position = tl.where(inside, lane + first, first)
        row = permuted(position, key_ptr, gamma_ptr, step_ptr, 0, size, a, b, ROUNDS)
        row_ptrs = packed_ptr + row * ROW_WIDTH
        valid = inside.to(tl.float32)
        if COLUMNS[6] >= 0:
            valid = tl.load(row_ptrs + COLUMNS[6], mask=inside, other=0.0)

        # forward
        d = tl.arange(0, PADDED)
        x_ptrs = row_ptrs[:, None] + COLUMNS[0] + d[None, :]
        x = tl.load(x_ptrs, mask=inside[:, None] & (d < INPUTS)[None, :], other=0.0)
        hidden = (x,)
        for layer in tl.static_range(len(SIZES)):
            hidden = hidden + (
                run_layer(
                    hidden[layer], parameters_ptr + WEIGHTS[layer], parameters_ptr + BIASES[layer],
                    tower, FAN_IN[layer], ROWS_IN[layer], SIZES[layer], ACTIVATION, PRECISION,
                ),
            )  # fmt: skip
        head_ptrs = parameters_ptr + head_at[:, None] + k[None, :]
        head = tl.load(head_ptrs, mask=in_head[:, None], other=0.0)
        head_bias = tl.load(parameters_ptr + head_bias_at, mask=in_head, other=0.0)
        output = tl.dot(hidden[len(SIZES)], tl.trans(head), input_precision=PRECISION)
        output += head_bias[None, :]

        # losses, and their gradients by the outputs
        gradient = tl.zeros((BLOCK, WIDTH), tl.float32)
        if is_actor:
            old_log_prob = tl.load(row_ptrs + COLUMNS[2], mask=inside, other=0.0)
            advantage = tl.load(row_ptrs + COLUMNS[4], mask=inside, other=0.0)
            gradient, of_log_std, surrogate, kl, clipped, entropy = actor_loss(
                output, row_ptrs + COLUMNS[1], old_log_prob, advantage, valid, log_std, clip_range,
                entropy_coef, of_actor, HEAD, NUM_OUTPUTS, BLOCK, WIDTH,
            )  # fmt: skip
            log_std_sum += of_log_std
            surrogate_sum += sum_of_valid(surrogate, valid)
            kl_sum += sum_of_valid(kl, valid)
            clipped_sum += sum_of_valid(clipped, valid)
            if HEAD != GAUSSIAN:  # whose entropy is the same in all rows
                entropy_sum += sum_of_valid(entropy, valid)
        if is_critic:
            value = tl.sum(tl.where(of_critic[None, :], output, 0.0), axis=1)
            returns = tl.load(row_ptrs + COLUMNS[5], mask=inside, other=0.0)
            old_value = tl.load(row_ptrs + COLUMNS[3], mask=inside, other=0.0)
            square, half_slope = value_error(
                value, returns, old_value, clip_range_value, CLIP_VALUE
            )
            by_value = tl.where(valid != 0.0, half_slope * (2.0 * value_coef), 0.0)
            gradient += tl.where(of_critic[None, :], by_value[:, None], 0.0)
            value_sum += sum_of_valid(square, valid)
            valid_sum += tl.sum(valid, axis=0)

        # backward: through the heads, then layer after layer
        head_sum += tl.dot(tl.trans(hidden[len(SIZES)]), gradient, input_precision=PRECISION)
        head_bias_sum += tl.sum(gradient, axis=0)
        of_hidden = tl.dot(gradient, head, input_precision=PRECISION)
        new_weight_sums = ()
        new_bias_sums = ()
        for layer in tl.static_range(len(SIZES) - 1, -1, -1):
            z_gradient = of_hidden * activation_slope(hidden[layer + 1], ACTIVATION)
            by_weight = tl.dot(tl.trans(hidden[layer]), z_gradient, input_precision=PRECISION)
            new_weight_sums = (weight_sums[layer] + by_weight,) + new_weight_sums
            new_bias_sums = (bias_sums[layer] + tl.sum(z_gradient, axis=0),) + new_bias_sums
            if layer > 0:
                weight_ptrs = _weight_ptrs(
                    parameters_ptr + WEIGHTS[layer], tower, SIZES[layer], SIZES[layer - 1]
                )
                of_hidden = tl.dot(z_gradient, tl.load(weight_ptrs), input_precision=PRECISION)
        weight_sums = new_weight_sums
        bias_sums = new_bias_sums

    # this network's part of a row of `partial`
    out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * partial_width
    for layer in tl.static_range(len(SIZES)):
        unit = tower * SIZES[layer] + tl.arange(0, SIZES[layer])
        below = tl.arange(0, ROWS_IN[layer])
        weight_ptrs = out_ptr + WEIGHTS[layer] + unit[:, None] * FAN_IN[layer] + below[None, :]
        is_used = (below < FAN_IN[layer])[None, :]
        tl.store(weight_ptrs, tl.trans(weight_sums[layer]), mask=is_used)
        tl.store(out_ptr + BIASES[layer] + unit, bias_sums[layer])
    tl.store(out_ptr + head_at[:, None] + k[None, :], tl.trans(head_sum), mask=in_head[:, None])
    tl.store(out_ptr + head_bias_at, head_bias_sum, mask=in_head)
    sums_ptr = out_ptr + NUM_PARAMETERS
    if is_actor:
        if HEAD != CATEGORICAL:
            log_std_ptrs = sums_ptr + LOG_STDS + column
            tl.store(log_std_ptrs, log_std_sum, mask=column < NUM_OUTPUTS)
        tl.store(sums_ptr, surrogate_sum)
        tl.store(sums_ptr + 2, kl_sum)
        tl.store(sums_ptr + 3, clipped_sum)
        tl.store(sums_ptr + 4, entropy_sum)
    if is_critic:
        tl.store(sums_ptr + 1, value_sum)
        tl.store(sums_ptr + 5, valid_sum)


@triton.jit
def _column_sums(partial_ptr, column, inside, G, partial_width, ROWS: tl.constexpr):
    """Sums of columns over the G rows of `partial`, in a fixed order."""
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, column.shape[0]), tl.float32)
    for start in range(0, G, ROWS):
        ptrs = partial_ptr + (start + row)[:, None].to(tl.int64) * partial_width + column[None, :]
        sums += tl.load(ptrs, mask=(start + row < G)[:, None] & inside[None, :], other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def ppo_reduce_kernel(
    partial_ptr, sums_ptr, parameters_ptr, entropy_coef_ptr, gradient_ptr, square_ptr,
    ticket_ptr, adam_step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr, counts_ptr,
    first_losses_ptr,
    G, partial_width, P, sums_width, value_coef, min_log_std, max_log_std, max_norm, largest_norm,
    NUM_PARAMETERS: tl.constexpr, NUM_OUTPUTS: tl.constexpr, HEAD: tl.constexpr,
    LOG_STD: tl.constexpr, LOG_STDS: tl.constexpr, CLIP: tl.constexpr,
    ROWS: tl.constexpr, SUM_ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_PARTIAL: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCK columns of the G rows of `partial` and divides by the number of valid
    rows: a part of the gradient. The last one adds the P rows of `sums` instead: the gradient by
    log_std, metrics and loss [6]. The last program to end begins the step of Adam.
    """
    entropy_coef = tl.load(entropy_coef_ptr)
    sums_at = tl.arange(0, 8)
    sums = _column_sums(sums_ptr, sums_at, sums_at < 6, P, sums_width, SUM_ROWS)
    count = tl.sum(tl.where(sums_at == 5, sums, 0.0), axis=0)
    scale = 1.0 / tl.maximum(count, 1.0)
    square = tl.zeros((), tl.float64)
    if tl.program_id(0) * BLOCK < NUM_PARAMETERS:
        # a part of the gradient
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < NUM_PARAMETERS
        if HEAD != CATEGORICAL:
            inside = inside & ((column < LOG_STD) | (column >= LOG_STD + NUM_OUTPUTS))
        gradient = _column_sums(partial_ptr, column, inside, G, partial_width, ROWS) * scale
        tl.store(gradient_ptr + column, gradient, mask=inside)
        wide = gradient.to(tl.float64)
        square = tl.sum(wide * wide, axis=0)
    else:
        means = sums * scale
        index = tl.arange(0, WIDTH)
        used = index < NUM_OUTPUTS
        if HEAD != CATEGORICAL:
            # the gradient by log_std; only one at or inside its limits has any
            log_std = tl.load(parameters_ptr + LOG_STD + index, mask=used, other=0.0)
            bounded = clip(log_std, min_log_std, max_log_std)
            total = _column_sums(sums_ptr, LOG_STDS + index, used, P, sums_width, SUM_ROWS)
            of_entropy = entropy_coef if HEAD == GAUSSIAN else 0.0
            by_log_std = tl.where(used & (log_std == bounded), total * scale - of_entropy, 0.0)
            tl.store(gradient_ptr + LOG_STD + index, by_log_std, mask=used)
            wide_by_log_std = by_log_std.to(tl.float64)
            square = tl.sum(wide_by_log_std * wide_by_log_std, axis=0)
        # metrics and loss
        if HEAD == GAUSSIAN:
            deviation = tl.where(used, bounded, 0.0)
            entropy = tl.sum(deviation, axis=0) + 0.5 * (1.0 + LOG_2PI) * NUM_OUTPUTS
            means = tl.where(sums_at == 4, entropy, means)
        coefficient = tl.where(sums_at == 0, -1.0, tl.where(sums_at == 1, value_coef, 0.0))
        coefficient = tl.where(sums_at == 4, -entropy_coef, coefficient)
        of_loss = (sums_at < 2) | (sums_at == 4)
        loss = tl.sum(tl.where(of_loss, coefficient * means, 0.0), axis=0)
        tl.store(loss_ptr + sums_at, tl.where(sums_at == 5, loss, means), mask=sums_at < 6)
    tl.store(square_ptr + tl.program_id(0), square)
    if is_last_program(ticket_ptr):
        begin_step(
            square_ptr, adam_step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr, counts_ptr,
            first_losses_ptr, tl.num_programs(0), 6, max_norm, largest_norm,
            CLIP, True, BLOCK_PARTIAL,
        )  # fmt: skip


def tile_rows(shape: UpdateShape) -> int:
    """Rows of a tile."""
    # more registers for the first layer and the heads
    is_large = max(shape.inputs, shape.num_outputs + 1) > 16
    return 16 if is_large else TILE_ROWS[shape.precision][max(shape.sizes)]


def update_constants(shape: UpdateShape, size: int, num_parameters: int) -> dict[str, Any]:
    """The constexprs of the first kernel; size: rows of the rollout."""
    padded = max(triton.next_power_of_2(shape.inputs), 16)  # tl.dot needs 16
    return {
        "INPUTS": shape.inputs,
        "PADDED": padded,
        "SIZES": shape.sizes,
        "LAST": shape.sizes[-1],
        "FAN_IN": (shape.inputs, *shape.sizes[:-1]),
        "ROWS_IN": (padded, *shape.sizes[:-1]),
        "ACTIVATION": ACTIVATIONS[shape.activation],
        "NUM_OUTPUTS": shape.num_outputs,
        "HEAD": HEADS[shape.head],
        "WEIGHTS": shape.weights,
        "BIASES": shape.biases,
        "HEADS_AT": shape.heads,
        "LOG_STD": shape.log_std,
        "NUM_PARAMETERS": num_parameters,
        "LOG_STDS": LOG_STDS_AT,
        "ROUNDS": permutation_network(size)[2],
        "PRECISION": shape.precision,
        "WIDTH": max(triton.next_power_of_2(shape.num_outputs + 1), 16),
        "BLOCK": tile_rows(shape),
        "num_warps": NUM_WARPS,
    }


def num_groups(shape: UpdateShape, count: int, device: torch.device) -> int:
    """Programs of each network: as many as run at once, two on each multiprocessor, if there are
    rows enough.
    """
    processors = PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = processors * 2 // (1 if shape.shared else 2)
    return max(1, min(programs, triton.cdiv(count, tile_rows(shape))))


class PpoUpdate:
    """The memory of the minibatch steps of one optimiser, reused by all of them. Of a subclass
    `launch_gradients` is different.
    """

    reduce_columns = REDUCE_COLUMNS

    def __init__(
        self,
        shape: UpdateShape,
        options: PpoOptions,
        state: AdamState,
        gradient: Tensor,
        learning_rate: Tensor,
        adam: AdamOptions,
    ) -> None:
        """state, gradient, learning_rate, adam: as `gpurl.kernels.adam.adam_step` gets them; the
        parameters are laid out as `shape` says, with zeros between them. ValueError for a shape
        that the kernel cannot train.
        """
        if obstacle := self.obstacle_of(shape):
            raise ValueError(f"no fused update: {obstacle}")
        self.shape = shape
        self.options = options
        self.state = state
        self.gradient = gradient
        self.learning_rate = learning_rate
        self.adam = adam
        self.num_parameters = state.parameters.numel()
        # the numbers between parameters stay 0
        self.partial = torch.zeros(
            self.most_groups(), self.num_parameters + SUMS, device=gradient.device
        )

    @staticmethod
    def obstacle_of(shape: UpdateShape) -> str:
        """The reason why the kernel cannot train networks of this shape, or ""."""
        if not shape.sizes:
            return "it needs a hidden layer"
        tiles = TILE_ROWS[shape.precision]
        for size in shape.sizes:
            if size not in tiles:
                return f"it takes layers of {', '.join(map(str, tiles))} units, not of {size}"
        if shape.num_outputs > MAX_OUTPUTS:
            return f"it takes {MAX_OUTPUTS} actions or logits, not {shape.num_outputs}"
        if shape.inputs > MAX_INPUTS:
            return f"it takes {MAX_INPUTS} observations, not {shape.inputs}"
        return ""

    def most_groups(self) -> int:
        """Rows of `partial`."""
        return num_groups(self.shape, 1 << 30, self.gradient.device)

    def step(
        self,
        packed: Tensor,
        columns: Columns,
        streams: RandomStreams,
        first: int,
        count: int,
        clip_range: Tensor,
        entropy_coef: Tensor,
        results: Tensor,
    ) -> None:
        """One minibatch step on rows order[first : first + count] of packed [S, W] float32, where
        order is `permutation(*streams, 0, S)`.

        clip_range, entropy_coef: 0-d float32 on the device. results: [NUM_RESULTS] float32, gets
        METRICS, the loss and, at NORM, the norm of the gradient before clipping.
        """
        shape, options, adam = self.shape, self.options, self.adam
        # gradients of all rows
        groups, sums = self.launch_gradients(
            packed, columns, streams, first, count, clip_range, entropy_coef
        )
        # their sums, the metrics and the norm
        losses, scalars = results[:NUM_SUMS], results[SCALARS:]
        programs = triton.cdiv(self.num_parameters, self.reduce_columns) + 1
        squares = torch.empty(programs, dtype=torch.float64, device=packed.device)
        ppo_reduce_kernel[(programs,)](
            self.partial, sums, self.state.parameters, entropy_coef, self.gradient, squares,
            *begin_arguments(self.state, self.learning_rate, adam, scalars, losses),
            groups, self.partial.shape[1], sums.shape[0], sums.stride(0), options.value_coef,
            options.min_log_std, options.max_log_std, adam.max_grad_norm or 1.0, adam.largest_norm,
            NUM_PARAMETERS=self.num_parameters, NUM_OUTPUTS=shape.num_outputs,
            HEAD=HEADS[shape.head], LOG_STD=shape.log_std, LOG_STDS=LOG_STDS_AT,
            CLIP=adam.max_grad_norm is not None, ROWS=REDUCE_NUMBERS // self.reduce_columns,
            SUM_ROWS=SUM_ROWS, BLOCK=self.reduce_columns,
            WIDTH=triton.next_power_of_2(shape.num_outputs), BLOCK_PARTIAL=BLOCK_PARTIAL,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        # Adam
        finish_step(self.state, self.gradient, self.learning_rate, adam, scalars)

    def launch_gradients(
        self,
        packed: Tensor,
        columns: Columns,
        streams: RandomStreams,
        first: int,
        count: int,
        clip_range: Tensor,
        entropy_coef: Tensor,
    ) -> tuple[int, Tensor]:
        """Write gradients, not divided by the number of rows, to `partial`; arguments as of `step`.
        Returns how many of its rows add up to the gradient, and the sums over rows [P, SUMS].
        """
        shape, options = self.shape, self.options
        size, row_width = packed.shape
        a, b, _ = permutation_network(size)
        groups = num_groups(shape, count, packed.device)
        ppo_gradient_kernel[(groups, 1 if shape.shared else 2)](
            self.state.parameters, packed, *streams, clip_range, entropy_coef, self.partial,
            first, count, size, a, b, self.partial.shape[1],
            options.value_coef, options.clip_range_value or 0.0,
            options.min_log_std, options.max_log_std,
            COLUMNS=tuple(columns), ROW_WIDTH=row_width,
            CLIP_VALUE=options.clip_range_value is not None,
            **update_constants(shape, size, self.num_parameters),
        )  # fmt: skip
        return groups, self.partial[:groups, self.num_parameters :]
