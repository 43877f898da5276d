"""Squashed Gaussian actions of an actor that gives mean and log standard deviation: sampling,
log-probability and gradient.

    a = tanh(u),   u = mean + step,   step = exp(log_std) noise,   log p(a) = sum_i log N(noise_i) -
                   log_std_i - log(1 - tanh(u_i)^2)
    log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|)))
    dL/du = dL/da (1 - a^2) + 2 a dL/dlog p,   dL/dmean = dL/du,   dL/dlog_std = dL/du step -
    dL/dlog p, 0 outside the limits of log_std

Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), appendix C, in a form that
is stable for any u. The gradient keeps the noise fixed (the reparametrisation of their equation
11).
"""

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import softplus

from gpurl.kernels import c_library
from gpurl.kernels.backend import (
    MembersAsRows,
    refuse_second_derivative,
    use_c,
    use_triton,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.rollout_policy import clipped

Limits = tuple[float, float]
LOG_STD_LIMITS: Limits = (-5.0, 2.0)  # by default the log standard deviation is clamped to them
LARGEST_ACTION = 1.0 - 1e-6  # of given actions: atanh(1) is infinite
LOG_2, HALF_LOG_2PI = tl.constexpr(math.log(2.0)), tl.constexpr(0.5 * math.log(2.0 * math.pi))
TILE, NUM_WARPS = 256, 2  # a small tile of a program: a batch of 256 rows fills a GPU


class Squashed(NamedTuple):
    """A sampled action and what its gradient needs."""

    action: Tensor  # [B, A] in [-1, 1]
    log_prob: Tensor  # [B]
    step: Tensor  # [B, A]: exp(log_std) noise
    is_free: Tensor  # [B, A] bool: where log_std is within its limits


# ---- torch ----


def _log_tanh_derivative(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2)."""
    size = u.abs()
    return 2.0 * (LOG_2.value - size - softplus(-2.0 * size))


def squashed_sample_reference(
    output: Tensor, noise: Tensor, limits: Limits = LOG_STD_LIMITS
) -> Squashed:
    """The specification, of any dtype: action and log_prob are those of `squashed_sample`."""
    # u = mean + step
    mean, unlimited = output.chunk(2, dim=-1)
    noise = noise.to(output.dtype)
    log_std = unlimited.clamp(*limits)
    step = log_std.exp() * noise
    u = mean + step
    # log-probability of the noise, minus the logarithm of the squashing's derivative
    log_density = noise.square() * -0.5 - log_std - HALF_LOG_2PI.value
    return Squashed(
        u.tanh(), (log_density - _log_tanh_derivative(u)).sum(-1), step, log_std == unlimited
    )


def squashed_backward_reference(
    sample: Squashed, action_gradient: Tensor, log_prob_gradient: Tensor
) -> Tensor:
    """The specification: the gradient by `output` [B, 2A], from those by the action [B, A] and by
    its log-probability [B].
    """
    action = sample.action
    log_prob_gradient = log_prob_gradient.unsqueeze(1)
    u_gradient = action_gradient * (1.0 - action * action) + 2.0 * log_prob_gradient * action
    log_std_gradient = (u_gradient * sample.step - log_prob_gradient) * sample.is_free
    return torch.cat((u_gradient, log_std_gradient), -1)


# ---- Triton ----


@triton.jit
def _tile_of(B, A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr):
    """(rows of this program [BLOCK_B], columns [BLOCK_A], mask of the cells that exist)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_A)
    return row, column, (row < B)[:, None] & (column < A)[None, :]


