"""Running mean and variance of columns, and normalising with them.

Merging a batch (n, mean_b, var_b) into (N, mean, var), Chan, Golub and LeVeque 1979:
    d = mean_b - mean;   mean += d n / (N + n)
    var = (N var + n var_b + d^2 N n / (N + n)) / (N + n);   N += n
The variance of a block is the corrected two-pass one, and the running values are float64: float32
loses 3e-5 at mean / std = 1e5. A column whose moments would not be finite keeps those it has, as a
NaN in them would stay for ever. The count is that of the first column.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.backend import (
    ForMembers,
    check_written,
    choose_kernel,
    dense,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton

# numbers of a block, and its fewest rows
TILE, MIN_ROWS = 4096, 256
MERGED = 512  # numbers of the blocks that are merged at once


class RunningMoments(NamedTuple):
    """What `update_moments` changes in place."""

    mean: Tensor  # [D] float64
    variance: Tensor  # [D] float64
    count: Tensor  # 0-d float64
    shift: Tensor  # [D] float32: the mean, for `normalize`
    inv_std: Tensor  # [D] float32: 1 / sqrt(variance + epsilon)


def update_moments_reference(
    running: RunningMoments, epsilon: float, x: Tensor, valid: Tensor | None = None
) -> None:
    """The specification; arguments as in `update_moments`."""
    merge_moments(running, epsilon, *batch_moments(x, valid))


def batch_moments(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(number of rows, 0-d; mean [D]; population variance [D]), float64, of the rows of x [B, D]
    where valid [B] bool (None: all).
    """
    if valid is None:
        variance, mean = torch.var_mean(x.double(), dim=0, correction=0)
        return mean.new_full((), x.shape[0]), mean, variance
    rows = torch.where(valid.unsqueeze(1), x.double(), 0.0)
    number = valid.sum().double()
    mean = rows.sum(0) / number.clamp(min=1)
    deviation = torch.where(valid.unsqueeze(1), rows - mean, 0.0)
    return number, mean, deviation.square().sum(0) / number.clamp(min=1)


