"""Flat Adam(W) with global-norm clip and target update: one pass over the parameters, three
launches, no host sync.

    g <- g min(1, max_norm / (|g| + 1e-6));   m <- m + (1 - b1)(g - m);   v <- v + (1 - b2)(g^2 - v)
    p <- p - lr/(1 - b1^t) m / (sqrt(v)/sqrt(1 - b2^t) + eps);   target <- target + tau (p - target)

Kingma and Ba 2015, algorithm 1; decoupled decay p <- p (1 - lr wd) as in Loshchilov and Hutter
2019, else wd p is added to g; the clip is torch.nn.utils.clip_grad_norm_'s. A gradient or a loss
with NaN or infinity changes nothing at all, nor does a gradient that no clip bounds and whose
squares overflow in v. What was left out is counted on the device, and the first such gradient and
its losses are kept.
"""

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import use_c, use_triton

BLOCK = 1024
MAX_LOSSES = 8
COUNTS = ("asked", "skipped", "in_a_row", "longest", "first")  # of SkippedSteps
LARGEST_NORM = (
    1e18  # of what v takes in: v is float32, and an infinite one would stop its parameter for good
)
LARGEST_CLIPPED_NORM = 3e38  # of what a clip scales down first


class SkippedSteps(NamedTuple):
    """What was not done because it was not finite.

    counts: [5] int64, COUNTS: steps asked for; of them left out; left out in a row until now; the
    most in a row; the number of the first (0: none). gradient [P] and losses [MAX_LOSSES],
    float32, are those of the first; the next one is kept when that number is 0 again.
    """

    counts: Tensor
    gradient: Tensor
    losses: Tensor


class AdamState(NamedTuple):
    """What a step changes: parameters and moments, flat float32 [P]; steps taken, 0-d int64; a
    target network's parameters [P] or None.
    """

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    target: Tensor | None = None
    skipped: SkippedSteps | None = None


@dataclass(frozen=True)
class AdamOptions:
    """Constants of the formula; `decoupled`: AdamW; `max_grad_norm` None: no clip; `tau`: how far
    the target moves.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    max_grad_norm: float | None = None
    tau: float = 0.0


def adam_step_reference(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """The specification; arguments and result as in `adam_step`."""
    parameters, exp_avg, exp_avg_sq, step, target, skipped = state
    beta_1, beta_2 = options.betas
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    is_finite = norm <= (LARGEST_NORM if options.max_grad_norm is None else LARGEST_CLIPPED_NORM)
    if losses is not None:
        is_finite = is_finite & losses.isfinite().all()
    if skipped is not None:
        _note_step(skipped, gradient, losses, is_finite)
    norm = torch.where(is_finite, norm, norm * torch.inf).to(parameters.dtype)
    step += is_finite
    count = step.double()
    scale_1, scale_2 = 1.0 - beta_1**count, 1.0 - beta_2**count
    if options.max_grad_norm is not None:
        gradient = gradient * (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    decayed = parameters
    if options.decoupled:
        decayed = parameters * (1.0 - learning_rate * options.weight_decay)
    else:
        gradient = gradient + options.weight_decay * parameters
    new_avg = torch.lerp(exp_avg, gradient, 1.0 - beta_1)
    new_sq = exp_avg_sq + (1.0 - beta_2) * (gradient * gradient - exp_avg_sq)
    denominator = new_sq.sqrt() / scale_2.sqrt().to(parameters.dtype) + options.eps
    moved = decayed - (learning_rate / scale_1).to(parameters.dtype) * new_avg / denominator
    for old, new in ((parameters, moved), (exp_avg, new_avg), (exp_avg_sq, new_sq)):
        old.copy_(torch.where(is_finite, new, old))
    if target is not None:
        followed = torch.lerp(target, parameters, options.tau)
        target.copy_(torch.where(is_finite, followed, target))
    return norm


def _note_step(
    skipped: SkippedSteps, gradient: Tensor, losses: Tensor | None, is_finite: Tensor
) -> None:
    asked, total, in_a_row, longest, first = skipped.counts.unbind()
    is_first = ~is_finite & (first == 0)
    asked += 1
    total += ~is_finite
    in_a_row.copy_(torch.where(is_finite, 0, in_a_row + 1))
    torch.maximum(longest, in_a_row, out=longest)
    first.copy_(torch.where(is_first, asked, first))
    skipped.gradient.copy_(torch.where(is_first, gradient, skipped.gradient))
    if losses is not None:
        kept = skipped.losses[: losses.numel()]
        kept.copy_(torch.where(is_first, losses.flatten(), kept))


@triton.jit
def square_sums_kernel(gradient_ptr, partial_ptr, P, BLOCK: tl.constexpr):
    """Sum of squares of a block each, in float64 partials: deterministic, no atomics."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + offset, mask=offset < P, other=0.0).to(tl.float64)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(gradient * gradient, axis=0))


