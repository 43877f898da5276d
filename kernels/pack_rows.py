"""The columns of a rollout side by side, one row for each sample, scaled as training takes them.

A program writes whole rows: scaling, converting and copying a column each by itself would pass over
memory three times, and take 17 launches for PPO's columns.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.backend import (
    ForMembers,
    choose_kernel,
    dense,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.moments import normalize
from gpurl.kernels.optional_triton import tl, triton

BLOCK, BLOCK_W = 64, 32  # rows and columns of a tile
STD_EPSILON = tl.constexpr(1e-8)
SCALED, STANDARDIZED = tl.constexpr(1), tl.constexpr(2)  # kinds of columns, besides 0


class Scaled(NamedTuple):
    """A column that is packed as clamp((x - shift) * scale, -clip, clip), without the clamp where
    it has no D.
    """

    column: Tensor  # [T, N] for D = 1, or [T, N, D], float32
    shift: Tensor  # [D] float32
    scale: Tensor  # [D] float32
    clip: float


class Standardized(NamedTuple):
    """A column that is packed as (x - mean) / (sqrt(variance) + 1e-8)."""

    column: Tensor  # [T, N] float32
    moments: Tensor  # [3] float32: mean, variance, ...


Column = Tensor | Scaled | Standardized
KINDS = {Scaled: SCALED.value, Standardized: STANDARDIZED.value}


def unscaled(column: Column) -> Tensor:
    """[T, N, ...] as it is stored."""
    return column if isinstance(column, Tensor) else column.column


def scaled(column: Column) -> Tensor:
    """[T, N, ...] as it is packed, a tensor of its own."""
    if isinstance(column, Standardized):
        mean, variance, *_ = column.moments.unbind()
        return (column.column - mean) / (variance.sqrt() + STD_EPSILON.value)
    if isinstance(column, Scaled):
        x, shift, scale, clip = column
        return (x - shift).mul_(scale) if x.dim() == 2 else normalize(x, shift, scale, clip)
    return column


def pack_rows_reference(columns: Sequence[Column], width: int) -> Tensor:
    """The specification; arguments and result as in `pack_rows`."""
    first = unscaled(columns[0])
    packed = first.new_zeros(first.shape[0] * first.shape[1], width, dtype=torch.float32)
    start = 0
    for column in columns:
        rows = scaled(column).flatten(0, 1)
        size = rows.shape[1] if rows.dim() == 2 else 1
        packed[:, start : start + size] = rows.view(-1, size)
        start += size
    return packed


@triton.jit
def pack_rows_kernel(
    ptrs, shift_ptrs, scale_ptrs, out_ptr, S,
    STRIDES: tl.constexpr, SHIFT_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    WIDTHS: tl.constexpr, STARTS: tl.constexpr, KINDS: tl.constexpr, SCALES: tl.constexpr,
    CLIPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (i, j) writes BLOCK rows of BLOCK_W columns; a source is read where it overlaps them.
    SCALES: of each source the index into the tuples of shifts and scales. STRIDES, SHIFT_STRIDES
    and SCALE_STRIDES are from member to member, whose rows follow each other.
    """
    member = tl.program_id(2).to(tl.int64)
    out_ptr += member * S * WIDTH
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    out = tl.zeros((BLOCK, BLOCK_W), tl.float32)
    for i in tl.static_range(len(ptrs)):
        # the columns of this source
        local = column - STARTS[i]
        mine = (local >= 0) & (local < WIDTHS[i])
        used = (row < S)[:, None] & mine[None, :]
        first = ptrs[i] + member * STRIDES[i]
        place = first + row[:, None] * WIDTHS[i] + local[None, :]
        x = tl.load(place, mask=used, other=0).to(tl.float32)
        # scaled
        if KINDS[i] > 0:
            shift_ptr = shift_ptrs[SCALES[i]] + member * SHIFT_STRIDES[SCALES[i]]
            scale_ptr = scale_ptrs[SCALES[i]] + member * SCALE_STRIDES[SCALES[i]]
        if KINDS[i] == SCALED:
            shift = tl.load(shift_ptr + local, mask=mine, other=0.0)
            scale = tl.load(scale_ptr + local, mask=mine, other=0.0)
            x = (x - shift[None, :]) * scale[None, :]
            if CLIPS[i] > 0.0:  # NaN stays NaN
                x = tl.where(x > CLIPS[i], CLIPS[i], tl.where(x < -CLIPS[i], -CLIPS[i], x))
        if KINDS[i] == STANDARDIZED:
            mean = tl.load(shift_ptr)
            std = tl.sqrt_rn(tl.load(scale_ptr + 1))
            x = tl.div_rn(x - mean, tl.zeros_like(x) + (std + STD_EPSILON))
        out = tl.where(mine[None, :], x, out)
    place = out_ptr + row[:, None] * WIDTH + column[None, :]
    tl.store(place, out, mask=(row < S)[:, None] & (column < WIDTH)[None, :])


