"""Draws entries in proportion to their priorities and updates priorities, for prioritised replay;
without a tree of sums.

    P(i) = p_i / sum_k p_k;    draw i of B is the first entry whose running sum of p exceeds the
                               number (i + u_i) (sum_k p_k / B)

Schaul, Quan, Antonoglou and Silver, "Prioritized experience replay" (ICLR 2016), equation 1 with p
already raised to alpha, and appendix B.2.1: one draw from each of B equal ranges. u_i has 53 bits
and all sums are float64: with float32 sums, 5 % to 88 % of five million entries can never be drawn.
Summing everything is one fast pass; a tree would have to be updated at each change.

A priority that is NaN, infinite or not above zero counts as zero in the draw, and the update writes
it as zero. An entry that counts as zero is never drawn: if rounding leads to one, or beyond the
end, the draw is the last entry above zero, of the block or of all. The forms add in different
orders, so a draw within rounding of a boundary may fall on either side of it.
"""

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import choose_kernel
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import (
    WORDS_PER_STEP,
    RandomStreams,
    random_fraction_reference,
    splitmix_word,
    word_to_fraction,
)

BLOCK = 1024  # entries that one program sums
PREFIX_BLOCK = 2048  # sums that `prefix_kernel` adds at a time
C_GROUP = 64  # entries of a sum in C: to walk through one takes as long as the search for it
UPDATE_BLOCK = 256

# ---- torch ----


def _counted(priority: Tensor) -> Tensor:
    """The priorities, with zero for those that do not count."""
    return priority.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0.0)


def prioritized_draw_reference(
    priority: Tensor, streams: RandomStreams, offset: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The specification; arguments and results as in `prioritized_draw`."""
    size = priority.shape[0]
    device = priority.device
    counted = _counted(priority)
    # the running sum that each draw's number falls into
    running = counted.cumsum(0, dtype=torch.float64)
    uniform = random_fraction_reference(*streams, offset, batch_size)[0]
    number = (torch.arange(batch_size, device=device) + uniform) * (running[-1] / batch_size)
    index = torch.searchsorted(running, number, right=True).clamp_(max=size - 1)
    # rounding may end on an entry that counts as zero
    last = torch.where(counted > 0.0, torch.arange(size, device=device), 0).amax()
    index = torch.where(counted[index] > 0.0, index, last)
    probability = counted[index].double() / running[-1].clamp(min=torch.finfo(torch.float64).tiny)
    return index, probability.float()


def prioritized_update_reference(priority: Tensor, index: Tensor, value: Tensor) -> None:
    """The specification; arguments as in `prioritized_update`."""
    priority.index_fill_(0, index, 0.0).scatter_reduce_(0, index, _counted(value), "amax")


# ---- Triton ----


@triton.jit
def _counted_block(priority):
    """`_counted` of a block."""
    return tl.where((priority > 0.0) & (priority < float("inf")), priority, 0.0)


@triton.jit
def block_sums_kernel(priority_ptr, sums_ptr, S, BLOCK: tl.constexpr):
    """Program b adds entries b BLOCK .. (b + 1) BLOCK - 1 in float64."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    priority = tl.load(priority_ptr + entry, mask=entry < S, other=0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(_counted_block(priority).to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["num_blocks", "batch_size"])
def prefix_kernel(
    sums_ptr, prefix_ptr, scales_ptr, last_ptr, num_blocks, batch_size, BLOCK: tl.constexpr
):
    """One program computes prefix[b] = sums[0] + .. + sums[b], and what all draws need.

    scales [2]: total / B and 1 / total (0 for a total of 0); last: the last block with a sum above
    zero (0 if there is none).
    """
    # running sums, PREFIX_BLOCK at a time
    lane = tl.arange(0, BLOCK)
    total = tl.full((), 0.0, tl.float64)
    last = tl.full((), 0, tl.int32)
    for start in range(0, num_blocks, BLOCK):
        block = start + lane
        sums = tl.load(sums_ptr + block, mask=block < num_blocks, other=0.0)
        prefix = total + tl.cumsum(sums, axis=0)
        tl.store(prefix_ptr + block, prefix, mask=block < num_blocks)
        total = tl.max(prefix, axis=0)
        last = tl.maximum(last, tl.max(tl.where(sums > 0.0, block, 0), axis=0))
    # scales of their total
    tl.store(scales_ptr, total / tl.cast(batch_size, tl.float64))
    tl.store(scales_ptr + 1, tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0))
    tl.store(last_ptr, last)