@triton.jit
def prologue_kernel(
    partial_ptr, step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr, counts_ptr,
    first_losses_ptr, num_partials, num_losses,
    max_norm, largest_norm, CLIP: tl.constexpr, HAS_RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: norm, whether the step is taken, the step counter, bias corrections in float64
    -> scalars [6]; notes what is left out.

    The counter moves here and not in the many-program kernel behind, which would write what its
    other programs read.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_partials, BLOCK):
        total += tl.load(partial_ptr + start + lane, mask=start + lane < num_partials, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))  # of a float64: sqrt_rn takes float32 only
    loss = tl.load(loss_ptr + lane, mask=lane < num_losses, other=0.0)
    bad_losses = tl.sum(tl.where(tl.abs(loss) < float("inf"), 0, 1), axis=0)
    is_finite = (norm <= largest_norm) & (bad_losses == 0)  # false for NaN
    step = tl.load(step_ptr) + is_finite.to(tl.int64)
    tl.store(step_ptr, step)
    count = step.to(tl.float64)
    correction_1 = 1.0 - tl.exp(
        count * tl.load(log_beta_ptr)
    )  # float64 from memory: a Python float would arrive as float32
    correction_2 = 1.0 - tl.exp(count * tl.load(log_beta_ptr + 1))
    clip = norm * 0.0 + 1.0
    if CLIP:
        clip = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    rate = tl.load(rate_ptr).to(tl.float64)
    tl.store(scalar_ptr, clip.to(tl.float32))
    tl.store(scalar_ptr + 1, (rate / correction_1).to(tl.float32))
    tl.store(scalar_ptr + 2, tl.sqrt(correction_2).to(tl.float32))
    tl.store(scalar_ptr + 3, tl.where(is_finite, norm, norm * float("inf")).to(tl.float32))
    tl.store(scalar_ptr + 4, is_finite.to(tl.float32))
    if HAS_RECORD:
        asked = tl.load(counts_ptr) + 1
        bad = 1 - is_finite.to(tl.int64)
        in_a_row = (tl.load(counts_ptr + 2) + 1) * bad
        first = tl.load(counts_ptr + 4)
        is_first = (bad != 0) & (first == 0)
        tl.store(counts_ptr, asked)
        tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + bad)
        tl.store(counts_ptr + 2, in_a_row)
        tl.store(counts_ptr + 3, tl.maximum(tl.load(counts_ptr + 3), in_a_row))
        tl.store(counts_ptr + 4, tl.where(is_first, asked, first))
        tl.store(first_losses_ptr + lane, loss, mask=(lane < num_losses) & is_first)
        tl.store(scalar_ptr + 5, is_first.to(tl.float32))


