"""A linear recurrence over the steps of a rollout, for all columns at once, and its gradient.

    h_t = a_t h_{t-1} + b_t,   h_{-1} = initial

    dL/db_t = g_t + a_{t+1} dL/db_{t+1}     the same recurrence, from the last step back
    dL/da_t = h_{t-1} dL/db_t,   dL/dinitial = a_0 dL/db_0

where g_t = dL/dh_t of what reads h_t outside. Composition of the maps h -> a h + b is associative,
so tiles of steps are scanned in parallel (Blelloch 1990, "Prefix sums and their applications",
section 1.4; Martin and Cundy 2018, "Parallelizing linear recurrent neural nets over sequence
length"). Where a_t is 0 nothing of the steps before passes, not even NaN: an episode begins there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gpurl.kernels import c_library
from gpurl.kernels.backend import choose_kernel, refuse_second_derivative
from gpurl.kernels.gae import _tile
from gpurl.kernels.optional_triton import tl, triton

Gradients = tuple[Tensor, Tensor, Tensor]  # by a [T, ...], b [T, ...] and the initial state [...]

# ---- torch ----


def linear_scan_reference(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """The specification, of any dtype; arguments and result as in `linear_scan`."""
    state = initial
    states = []
    for a_now, b_now in zip(a.unbind(0), b.unbind(0)):
        # selected, not multiplied: 0 * NaN would leak across the end of an episode
        state = torch.where(a_now == 0.0, b_now, a_now * state + b_now)
        states.append(state)
    return torch.stack(states)


def linear_scan_backward_reference(
    a: Tensor, initial: Tensor, state: Tensor, gradient: Tensor
) -> Gradients:
    """The specification: the gradients by the arguments of `linear_scan`, from its result `state`
    and the gradient by it, both [T, ...].
    """
    nothing = torch.zeros_like(a[:1])
    a_after = torch.cat((a[1:], nothing))
    b_gradient = linear_scan_reference(a_after.flip(0), gradient.flip(0), nothing[0]).flip(0)
    state_before = torch.cat((initial.unsqueeze(0), state[:-1]))
    initial_gradient = torch.where(a[0] == 0.0, nothing[0], a[0] * b_gradient[0])
    return state_before * b_gradient, b_gradient, initial_gradient


# ---- Triton ----


@triton.jit
def _compose(first_a, first_b, second_a, second_b):
    """second(first(h)) of two maps h -> a h + b; nothing of the first where the second's a is 0."""
    is_start = second_a == 0.0
    return (
        tl.where(is_start, 0.0, first_a * second_a),
        second_b + tl.where(is_start, 0.0, second_a * first_b),
    )


@triton.jit
def _last_row(tile, BLOCK_T: tl.constexpr):
    """[BLOCK_W] of a tile [BLOCK_T, BLOCK_W]."""
    is_last = tl.arange(0, BLOCK_T) == BLOCK_T - 1
    return tl.sum(tl.where(is_last[:, None], tile, 0.0), axis=0)


