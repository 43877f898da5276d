"""PPO's loss and its gradients by the networks' outputs in one pass, for Gaussian and categorical
policies.

    L = -mean min(r A, clip(r, 1 +- c) A) + value_coef mean E - entropy_coef mean H,   r = exp(log
    pi(a) - log pi_old(a)) E = (V - R)^2, or with a clip of the value max((V - R)^2, (V_old + clip(V
    - V_old, +- c_v) - R)^2)

Schulman et al. 2017, equations 7 and 9; the clip of the value is PPO2's (Dhariwal et al. 2017). A
is (A - mean) / (std + 1e-8) where the advantage's moments are given. log r counts as
LARGEST_LOG_RATIO at most. Means are over the valid rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels.backend import use_triton

PARTS = ("surrogate", "value_loss", "approx_kl", "clip_fraction", "entropy")
LOG_2PI = tl.constexpr(math.log(2.0 * math.pi))
# so that a policy far from the acting one costs a large loss and not an infinite one; it has no
# slope beyond
LARGEST_LOG_RATIO = 20.0
LARGEST = tl.constexpr(LARGEST_LOG_RATIO)
SUMS_BLOCK = 4096  # numbers of `partial` that a program of the second launch adds at a time
Results = tuple[Tensor, Tensor, Tensor]


class PpoRows(NamedTuple):
    """A minibatch, [B] float32 columns of any stride; quickest when all have one stride, as the
    columns of one packed matrix have.

    action: [B, A], or [B] or [B, 1] whole numbers of a categorical policy. valid: 1 or 0; a row
    with 0 weighs nothing and may hold anything finite.
    """

    action: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    returns: Tensor
    old_value: Tensor
    valid: Tensor | None = None


class PpoScalars(NamedTuple):
    """Numbers that change between calls: 0-d float32 on the device, so that no graph bakes them in.

    advantage_moments: [2 or more], mean and population variance that the advantage is normalised
    with; None: it is taken as it is.
    num_valid: the sum of `valid`; every program needs it to scale its slopes, and a caller sums the
    columns of all minibatches of an epoch in one launch. None has it summed here, which is a launch
    more.
    """

    clip_range: Tensor
    entropy_coef: Tensor
    advantage_moments: Tensor | None = None
    num_valid: Tensor | None = None


@dataclass(frozen=True)
class PpoOptions:
    """Constants of the formula; `clip_range_value` None: the value is not clipped; the log standard
    deviation is clamped to its limits.
    """

    value_coef: float
    clip_range_value: float | None = None
    min_log_std: float = -math.inf
    max_log_std: float = math.inf


# ---- the specification ----


def gaussian_ppo_loss_reference(
    output: Tensor,
    log_std: Tensor,
    value: Tensor,
    rows: PpoRows,
    scalars: PpoScalars,
    options: PpoOptions,
    log_std_gradient_out: Tensor,
) -> Results:
    """The specification; arguments and results as in `gaussian_ppo_loss`."""

    def policy(log_std: Tensor, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        bounded = log_std.clamp(options.min_log_std, options.max_log_std)
        log_density = (
            -0.5 * ((action - output) / bounded.exp()).square() - bounded - 0.5 * LOG_2PI.value
        )
        return log_density.sum(1), (bounded + 0.5 * (1.0 + LOG_2PI.value)).sum()

    (log_std_gradient, *gradients), parts = _differentiated(
        policy, (log_std, output, value), rows, scalars, options
    )
    log_std_gradient_out.copy_(log_std_gradient)
    return gradients[0], gradients[1], parts


def categorical_ppo_loss_reference(
    output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
) -> Results:
    """The specification; arguments and results as in `categorical_ppo_loss`."""

    def policy(output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = output.log_softmax(1)
        return log_probs.gather(1, action.long().view(-1, 1)).squeeze(1), -(
            log_probs.exp() * log_probs
        ).sum(1)

    gradients, parts = _differentiated(policy, (output, value), rows, scalars, options)
    return gradients[0], gradients[1], parts


def _differentiated(
    policy: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    rows: PpoRows,
    scalars: PpoScalars,
    options: PpoOptions,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(gradients by `inputs`, the last of which is the value; parts); policy(*the others, action)
    -> (log_prob [B], entropy [B] or 0-d).
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
    ):  # the caller may be in inference mode, whose tensors autograd does not take
        valid = torch.ones_like(rows.advantage) if rows.valid is None else rows.valid
        count = valid.sum() if scalars.num_valid is None else scalars.num_valid
        leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
        action, *columns = (_where(valid, column) for column in rows[:5])
        log_prob, entropy = policy(*leaves[:-1], action)
        terms = _terms(log_prob, leaves[-1], columns, valid, scalars, options)
        means = [_where(valid, term).sum() / count.clamp(min=1) for term in terms]
        parts = torch.stack(
            (*means, _where(valid, entropy).sum() / count.clamp(min=1) if entropy.ndim else entropy)
        )
        loss = -parts[0] + options.value_coef * parts[1] - scalars.entropy_coef.clone() * parts[4]
        return torch.autograd.grad(loss, leaves), parts.detach()


def _terms(
    log_prob: Tensor,
    value: Tensor,
    columns: list[Tensor],
    valid: Tensor,
    scalars: PpoScalars,
    options: PpoOptions,
) -> tuple[Tensor, ...]:
    """[B] each: the surrogate, the squared error of the value, the KL divergence from the acting
    policy, whether the ratio was clipped.
    """
    old_log_prob, advantage, returns, old_value = columns
    if scalars.advantage_moments is not None:
        advantage = (advantage - scalars.advantage_moments[0]) / (
            scalars.advantage_moments[1].sqrt() + 1e-8
        )
    log_ratio = _where(valid, log_prob - old_log_prob).clamp(max=LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - scalars.clip_range, 1.0 + scalars.clip_range)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    square = (value - returns).square()
    if options.clip_range_value is not None:
        step = (value - old_value).clamp(-options.clip_range_value, options.clip_range_value)
        clipped_square = (old_value + step - returns).square()
        square = torch.where(
            square >= clipped_square, square, clipped_square
        )  # torch.maximum halves the slope where both are equal
    kl = ratio - 1.0 - log_ratio  # k3 of Schulman 2020: unbiased, never negative
    return surrogate, square, kl, (ratio != clipped_ratio).to(value.dtype)


def _where(valid: Tensor, x: Tensor) -> Tensor:
    """x [B, ...] with 0 in the rows that are not valid [B]: selected, not multiplied, because 0 *
    infinity is NaN.
    """
    return torch.where(valid.view(-1, *(1,) * (x.ndim - 1)) != 0, x, 0.0)


# ---- Triton ----


@triton.jit
def _clip(x, low, high):
    """Into [low, high]; NaN stays NaN, which tl.clamp may turn into a number."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _surrogate(log_prob, old_log_prob, advantage, clip_range):
    """Of each row: min(r A, clip(r) A), its slope by log_prob, the KL divergence (k3 of Schulman
    2020), whether the ratio was clipped.
    """
    unbounded = log_prob - old_log_prob
    log_ratio = tl.where(unbounded > LARGEST, LARGEST, unbounded)  # NaN stays NaN
    ratio = tl.exp(log_ratio)
    clipped_ratio = _clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    plain, clipped = ratio * advantage, clipped_ratio * advantage
    is_flat = (plain > clipped) | (
        unbounded > LARGEST
    )  # false for NaN, which so reaches the gradient and is found there
    changed = (ratio != clipped_ratio).to(tl.float32)
    return (
        tl.where(plain > clipped, clipped, plain),
        tl.where(is_flat, 0.0, plain),
        ratio - 1.0 - log_ratio,
        changed,
    )


