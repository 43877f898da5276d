"""PPO's loss and its gradients with respect to the networks' outputs in one pass, for Gaussian and
categorical policies.

    L = -mean min(r A, clip(r, 1 +- c) A) + value_coef mean E - entropy_coef mean H
    r = exp(log pi(a) - log pi_old(a))
    E = (V - R)^2, or max((V - R)^2, (V_old + clip(V - V_old, +- c_v) - R)^2) if values are clipped

Schulman et al. 2017, equations 7 and 9; the value clip is PPO2's (Dhariwal et al. 2017). log r is
limited to LARGEST_LOG_RATIO. The specification is `gpurl.losses.ppo_loss` with the
log-probabilities and entropies of `gpurl.nn.distributions`. A row of weight 0 may hold any finite
numbers.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpurl.kernels.backend import ForMembers, dense, member_strides, transforms_are_active
from gpurl.kernels.optional_triton import tl, triton

METRICS = ("surrogate", "value_loss", "approx_kl", "clip_fraction", "entropy")
LOG_2PI = tl.constexpr(math.log(2.0 * math.pi))
# keeps the loss finite for a policy far from the acting one; the gradient beyond it is 0
LARGEST_LOG_RATIO = 20.0
LARGEST = tl.constexpr(LARGEST_LOG_RATIO)
SUMS_BLOCK = 4096  # numbers of `partial` that a program of the second launch adds at once


class Rows(Protocol):
    """The columns of a minibatch that the loss reads, [...] float32 of any stride; fastest when all
    have the same stride, as the columns of one packed matrix.
    """

    action: Tensor  # [..., A], or [...] of a categorical policy, of any dtype
    log_prob: Tensor  # of the acting policy
    value: Tensor  # of the critic at that time
    advantage: Tensor
    returns: Tensor
    weight: Tensor | None  # sums to 1; None: all rows count the same


@dataclass(frozen=True)
class PpoOptions:
    """Constants of the formula."""

    value_coef: float
    clip_range_value: float | None = None  # None: values are not clipped
    min_log_std: float = -math.inf  # to these limits the log standard deviation is clamped
    max_log_std: float = math.inf


# ---- Triton ----


@triton.jit
def clip(x, low, high):
    """x limited to [low, high]; NaN stays NaN, while tl.clamp may turn it into a number."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def surrogate_and_slope(log_prob, old_log_prob, advantage, clip_range):
    """(min(r A, clip(r) A), its derivative by log_prob, the KL divergence (k3 of Schulman 2020),
    whether the ratio was clipped) of each row.
    """
    # the ratio of the policies, limited
    unbounded = log_prob - old_log_prob
    log_ratio = tl.where(unbounded > LARGEST, LARGEST, unbounded)  # NaN stays NaN
    ratio = tl.exp(log_ratio)
    clipped_ratio = clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    plain = ratio * advantage
    clipped = clipped_ratio * advantage
    # false for NaN, so that NaN reaches the gradient and is detected there
    is_flat = (plain > clipped) | (unbounded > LARGEST)
    changed = (ratio != clipped_ratio).to(tl.float32)
    return (
        tl.where(plain > clipped, clipped, plain),
        tl.where(is_flat, 0.0, plain),
        ratio - 1.0 - log_ratio,
        changed,
    )


@triton.jit
def value_error(value, returns, old_value, clip_range_value, CLIP_VALUE: tl.constexpr):
    """(squared error, half its derivative by the value) of each row."""
    # the plain error
    error = value - returns
    square = error * error
    half_slope = error
    if CLIP_VALUE:
        # the larger of the plain and the clipped error; outside the clip its derivative is 0
        step = value - old_value
        clipped_error = old_value + clip(step, -clip_range_value, clip_range_value) - returns
        clipped_square = clipped_error * clipped_error
        is_clipped = clipped_square > square
        half_slope = tl.where(
            is_clipped, tl.where(tl.abs(step) <= clip_range_value, clipped_error, 0.0), error
        )
        square = tl.where(is_clipped, clipped_square, square)
    return square, half_slope


@triton.jit
def log_softmax(logits, used):
    """(log-probabilities, probabilities) over the columns in `used`, along axis 1; the other
    columns have probability 0.
    """
    shifted = logits - tl.max(tl.where(used, logits, float("-inf")), axis=1)[:, None]
    exponential = tl.where(used, tl.exp(shifted), 0.0)
    total = tl.sum(exponential, axis=1)[:, None]
    return shifted - tl.log(total), exponential / total


