"""A minibatch step of PPO with networks of any width in 2 L + 5 launches for L hidden layers: the
rows, one launch a layer forward and one backward, the heads with the loss, then, as in
`gpurl.kernels.ppo_update`, the gradient's sum and norm, and Adam.

Actor and critic run side by side in every launch. A launch forward computes the product, the bias
and the activation. A launch backward computes both gradients of a layer, by its weights and by its
inputs; the sum over rows is split into GROUPS parts, so that small matrices occupy a GPU too. Sums
have a fixed order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.permutation import gather_rows_triton
from gpurl.kernels.ppo_loss import clip, value_error
from gpurl.kernels.ppo_update import (
    CATEGORICAL,
    HEADS,
    LOG_STDS_AT,
    MAX_OUTPUTS,
    SUMS,
    Columns,
    PpoUpdate,
    UpdateShape,
    activation_slope,
    actor_loss,
    sum_of_valid,
)
from gpurl.kernels.random import RandomStreams
from gpurl.kernels.rollout_policy import ACTIVATIONS, activated

NO_INPUT_GRADIENT = tl.constexpr(-1)  # in place of an activation
GROUPS = 16  # parts of a sum over the rows of a minibatch
# rows of a program of the heads, their products in full precision, of which there are few
HEAD_ROWS, HEAD_PRECISION = 64, "tf32x3"


class Tile(NamedTuple):
    """Of a product: rows and columns of a program's part of the result, how much of the sum it
    loads at once, and its warps.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int


TILES = {"tf32x3": Tile(64, 64, 32, 4), "tf32": Tile(128, 64, 32, 4)}