@triton.jit
def _value_error(value, returns, old_value, clip_range_value, CLIP_VALUE: tl.constexpr):
    """Of each row: the squared error and half its slope by the value."""
    error = value - returns
    square = error * error
    half_slope = error
    if CLIP_VALUE:
        step = value - old_value
        clipped_error = old_value + _clip(step, -clip_range_value, clip_range_value) - returns
        clipped_square = clipped_error * clipped_error
        is_clipped = clipped_square > square
        half_slope = tl.where(
            is_clipped, tl.where(tl.abs(step) <= clip_range_value, clipped_error, 0.0), error
        )
        square = tl.where(is_clipped, clipped_square, square)
    return square, half_slope


@triton.jit
def _log_softmax(logits, used):
    """(log-probabilities, probabilities) over axis 1 of the columns in `used`; the other columns
    have probability 0.
    """
    shifted = logits - tl.max(tl.where(used, logits, float("-inf")), axis=1)[:, None]
    exponential = tl.where(used, tl.exp(shifted), 0.0)
    total = tl.sum(exponential, axis=1)[:, None]
    return shifted - tl.log(total), exponential / total


@triton.jit
def ppo_loss_kernel(
    output_ptr, log_std_ptr, value_ptr, action_ptr, old_log_prob_ptr, advantage_ptr, returns_ptr,
    old_value_ptr, valid_ptr,
    num_valid_ptr, moments_ptr, clip_range_ptr, entropy_coef_ptr, output_gradient_ptr,
    value_gradient_ptr, partial_ptr,
    B, A, output_stride, value_stride, action_stride, stride, value_coef, clip_range_value,
    min_log_std, max_log_std,
    IS_GAUSSIAN: tl.constexpr, HAS_VALID: tl.constexpr, HAS_MOMENTS: tl.constexpr,
    CLIP_VALUE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_B rows; its sums go to a row of `partial`: four parts, then the log_std
    gradient [A], or the entropy.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_A)
    inside = row < B
    cell = inside[:, None] & (column < A)[None, :]
    used = inside
    share = 1.0 / B
    if HAS_VALID:
        used = inside & (tl.load(valid_ptr + row * stride, mask=inside, other=0.0) != 0)
        share = 1.0 / tl.maximum(tl.load(num_valid_ptr), 1.0)
    output = tl.load(
        output_ptr + row[:, None] * output_stride + column[None, :], mask=cell, other=0.0
    )
    if IS_GAUSSIAN:
        action = tl.load(
            action_ptr + row[:, None] * action_stride + column[None, :], mask=cell, other=0.0
        )
        log_std = _clip(
            tl.load(log_std_ptr + column, mask=column < A, other=0.0), min_log_std, max_log_std
        )
        inv_std = tl.exp(-log_std)[None, :]
        z = (action - output) * inv_std
        log_prob = -0.5 * tl.sum(z * z, axis=1) - (
            tl.sum(tl.where(column < A, log_std, 0.0), axis=0) + 0.5 * LOG_2PI * A
        )
    else:
        log_probs, probability = _log_softmax(output, (column < A)[None, :])
        entropy = -tl.sum(tl.where((column < A)[None, :], probability * log_probs, 0.0), axis=1)
        is_taken = (
            column[None, :]
            == tl.load(action_ptr + row * action_stride, mask=inside, other=0.0)[:, None]
        )
        log_prob = tl.sum(tl.where(is_taken, log_probs, 0.0), axis=1)

    advantage = tl.load(advantage_ptr + row * stride, mask=inside, other=0.0)
    if HAS_MOMENTS:
        advantage = (advantage - tl.load(moments_ptr)) / (
            tl.sqrt_rn(tl.load(moments_ptr + 1)) + 1e-8
        )
    old_log_prob = tl.load(old_log_prob_ptr + row * stride, mask=inside, other=0.0)
    surrogate, slope, kl, clipped = _surrogate(
        log_prob, old_log_prob, advantage, tl.load(clip_range_ptr)
    )
    value = tl.load(value_ptr + row * value_stride, mask=inside, other=0.0)
    returns = tl.load(returns_ptr + row * stride, mask=inside, other=0.0)
    old_value = tl.load(old_value_ptr + row * stride, mask=inside, other=0.0)
    square, half_slope = _value_error(value, returns, old_value, clip_range_value, CLIP_VALUE)
    tl.store(
        value_gradient_ptr + row,
        tl.where(used, half_slope * (2.0 * value_coef * share), 0.0),
        mask=inside,
    )

    slope = (slope * -share)[:, None]
    sums_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (4 + A if IS_GAUSSIAN else 5)
    if IS_GAUSSIAN:
        gradient = slope * z * inv_std
        of_log_std = tl.sum(tl.where(used[:, None], slope * (z * z - 1.0), 0.0), axis=0)
        tl.store(sums_ptr + 4 + column, of_log_std, mask=column < A)
    else:
        of_entropy = (
            probability * (log_probs + entropy[:, None]) * (tl.load(entropy_coef_ptr) * share)
        )
        gradient = slope * (is_taken.to(tl.float32) - probability) + of_entropy
        tl.store(sums_ptr + 4, tl.sum(tl.where(used, entropy, 0.0), axis=0) * share)
    gradient = tl.where(used[:, None], gradient, 0.0)  # selected: 0 * infinity is NaN
    tl.store(output_gradient_ptr + row[:, None] * A + column[None, :], gradient, mask=cell)
    tl.store(sums_ptr, tl.sum(tl.where(used, surrogate, 0.0), axis=0) * share)
    tl.store(sums_ptr + 1, tl.sum(tl.where(used, square, 0.0), axis=0) * share)
    tl.store(sums_ptr + 2, tl.sum(tl.where(used, kl, 0.0), axis=0) * share)
    tl.store(sums_ptr + 3, tl.sum(tl.where(used, clipped, 0.0), axis=0) * share)


