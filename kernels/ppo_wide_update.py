"""A minibatch step of PPO with networks of any width, layer by layer.

Actor and critic run side by side. Forward, one launch a layer computes the product, the bias and
the activation, and one the heads with the loss. Backward, the products are the BLAS library's: on
an H200 they took half the time of products in Triton, whose matrix instructions for TF32 want an
operand of them transposed. One launch a layer multiplies by the slope of the activation and sums
the gradient by the biases, in a fixed order. Then, as in `gpurl.kernels.ppo_update`, the gradient's
norm, and Adam.
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

LINEAR = tl.constexpr(-1)  # in place of an activation
# rows and columns of a tile of a gradient, and rows whose sum is one part of that by the biases
SLOPE_TILE, SLOPE_ROWS = (32, 64), 256
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


# of those that were tried on an H200, the fastest for 512-256-128
TILES = {"tf32x3": Tile(64, 64, 32, 4), "tf32": Tile(128, 128, 32, 8)}


def pipeline_stages(device: torch.device) -> int:
    """Tiles of a product that are under way at once. On Blackwell Triton before 3.7 lacks a barrier
    where they are more than one (triton issue 9871).
    """
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 10:
        return 3  # Triton's own
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return 1 if version < (3, 7) else 3


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
def slope_kernel(
    gradient_ptr, y_ptr, of_bias_ptr, num_rows, num_out, group_rows,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Program (g, i, e) takes BLOCK_OUT columns of gradient [E, B, out] by y_e = activation(z_e) to
    that by z_e, in place, in group g of group_rows rows, and sums them: of_bias [G, E, out].
    """
    tower = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    unit_inside = unit < num_out
    by_bias = tl.zeros((BLOCK_OUT,), tl.float32)
    first = tl.program_id(0) * group_rows
    end = tl.minimum(first + group_rows, num_rows)
    for start in range(first, end, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        at = (tower * num_rows + row)[:, None] * num_out + unit[None, :]
        inside = (row < end)[:, None] & unit_inside[None, :]
        gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
        if ACTIVATION != LINEAR:
            y = tl.load(y_ptr + at, mask=inside, other=0.0)
            gradient *= activation_slope(y, ACTIVATION)
            tl.store(gradient_ptr + at, gradient, mask=inside)
        by_bias += tl.sum(gradient, axis=0)
    place = (tl.program_id(0) * tl.num_programs(2) + tower) * num_out
    tl.store(of_bias_ptr + place + unit, by_bias, mask=unit_inside)


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
        return 1

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
        rows = gather_rows_triton(packed, *streams, offset=0, start=first, count=count)
        results = self._launch_layers(rows, columns)
        gradient, sums = self._launch_heads(
            results[-1], rows, columns, count, clip_range, entropy_coef
        )
        self._launch_backward(gradient, results)
        return 1, sums

    def _launch_layers(self, rows: Tensor, columns: Columns) -> list[Tensor]:
        """The observations [B, row width] and the results of all layers [2, B, size]."""
        shape, parameters, count = self.shape, self.state.parameters, rows.shape[0]
        tile = TILES[shape.precision]
        results = [rows[:, columns.obs :]]
        for layer, size in enumerate(shape.sizes):
            x, y = results[-1], rows.new_empty(2, count, size)
            tiles = triton.cdiv(count, tile.rows) * triton.cdiv(size, tile.columns)
            layer_forward_kernel[(tiles, 2)](
                x, parameters[shape.weights[layer] :], parameters[shape.biases[layer] :], y,
                count, _fan_in(shape, layer), size, x.stride(-2), _step_of(x),
                ACTIVATION=ACTIVATIONS[shape.activation], PRECISION=shape.precision,
                BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.columns, BLOCK_K=tile.depth,
                num_warps=tile.num_warps, num_stages=pipeline_stages(rows.device),
            )  # fmt: skip
            results.append(y)
        return results

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
            num_stages=pipeline_stages(rows.device),
        )  # fmt: skip
        return gradient, sums

    def _launch_backward(self, gradient: Tensor, results: list[Tensor]) -> None:
        """Write the gradients of all parameters, from that by the outputs [2, B, WIDTH]."""
        shape, parameters, of_parameters = self.shape, self.state.parameters, self.partial[0]
        # through the heads, whose gradients have columns of padding
        by_bias = _parts_by_bias(gradient, gradient, LINEAR.value).sum(0)
        of_result = torch.empty_like(results[-1])
        below = shape.sizes[-1]
        for tower, width in enumerate((shape.num_outputs, 1)):
            weight, bias = shape.heads[2 * tower : 2 * tower + 2]
            place = slice(weight, weight + width * below)
            used = gradient[tower, :, :width]
            torch.mm(used.t(), results[-1][tower], out=of_parameters[place].view(width, below))
            of_parameters[bias : bias + width].copy_(by_bias[tower, :width])
            torch.mm(used, parameters[place].view(width, below), out=of_result[tower])
        # layer after layer
        for layer in reversed(range(len(shape.sizes))):
            x, size, below = results[layer], shape.sizes[layer], _fan_in(shape, layer)
            weight, bias = shape.weights[layer], shape.biases[layer]
            place = slice(weight, weight + 2 * size * below)
            parts = _parts_by_bias(of_result, results[layer + 1], ACTIVATIONS[shape.activation])
            torch.sum(parts, 0, out=of_parameters[bias : bias + 2 * size].view(2, size))
            by_weight = of_parameters[place].view(2, size, below)
            # one by one, as BLAS splits the sum over so many rows of one product only
            for tower in range(2):
                x_of_tower = x[tower] if x.dim() == 3 else x[:, :below]
                torch.mm(of_result[tower].t(), x_of_tower, out=by_weight[tower])
            if layer > 0:
                of_result = torch.bmm(of_result, parameters[place].view(2, size, below))


def _parts_by_bias(gradient: Tensor, y: Tensor, activation: int) -> Tensor:
    """Sums over groups of rows [G, E, out] of gradient [E, B, out], which is taken through the
    activation with the results y [E, B, out] before, in place.
    """
    towers, num_rows, num_out = gradient.shape
    groups = triton.cdiv(num_rows, SLOPE_ROWS)
    block_rows, block_out = SLOPE_TILE
    parts = gradient.new_empty(groups, towers, num_out)
    slope_kernel[(groups, triton.cdiv(num_out, block_out), towers)](
        gradient, y, parts, num_rows, num_out, SLOPE_ROWS,
        ACTIVATION=activation, BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, num_warps=4,
    )  # fmt: skip
    return parts


def _step_of(x: Tensor) -> int:
    """Numbers between the inputs of the two networks: 0 for observations, which they share."""
    return x.stride(0) if x.dim() == 3 else 0


def _fan_in(shape: UpdateShape, layer: int) -> int:
    """Numbers that a unit of the layer reads."""
    return shape.sizes[layer - 1] if layer > 0 else shape.inputs
