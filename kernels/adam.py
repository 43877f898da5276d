"""Flat Adam(W) with global-norm clip and target update: one pass over the parameters, two
launches, no host sync; the members of a stacked population step in the same two.

    g <- g min(1, max_norm / (|g| + 1e-6));   m <- m + (1 - b1)(g - m);   v <- v + (1 - b2)(g^2 - v)
    p <- p - lr/(1 - b1^t) m / (sqrt(v)/sqrt(1 - b2^t) + eps);   target <- target + tau (p - target)

Kingma and Ba 2015, algorithm 1; decoupled decay p <- p (1 - lr wd) as in Loshchilov and Hutter
2019, else wd p is added to g; the clip is torch.nn.utils.clip_grad_norm_'s. A gradient or a loss
with NaN or infinity changes nothing, nor does a gradient without clip whose squares overflow in v.
Skipped steps are counted on the device, and the gradient and losses of the first one are kept.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import ForMembers, choose_kernel, member_strides, use_triton_for_members
from gpurl.kernels.optional_triton import tl, triton

BLOCK = 1024
BLOCK_PARTIAL = 256  # of the sums of squares that are added at once
MAX_LOSSES = 8
COUNTS = ("steps", "skipped", "in_a_row", "longest", "first")  # of SkippedSteps
# of a gradient that is not clipped: v is float32, and where it is infinite its parameter never
# moves again
LARGEST_NORM = 1e18
LARGEST_CLIPPED_NORM = 3e38  # of a gradient before its clip


class SkippedSteps(NamedTuple):
    """The steps that were skipped because a gradient or a loss was not finite.

    counts: [5] int64, COUNTS: all steps; the skipped ones; those skipped in a row until now; the
    longest such row; the number of the first one (0: none). gradient [P] and losses [MAX_LOSSES],
    float32, are those of the first one. Set its number to 0 to keep those of the next one.
    """

    counts: Tensor
    gradient: Tensor
    losses: Tensor


class AdamState(NamedTuple):
    """What a step changes."""

    parameters: Tensor  # [P] float32
    exp_avg: Tensor  # [P] float32: m
    exp_avg_sq: Tensor  # [P] float32: v
    step: Tensor  # 0-d int64: steps taken
    target: Tensor | None = None  # [P] float32: parameters of a target network
    skipped: SkippedSteps | None = None
    ticket: Tensor | None = None  # [1] int32, 0: of `is_last_program`; None: one for each step


@dataclass(frozen=True)
class AdamOptions:
    """Constants of the formula."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False  # AdamW
    max_grad_norm: float | None = None  # None: no clip
    tau: float = 0.0  # fraction by which the target moves towards the parameters

    @property
    def largest_norm(self) -> float:
        """The largest norm of a gradient that is used."""
        return LARGEST_NORM if self.max_grad_norm is None else LARGEST_CLIPPED_NORM


