"""Flat Adam(W) with global-norm clip and target update: one pass over the parameters, three launches, no host sync.

    g <- g min(1, max_norm / (|g| + 1e-6));   m <- m + (1 - b1)(g - m);   v <- v + (1 - b2)(g^2 - v)
    p <- p - lr/(1 - b1^t) m / (sqrt(v)/sqrt(1 - b2^t) + eps);   target <- target + tau (p - target)

Kingma and Ba 2015, algorithm 1; decoupled decay p <- p (1 - lr wd) as in Loshchilov and Hutter 2019, else wd p is added to g; the clip is
torch.nn.utils.clip_grad_norm_'s. A gradient with NaN or infinity changes nothing at all.
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


class AdamState(NamedTuple):
    """What a step changes: parameters and moments, flat float32 [P]; steps taken, 0-d int64; a target network's parameters [P] or None."""

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    target: Tensor | None = None


@dataclass(frozen=True)
class AdamOptions:
    """Constants of the formula; `decoupled`: AdamW; `max_grad_norm` None: no clip; `tau`: how far the target moves."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    max_grad_norm: float | None = None
    tau: float = 0.0


def adam_step_reference(state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions) -> Tensor:
    """The specification; arguments and result as in `adam_step`."""
    parameters, exp_avg, exp_avg_sq, step, target = state
    beta_1, beta_2 = options.betas
    norm = torch.linalg.vector_norm(gradient)
    ok = torch.isfinite(norm)
    step += ok
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
        old.copy_(torch.where(ok, new, old))
    if target is not None:
        target.copy_(torch.where(ok, torch.lerp(target, parameters, options.tau), target))
    return norm


@triton.jit
def square_sums_kernel(gradient_ptr, partial_ptr, P, BLOCK: tl.constexpr):
    """Sum of squares of a block each, in float64 partials: deterministic, no atomics."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + offset, mask=offset < P, other=0.0).to(tl.float64)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(gradient * gradient, axis=0))


@triton.jit
def prologue_kernel(
    partial_ptr, step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, num_partials, max_norm, CLIP: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: norm, whether it is finite, the step counter, bias corrections in float64 -> scalars [5].

    The counter moves here and not in the many-program kernel behind, which would write what its other programs read.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_partials, BLOCK):
        total += tl.load(partial_ptr + start + lane, mask=start + lane < num_partials, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))  # of a float64: sqrt_rn takes float32 only
    is_finite = norm < float("inf")
    step = tl.load(step_ptr) + is_finite.to(tl.int64)
    tl.store(step_ptr, step)
    count = step.to(tl.float64)
    correction_1 = 1.0 - tl.exp(count * tl.load(log_beta_ptr))  # float64 from memory: a Python float would arrive as float32
    correction_2 = 1.0 - tl.exp(count * tl.load(log_beta_ptr + 1))
    clip = norm * 0.0 + 1.0
    if CLIP:
        clip = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    rate = tl.load(rate_ptr).to(tl.float64)
    tl.store(scalar_ptr, clip.to(tl.float32))
    tl.store(scalar_ptr + 1, (rate / correction_1).to(tl.float32))
    tl.store(scalar_ptr + 2, tl.sqrt(correction_2).to(tl.float32))
    tl.store(scalar_ptr + 3, norm.to(tl.float32))
    tl.store(scalar_ptr + 4, is_finite.to(tl.float32))


@triton.jit
def adam_kernel(
    parameters_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, target_ptr, scalar_ptr, learning_rate_ptr, P,
    one_minus_beta_1, one_minus_beta_2, eps, weight_decay, tau,
    DECOUPLED: tl.constexpr, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads every array once and writes it once; nothing at all where the gradient was not finite."""
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


@functools.cache  # for good: CUDA graphs hold the place
def _log_betas(device: torch.device, betas: tuple[float, float]) -> Tensor:
    return torch.tensor([math.log(beta) for beta in betas], dtype=torch.float64, device=device)


def adam_step_triton(state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions) -> Tensor:
    """`adam_step_reference` in three launches."""
    parameters, exp_avg, exp_avg_sq, step, target = state
    size = parameters.numel()
    programs = triton.cdiv(size, BLOCK)
    partial = torch.empty(programs, dtype=torch.float64, device=parameters.device)
    scalars = torch.empty(5, dtype=torch.float32, device=parameters.device)
    square_sums_kernel[(programs,)](gradient, partial, size, BLOCK=BLOCK, num_warps=4)
    prologue_kernel[(1,)](
        partial, step, learning_rate, _log_betas(parameters.device, options.betas), scalars, programs, options.max_grad_norm or 1.0,
        CLIP=options.max_grad_norm is not None, BLOCK=256, num_warps=4,
    )  # fmt: skip
    adam_kernel[(programs,)](
        parameters, gradient, exp_avg, exp_avg_sq, parameters if target is None else target, scalars, learning_rate, size,
        1.0 - options.betas[0], 1.0 - options.betas[1], options.eps, options.weight_decay, options.tau,
        DECOUPLED=options.decoupled, HAS_TARGET=target is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return scalars[3]


def c_arguments(state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions) -> "AdamInC":
    """What adam_cpu.h's step takes; the tensors must be contiguous and outlive it."""
    parameters, exp_avg, exp_avg_sq, step, target = state
    max_norm = math.inf if options.max_grad_norm is None else options.max_grad_norm
    return AdamInC(
        *(tensor.data_ptr() for tensor in (parameters, exp_avg, exp_avg_sq)), None if target is None else target.data_ptr(),
        gradient.data_ptr(), step.data_ptr(), gradient.numel(), options.decoupled, learning_rate.data_ptr(),
        *options.betas, options.eps, options.weight_decay, max_norm, options.tau,
    )  # fmt: skip


class AdamInC(ctypes.Structure):
    """adam_cpu.h's Adam."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parameters", "exp_avg", "exp_avg_sq", "target", "gradient", "step")),
        *((name, ctypes.c_int64) for name in ("size", "decoupled")),
        ("learning_rate", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("beta_1", "beta_2", "epsilon", "weight_decay", "max_norm", "tau")),
    ]


def adam_step_c(state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions) -> Tensor:
    """`adam_step_reference` in one pass, where torch makes twenty."""
    norm = torch.empty(())
    c_library.functions().adam(ctypes.byref(c_arguments(state, gradient, learning_rate, options)), ctypes.c_void_p(norm.data_ptr()))
    return norm


def adam_step(state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions) -> Tensor:
    """One step of `state`, in place, along `gradient` [P]; returns the gradient's norm before clipping, 0-d.

    learning_rate: 0-d float32 on the device.
    """
    if use_triton(gradient):
        return adam_step_triton(state, gradient, learning_rate, options)
    in_c = use_c(gradient) and gradient.dtype == torch.float32
    return (adam_step_c if in_c else adam_step_reference)(state, gradient, learning_rate, options)