def pooled_moments(number: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(number [...], mean [...], variance [...]) of all rows of G batches together, the
    same merge for G at once. number, mean, variance: [G, ...]; a batch without rows counts nothing.
    """
    total = number.sum(0)
    share = number / total.clamp(min=1)
    pooled = (share * mean).sum(0)
    return total, pooled, (share * (variance + (mean - pooled).square())).sum(0)


def merge_moments(
    running: RunningMoments,
    epsilon: float,
    number: Tensor,
    batch_mean: Tensor,
    batch_variance: Tensor,
) -> None:
    """Merge a batch of `number` rows, 0-d, with these moments [D] into `running`, in place."""
    mean, variance, count, shift, inv_std = running
    total = (count + number).clamp(min=1)
    difference = batch_mean - mean
    merged = (
        count * variance + number * batch_variance + difference.square() * (count * number / total)
    ) / total
    moved = mean + difference * (number / total)
    # x 0 is 0 or NaN: half the operations of isfinite
    takes = (merged * 0.0 + moved * 0.0 == 0.0) & (number > 0)
    torch.where(takes, merged, variance, out=variance)
    torch.where(takes, moved, mean, out=mean)
    count.add_(torch.where(takes[0], number, 0.0))
    # as `normalize` takes them
    shift.copy_(mean)
    inv_std.copy_((variance + epsilon).rsqrt())


def normalize_reference(x: Tensor, mean: Tensor, inv_std: Tensor, clip: float) -> Tensor:
    """The specification; arguments and result as in `normalize`."""
    return (x - mean).mul_(inv_std).clamp_(-clip, clip)


@triton.jit
def block_moments_kernel(
    x_ptr, valid_ptr, count_ptr, partial_ptr, old_count_ptr, B, D,
    x_stride, valid_stride, count_stride, partial_stride, old_count_stride,
    HAS_VALID: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes count, mean and squared deviations of BLOCK_B rows of BLOCK_D columns
    -> partial [blocks, 3, D] float64. The count so far is copied to where the next launch changes
    nothing. Strides are from member to member.
    """
    member = tl.program_id(2).to(tl.int64)
    x_ptr += member * x_stride
    valid_ptr += member * valid_stride
    count_ptr += member * count_stride
    partial_ptr += member * partial_stride
    old_count_ptr += member * old_count_stride
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(old_count_ptr, tl.load(count_ptr))
    # load the valid rows
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    used = (row < B)[:, None] & (column < D)[None, :]
    if HAS_VALID:
        used = used & (tl.load(valid_ptr + row, mask=row < B, other=0) != 0)[:, None]
    x = tl.load(x_ptr + row[:, None] * D + column[None, :], mask=used, other=0.0).to(tl.float64)
    # two passes over the registers: mean, then deviations from it
    weight = used.to(tl.float64)
    count = tl.sum(weight, axis=0)
    mean = tl.sum(x, axis=0) / tl.maximum(count, 1.0)
    deviation = tl.where(used, x - mean[None, :], 0.0)
    square = tl.sum(deviation * deviation, axis=0)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * 3 * D + column
    tl.store(out, count, mask=column < D)
    tl.store(out + D, mean, mask=column < D)
    tl.store(out + 2 * D, square, mask=column < D)


@triton.jit
def merge_moments_kernel(
    partial_ptr, old_count_ptr, mean_ptr, variance_ptr, count_ptr, shift_ptr, inv_std_ptr,
    P, D, partial_stride, old_count_stride, mean_stride, variance_stride, count_stride,
    shift_stride, inv_std_stride, epsilon, LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program j merges the P blocks of BLOCK_D columns into the running moments, in a fixed order;
    program 0 writes the new count. Strides are from member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    partial_ptr += member * partial_stride
    old_count_ptr += member * old_count_stride
    mean_ptr += member * mean_stride
    variance_ptr += member * variance_stride
    count_ptr += member * count_stride
    shift_ptr += member * shift_stride
    inv_std_ptr += member * inv_std_stride
    # lane l merges the blocks l, l + LANES, ...
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    lane = tl.arange(0, LANES)
    counts = tl.zeros((LANES, BLOCK_D), tl.float64)
    means = tl.zeros((LANES, BLOCK_D), tl.float64)
    squares = tl.zeros((LANES, BLOCK_D), tl.float64)
    for start in range(0, P, LANES):
        block = (start + lane).to(tl.int64)
        used = (block < P)[:, None] & inside[None, :]
        at = partial_ptr + block[:, None] * 3 * D + column[None, :]
        number = tl.load(at, mask=used, other=0.0)
        difference = tl.load(at + D, mask=used, other=0.0) - means
        total = counts + number
        share = number / tl.maximum(total, 1.0)
        of_block = tl.load(at + 2 * D, mask=used, other=0.0)
        squares += of_block + difference * difference * counts * share
        means += difference * share
        counts = total
    # the lanes' moments into those of the batch
    number = tl.sum(counts, axis=0)
    batch_mean = tl.sum(counts * means, axis=0) / tl.maximum(number, 1.0)
    deviation = means - batch_mean[None, :]
    batch_square = tl.sum(squares + counts * deviation * deviation, axis=0)
    # the batch's into the running ones
    old_count = tl.load(old_count_ptr) + tl.zeros((BLOCK_D,), tl.float64)
    old_mean = tl.load(mean_ptr + column, mask=inside, other=0.0)
    old_variance = tl.load(variance_ptr + column, mask=inside, other=0.0)
    count = old_count + number
    difference = batch_mean - old_mean
    share = number / tl.maximum(count, 1.0)
    mean = old_mean + difference * share
    square = old_variance * old_count + batch_square + difference * difference * old_count * share
    variance = square / tl.maximum(count, 1.0)
    # store the columns that are finite (NaN compares false)
    takes = (count > 0.0) & (tl.abs(variance) < float("inf")) & (tl.abs(mean) < float("inf"))
    mean = tl.where(takes, mean, old_mean)
    variance = tl.where(takes, variance, old_variance)
    tl.debug_barrier()  # every thread has read its columns before one writes
    tl.store(mean_ptr + column, mean, mask=inside)
    tl.store(variance_ptr + column, variance, mask=inside)
    tl.store(shift_ptr + column, mean.to(tl.float32), mask=inside)
    inv_std = 1.0 / tl.sqrt(variance + epsilon)
    tl.store(inv_std_ptr + column, inv_std.to(tl.float32), mask=inside)
    is_first = column == 0
    tl.store(count_ptr + column, tl.where(takes, count, old_count), mask=is_first)


@triton.jit
def normalize_kernel(
    x_ptr, mean_ptr, inv_std_ptr, out_ptr, size, D, x_stride, mean_stride, inv_std_stride, clip,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A lane computes one element; NaN stays NaN. Strides are from member to member, whose results
    follow each other.
    """
    member = tl.program_id(1).to(tl.int64)
    x_ptr += member * x_stride
    mean_ptr += member * mean_stride
    inv_std_ptr += member * inv_std_stride
    out_ptr += member * size
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    column = offset % D
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + column, mask=inside, other=0.0)
    y = (x - mean) * tl.load(inv_std_ptr + column, mask=inside, other=0.0)
    y = tl.where(y > clip, clip, tl.where(y < -clip, -clip, y))
    tl.store(out_ptr + offset, y, mask=inside)


def block_rows(block_d: int) -> int:
    """Rows of a block with `block_d` columns."""
    return max(TILE // block_d, MIN_ROWS)


def update_moments_triton(
    running: RunningMoments, epsilon: float, x: Tensor, valid: Tensor | None = None
) -> None:
    """`update_moments_reference` in two launches. Also of M members, each tensor with a leading
    axis [M, ...], of any stride there.
    """
    members, have_members = x.shape[:-2], x.dim() > 2
    x = dense(x, have_members)
    rows, columns = x.shape[-2:]
    # tiles: narrow ones for few columns, so that all lanes have work
    block_d = min(32, triton.next_power_of_2(columns))
    block_b = block_rows(block_d)
    grid = (triton.cdiv(rows, block_b), triton.cdiv(columns, block_d))
    # moments of the blocks, and the count so far
    size = grid[0] * 3 * columns + 1
    partial = torch.empty((*members, size), dtype=torch.float64, device=x.device)
    old_count = partial[..., -1]
    flags = x if valid is None else dense(valid, have_members).view(torch.uint8)
    blocks = x, flags, running.count, partial, old_count
    block_moments_kernel[(grid[0], grid[1], members.numel())](
        *blocks, rows, columns, *member_strides(blocks, have_members),
        HAS_VALID=valid is not None, BLOCK_B=block_b, BLOCK_D=block_d, num_warps=8,
    )  # fmt: skip
    merged = partial, old_count, *running
    merge_moments_kernel[(grid[1], members.numel())](
        *merged, grid[0], columns, *member_strides(merged, have_members), epsilon,
        LANES=MERGED // block_d, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def normalize_triton(x: Tensor, mean: Tensor, inv_std: Tensor, clip: float) -> Tensor:
    """`normalize_reference` in one launch. Also of M members, each tensor with a leading axis
    [M, ...], of any stride there.
    """
    members, have_members = mean.shape[:-1], mean.dim() > 1
    x, mean, inv_std = (dense(each, have_members) for each in (x, mean, inv_std))
    out = x.new_empty(x.shape)
    if x.numel():
        size = x.numel() // members.numel()
        normalize_kernel[(triton.cdiv(size, 1024), members.numel())](
            x, mean, inv_std, out, size, x.shape[-1],
            *member_strides((x, mean, inv_std), have_members), clip, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


class NormalizeOfMembers(ForMembers):
    """`normalize_triton`, its arguments by position."""

    takes_strides = True
    forward = staticmethod(normalize_triton)


class MomentsOfMembers(ForMembers):
    """`update_moments_triton` of the tensors of the running moments, epsilon, x and valid; returns
    nothing of use.
    """

    takes_strides = True

    @staticmethod
    def forward(*given: Any) -> Tensor:
        running = RunningMoments(*given[:5])
        if running.mean.dim() > 1:
            check_written(*running)
        update_moments_triton(running, *given[5:])
        return running.mean.new_empty(len(running.mean), 0)


def update_moments(
    running: RunningMoments, epsilon: float, x: Tensor, valid: Tensor | None = None
) -> None:
    """Merge the rows of x [B, D] float32 where valid [B] bool (None: all) into `running`, in place.

    epsilon: added to the variance before its root.
    """
    if use_triton_for_members(x):
        MomentsOfMembers.apply(*running, epsilon, x, valid)  # type: ignore[no-untyped-call]
        return
    function = choose_kernel(x, triton=update_moments_triton, reference=update_moments_reference)
    function(running, epsilon, x, valid)


def normalize(x: Tensor, mean: Tensor, inv_std: Tensor, clip: float) -> Tensor:
    """clamp((x - mean) * inv_std, -clip, clip). x: [..., D]; mean, inv_std: [D]; all float32. NaN
    stays NaN.
    """
    if use_triton_for_members(x):
        return NormalizeOfMembers.apply(x, mean, inv_std, clip)  # type: ignore[no-any-return, no-untyped-call]
    function = choose_kernel(x, triton=normalize_triton, reference=normalize_reference)
    return function(x, mean, inv_std, clip)