def adam_step_reference(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """The specification; arguments and result as in `adam_step`."""
    parameters, exp_avg, exp_avg_sq, step, target, skipped, _ = state
    beta_1, beta_2 = options.betas

    # whether the step is taken
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    is_finite = norm <= options.largest_norm
    if losses is not None:
        is_finite = is_finite & losses.isfinite().all()
    if skipped is not None:
        _count_step(skipped, gradient, losses, is_finite)
    norm = torch.where(is_finite, norm, norm * torch.inf).to(parameters.dtype)
    step += is_finite

    # clip and weight decay
    if options.max_grad_norm is not None:
        gradient = gradient * (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    decayed = parameters
    if options.decoupled:
        decayed = parameters * (1.0 - learning_rate * options.weight_decay)
    else:
        gradient = gradient + options.weight_decay * parameters

    # moments, bias corrections and the step
    count = step.double()
    correction_1 = 1.0 - beta_1**count
    correction_2 = 1.0 - beta_2**count
    new_avg = torch.lerp(exp_avg, gradient, 1.0 - beta_1)
    new_sq = exp_avg_sq + (1.0 - beta_2) * (gradient * gradient - exp_avg_sq)
    denominator = new_sq.sqrt() / correction_2.sqrt().to(parameters.dtype) + options.eps
    moved = decayed - (learning_rate / correction_1).to(parameters.dtype) * new_avg / denominator

    # write by selection, so that a skipped step changes nothing
    for old, new in ((parameters, moved), (exp_avg, new_avg), (exp_avg_sq, new_sq)):
        old.copy_(torch.where(is_finite, new, old))
    if target is not None:
        followed = torch.lerp(target, parameters, options.tau)
        target.copy_(torch.where(is_finite, followed, target))
    return norm


def _count_step(
    skipped: SkippedSteps, gradient: Tensor, losses: Tensor | None, is_finite: Tensor
) -> None:
    # views of the counts, written in place
    steps, num_skipped, in_a_row, longest, first = skipped.counts.unbind()
    is_first = ~is_finite & (first == 0)
    steps += 1
    num_skipped += ~is_finite
    in_a_row.copy_(torch.where(is_finite, 0, in_a_row + 1))
    torch.maximum(longest, in_a_row, out=longest)
    first.copy_(torch.where(is_first, steps, first))
    skipped.gradient.copy_(torch.where(is_first, gradient, skipped.gradient))
    if losses is not None:
        kept = skipped.losses[: losses.numel()]
        kept.copy_(torch.where(is_first, losses.flatten(), kept))


@triton.jit
def is_last_program(ticket_ptr):
    """Whether all other programs of the launch have called this; the stores that they made before
    are visible then. Nobody waits. The ticket, one int32, is 0 before and after the launch.
    """
    tl.debug_barrier()  # all stores of this program come before its ticket
    is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if is_last:
        tl.store(ticket_ptr, 0)
    return is_last


@triton.jit
def begin_step(
    partial_ptr, step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr, counts_ptr,
    first_losses_ptr, num_partials, num_losses,
    max_norm, largest_norm, CLIP: tl.constexpr, HAS_RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes what all programs of `adam_kernel` read, scalars [6]: clip factor, rate
    over correction 1, root of correction 2, norm, whether the step is taken, whether it is the
    first skipped one. It counts steps and skipped steps.

    partial: [num_partials] float64, the sums of squares of the gradient. The step counter moves
    here: `adam_kernel` would write what its other programs read.
    """
    # norm of the gradient, in a fixed order
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_partials, BLOCK):
        total += tl.load(partial_ptr + start + lane, mask=start + lane < num_partials, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))  # of a float64: sqrt_rn takes float32 only
    # whether the step is taken
    loss = tl.load(loss_ptr + lane, mask=lane < num_losses, other=0.0)
    bad_losses = tl.sum(tl.where(tl.abs(loss) < float("inf"), 0, 1), axis=0)
    is_finite = (norm <= largest_norm) & (bad_losses == 0)  # false for NaN
    step = tl.load(step_ptr) + is_finite.to(tl.int64)
    tl.debug_barrier()  # every thread has read the step before one writes
    tl.store(step_ptr, step)
    # bias corrections, clip and rate; the betas come from memory, as a Python float would arrive as
    # float32
    count = step.to(tl.float64)
    correction_1 = 1.0 - tl.exp(count * tl.load(log_beta_ptr))
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
        # counts of skipped steps, and the losses of the first one
        num_steps = tl.load(counts_ptr) + 1
        bad = 1 - is_finite.to(tl.int64)
        in_a_row = (tl.load(counts_ptr + 2) + 1) * bad
        first = tl.load(counts_ptr + 4)
        is_first = (bad != 0) & (first == 0)
        all_bad = tl.load(counts_ptr + 1) + bad
        most_in_a_row = tl.maximum(tl.load(counts_ptr + 3), in_a_row)
        tl.debug_barrier()  # the same for the counts
        tl.store(counts_ptr, num_steps)
        tl.store(counts_ptr + 1, all_bad)
        tl.store(counts_ptr + 2, in_a_row)
        tl.store(counts_ptr + 3, most_in_a_row)
        tl.store(counts_ptr + 4, tl.where(is_first, num_steps, first))
        tl.store(first_losses_ptr + lane, loss, mask=(lane < num_losses) & is_first)
        tl.store(scalar_ptr + 5, is_first.to(tl.float32))


@triton.jit(
    do_not_specialize=[
        *("num_losses", "ticket_stride", "step_stride", "rate_stride", "loss_stride"),
        *("counts_stride", "first_losses_stride"),
    ]
)
def norm_kernel(
    gradient_ptr, partial_ptr, ticket_ptr, step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr,
    counts_ptr, first_losses_ptr, P, num_losses,
    gradient_stride, ticket_stride, step_stride, rate_stride, loss_stride, counts_stride,
    first_losses_stride,
    max_norm, largest_norm, CLIP: tl.constexpr, HAS_RECORD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PARTIAL: tl.constexpr,
):  # fmt: skip
    """A program sums the squares of a block in float64. The last one of a member to end begins its
    step; the order in which it adds the sums is fixed. Strides are from member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    gradient_ptr += member * gradient_stride
    partial_ptr += member * tl.num_programs(0)
    ticket_ptr += member * ticket_stride
    step_ptr += member * step_stride
    rate_ptr += member * rate_stride
    scalar_ptr += member * 6
    loss_ptr += member * loss_stride
    counts_ptr += member * counts_stride
    first_losses_ptr += member * first_losses_stride
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + offset, mask=offset < P, other=0.0).to(tl.float64)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(gradient * gradient, axis=0))
    if is_last_program(ticket_ptr):
        begin_step(
            partial_ptr, step_ptr, rate_ptr, log_beta_ptr, scalar_ptr, loss_ptr, counts_ptr,
            first_losses_ptr, tl.num_programs(0), num_losses, max_norm, largest_norm,
            CLIP, HAS_RECORD, BLOCK_PARTIAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["learning_rate_stride"])
def adam_kernel(
    parameters_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, target_ptr, scalar_ptr,
    learning_rate_ptr, first_gradient_ptr, P,
    parameters_stride, gradient_stride, exp_avg_stride, exp_avg_sq_stride, target_stride,
    learning_rate_stride, first_gradient_stride,
    one_minus_beta_1, one_minus_beta_2, eps, weight_decay, tau,
    DECOUPLED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads every array once and writes it once. A skipped step changes nothing, but its gradient
    is kept if it is the first one. Strides are from member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    parameters_ptr += member * parameters_stride
    gradient_ptr += member * gradient_stride
    exp_avg_ptr += member * exp_avg_stride
    exp_avg_sq_ptr += member * exp_avg_sq_stride
    target_ptr += member * target_stride
    scalar_ptr += member * 6
    learning_rate_ptr += member * learning_rate_stride
    first_gradient_ptr += member * first_gradient_stride
    # a branch and not a part of the mask, which would prevent accesses of 16 bytes
    if tl.load(scalar_ptr + 4) != 0.0:
        # clip and weight decay
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < P
        parameters = tl.load(parameters_ptr + offset, mask=inside, other=0.0)
        gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0) * tl.load(scalar_ptr)
        if DECOUPLED:
            parameters = parameters * (1.0 - tl.load(learning_rate_ptr) * weight_decay)
        else:
            gradient = gradient + weight_decay * parameters
        # moments
        exp_avg = tl.load(exp_avg_ptr + offset, mask=inside, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask=inside, other=0.0)
        exp_avg = exp_avg + one_minus_beta_1 * (gradient - exp_avg)
        exp_avg_sq = exp_avg_sq + one_minus_beta_2 * (gradient * gradient - exp_avg_sq)
        # step, rounded as torch rounds
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(scalar_ptr + 2)) + eps
        parameters = parameters - tl.div_rn(tl.load(scalar_ptr + 1) * exp_avg, denominator)
        tl.store(parameters_ptr + offset, parameters, mask=inside)
        tl.store(exp_avg_ptr + offset, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + offset, exp_avg_sq, mask=inside)
        # the target network follows
        if HAS_TARGET:
            target = tl.load(target_ptr + offset, mask=inside, other=0.0)
            tl.store(target_ptr + offset, target + tau * (parameters - target), mask=inside)
    elif HAS_RECORD:  # noqa: SIM102 - a constant of the compilation, and the next condition is not
        if tl.load(scalar_ptr + 5) != 0.0:
            offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offset < P
            gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0)
            tl.store(first_gradient_ptr + offset, gradient, mask=inside)