@triton.jit
def ppo_loss_kernel(
    output_ptr, log_std_ptr, value_ptr, action_ptr, old_log_prob_ptr, old_value_ptr, advantage_ptr,
    returns_ptr, weight_ptr, clip_range_ptr, entropy_coef_ptr, output_gradient_ptr,
    value_gradient_ptr, partial_ptr,
    B, A, output_stride, value_stride, action_stride, stride,
    next_output, next_log_std, next_value, next_action, next_columns, next_clip_range,
    next_entropy_coef,
    value_coef, clip_range_value, min_log_std, max_log_std,
    IS_GAUSSIAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, CLIP_VALUE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_B rows. It writes the gradients of their outputs and values, and its
    sums to a row of `partial`: surrogate, value error, KL, clip fraction, then the log_std gradient
    [A], or the entropy. next_*: strides from member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    output_ptr += member * next_output
    log_std_ptr += member * next_log_std
    value_ptr += member * next_value
    action_ptr += member * next_action
    old_log_prob_ptr += member * next_columns
    old_value_ptr += member * next_columns
    advantage_ptr += member * next_columns
    returns_ptr += member * next_columns
    weight_ptr += member * next_columns
    clip_range_ptr += member * next_clip_range
    entropy_coef_ptr += member * next_entropy_coef
    # the results of all members follow each other
    output_gradient_ptr += member * B * A
    value_gradient_ptr += member * B
    partial_ptr += member * tl.num_programs(0) * (4 + A if IS_GAUSSIAN else 5)
    # rows and their weights; rows of weight 0 are removed by selection, as 0 * infinity is NaN
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_A)
    inside = row < B
    cell = inside[:, None] & (column < A)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row * stride, mask=inside, other=0.0)
    else:
        weight = tl.where(inside, 1.0 / B, 0.0)
    used = weight != 0.0

    # log-probability of the action
    output_ptrs = output_ptr + row[:, None] * output_stride + column[None, :]
    output = tl.load(output_ptrs, mask=cell, other=0.0)
    if IS_GAUSSIAN:
        action_ptrs = action_ptr + row[:, None] * action_stride + column[None, :]
        action = tl.load(action_ptrs, mask=cell, other=0.0)
        log_std = tl.load(log_std_ptr + column, mask=column < A, other=0.0)
        log_std = clip(log_std, min_log_std, max_log_std)
        inv_std = tl.exp(-log_std)[None, :]
        z = (action - output) * inv_std
        log_prob = -0.5 * tl.sum(z * z, axis=1) - (
            tl.sum(tl.where(column < A, log_std, 0.0), axis=0) + 0.5 * LOG_2PI * A
        )
    else:
        log_probs, probability = log_softmax(output, (column < A)[None, :])
        entropy = -tl.sum(tl.where((column < A)[None, :], probability * log_probs, 0.0), axis=1)
        action = tl.load(action_ptr + row * action_stride, mask=inside, other=0.0)
        is_taken = column[None, :] == action[:, None]
        log_prob = tl.sum(tl.where(is_taken, log_probs, 0.0), axis=1)

    # surrogate and value error, and their derivatives
    advantage = tl.load(advantage_ptr + row * stride, mask=inside, other=0.0)
    old_log_prob = tl.load(old_log_prob_ptr + row * stride, mask=inside, other=0.0)
    surrogate, slope, kl, clipped = surrogate_and_slope(
        log_prob, old_log_prob, advantage, tl.load(clip_range_ptr)
    )
    value = tl.load(value_ptr + row * value_stride, mask=inside, other=0.0)
    returns = tl.load(returns_ptr + row * stride, mask=inside, other=0.0)
    old_value = tl.load(old_value_ptr + row * stride, mask=inside, other=0.0)
    square, half_slope = value_error(value, returns, old_value, clip_range_value, CLIP_VALUE)
    value_gradient = tl.where(used, half_slope * (2.0 * value_coef * weight), 0.0)
    tl.store(value_gradient_ptr + row, value_gradient, mask=inside)

    # gradients by the actor's outputs, and the sums over these rows
    slope = (slope * -weight)[:, None]
    sums_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (4 + A if IS_GAUSSIAN else 5)
    if IS_GAUSSIAN:
        gradient = slope * z * inv_std
        of_log_std = tl.sum(tl.where(used[:, None], slope * (z * z - 1.0), 0.0), axis=0)
        tl.store(sums_ptr + 4 + column, of_log_std, mask=column < A)
    else:
        of_entropy = probability * (log_probs + entropy[:, None])
        of_entropy *= (tl.load(entropy_coef_ptr) * weight)[:, None]
        gradient = slope * (is_taken.to(tl.float32) - probability) + of_entropy
        tl.store(sums_ptr + 4, tl.sum(tl.where(used, entropy * weight, 0.0), axis=0))
    gradient = tl.where(used[:, None], gradient, 0.0)
    tl.store(output_gradient_ptr + row[:, None] * A + column[None, :], gradient, mask=cell)
    tl.store(sums_ptr, tl.sum(tl.where(used, surrogate * weight, 0.0), axis=0))
    tl.store(sums_ptr + 1, tl.sum(tl.where(used, square * weight, 0.0), axis=0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(used, kl * weight, 0.0), axis=0))
    tl.store(sums_ptr + 3, tl.sum(tl.where(used, clipped * weight, 0.0), axis=0))