@triton.jit(do_not_specialize=["num_blocks", "offset"])
def draw_kernel(
    priority_ptr, sums_ptr, prefix_ptr, scales_ptr, last_ptr, key_ptr, gamma_ptr, step_ptr,
    index_ptr, probability_ptr, S, num_blocks,
    offset, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i makes draw i: a binary search finds the block, a running sum the entry in it.

    SEARCH_STEPS: bits of num_blocks. A parallel sum may grow by rounding at a block of sum zero, so
    the sum of the block is checked.
    """
    # the number to search
    draw = tl.program_id(0)
    word = splitmix_word(
        tl.load(key_ptr), tl.load(gamma_ptr), tl.load(step_ptr) * 65536 + offset + draw
    )
    number = (draw.to(tl.float64) + word_to_fraction(word)) * tl.load(scales_ptr)
    # its block: the number of blocks that end at or before it
    block = 0
    for bit in tl.static_range(SEARCH_STEPS):
        further = block + (1 << (SEARCH_STEPS - 1 - bit))
        end = tl.load(prefix_ptr + further - 1, mask=further <= num_blocks, other=float("inf"))
        block = tl.where(end <= number, further, block)
    has_share = (block < num_blocks) & (tl.load(sums_ptr + tl.minimum(block, num_blocks - 1)) > 0.0)
    block = tl.where(has_share, block, tl.load(last_ptr))
    # the entry in the block, and its probability
    rest = number - tl.where(block > 0, tl.load(prefix_ptr + tl.maximum(block - 1, 0)), 0.0)
    lane = tl.arange(0, BLOCK)
    entry = block.to(tl.int64) * BLOCK + lane
    counted = _counted_block(tl.load(priority_ptr + entry, mask=entry < S, other=0.0)).to(
        tl.float64
    )
    drawable = counted > 0.0
    first = tl.min(tl.where(drawable & (tl.cumsum(counted, axis=0) > rest), lane, BLOCK), axis=0)
    pick = tl.where(first < BLOCK, first, tl.max(tl.where(drawable, lane, 0), axis=0))
    share = tl.sum(tl.where(lane == pick, counted, 0.0), axis=0)
    tl.store(index_ptr + draw, block.to(tl.int64) * BLOCK + pick)
    tl.store(probability_ptr + draw, (share * tl.load(scales_ptr + 1)).to(tl.float32))


@triton.jit(do_not_specialize=["B"])
def clear_priorities_kernel(priority_ptr, index_ptr, B, BLOCK: tl.constexpr):
    """Set the entries at index [B] to zero."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + lane, mask=lane < B, other=0)
    tl.store(priority_ptr + index, 0, mask=lane < B)


@triton.jit(do_not_specialize=["B"])
def raise_priorities_kernel(priority_ptr, index_ptr, value_ptr, B, BLOCK: tl.constexpr):
    """Set the entries at index [B] to the largest of their values. priority is passed as int32:
    the bits of floats from 0 up have the order of the floats.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + lane, mask=lane < B, other=0)
    value = _counted_block(tl.load(value_ptr + lane, mask=lane < B, other=0.0))
    tl.atomic_max(priority_ptr + index, value.to(tl.int32, bitcast=True), mask=lane < B)


def prioritized_draw_triton(
    priority: Tensor, streams: RandomStreams, offset: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """`prioritized_draw_reference` in three launches."""
    # room for C to work in, and the results
    size = priority.shape[0]
    device = priority.device
    num_blocks = triton.cdiv(size, BLOCK)
    sums, prefix, scales = (
        torch.empty(count, dtype=torch.float64, device=device)
        for count in (num_blocks, num_blocks, 2)
    )
    last = torch.empty(1, dtype=torch.int32, device=device)
    index = torch.empty(batch_size, dtype=torch.int64, device=device)
    probability = torch.empty(batch_size, device=device)
    block_sums_kernel[(num_blocks,)](priority, sums, size, BLOCK=BLOCK, num_warps=4)
    prefix_kernel[(1,)](
        sums, prefix, scales, last, num_blocks, batch_size, BLOCK=PREFIX_BLOCK, num_warps=8
    )
    draw_kernel[(batch_size,)](
        priority, sums, prefix, scales, last, *streams, index, probability,
        size, num_blocks, offset,
        SEARCH_STEPS=num_blocks.bit_length(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return index, probability


def prioritized_update_triton(priority: Tensor, index: Tensor, value: Tensor) -> None:
    """`prioritized_update_reference` in two launches."""
    bits = priority.view(torch.int32)
    index = index.contiguous()
    value = value.contiguous()
    batch_size = index.shape[0]
    grid = (triton.cdiv(batch_size, UPDATE_BLOCK),)
    if batch_size:
        clear_priorities_kernel[grid](bits, index, batch_size, BLOCK=UPDATE_BLOCK, num_warps=4)
        raise_priorities_kernel[grid](
            bits, index, value, batch_size, BLOCK=UPDATE_BLOCK, num_warps=4
        )


# ---- C ----


def prioritized_draw_c(
    priority: Tensor, streams: RandomStreams, offset: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """`prioritized_draw_reference` in one call."""
    size = priority.shape[0]
    group_sums = torch.empty(triton.cdiv(size, C_GROUP), dtype=torch.float64)
    numbers = torch.empty(batch_size, dtype=torch.float64)
    index = torch.empty(batch_size, dtype=torch.int64)
    probability = torch.empty(batch_size, dtype=torch.float32)
    c_library.functions().prioritized_draw(
        *c_library.pointers(priority, *streams, group_sums, numbers, index, probability),
        *c_library.integers(size, offset, batch_size, C_GROUP),
    )
    return index, probability


# ---- dispatch ----


def _check_priority(priority: Tensor) -> None:
    if (
        priority.dim() != 1
        or not priority.shape[0]
        or priority.dtype != torch.float32
        or not priority.is_contiguous()
    ):
        raise ValueError(
            f"priority must be [S] float32 contiguous, S above 0, got {priority.dtype} "
            f"{tuple(priority.shape)} of strides {priority.stride()}"
        )


def prioritized_draw(
    priority: Tensor, streams: RandomStreams, offset: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """(index [B] int64, probability [B] float32): B entries drawn in proportion to priority [S]
    float32, contiguous, and their P.

    `streams` is one stream: key, gamma [1], step 0-d. The step is read on the device, so the replay
    of a graph after `CounterRandom.advance` makes other draws. Takes words offset .. offset + B - 1
    of the step. If all priorities count as zero, index and probability are 0. ValueError for a
    priority of another form and for more draws than the step has words.
    """
    _check_priority(priority)
    if batch_size < 1 or offset < 0 or offset + batch_size > WORDS_PER_STEP:
        raise ValueError(
            f"a step has words 0 to {WORDS_PER_STEP - 1}: {batch_size} draws from word {offset} on "
            f"are not within them"
        )
    function = choose_kernel(
        priority,
        triton=prioritized_draw_triton,
        c=prioritized_draw_c,
        reference=prioritized_draw_reference,
    )
    return function(priority, streams, offset, batch_size)


def prioritized_update(priority: Tensor, index: Tensor, value: Tensor) -> None:
    """priority[index] = value in place; the largest value counts for an index that comes more than
    once.

    priority: [S] float32, contiguous; index: [B] int64 in [0, S); value: [B] float32, already
    raised to alpha. ValueError for other dtypes and shapes.
    """
    _check_priority(priority)
    if (
        index.dtype != torch.int64
        or value.dtype != torch.float32
        or index.dim() != 1
        or index.shape != value.shape
    ):
        raise ValueError(
            f"index and value must be [B] int64 and [B] float32, got {index.dtype} "
            f"{tuple(index.shape)} and {value.dtype} {tuple(value.shape)}"
        )
    function = choose_kernel(
        priority, triton=prioritized_update_triton, reference=prioritized_update_reference
    )
    function(priority, index, value)