@triton.jit
def layer_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    num_rows, num_in, num_out, x_width, x_step,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (i, e) computes a tile of y [E, B, out] = activation(x_e W_e^T + b_e).

    x: [B, x_width] from x_ptr + e x_step on; weight: [E, out, in]; bias: [E, out].
    """
    tower = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(num_out, BLOCK_OUT)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = tl.program_id(0) % tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_inside = (row < num_rows)[:, None]
    unit_inside = unit < num_out
    x_ptrs = x_ptr + tower * x_step + row[:, None] * x_width
    weight_ptrs = weight_ptr + (tower * num_out + unit)[:, None] * num_in
    z = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_inside = (k < num_in)[None, :]
        x = tl.load(x_ptrs + k[None, :], mask=row_inside & k_inside, other=0.0)
        weight_mask = unit_inside[:, None] & k_inside
        weight = tl.load(weight_ptrs + k[None, :], mask=weight_mask, other=0.0)
        z = tl.dot(x, tl.trans(weight), z, input_precision=PRECISION)
    bias = tl.load(bias_ptr + tower * num_out + unit, mask=unit_inside, other=0.0)
    y_ptrs = y_ptr + (tower * num_rows + row)[:, None] * num_out + unit[None, :]
    tl.store(y_ptrs, activated(z + bias[None, :], ACTIVATION), row_inside & unit_inside[None, :])


@triton.jit
def ppo_heads_kernel(
    hidden_ptr, weight_ptr, bias_ptr, log_std_ptr, rows_ptr, clip_range_ptr, entropy_coef_ptr,
    gradient_ptr, sums_ptr,
    num_rows, num_in, weight_step, bias_step,
    value_coef, clip_range_value, min_log_std, max_log_std,
    NUM_OUTPUTS: tl.constexpr, HEAD: tl.constexpr, CLIP_VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, ROW_WIDTH: tl.constexpr, SUMS_WIDTH: tl.constexpr,
    LOG_STDS: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (i, e) computes the outputs of head e for BLOCK rows, the actor's for e = 0 and the
    critic's for e = 1, and its loss; it writes the gradient by the outputs, gradient [E, B, WIDTH],
    and row i of sums. Neither is divided by the number of rows.

    hidden: [E, B, in]; the weights of head 1 lie weight_step numbers behind those of head 0; rows:
    [B, ROW_WIDTH], in the order of the minibatch.
    """
    tower = tl.program_id(1)
    is_actor = tower == 0
    column = tl.arange(0, WIDTH)
    in_head = column < tl.where(is_actor, NUM_OUTPUTS, 1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    row_ptrs = rows_ptr + row * ROW_WIDTH
    valid = inside.to(tl.float32)
    if COLUMNS[6] >= 0:
        valid = tl.load(row_ptrs + COLUMNS[6], mask=inside, other=0.0)

    # outputs
    output = tl.zeros((BLOCK, WIDTH), tl.float32)
    hidden_ptrs = hidden_ptr + (tower.to(tl.int64) * num_rows + row)[:, None] * num_in
    weight_ptrs = weight_ptr + tower.to(tl.int64) * weight_step + column[:, None] * num_in
    for start in range(0, num_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_inside = (k < num_in)[None, :]
        hidden = tl.load(hidden_ptrs + k[None, :], mask=inside[:, None] & k_inside, other=0.0)
        weight = tl.load(weight_ptrs + k[None, :], mask=in_head[:, None] & k_inside, other=0.0)
        output = tl.dot(hidden, tl.trans(weight), output, input_precision=PRECISION)
    bias_ptrs = bias_ptr + tower.to(tl.int64) * bias_step + column
    output += tl.load(bias_ptrs, mask=in_head, other=0.0)[None, :]

    # the loss of one network, its gradient, and the sums over these rows
    gradient = tl.zeros((BLOCK, WIDTH), tl.float32)
    out_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * SUMS_WIDTH
    if is_actor:
        log_std = tl.zeros((WIDTH,), tl.float32)
        if HEAD != CATEGORICAL:
            log_std = tl.load(log_std_ptr + column, mask=in_head, other=0.0)
            log_std = clip(log_std, min_log_std, max_log_std)
        old_log_prob = tl.load(row_ptrs + COLUMNS[2], mask=inside, other=0.0)
        advantage = tl.load(row_ptrs + COLUMNS[4], mask=inside, other=0.0)
        gradient, of_log_std, surrogate, kl, clipped, entropy = actor_loss(
            output, row_ptrs + COLUMNS[1], old_log_prob, advantage, valid, log_std,
            tl.load(clip_range_ptr), tl.load(entropy_coef_ptr), in_head,
            HEAD, NUM_OUTPUTS, BLOCK, WIDTH,
        )  # fmt: skip
        tl.store(out_ptr, sum_of_valid(surrogate, valid))
        tl.store(out_ptr + 2, sum_of_valid(kl, valid))
        tl.store(out_ptr + 3, sum_of_valid(clipped, valid))
        tl.store(out_ptr + 4, sum_of_valid(entropy, valid))
        if HEAD != CATEGORICAL:
            tl.store(out_ptr + LOG_STDS + column, of_log_std, mask=in_head)
    else:
        value = tl.sum(tl.where(in_head[None, :], output, 0.0), axis=1)
        returns = tl.load(row_ptrs + COLUMNS[5], mask=inside, other=0.0)
        old_value = tl.load(row_ptrs + COLUMNS[3], mask=inside, other=0.0)
        square, half_slope = value_error(value, returns, old_value, clip_range_value, CLIP_VALUE)
        by_value = tl.where(valid != 0.0, half_slope * (2.0 * value_coef), 0.0)
        gradient = tl.where(in_head[None, :], by_value[:, None], 0.0)
        tl.store(out_ptr + 1, sum_of_valid(square, valid))
        tl.store(out_ptr + 5, tl.sum(valid, axis=0))
    gradient_ptrs = gradient_ptr + (tower.to(tl.int64) * num_rows + row)[:, None] * WIDTH
    tl.store(gradient_ptrs + column[None, :], gradient, mask=inside[:, None])


@triton.jit
def _by_weight(
    gradient_ptr, x_ptr, of_weight_ptr, of_bias_ptr, tile_in, tile_out, group, group_rows,
    num_rows, num_in, num_out, gradient_width, x_width, PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient by the weights, over one group of rows, and with the first tile_in of
    that by the biases.
    """
    unit = tile_out * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    below = tile_in * BLOCK_IN + tl.arange(0, BLOCK_IN)
    unit_inside = unit < num_out
    below_inside = below < num_in
    by_weight = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    by_bias = tl.zeros((BLOCK_OUT,), tl.float32)
    end = tl.minimum((group + 1) * group_rows, num_rows)
    for start in range(group * group_rows, end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        inside = (row < end)[:, None]
        gradient_ptrs = gradient_ptr + row[:, None] * gradient_width + unit[None, :]
        gradient = tl.load(gradient_ptrs, mask=inside & unit_inside[None, :], other=0.0)
        x_ptrs = x_ptr + row[:, None] * x_width + below[None, :]
        x = tl.load(x_ptrs, mask=inside & below_inside[None, :], other=0.0)
        by_weight = tl.dot(tl.trans(gradient), x, by_weight, input_precision=PRECISION)
        by_bias += tl.sum(gradient, axis=0)
    weight_ptrs = of_weight_ptr + unit[:, None] * num_in + below[None, :]
    tl.store(weight_ptrs, by_weight, mask=unit_inside[:, None] & below_inside[None, :])
    tl.store(of_bias_ptr + unit, by_bias, mask=unit_inside & (tile_in == 0))


@triton.jit
def _by_input(
    gradient_ptr, x_ptr, weight_ptr, of_x_ptr, tile_row, tile_in,
    num_rows, num_in, num_out, gradient_width, x_width,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient by the inputs, through the activation whose results they are."""
    row = tile_row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    below = tile_in * BLOCK_IN + tl.arange(0, BLOCK_IN)
    inside = (row < num_rows)[:, None]
    below_inside = (below < num_in)[None, :]
    by_x = tl.zeros((BLOCK_ROWS, BLOCK_IN), tl.float32)
    for start in range(0, num_out, BLOCK_K):
        unit = start + tl.arange(0, BLOCK_K)
        gradient_ptrs = gradient_ptr + row[:, None] * gradient_width + unit[None, :]
        unit_inside = unit < num_out
        gradient = tl.load(gradient_ptrs, mask=inside & unit_inside[None, :], other=0.0)
        weight_ptrs = weight_ptr + unit[:, None] * num_in + below[None, :]
        weight = tl.load(weight_ptrs, mask=unit_inside[:, None] & below_inside, other=0.0)
        by_x = tl.dot(gradient, weight, by_x, input_precision=PRECISION)
    x_ptrs = x_ptr + row[:, None] * x_width + below[None, :]
    x = tl.load(x_ptrs, mask=inside & below_inside, other=0.0)
    of_x_ptrs = of_x_ptr + row[:, None] * num_in + below[None, :]
    tl.store(of_x_ptrs, by_x * activation_slope(x, ACTIVATION), mask=inside & below_inside)


@triton.jit(do_not_specialize=["first_out", "second_out", "weight_programs", "group_rows"])
def layer_backward_kernel(
    gradient_ptr, x_ptr, weight_ptr, of_weight_ptr, of_bias_ptr, of_x_ptr,
    num_rows, num_in, first_out, second_out, gradient_width, x_width, x_step, weight_step,
    bias_step, partial_width, weight_programs, group_rows,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of a layer from gradient [E, B, gradient_width], that by z = x_e W_e^T + b_e.

    The first `weight_programs` programs (i, e) compute those by W_e and b_e over one of the groups
    of group_rows rows, into row g of `partial`; the others a tile of that by the z of the layer
    below, whose results are x and whose activation is ACTIVATION: of_x [E, B, in]. The layer has
    first_out outputs for e = 0, second_out for e = 1.
    """
    tower = tl.program_id(1).to(tl.int64)
    num_out = tl.where(tower == 0, first_out, second_out)
    gradient_ptr += tower * num_rows * gradient_width
    x_ptr += tower * x_step
    tiles_in = tl.cdiv(num_in, BLOCK_IN)
    if tl.program_id(0) < weight_programs:
        rest = tl.program_id(0) // tiles_in
        tiles_out = tl.cdiv(tl.maximum(first_out, second_out), BLOCK_OUT)
        group = (rest // tiles_out).to(tl.int64)
        place = group * partial_width
        _by_weight(
            gradient_ptr, x_ptr, of_weight_ptr + place + tower * weight_step,
            of_bias_ptr + place + tower * bias_step, tl.program_id(0) % tiles_in, rest % tiles_out,
            group, group_rows, num_rows, num_in, num_out, gradient_width, x_width,
            PRECISION, BLOCK_OUT, BLOCK_IN, BLOCK_K,
        )  # fmt: skip
    elif ACTIVATION != NO_INPUT_GRADIENT:
        tile = tl.program_id(0) - weight_programs
        _by_input(
            gradient_ptr, x_ptr, weight_ptr + tower * weight_step,
            of_x_ptr + tower * num_rows * num_in, tile // tiles_in, tile % tiles_in,
            num_rows, num_in, num_out, gradient_width, x_width,
            ACTIVATION, PRECISION, BLOCK_ROWS, BLOCK_IN, BLOCK_K,
        )  # fmt: skip


class WidePpoUpdate(PpoUpdate):
    """Minibatch steps layer by layer."""

    reduce_columns = 512

    @staticmethod
    def obstacle_of(shape: UpdateShape) -> str:
        """The reason why the kernels cannot train networks of this shape, or ""."""
        if not shape.sizes:
            return "it needs a hidden layer"
        if shape.shared:
            return "it takes shared layers of 16, 32 or 64 units only"
        if shape.num_outputs > MAX_OUTPUTS:
            return f"it takes {MAX_OUTPUTS} actions or logits, not {shape.num_outputs}"
        return ""

    def most_groups(self) -> int:
        return GROUPS

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
        shape, parameters = self.shape, self.state.parameters
        tile, activation = TILES[shape.precision], ACTIVATIONS[shape.activation]
        rows = gather_rows_triton(packed, *streams, offset=0, start=first, count=count)
        # forward: the results of all layers, the observations first
        results = [rows[:, columns.obs :]]
        fan_in = (shape.inputs, *shape.sizes)
        for layer, size in enumerate(shape.sizes):
            x, y = results[-1], rows.new_empty(2, count, size)
            tiles = triton.cdiv(count, tile.rows) * triton.cdiv(size, tile.columns)
            layer_forward_kernel[(tiles, 2)](
                x, parameters[shape.weights[layer] :], parameters[shape.biases[layer] :], y,
                count, fan_in[layer], size, x.stride(-2), _step_of(x),
                ACTIVATION=activation, PRECISION=shape.precision,
                BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.columns, BLOCK_K=tile.depth,
                num_warps=tile.num_warps,
            )  # fmt: skip
            results.append(y)
        # the heads, the loss, and the gradient by their outputs
        gradient, sums = self._launch_heads(
            results[-1], rows, columns, count, clip_range, entropy_coef
        )
        # backward: the heads first, then layer after layer
        actor_weight, actor_bias, critic_weight, critic_bias = shape.heads
        layers = [
            (actor_weight, actor_bias, critic_weight - actor_weight, critic_bias - actor_bias)
        ]
        outputs = [(shape.num_outputs, 1)]
        for layer in reversed(range(len(shape.sizes))):
            size = shape.sizes[layer]
            layers.append((shape.weights[layer], shape.biases[layer], size * fan_in[layer], size))
            outputs.append((size, size))
        groups = min(GROUPS, triton.cdiv(count, tile.depth))
        group_rows = triton.cdiv(triton.cdiv(count, groups), tile.depth) * tile.depth
        for x, (weight, bias, *steps), num_out in zip(reversed(results), layers, outputs):
            num_in = x.shape[-1] if x.dim() == 3 else shape.inputs
            is_first = x.dim() == 2
            block_out = min(tile.rows, max(triton.next_power_of_2(num_out[0]), 16))
            tiles_in = triton.cdiv(num_in, tile.columns)
            weight_programs = groups * triton.cdiv(num_out[0], block_out) * tiles_in
            programs = weight_programs
            of_x = gradient
            if not is_first:
                programs += triton.cdiv(count, tile.rows) * tiles_in
                of_x = torch.empty_like(x)
            layer_backward_kernel[(programs, 2)](
                gradient, x, parameters[weight:], self.partial[0, weight:], self.partial[0, bias:],
                of_x, count, num_in, *num_out, gradient.shape[2], x.stride(-2), _step_of(x),
                *steps, self.partial.shape[1], weight_programs, group_rows,
                ACTIVATION=NO_INPUT_GRADIENT.value if is_first else activation,
                PRECISION=shape.precision,
                BLOCK_ROWS=tile.rows, BLOCK_OUT=block_out, BLOCK_IN=tile.columns,
                BLOCK_K=tile.depth, num_warps=tile.num_warps,
            )  # fmt: skip
            gradient = of_x
        return groups, sums

    def _launch_heads(
        self,
        hidden: Tensor,
        rows: Tensor,
        columns: Columns,
        count: int,
        clip_range: Tensor,
        entropy_coef: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(gradient by the outputs [2, B, WIDTH], sums over rows [P, SUMS])."""
        shape, options, parameters = self.shape, self.options, self.state.parameters
        actor_weight, actor_bias, critic_weight, critic_bias = shape.heads
        width = max(triton.next_power_of_2(shape.num_outputs), 16)
        programs = triton.cdiv(count, HEAD_ROWS)
        gradient = rows.new_empty(2, count, width)
        sums = rows.new_empty(programs, SUMS)
        ppo_heads_kernel[(programs, 2)](
            hidden, parameters[actor_weight:], parameters[actor_bias:],
            parameters[max(shape.log_std, 0) :], rows, clip_range, entropy_coef, gradient, sums,
            count, shape.sizes[-1], critic_weight - actor_weight, critic_bias - actor_bias,
            options.value_coef, options.clip_range_value or 0.0,
            options.min_log_std, options.max_log_std,
            NUM_OUTPUTS=shape.num_outputs, HEAD=HEADS[shape.head],
            CLIP_VALUE=options.clip_range_value is not None, COLUMNS=tuple(columns),
            ROW_WIDTH=rows.shape[1], SUMS_WIDTH=SUMS, LOG_STDS=LOG_STDS_AT,
            PRECISION=HEAD_PRECISION, WIDTH=width, BLOCK=HEAD_ROWS,
            BLOCK_K=TILES[HEAD_PRECISION].depth, num_warps=4,
        )  # fmt: skip
        return gradient, sums


def _step_of(x: Tensor) -> int:
    """Numbers between the inputs of the two networks: 0 for observations, which they share."""
    return x.stride(0) if x.dim() == 3 else 0