@triton.jit
def ppo_sums_kernel(
    partial_ptr, log_std_ptr, entropy_coef_ptr, metrics_ptr, loss_ptr, log_std_gradient_ptr, P, A,
    next_log_std, next_entropy_coef, value_coef, min_log_std, max_log_std,
    IS_GAUSSIAN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCK_K columns of the P rows of `partial` in a fixed order -> metrics [5],
    the loss and, of a Gaussian, the log_std gradient. next_*: strides from member to member.
    """
    width = 4 + A if IS_GAUSSIAN else 5
    member = tl.program_id(1).to(tl.int64)
    partial_ptr += member * P * width
    log_std_ptr += member * next_log_std
    entropy_coef_ptr += member * next_entropy_coef
    metrics_ptr += member * 5
    loss_ptr += member
    log_std_gradient_ptr += member * A
    # sums over the rows of `partial`
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_P, BLOCK_K), tl.float32)
    for start in range(0, P, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        inside = (program < P)[:, None] & (column < width)[None, :]
        sums_ptrs = partial_ptr + program.to(tl.int64)[:, None] * width + column[None, :]
        sums += tl.load(sums_ptrs, mask=inside, other=0.0)
    total = tl.sum(sums, axis=0)
    entropy_coef = tl.load(entropy_coef_ptr)
    # the loss is computed by the first program, which has the columns that it needs
    coefficient = tl.where(column == 0, -1.0, tl.where(column == 1, value_coef, 0.0))
    if IS_GAUSSIAN:
        is_log_std = (column >= 4) & (column < width)
        log_std = tl.load(log_std_ptr + column - 4, mask=is_log_std, other=0.0)
        is_free = log_std == clip(log_std, min_log_std, max_log_std)
        gradient = tl.where(is_free, total - entropy_coef, 0.0)
        tl.store(log_std_gradient_ptr + column - 4, gradient, mask=is_log_std)
        tl.store(metrics_ptr + column, total, mask=column < 4)
        if tl.program_id(0) == 0:
            index = tl.arange(0, BLOCK_A)
            bounded = tl.load(log_std_ptr + index, mask=index < A, other=0.0)
            bounded = clip(bounded, min_log_std, max_log_std)
            entropy = tl.sum(tl.where(index < A, bounded, 0.0), axis=0) + 0.5 * (1.0 + LOG_2PI) * A
            tl.store(metrics_ptr + 4, entropy)
            of_sums = tl.sum(tl.where(column < 2, coefficient * total, 0.0), axis=0)
            tl.store(loss_ptr, of_sums - entropy_coef * entropy)
    else:
        tl.store(metrics_ptr + column, total, mask=column < 5)
        coefficient = tl.where(column == 4, -entropy_coef, coefficient)
        is_of_loss = (column < 2) | (column == 4)
        tl.store(loss_ptr, tl.sum(tl.where(is_of_loss, coefficient * total, 0.0), axis=0))


def _tile(num_columns: int) -> tuple[int, int, int]:
    """(BLOCK_B, BLOCK_A, num_warps): few rows in a program, so that 8192 rows occupy a whole GPU,
    and at most eight numbers of a tile in a thread.
    """
    block_a = triton.next_power_of_2(num_columns)
    block_b = max(1, min(64, 2048 // block_a))
    if block_a <= 8:
        return block_b, block_a, 2
    return block_b, block_a, 4 if block_a <= 16 else 8


def _launch(
    output: Tensor,
    log_std: Tensor | None,
    value: Tensor,
    clip_range: Tensor,
    entropy_coef: Tensor,
    options: PpoOptions,
    action: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, ...]:
    """(loss, metrics, gradients of output, value and, if there is one, log_std) in two launches;
    action [B, A], columns [B] each: log-probability, value, advantage, returns, weight if rows have
    one. Also of M members, each tensor with a leading axis [M, ...] of any stride.
    """
    *members, num_rows, num_columns = output.shape
    is_gaussian = log_std is not None

    # columns with the strides that the kernel takes
    log_std = None if log_std is None else dense(log_std, bool(members))
    output, action = (
        x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (output, action)
    )
    # the same strides serve all of them
    if len({column.stride() for column in columns}) > 1:
        columns = tuple(column.contiguous() for column in columns)

    # tensors for the results
    block_b, block_a, num_warps = _tile(num_columns)
    programs = triton.cdiv(num_rows, block_b)
    width = 4 + num_columns if is_gaussian else 5
    shapes = (num_rows, num_columns), (num_rows,), (programs, width), (len(METRICS),), ()
    output_gradient, value_gradient, partial, metrics, loss = (
        torch.empty((*members, *shape), dtype=torch.float32, device=output.device)
        for shape in shapes
    )
    gradients = [output_gradient, value_gradient]
    if log_std is not None:
        gradients.append(torch.empty_like(log_std, memory_format=torch.contiguous_format))

    # a categorical policy has no log_std: the kernels do not read these pointers then
    parameter, parameter_gradient = (
        (metrics, metrics) if log_std is None else (log_std, gradients[2])
    )
    limits = options.min_log_std, options.max_log_std
    next_output, next_log_std, *next_others, next_entropy_coef = member_strides(
        (output, parameter, value, action, columns[0], clip_range, entropy_coef), bool(members)
    )
    per_member = members or [1]
    grid = (programs, *per_member)
    ppo_loss_kernel[grid](
        output, parameter, value, action, *columns[:4], columns[-1], clip_range, entropy_coef,
        output_gradient, value_gradient, partial, num_rows, num_columns, output.stride(-2),
        value.stride(-1), action.stride(-2), columns[0].stride(-1),
        next_output, next_log_std, *next_others, next_entropy_coef,
        options.value_coef, options.clip_range_value or 0.0, *limits,
        IS_GAUSSIAN=is_gaussian, HAS_WEIGHT=len(columns) > 4,
        CLIP_VALUE=options.clip_range_value is not None, BLOCK_B=block_b, BLOCK_A=block_a,
        num_warps=num_warps,
    )  # fmt: skip
    # the sums over programs, and from them the loss
    block_k = min(16, triton.next_power_of_2(width))
    grid = (triton.cdiv(width, block_k), *per_member)
    ppo_sums_kernel[grid](
        partial, parameter, entropy_coef, metrics, loss, parameter_gradient, programs, num_columns,
        next_log_std, next_entropy_coef, options.value_coef, *limits,
        IS_GAUSSIAN=is_gaussian, BLOCK_P=SUMS_BLOCK // block_k, BLOCK_K=block_k, BLOCK_A=block_a,
        num_warps=4,
    )  # fmt: skip
    return loss, metrics, *gradients


class _PpoLoss(torch.autograd.Function):
    """`_launch`, of whose arguments the first three have gradients. The forward pass computes these
    too; the backward pass scales them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, *given: Any
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, *gradients = _launch(*given)
        ctx.others = len(given) - 3
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)  # no zeros in place of the metrics' missing gradient
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, loss_gradient: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradients = torch._foreach_mul(list(ctx.saved_tensors), loss_gradient)
        output, value, log_std = (*gradients, None)[:3]
        return output, log_std, value, *[None] * ctx.others