def constants_of(
    columns: Sequence[Column], width: int, have_members: bool = False
) -> dict[str, object]:
    """The constexprs of the kernel that describe the columns."""
    sizes = [unscaled(column).shape[have_members:] for column in columns]
    widths = [math.prod(size[2:]) for size in sizes]
    kinds = [KINDS.get(type(column), 0) for column in columns]
    # 0: not clipped
    clips = [
        column.clip if isinstance(column, Scaled) and len(size) == 3 else 0.0
        for column, size in zip(columns, sizes)
    ]
    return {
        "WIDTHS": tuple(widths),
        "STARTS": tuple(sum(widths[:i]) for i in range(len(widths))),
        "KINDS": tuple(kinds),
        "SCALES": tuple(sum(kind > 0 for kind in kinds[:i]) for i in range(len(kinds))),
        "CLIPS": tuple(clips),
        "WIDTH": width,
    }


def pack_rows_triton(columns: Sequence[Column], width: int, have_members: bool = False) -> Tensor:
    """`pack_rows_reference` in one launch. Also of M members, each tensor with a leading axis
    [M, ...], of any stride there.
    """
    stored = [dense(unscaled(column), have_members) for column in columns]
    # Triton loads bytes, not bools
    sources = tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in stored)
    shifts, scales = [], []
    for column in columns:
        if isinstance(column, Scaled):
            shifts.append(dense(column.shift, have_members))
            scales.append(dense(column.scale, have_members))
        elif isinstance(column, Standardized):
            shifts.append(dense(column.moments, have_members))
            scales.append(shifts[-1])
    members = stored[0].shape[:have_members]
    rows = math.prod(stored[0].shape[have_members : have_members + 2])
    packed = torch.empty((*members, rows, width), dtype=torch.float32, device=stored[0].device)
    constants = constants_of(columns, width, have_members)
    block_w = min(BLOCK_W, triton.next_power_of_2(width))
    strides, shift_strides, scale_strides = (
        tuple(member_strides(tensors, have_members)) for tensors in (sources, shifts, scales)
    )
    pack_rows_kernel[(triton.cdiv(rows, BLOCK), triton.cdiv(width, block_w), members.numel())](
        sources, tuple(shifts), tuple(scales), packed, rows,
        STRIDES=strides, SHIFT_STRIDES=shift_strides, SCALE_STRIDES=scale_strides,
        **constants, BLOCK=BLOCK, BLOCK_W=block_w, num_warps=4,
    )  # fmt: skip
    return packed


class PackOfMembers(ForMembers):
    """`pack_rows_triton` of the fields of all columns; their classes and dimensions."""

    takes_strides = True

    @staticmethod
    def forward(width: int, kinds: Sequence[Any], *fields: Any) -> Tensor:
        left = iter(fields)
        columns: list[Column] = [
            next(left) if kind is Tensor else kind(*itertools.islice(left, len(kind._fields)))
            for kind, _ in kinds
        ]
        have_members = unscaled(columns[0]).dim() > kinds[0][1]
        return pack_rows_triton(columns, width, have_members)


def pack_rows(columns: Sequence[Column], width: int) -> Tensor:
    """[T N, width] float32: row t N + n has the columns at step t of environment n, one after the
    other, then zeros. columns: [T, N] or [T, N, D] each, of any dtype where they are not scaled.
    """
    if use_triton_for_members(unscaled(columns[0])):
        fields = itertools.chain(*((x,) if isinstance(x, Tensor) else x for x in columns))
        kinds = [(Tensor if isinstance(x, Tensor) else type(x), unscaled(x).dim()) for x in columns]
        return PackOfMembers.apply(width, kinds, *fields)  # type: ignore[no-any-return, no-untyped-call]
    function: Callable[[Sequence[Column], int], Tensor] = choose_kernel(
        unscaled(columns[0]), triton=pack_rows_triton, reference=pack_rows_reference
    )
    return function(columns, width)