@triton.jit
def adam_kernel(
    parameters_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, target_ptr, scalar_ptr,
    learning_rate_ptr, first_gradient_ptr, P,
    one_minus_beta_1, one_minus_beta_2, eps, weight_decay, tau,
    DECOUPLED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads every array once and writes it once; nothing at all where the step is left out, but the
    first such gradient is kept.
    """
    if tl.load(scalar_ptr + 4) != 0.0:  # not part of the mask: that would cost the 16-byte accesses
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < P
        parameters = tl.load(parameters_ptr + offset, mask=inside, other=0.0)
        gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0) * tl.load(scalar_ptr)
        if DECOUPLED:
            parameters = parameters * (1.0 - tl.load(learning_rate_ptr) * weight_decay)
        else:
            gradient = gradient + weight_decay * parameters
        exp_avg = tl.load(exp_avg_ptr + offset, mask=inside, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask=inside, other=0.0)
        exp_avg = exp_avg + one_minus_beta_1 * (gradient - exp_avg)
        exp_avg_sq = exp_avg_sq + one_minus_beta_2 * (gradient * gradient - exp_avg_sq)
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(scalar_ptr + 2)) + eps
        parameters = parameters - tl.div_rn(tl.load(scalar_ptr + 1) * exp_avg, denominator)
        tl.store(parameters_ptr + offset, parameters, mask=inside)
        tl.store(exp_avg_ptr + offset, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + offset, exp_avg_sq, mask=inside)
        if HAS_TARGET:
            target = tl.load(target_ptr + offset, mask=inside, other=0.0)
            tl.store(target_ptr + offset, target + tau * (parameters - target), mask=inside)
    elif HAS_RECORD:  # noqa: SIM102 - known when it is compiled, what is inside is not
        if tl.load(scalar_ptr + 5) != 0.0:  # not part of the mask either
            offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offset < P
            tl.store(
                first_gradient_ptr + offset,
                tl.load(gradient_ptr + offset, mask=inside, other=0.0),
                mask=inside,
            )


@functools.cache  # for good: CUDA graphs hold the place
def _log_betas(device: torch.device, betas: tuple[float, float]) -> Tensor:
    return torch.tensor([math.log(beta) for beta in betas], dtype=torch.float64, device=device)


def adam_step_triton(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """`adam_step_reference` in three launches."""
    parameters, exp_avg, exp_avg_sq, step, target, skipped = state
    size, clips, has_record = (
        parameters.numel(),
        options.max_grad_norm is not None,
        skipped is not None,
    )
    programs = triton.cdiv(size, BLOCK)
    partial = torch.empty(programs, dtype=torch.float64, device=parameters.device)
    scalars = torch.empty(6, dtype=torch.float32, device=parameters.device)
    counts, first_gradient, first_losses = (
        (step, gradient, scalars) if skipped is None else skipped
    )  # pointers, unused without
    square_sums_kernel[(programs,)](gradient, partial, size, BLOCK=BLOCK, num_warps=4)
    prologue_kernel[(1,)](
        partial, step, learning_rate, _log_betas(parameters.device, options.betas), scalars,
        scalars if losses is None else losses, counts, first_losses, programs,
        0 if losses is None else losses.numel(),
        options.max_grad_norm or 1.0, LARGEST_CLIPPED_NORM if clips else LARGEST_NORM,
        CLIP=clips, HAS_RECORD=has_record, BLOCK=256, num_warps=4,
    )  # fmt: skip
    adam_kernel[(programs,)](
        parameters, gradient, exp_avg, exp_avg_sq, parameters if target is None else target,
        scalars, learning_rate, first_gradient, size,
        1.0 - options.betas[0], 1.0 - options.betas[1], options.eps, options.weight_decay,
        options.tau,
        DECOUPLED=options.decoupled, HAS_TARGET=target is not None, HAS_RECORD=has_record,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return scalars[3]


def c_arguments(
    state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions
) -> "AdamInC":
    """What adam_cpu.h's step takes; the tensors must be contiguous and outlive it."""
    parameters, exp_avg, exp_avg_sq, step, target, skipped = state
    max_norm = math.inf if options.max_grad_norm is None else options.max_grad_norm
    largest_norm = LARGEST_NORM if options.max_grad_norm is None else LARGEST_CLIPPED_NORM
    noted = (None, None, None) if skipped is None else (tensor.data_ptr() for tensor in skipped)
    return AdamInC(
        *(tensor.data_ptr() for tensor in (parameters, exp_avg, exp_avg_sq)),
        None if target is None else target.data_ptr(),
        gradient.data_ptr(), step.data_ptr(), gradient.numel(), options.decoupled,
        learning_rate.data_ptr(),
        *options.betas, options.eps, options.weight_decay, max_norm, largest_norm, options.tau,
        *noted,
    )  # fmt: skip


class AdamInC(ctypes.Structure):
    """adam_cpu.h's Adam."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("parameters", "exp_avg", "exp_avg_sq", "target", "gradient", "step")
        ),
        *((name, ctypes.c_int64) for name in ("size", "decoupled")),
        ("learning_rate", ctypes.c_void_p),
        *(
            (name, ctypes.c_double)
            for name in (
                "beta_1",
                "beta_2",
                "epsilon",
                "weight_decay",
                "max_norm",
                "largest_norm",
                "tau",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("counts", "first_gradient", "first_losses")),
    ]


def adam_step_c(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """`adam_step_reference` in one pass, where torch makes twenty."""
    norm = torch.empty(())
    c_library.functions().adam(
        ctypes.byref(c_arguments(state, gradient, learning_rate, options)),
        ctypes.c_int64(0 if losses is None else losses.numel()),
        ctypes.c_void_p(None if losses is None else losses.data_ptr()),
        ctypes.c_void_p(norm.data_ptr()),
    )
    return norm


def adam_step(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """One step of `state`, in place, along `gradient` [P]; returns the gradient's norm before
    clipping, 0-d.

    learning_rate: 0-d float32 on the device. losses: [up to MAX_LOSSES], contiguous, of the
    parameters' type, what the gradient is of; where one of them or the gradient is not finite
    nothing changes, and what is returned is not finite.
    """
    if losses is not None:  # which kernels read as they lie: of bf16 a NaN would be none
        got = losses.dtype, losses.is_contiguous(), losses.numel() <= MAX_LOSSES
        assert got == (state.parameters.dtype, True, True), (*got, losses.shape)
    if use_triton(gradient):
        return adam_step_triton(state, gradient, learning_rate, options, losses)
    in_c = use_c(gradient) and gradient.dtype == torch.float32
    return (adam_step_c if in_c else adam_step_reference)(
        state, gradient, learning_rate, options, losses
    )