@triton.jit
def ppo_sums_kernel(
    partial_ptr, log_std_ptr, entropy_coef_ptr, parts_ptr, log_std_gradient_ptr, P, A, min_log_std,
    max_log_std,
    IS_GAUSSIAN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCK_K columns of the P rows of `partial`, in a fixed order -> parts [5] and,
    of a Gaussian, the log_std gradient.
    """
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    width = 4 + A if IS_GAUSSIAN else 5
    sums = tl.zeros((BLOCK_P, BLOCK_K), tl.float32)
    for start in range(0, P, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        inside = (program < P)[:, None] & (column < width)[None, :]
        sums += tl.load(
            partial_ptr + program.to(tl.int64)[:, None] * width + column[None, :],
            mask=inside,
            other=0.0,
        )
    total = tl.sum(sums, axis=0)
    if IS_GAUSSIAN:
        is_log_std = (column >= 4) & (column < width)
        log_std = tl.load(log_std_ptr + column - 4, mask=is_log_std, other=0.0)
        gradient = tl.where(
            log_std == _clip(log_std, min_log_std, max_log_std),
            total - tl.load(entropy_coef_ptr),
            0.0,
        )
        tl.store(log_std_gradient_ptr + column - 4, gradient, mask=is_log_std)
        tl.store(parts_ptr + column, total, mask=column < 4)
        if tl.program_id(0) == 0:
            index = tl.arange(0, BLOCK_A)
            bounded = _clip(
                tl.load(log_std_ptr + index, mask=index < A, other=0.0), min_log_std, max_log_std
            )
            tl.store(
                parts_ptr + 4,
                tl.sum(tl.where(index < A, bounded, 0.0), axis=0) + 0.5 * (1.0 + LOG_2PI) * A,
            )
    else:
        tl.store(parts_ptr + column, total, mask=column < 5)


def _tile(num_columns: int) -> tuple[int, int, int]:
    """(BLOCK_B, BLOCK_A, num_warps): few rows a program, so that 8192 busy a whole GPU, and at most
    eight numbers of a tile a thread.
    """
    block_a = triton.next_power_of_2(num_columns)
    return (
        max(1, min(64, 2048 // block_a)),
        block_a,
        2 if block_a <= 8 else 4 if block_a <= 16 else 8,
    )


def _launch(
    output: Tensor,
    log_std: Tensor | None,
    value: Tensor,
    rows: PpoRows,
    scalars: PpoScalars,
    options: PpoOptions,
    gradient_out: Tensor | None,
) -> Results:
    """The loss in two launches, of a Gaussian policy where `log_std` is given."""
    (num_rows, num_columns), is_gaussian, has_valid = (
        output.shape,
        log_std is not None,
        rows.valid is not None,
    )
    block_b, block_a, num_warps = _tile(num_columns)
    programs, width = triton.cdiv(num_rows, block_b), 4 + num_columns if is_gaussian else 5
    action = rows.action if is_gaussian else rows.action.reshape(num_rows, 1)
    output, action = (
        x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in (output, action)
    )
    columns = _columns(rows)
    shapes = output.shape, (num_rows,), (programs, width), (5,)
    output_gradient, value_gradient, partial, parts = (
        torch.empty(shape, dtype=torch.float32, device=output.device) for shape in shapes
    )
    num_valid = (
        rows.valid.sum()
        if rows.valid is not None and scalars.num_valid is None
        else scalars.num_valid
    )
    optional = (log_std, gradient_out, scalars.advantage_moments, num_valid)
    parameter, parameter_gradient, moments, num_valid = (
        parts if tensor is None else tensor for tensor in optional
    )  # a pointer, not read
    limits = options.min_log_std, options.max_log_std
    ppo_loss_kernel[(programs,)](
        output, parameter, value, action, *columns, num_valid, moments, scalars.clip_range,
        scalars.entropy_coef, output_gradient,
        value_gradient, partial, num_rows, num_columns, output.stride(0), value.stride(0),
        action.stride(0),
        columns[0].stride(0), options.value_coef, options.clip_range_value or 0.0, *limits,
        IS_GAUSSIAN=is_gaussian, HAS_VALID=has_valid,
        HAS_MOMENTS=scalars.advantage_moments is not None,
        CLIP_VALUE=options.clip_range_value is not None, BLOCK_B=block_b, BLOCK_A=block_a,
        num_warps=num_warps,
    )  # fmt: skip
    block_k = min(16, triton.next_power_of_2(width))
    ppo_sums_kernel[(triton.cdiv(width, block_k),)](
        partial, parameter, scalars.entropy_coef, parts, parameter_gradient, programs, num_columns,
        *limits,
        IS_GAUSSIAN=is_gaussian, BLOCK_P=SUMS_BLOCK // block_k, BLOCK_K=block_k, BLOCK_A=block_a,
        num_warps=4,
    )  # fmt: skip
    return output_gradient, value_gradient, parts


def _columns(rows: PpoRows) -> list[Tensor]:
    """old_log_prob, advantage, returns, old_value and valid (or what may stand for it unread),
    copied where they have several strides.
    """
    columns = [*rows[1:5], rows.old_value if rows.valid is None else rows.valid]
    return (
        columns
        if len({column.stride(0) for column in columns}) == 1
        else [column.contiguous() for column in columns]
    )


def gaussian_ppo_loss_triton(
    output: Tensor,
    log_std: Tensor,
    value: Tensor,
    rows: PpoRows,
    scalars: PpoScalars,
    options: PpoOptions,
    log_std_gradient_out: Tensor,
) -> Results:
    """`gaussian_ppo_loss_reference` in two launches."""
    return _launch(output, log_std, value, rows, scalars, options, log_std_gradient_out)


def categorical_ppo_loss_triton(
    output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
) -> Results:
    """`categorical_ppo_loss_reference` in two launches."""
    return _launch(output, None, value, rows, scalars, options, None)


# ---- what callers take ----


def gaussian_ppo_loss(
    output: Tensor,
    log_std: Tensor,
    value: Tensor,
    rows: PpoRows,
    scalars: PpoScalars,
    options: PpoOptions,
    log_std_gradient_out: Tensor,
) -> Results:
    """(gradient by output [B, A], gradient by value [B], parts [5] in the order of PARTS); that by
    log_std is written to its place.

    output: [B, A] float32, the means; log_std: [A] contiguous; value: [B] of any stride;
    log_std_gradient_out: [A] contiguous.
    Parts are means over the valid rows, but the entropy is that of the clamped log_std, which is
    the same for all. A log_std beyond its limits has gradient 0; one exactly at a limit is free, as
    for torch.clamp, or it could never leave it.
    """
    function = gaussian_ppo_loss_triton if use_triton(output) else gaussian_ppo_loss_reference
    return function(output, log_std, value, rows, scalars, options, log_std_gradient_out)


def categorical_ppo_loss(
    output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
) -> Results:
    """As `gaussian_ppo_loss`; output: [B, n] float32, the logits of n actions. The entropy is the
    mean over the valid rows.
    """
    function = categorical_ppo_loss_triton if use_triton(output) else categorical_ppo_loss_reference
    return function(output, value, rows, scalars, options)