@functools.cache  # never freed: CUDA graphs hold its address
def _log_betas(device: torch.device, betas: tuple[float, float]) -> Tensor:
    return torch.tensor([math.log(beta) for beta in betas], dtype=torch.float64, device=device)


def adam_step_triton(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """`adam_step_reference` in two launches, also of M members, each tensor with a leading axis
    [M, ...]; those that keep the state may have any stride there.
    """
    device = gradient.device
    members, size = gradient.shape[:-1], gradient.shape[-1]
    programs = triton.cdiv(size, BLOCK)
    partial = torch.empty((*members, programs), dtype=torch.float64, device=device)
    scalars = torch.empty((*members, 6), dtype=torch.float32, device=device)
    pointers = begin_arguments(state, learning_rate, options, scalars, losses)
    ticket, step, rate, _, _, of_losses, counts, first_losses = pointers
    num_losses = 0 if losses is None else losses.numel() // members.numel()
    given = (gradient, ticket, step, rate, of_losses, counts, first_losses)
    norm_kernel[(programs, members.numel())](
        gradient, partial, *pointers, size, num_losses,
        *member_strides(given, bool(members)), options.max_grad_norm or 1.0, options.largest_norm,
        CLIP=options.max_grad_norm is not None, HAS_RECORD=state.skipped is not None,
        BLOCK=BLOCK, BLOCK_PARTIAL=BLOCK_PARTIAL, num_warps=4,
    )  # fmt: skip
    return finish_step(state, gradient, learning_rate, options, scalars)


def begin_arguments(
    state: AdamState,
    learning_rate: Tensor,
    options: AdamOptions,
    scalars: Tensor,
    losses: Tensor | None,
) -> tuple[Tensor, ...]:
    """The ticket and the pointers of `begin_step` after `partial`."""
    ticket = state.ticket
    if ticket is None:
        ticket = torch.zeros((*scalars.shape[:-1], 1), dtype=torch.int32, device=scalars.device)
    # without a record any pointers, which are not used
    counts, _, first_losses = state.skipped or (state.step, None, scalars)
    log_betas = _log_betas(scalars.device, options.betas)
    pointers = ticket, state.step, learning_rate, log_betas, scalars
    return *pointers, scalars if losses is None else losses, counts, first_losses


def finish_step(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    scalars: Tensor,
) -> Tensor:
    """Move the parameters as the scalars of `begin_step` say, in one launch; returns the norm."""
    parameters, exp_avg, exp_avg_sq, _, target, skipped, _ = state
    members, size = parameters.shape[:-1], parameters.shape[-1]
    target_or_any = parameters if target is None else target
    first = gradient if skipped is None else skipped.gradient
    arrays = (parameters, gradient, exp_avg, exp_avg_sq, target_or_any)
    adam_kernel[(triton.cdiv(size, BLOCK), members.numel())](
        *arrays, scalars, learning_rate, first, size,
        *member_strides((*arrays, learning_rate, first), bool(members)),
        1.0 - options.betas[0], 1.0 - options.betas[1], options.eps, options.weight_decay,
        options.tau,
        DECOUPLED=options.decoupled, HAS_TARGET=target is not None,
        HAS_RECORD=skipped is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return scalars[..., 3]


class StepOfMembers(ForMembers):
    """`adam_step_triton` of what `_packed` gives."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        state, gradient, learning_rate, options, losses = _unpacked(given)
        assert state.parameters.stride(0), "members need weights of their own"
        return adam_step_triton(state, gradient, learning_rate, options, losses)


def _packed(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None,
) -> tuple[Any, ...]:
    """The arguments without tuples, into which torch.func.vmap does not look."""
    *tensors, skipped, ticket = state
    return *tensors, *(skipped or (None,) * 3), ticket, gradient, learning_rate, losses, options


def _unpacked(
    given: Sequence[Any],
) -> tuple[AdamState, Tensor, Tensor, AdamOptions, Tensor | None]:
    """What `_packed` was given."""
    parameters, exp_avg, exp_avg_sq, step, target, *record, ticket = given[:9]
    skipped = None if record[0] is None else SkippedSteps(*record)
    state = AdamState(parameters, exp_avg, exp_avg_sq, step, target, skipped, ticket)
    gradient, learning_rate, losses, options = given[9:]
    return state, gradient, learning_rate, options, losses


class AdamInC(ctypes.Structure):
    """The struct Adam of adam_cpu.h."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (ctypes.c_void_p, "parameters exp_avg exp_avg_sq target gradient step"),
            (ctypes.c_int64, "size decoupled"),
            (ctypes.c_void_p, "learning_rate"),
            (ctypes.c_double, "beta_1 beta_2 epsilon weight_decay max_norm largest_norm tau"),
            (ctypes.c_void_p, "counts first_gradient first_losses"),
        )
        for name in names.split()
    ]