@triton.jit(do_not_specialize=["T"])
def linear_scan_kernel(
    a_ptr, b_ptr, initial_ptr, state_ptr, T, W, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_W columns over all T steps, a tile of BLOCK_T steps at a time."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    width = tl.cast(W, tl.int64)
    before = tl.load(initial_ptr + column, mask=column < W, other=0.0)
    for start in range(0, T, BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)
        inside = (row < T)[:, None] & (column < W)[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        # rows after the last step are the identity
        a = tl.load(a_ptr + offset, mask=inside, other=1.0)
        b = tl.load(b_ptr + offset, mask=inside, other=0.0)
        # the maps of all steps of the tile so far, applied to the state before it
        scale, shift = tl.associative_scan((a, b), 0, _compose)
        state = shift + tl.where(scale == 0.0, 0.0, scale * before[None, :])
        tl.store(state_ptr + offset, state, mask=inside)
        before = _last_row(state, BLOCK_T)


@triton.jit(do_not_specialize=["T"])
def linear_scan_backward_kernel(
    a_ptr, initial_ptr, state_ptr, gradient_ptr, a_gradient_ptr, b_gradient_ptr,
    initial_gradient_ptr, T, W, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_W columns over all T steps, the last tile first.

    Rows are reversed in the loads and scanned forward: `associative_scan(reverse=True)` is wrong on
    some GPUs (triton issue 4362).
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    width = tl.cast(W, tl.int64)
    initial = tl.load(initial_ptr + column, mask=column < W, other=0.0)
    after = tl.zeros((BLOCK_W,), tl.float32)
    for start in range(0, T, BLOCK_T):
        row = T - 1 - start - tl.arange(0, BLOCK_T)
        inside = (row >= 0)[:, None] & (column < W)[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        # what each step passes back: nothing comes after the last step, and rows before the first
        # one are the identity
        has_after = inside & (row < T - 1)[:, None]
        a_after = tl.load(a_ptr + offset + width, mask=has_after, other=0.0)
        a_after = tl.where(has_after, a_after, tl.where(row < 0, 1.0, 0.0)[:, None])
        gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0)
        scale, shift = tl.associative_scan((a_after, gradient), 0, _compose)
        b_gradient = shift + tl.where(scale == 0.0, 0.0, scale * after[None, :])
        tl.store(b_gradient_ptr + offset, b_gradient, mask=inside)
        # the state before each step
        has_before = inside & (row > 0)[:, None]
        before = tl.load(state_ptr + offset - width, mask=has_before, other=0.0)
        before = tl.where((row > 0)[:, None], before, initial[None, :])
        tl.store(a_gradient_ptr + offset, before * b_gradient, mask=inside)
        after = _last_row(b_gradient, BLOCK_T)
    # `after` is that of the first step now
    first = tl.load(a_ptr + column, mask=column < W, other=0.0)
    initial_gradient = tl.where(first == 0.0, 0.0, first * after)
    tl.store(initial_gradient_ptr + column, initial_gradient, mask=column < W)


def linear_scan_triton(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """`linear_scan_reference` in one launch."""
    a, b, initial = (each.contiguous() for each in (a, b, initial))
    state = _empty(b)
    columns = initial.numel()
    block_t, block_w, num_warps = _tile(len(a), columns)
    linear_scan_kernel[(triton.cdiv(columns, block_w),)](
        a, b, initial, state, len(a), columns,
        BLOCK_T=block_t, BLOCK_W=block_w, num_warps=num_warps,
    )  # fmt: skip
    return state


def linear_scan_backward_triton(
    a: Tensor, initial: Tensor, state: Tensor, gradient: Tensor
) -> Gradients:
    """`linear_scan_backward_reference` in one launch."""
    a, initial, gradient = (each.contiguous() for each in (a, initial, gradient))
    gradients = _empty(a), _empty(a), _empty(initial)
    columns = initial.numel()
    block_t, block_w, num_warps = _tile(len(a), columns)
    linear_scan_backward_kernel[(triton.cdiv(columns, block_w),)](
        a, initial, state, gradient, *gradients, len(a), columns,
        BLOCK_T=block_t, BLOCK_W=block_w, num_warps=num_warps,
    )  # fmt: skip
    return gradients


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)


# ---- C ----


def linear_scan_c(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """`linear_scan_reference` in one pass."""
    a, b, initial = (each.contiguous() for each in (a, b, initial))
    state = _empty(b)
    c_library.functions().linear_scan(
        *c_library.pointers(a, b, initial),
        *c_library.integers(len(a), initial.numel()),
        *c_library.pointers(state),
    )
    return state


def linear_scan_backward_c(
    a: Tensor, initial: Tensor, state: Tensor, gradient: Tensor
) -> Gradients:
    """`linear_scan_backward_reference` in one pass."""
    a, initial, gradient = (each.contiguous() for each in (a, initial, gradient))
    gradients = _empty(a), _empty(a), _empty(initial)
    c_library.functions().linear_scan_backward(
        *c_library.pointers(a, initial, state, gradient),
        *c_library.integers(len(a), initial.numel()),
        *c_library.pointers(*gradients),
    )
    return gradients


# ---- dispatch and autograd ----


def linear_scan(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """[T, ...] the states h_t after each step, differentiable by all arguments.

    a, b: [T, ...] with T >= 1; initial: [...], the state before the first step; all of one dtype.
    Kernels compute float32, the reference everything else. ValueError for other shapes and dtypes,
    which C and Triton would read beyond or wrongly.
    """
    shapes = tuple(a.shape), tuple(b.shape), tuple(initial.shape)
    if shapes[0] != shapes[1] or shapes[0][1:] != shapes[2] or shapes[0][:1] in ((), (0,)):
        raise ValueError(
            "a and b must be [T, ...] and initial [...], T at least 1, got {}, {} and {}".format(
                *shapes
            )
        )
    if not a.dtype == b.dtype == initial.dtype:
        raise ValueError(
            f"a, b and initial must be of one dtype, got {a.dtype}, {b.dtype} and {initial.dtype}"
        )
    return _LinearScan.apply(a, b, initial)


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


class _LinearScan(torch.autograd.Function):
    """The recurrence, and the reversed one as its gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, a: Tensor, b: Tensor, initial: Tensor
    ) -> Tensor:
        scan = linear_scan_reference
        if _has_kernel(a):
            scan = choose_kernel(
                a, triton=linear_scan_triton, c=linear_scan_c, reference=linear_scan_reference
            )
        state = scan(a, b, initial)
        ctx.save_for_backward(a, initial, state)
        return state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        a, initial, state = ctx.saved_tensors
        backward = linear_scan_backward_reference
        if _has_kernel(a):
            backward = choose_kernel(
                a,
                triton=linear_scan_backward_triton,
                c=linear_scan_backward_c,
                reference=linear_scan_backward_reference,
            )
        if backward is not linear_scan_backward_reference:
            refuse_second_derivative()
        return backward(a, initial, state, gradient)