@triton.jit(do_not_specialize=["B"])
def squashed_sample_kernel(
    output_ptr, noise_ptr, action_ptr, log_prob_ptr, step_ptr, is_free_ptr, B,
    A: tl.constexpr, MIN_LOG_STD: tl.constexpr, MAX_LOG_STD: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program samples BLOCK_B rows; exp(-2|u|) gives both tanh and the log of its derivative."""
    row, column, inside = _tile_of(B, A, BLOCK_B, BLOCK_A)
    cell = row[:, None] * A + column[None, :]
    first = row[:, None] * (2 * A) + column[None, :]
    # u = mean + step; a row of `output` has the means, then the log standard deviations
    noise = tl.load(noise_ptr + cell, mask=inside, other=0.0)
    unlimited = tl.load(output_ptr + first + A, mask=inside, other=0.0)
    log_std = clipped(unlimited, MIN_LOG_STD, MAX_LOG_STD)
    step = tl.exp(log_std) * noise
    u = tl.load(output_ptr + first, mask=inside, other=0.0) + step
    # tanh and the logarithm of its derivative, both of |u|: no exponential overflows
    size = tl.abs(u)
    e = tl.exp(-2.0 * size)
    tanh_of_size = (1.0 - e) / (1.0 + e)
    log_slope = 2.0 * (LOG_2 - size - tl.log(1.0 + e))
    term = -0.5 * noise * noise - log_std - HALF_LOG_2PI - log_slope
    tl.store(action_ptr + cell, tl.where(u < 0.0, -tanh_of_size, tanh_of_size), mask=inside)
    tl.store(log_prob_ptr + row, tl.sum(tl.where(inside, term, 0.0), axis=1), mask=row < B)
    tl.store(step_ptr + cell, step, mask=inside)
    tl.store(is_free_ptr + cell, (log_std == unlimited).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["B"])
def squashed_backward_kernel(
    action_ptr, step_ptr, is_free_ptr, action_gradient_ptr, log_prob_gradient_ptr, gradient_ptr, B,
    action_stride, log_prob_stride,
    A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_B rows; action_stride, log_prob_stride: of the gradients, by row."""
    row, column, inside = _tile_of(B, A, BLOCK_B, BLOCK_A)
    cell = row[:, None] * A + column[None, :]
    # what the forward pass stored, and the incoming gradients
    action = tl.load(action_ptr + cell, mask=inside, other=0.0)
    step = tl.load(step_ptr + cell, mask=inside, other=0.0)
    is_free = tl.load(is_free_ptr + cell, mask=inside, other=0).to(tl.float32)
    action_gradient = tl.load(
        action_gradient_ptr + row[:, None] * action_stride + column[None, :], mask=inside, other=0.0
    )
    log_prob_gradient = tl.load(
        log_prob_gradient_ptr + row * log_prob_stride, mask=row < B, other=0.0
    )
    log_prob_gradient = log_prob_gradient[:, None]
    # dL/du, and from it the gradients by mean and log_std
    u_gradient = action_gradient * (1.0 - action * action) + 2.0 * log_prob_gradient * action
    first = row[:, None] * (2 * A) + column[None, :]
    tl.store(gradient_ptr + first, u_gradient, mask=inside)
    tl.store(
        gradient_ptr + first + A, (u_gradient * step - log_prob_gradient) * is_free, mask=inside
    )


def _tile(num_actions: int) -> tuple[int, int]:
    """(BLOCK_B, BLOCK_A)."""
    block_a = triton.next_power_of_2(num_actions)
    return max(TILE // block_a, 1), block_a


def squashed_sample_triton(
    output: Tensor, noise: Tensor, limits: Limits = LOG_STD_LIMITS
) -> Squashed:
    """`squashed_sample_reference` in one launch."""
    num_rows, num_actions = noise.shape
    sample = _empty(noise)
    block_b, block_a = _tile(num_actions)
    squashed_sample_kernel[(triton.cdiv(num_rows, block_b),)](
        output.contiguous(), noise.contiguous(), *sample[:3], sample.is_free.view(torch.uint8),
        num_rows,
        A=num_actions, MIN_LOG_STD=limits[0], MAX_LOG_STD=limits[1],
        BLOCK_B=block_b, BLOCK_A=block_a, num_warps=NUM_WARPS,
    )  # fmt: skip
    return sample


def squashed_backward_triton(
    sample: Squashed, action_gradient: Tensor, log_prob_gradient: Tensor
) -> Tensor:
    """`squashed_backward_reference` in one launch."""
    num_rows, num_actions = sample.action.shape
    action_gradient = _with_dense_rows(action_gradient)
    gradient = torch.empty(
        num_rows, 2 * num_actions, dtype=torch.float32, device=action_gradient.device
    )
    block_b, block_a = _tile(num_actions)
    squashed_backward_kernel[(triton.cdiv(num_rows, block_b),)](
        sample.action, sample.step, sample.is_free.view(torch.uint8), action_gradient,
        log_prob_gradient, gradient, num_rows, action_gradient.stride(0),
        log_prob_gradient.stride(0),
        A=num_actions, BLOCK_B=block_b, BLOCK_A=block_a, num_warps=NUM_WARPS,
    )  # fmt: skip
    return gradient


def _empty(noise: Tensor) -> Squashed:
    """Memory for samples with noise [B, A] float32."""
    return Squashed(
        torch.empty(noise.shape, dtype=torch.float32, device=noise.device),
        torch.empty(noise.shape[0], dtype=torch.float32, device=noise.device),
        torch.empty(noise.shape, dtype=torch.float32, device=noise.device),
        torch.empty(noise.shape, dtype=torch.bool, device=noise.device),
    )


def _with_dense_rows(gradient: Tensor) -> Tensor:
    """`gradient` [B, A], copied unless its rows are dense; they may be parts of wider rows."""
    is_dense = gradient.stride(1) == 1 or gradient.shape[1] == 1
    return gradient if is_dense else gradient.contiguous()


# ---- C ----


def squashed_sample_c(output: Tensor, noise: Tensor, limits: Limits = LOG_STD_LIMITS) -> Squashed:
    """`squashed_sample_reference` in one pass."""
    output = output.contiguous()
    noise = noise.contiguous()
    sample = _empty(noise)
    term = torch.empty_like(noise)  # each action's part of the log-probability
    c_library.functions().squashed_sample(
        *c_library.pointers(output, noise),
        *c_library.integers(*noise.shape),
        *map(ctypes.c_float, limits),
        *c_library.pointers(term, *sample),
    )
    return sample


def squashed_backward_c(
    sample: Squashed, action_gradient: Tensor, log_prob_gradient: Tensor
) -> Tensor:
    """`squashed_backward_reference` in one pass."""
    num_rows, num_actions = sample.action.shape
    action_gradient = _with_dense_rows(action_gradient)
    gradient = torch.empty(num_rows, 2 * num_actions, dtype=torch.float32)
    c_library.functions().squashed_backward(
        *c_library.pointers(sample.action, sample.step, sample.is_free, action_gradient),
        *c_library.integers(action_gradient.stride(0)),
        *c_library.pointers(log_prob_gradient),
        *c_library.integers(log_prob_gradient.stride(0), num_rows, num_actions),
        *c_library.pointers(gradient),
    )
    return gradient


# ---- dispatch and autograd ----


def squashed_sample(
    output: Tensor, noise: Tensor, limits: Limits = LOG_STD_LIMITS
) -> tuple[Tensor, Tensor]:
    """(action [B, A] in [-1, 1], its log-probability [B]), once differentiable by `output`.

    output: [B, 2A], means before log standard deviations; noise: [B, A] standard normal, of the
    same dtype; limits: of the log standard deviation. Other dtypes than float32 take the reference.
    """
    # C and Triton would read other memory
    if noise.dim() != 2 or output.shape != (noise.shape[0], 2 * noise.shape[1]):
        raise ValueError(
            f"output must be [B, 2A] and noise [B, A], got {tuple(output.shape)} and "
            f"{tuple(noise.shape)}"
        )
    is_float = output.dtype == noise.dtype == torch.float32
    if is_float and use_triton_for_members(output):
        return _SampleOfMembers.apply(output, noise, limits)[:2]  # type: ignore[no-untyped-call]
    if not is_float or not (use_triton(output) or use_c(output)):
        return squashed_sample_reference(output, noise, limits)[:2]
    if output.requires_grad and torch.is_grad_enabled():
        return _SquashedSample.apply(output, noise, limits)
    return _sample(output, noise, limits)[:2]


def _sample(output: Tensor, noise: Tensor, limits: Limits) -> Squashed:
    sample = squashed_sample_triton if use_triton(output) else squashed_sample_c
    return sample(output, noise, limits)


class _SquashedSample(torch.autograd.Function):
    """The sample and its gradient in one kernel each."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, output: Tensor, noise: Tensor, limits: Limits
    ) -> tuple[Tensor, Tensor]:
        sample = _sample(output, noise, limits)
        ctx.save_for_backward(*sample)
        return sample.action, sample.log_prob

    @staticmethod
    def backward(
        ctx: Any, action_gradient: Tensor, log_prob_gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        sample = Squashed(*ctx.saved_tensors)
        backward = squashed_backward_triton if use_triton(sample.action) else squashed_backward_c
        return backward(sample, action_gradient, log_prob_gradient), None, None


class _SampleOfMembers(MembersAsRows):
    """`_SquashedSample` inside torch.func.vmap, where a backward pass can only read results."""

    @staticmethod
    def forward(output: Tensor, noise: Tensor, limits: Limits) -> tuple[Tensor, ...]:
        return tuple(_sample(output, noise, limits))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _GradientOfMembers.apply(*ctx.saved_tensors, *gradients[:2]), None, None  # type: ignore[no-untyped-call]


class _GradientOfMembers(MembersAsRows):
    """The gradient of `_SampleOfMembers`, which has none itself."""

    @staticmethod
    def forward(*given: Tensor) -> Tensor:
        return squashed_backward_triton(Squashed(*given[:4]), *given[4:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)


def squashed_mode(output: Tensor) -> Tensor:
    """[B, A] the action of the mean."""
    return output.chunk(2, dim=-1)[0].tanh()


def squashed_likelihood(output: Tensor, action: Tensor) -> Tensor:
    """[B] log-probability of given actions [B, A], once differentiable by `output` [B, 2A].

    Actions are clamped to +-(1 - 1e-6), where atanh is finite. The gradient moves a log_std outside
    its limits back only, never further out.
    """
    return _SquashedLikelihood.apply(output, action)


def _likelihood_and_gradient(output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [B], its gradient by `output` [B, 2A])."""
    mean, unlimited = output.chunk(2, dim=-1)
    log_std = unlimited.clamp(*LOG_STD_LIMITS)
    inv_std = log_std.neg().exp()
    # the normal number that gives this action
    u = action.clamp(-LARGEST_ACTION, LARGEST_ACTION).atanh()
    z = (u - mean) * inv_std
    # log-probability, as of a sample with noise z
    log_prob = (z.square() * -0.5 - log_std - HALF_LOG_2PI.value - _log_tanh_derivative(u)).sum(-1)
    # beyond a limit only gradients that point back to it count
    log_std_gradient = z.square() - 1.0
    to_limit = log_std - unlimited
    moves = (to_limit == 0.0) | (log_std_gradient * to_limit > 0.0)
    return log_prob, torch.cat((z * inv_std, log_std_gradient * moves), -1)


class _SquashedLikelihood(torch.autograd.Function):
    """Replaces the gradient where log_std is outside its limits."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, output: Tensor, action: Tensor
    ) -> Tensor:
        log_prob, gradient = _likelihood_and_gradient(output, action)
        ctx.save_for_backward(gradient)
        return log_prob

    @staticmethod
    def backward(ctx: Any, log_prob_gradient: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        (gradient,) = ctx.saved_tensors
        return gradient * log_prob_gradient.unsqueeze(1), None