class _LossOfMembers(ForMembers):
    """`_PpoLoss` inside torch.func.vmap, where a backward pass can only read results."""

    takes_strides = True

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        return _launch(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.others = len(inputs) - 3

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, loss_gradient: Tensor, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # [M] of all members outside of their vmap
        members = loss_gradient.shape
        factors = [
            loss_gradient.view(*members, *[1] * (each.dim() - len(members)))
            for each in ctx.saved_tensors
        ]
        gradients = [each * factor for each, factor in zip(ctx.saved_tensors, factors)]
        output, value, log_std = (*gradients, None)[:3]
        return output, log_std, value, *[None] * ctx.others


def fused_ppo_loss(
    output: Tensor,
    log_std: Tensor | None,
    value: Tensor,
    rows: Rows,
    clip_range: Tensor,
    entropy_coef: Tensor,
    options: PpoOptions,
) -> tuple[Tensor, Tensor]:
    """(loss 0-d, metrics [5] in the order of METRICS, without gradient) of a Gaussian policy, or of
    a categorical one if log_std is None; differentiable by output, log_std and value.

    output: [..., A] float32, the means or the logits; log_std: [A] contiguous; value: [...]; rows:
    of the same shape. clip_range, entropy_coef: 0-d float32 on the device, so that a CUDA graph can
    read new ones. A log_std outside its limits has gradient 0; one exactly at a limit has its
    gradient, as with torch.clamp, or it could never leave it.
    """
    flat = output.reshape(-1, output.shape[-1])
    columns = [rows.log_prob, rows.value, rows.advantage, rows.returns]
    columns += [] if rows.weight is None else [rows.weight]
    loss, metrics, *_ = (_LossOfMembers if transforms_are_active() else _PpoLoss).apply(  # type: ignore[no-untyped-call]
        flat,
        log_std,
        value.reshape(-1),
        clip_range,
        entropy_coef,
        options,
        rows.action.reshape(len(flat), -1),
        *(column.reshape(-1) for column in columns),
    )
    return loss, metrics