def c_arguments(
    state: AdamState, gradient: Tensor, learning_rate: Tensor, options: AdamOptions
) -> AdamInC:
    """The arguments of a step in C; the tensors must be contiguous and outlive them."""
    parameters, exp_avg, exp_avg_sq, step, target, skipped, _ = state
    # C compares with infinity where there is no clip
    max_norm = math.inf if options.max_grad_norm is None else options.max_grad_norm
    return AdamInC(
        *c_library.pointers(parameters, exp_avg, exp_avg_sq, target, gradient, step),
        gradient.numel(), options.decoupled, *c_library.pointers(learning_rate),
        *options.betas, options.eps, options.weight_decay, max_norm, options.largest_norm,
        options.tau, *c_library.pointers(*(skipped or (None, None, None))),
    )  # fmt: skip


def adam_step_c(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """`adam_step_reference` in one pass, where torch makes twenty."""
    norm = torch.empty((), dtype=torch.float32)
    c_library.functions().adam(
        ctypes.byref(c_arguments(state, gradient, learning_rate, options)),
        *c_library.integers(0 if losses is None else losses.numel()),
        *c_library.pointers(losses, norm),
    )
    return norm


def adam_step(
    state: AdamState,
    gradient: Tensor,
    learning_rate: Tensor,
    options: AdamOptions,
    losses: Tensor | None = None,
) -> Tensor:
    """One step of `state`, in place, along `gradient` [P]; returns the norm of the gradient before
    clipping, 0-d.

    learning_rate: 0-d float32 on the device. losses: [up to MAX_LOSSES], contiguous, of the
    parameters' dtype: the losses of this gradient. If one of them or the gradient is not finite,
    nothing changes and the returned norm is not finite.
    """
    # kernels read the memory of the losses: they would not see a NaN of another dtype
    if losses is not None:
        got = losses.dtype, losses.is_contiguous(), losses.numel() <= MAX_LOSSES
        assert got == (state.parameters.dtype, True, True), (*got, losses.shape)
    if use_triton_for_members(gradient):
        packed = _packed(state, gradient, learning_rate, options, losses)
        return StepOfMembers.apply(*packed)  # type: ignore[no-untyped-call]
    function = choose_kernel(
        gradient,
        triton=adam_step_triton,
        c=adam_step_c if gradient.dtype == torch.float32 else None,
        reference=adam_step_reference,
    )
    return function(state, gradient, learning_rate, options, losses)
