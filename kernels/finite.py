"""Finds NaN and infinity in a rollout, marks the rows that hold them or lead to them as not valid,
and replaces them by 0.

A row (t, env) is bad if a checked column is not finite in it, or if its episode goes on and a
column that shows the successor is not finite in row t + 1. A row that was not valid before is no
bad one, whatever it holds. A bit stands for each column, in their order.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.backend import (
    ForMembers,
    check_written,
    choose_kernel,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton

BLOCK = 256  # rows of a tile
BLOCK_P = 1024  # parts that are merged at once
ENOUGH_PROGRAMS = 256  # to fill a GPU
NO_ROW = tl.constexpr(1 << 62)


class Columns(NamedTuple):
    """Checked columns of a rollout, [T, N] or [T, N, ...] of any floating point: first those of the
    environment, then those of the policy, then those that depend on both.
    """

    values: Sequence[Tensor]
    num_successor: int  # the first ones show in the next row what a step led to
    num_env: int
    num_policy: int


class Findings(NamedTuple):
    """What was found since `first` was set to -1, `count` to 0 and `policy_diverged` to False."""

    first: Tensor  # 0-d int64: t * N + env of the first bad row, or -1
    keys: Tensor  # 0-d int64: a bit for each column that is not finite in it
    count: Tensor  # 0-d int64: bad rows
    policy_diverged: Tensor  # 0-d bool: not finite in a column of the policy and in none of the env


class Evidence(NamedTuple):
    """A column of which the values of the first bad row's environment are kept, as they were."""

    column: Tensor  # [T, N, ...] of any dtype
    kept: Tensor  # [T, ...]


def find_non_finite_reference(
    columns: Columns,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None,
    findings: Findings,
    evidence: Sequence[Evidence],
) -> tuple[Tensor, Tensor]:
    """The specification; arguments and results as in `find_non_finite`."""
    # x * 0 is 0 or NaN: few operations a column, and no finite number overflows
    zeros = [column * 0.0 for column in columns.values]
    bad = torch.stack([x.flatten(2).sum(2) if x.dim() > 2 else x for x in zeros]) != 0.0
    # a row is bad, too, if its successor in the same episode was not finite
    rows = bad.any(0)
    for column_bad in bad[: columns.num_successor]:
        rows[:-1] |= column_bad[1:] & ~(terminated | truncated)[:-1]
    # rows that were not valid before are not trained on and may hold anything
    if valid is None:
        valid = torch.ones_like(rows)
    rows &= valid
    valid &= ~rows
    # the first bad row, by selection instead of indexing: no host sync
    flat = rows.flatten()
    index = flat.int().argmax()
    is_first = flat.any() & (findings.first < 0)
    shifts = torch.arange(len(bad), device=bad.device)
    of_row = bad.flatten(1).index_select(1, index.view(1)).squeeze(1)
    torch.where(is_first, (of_row.long() << shifts).sum(), findings.keys, out=findings.keys)
    torch.where(is_first, index, findings.first, out=findings.first)
    # the columns of its environment
    env = (index % rows.shape[1]).view(1)
    for column, kept in evidence:
        torch.where(is_first, column.index_select(1, env).squeeze(1), kept, out=kept)
    for column in columns.values:
        column.nan_to_num_(0.0, 0.0, 0.0)
    findings.count.add_(rows.sum())
    # NaN only in columns of the policy is the policy's
    of_env, of_policy = columns.num_env, columns.num_env + columns.num_policy
    is_bad = (bad & rows).flatten(1).any(1)
    findings.policy_diverged.logical_or_(is_bad[of_env:of_policy].any() & ~is_bad[:of_env].any())
    return valid, rows.any(0)


@triton.jit
def _tile_rows(start, first_env, T, N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """(t, t N + env, inside) of the BLOCK_T BLOCK_N rows of a tile: BLOCK_N environments, next to
    each other, for BLOCK_T steps.
    """
    lane = tl.arange(0, BLOCK_T * BLOCK_N)
    t = start + lane // BLOCK_N
    env = first_env + lane % BLOCK_N
    return t, t.to(tl.int64) * N + env, (t < T) & (env < N)


@triton.jit
def _numbers(ptr, row, inside, start, WIDTH: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """(addresses, mask) of W numbers from `start` of rows; [rows, W]."""
    column = start + tl.arange(0, W)
    return (
        ptr + row[:, None] * STRIDE + column[None, :],
        inside[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def _is_bad(x):
    """NaN compares false."""
    return (tl.abs(x) < float("inf")) == 0


@triton.jit
def _has_bad(ptr, row, inside, WIDTH: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """1 for each row that is not finite in a column, else 0."""
    found = tl.zeros_like(row).to(tl.int32)
    for start in range(0, WIDTH, W):
        place, mask = _numbers(ptr, row, inside, start, WIDTH, STRIDE, W)
        x = tl.load(place, mask=mask, other=0.0)
        found |= tl.max(_is_bad(x).to(tl.int32), axis=1)
    return found


@triton.jit(do_not_specialize=["T"])
def find_kernel(
    ptrs, terminated_ptr, truncated_ptr, valid_ptr, bad_envs_ptr, partial_ptr, T, N,
    terminated_stride, truncated_stride, valid_stride, MEMBER_STRIDES: tl.constexpr,
    HAS_VALID: tl.constexpr, WIDTHS: tl.constexpr, STRIDES: tl.constexpr, BLOCKS: tl.constexpr,
    NUM_SUCCESSOR: tl.constexpr, NUM_ENV: tl.constexpr, NUM_POLICY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program reads BLOCK_N environments over all T steps; it writes which rows are valid, which
    environments had bad ones, and its part [6] of what was found: number of bad rows, the first
    one and its bits, whether columns of the environment and of the policy are bad in any, and
    whether anything is to be zeroed. The strides of flags and MEMBER_STRIDES, of columns, are from
    member to member, whose results follow each other.
    """
    member = tl.program_id(1).to(tl.int64)
    terminated_ptr += member * terminated_stride
    truncated_ptr += member * truncated_stride
    valid_ptr += member * valid_stride
    bad_envs_ptr += member * N
    partial_ptr += member * 6 * tl.num_programs(0)
    first_env = tl.program_id(0).to(tl.int64) * BLOCK_N
    # of each lane, over all tiles
    count = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
    first = tl.full((BLOCK_T * BLOCK_N,), NO_ROW, tl.int64)
    keys = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
    bits_of_bad = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
    bits_of_all = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
    for start in range(0, T, BLOCK_T):
        t, row, inside = _tile_rows(start, first_env, T, N, BLOCK_T, BLOCK_N)
        # which columns are not finite
        bits = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
        for i in tl.static_range(len(ptrs)):
            ptr = ptrs[i] + member * MEMBER_STRIDES[i]
            bits |= _has_bad(ptr, row, inside, WIDTHS[i], STRIDES[i], BLOCKS[i]) << i
        # a step leads to the next row, unless its episode ended
        terminated = tl.load(terminated_ptr + row, mask=inside, other=1)
        truncated = tl.load(truncated_ptr + row, mask=inside, other=1)
        goes_on = inside & (t + 1 < T) & ((terminated | truncated) == 0)
        leads_to = tl.zeros((BLOCK_T * BLOCK_N,), tl.int32)
        for i in tl.static_range(NUM_SUCCESSOR):
            ptr = ptrs[i] + member * MEMBER_STRIDES[i]
            leads_to |= _has_bad(ptr, row + N, goes_on, WIDTHS[i], STRIDES[i], BLOCKS[i])
        bad = (bits | leads_to) != 0
        if HAS_VALID:
            was_valid = tl.load(valid_ptr + row, mask=inside, other=0) != 0
            bad = bad & was_valid
            tl.debug_barrier()  # warps may have copies of a tile: all have read before one writes
            tl.store(valid_ptr + row, (was_valid & (bad == 0)).to(tl.uint8), mask=inside)
        else:
            tl.store(valid_ptr + row, (bad == 0).to(tl.uint8), mask=inside)
        # add them up
        is_first = bad & (first == NO_ROW)
        first = tl.where(is_first, row, first)
        keys = tl.where(is_first, bits, keys)
        count += bad.to(tl.int32)
        bits_of_bad |= tl.where(bad, bits, 0)
        bits_of_all |= bits
    env = first_env + tl.arange(0, BLOCK_N)
    of_env = tl.max(tl.reshape(count, (BLOCK_T, BLOCK_N)), axis=0) > 0
    tl.store(bad_envs_ptr + env, of_env.to(tl.uint8), mask=env < N)
    # the part of this program
    OF_ENV: tl.constexpr = (1 << NUM_ENV) - 1
    OF_POLICY: tl.constexpr = ((1 << NUM_POLICY) - 1) << NUM_ENV
    first_row = tl.min(first, axis=0)
    part = partial_ptr + tl.program_id(0)
    P = tl.num_programs(0)
    tl.store(part, tl.sum(count, axis=0).to(tl.int64))
    tl.store(part + P, first_row)
    tl.store(part + 2 * P, tl.sum(tl.where(first == first_row, keys, 0), axis=0).to(tl.int64))
    tl.store(part + 3 * P, tl.max(((bits_of_bad & OF_ENV) != 0).to(tl.int64), axis=0))
    tl.store(part + 4 * P, tl.max(((bits_of_bad & OF_POLICY) != 0).to(tl.int64), axis=0))
    tl.store(part + 5 * P, tl.max((bits_of_all != 0).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["T", "P"])
def keep_kernel(
    ptrs, evidence_ptrs, kept_ptrs, partial_ptr, first_ptr, keys_ptr, count_ptr, diverged_ptr,
    T, N, P, first_stride, keys_stride, count_stride, diverged_stride,
    MEMBER_STRIDES: tl.constexpr, EVIDENCE_MEMBER_STRIDES: tl.constexpr,
    KEPT_MEMBER_STRIDES: tl.constexpr,
    WIDTHS: tl.constexpr, STRIDES: tl.constexpr, BLOCKS: tl.constexpr,
    EVIDENCE_WIDTHS: tl.constexpr, EVIDENCE_STRIDES: tl.constexpr, EVIDENCE_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program merges the P parts of a member; where there is something bad, it keeps the
    evidence and then replaces what is not finite.
    """
    member = tl.program_id(0).to(tl.int64)
    partial_ptr += member * 6 * P
    first_ptr += member * first_stride
    keys_ptr += member * keys_stride
    count_ptr += member * count_stride
    diverged_ptr += member * diverged_stride
    # merge the parts
    count = tl.zeros((BLOCK_P,), tl.int64)
    first = tl.full((BLOCK_P,), NO_ROW, tl.int64)
    keys = tl.zeros((BLOCK_P,), tl.int64)
    of_env = tl.zeros((BLOCK_P,), tl.int64)
    of_policy = tl.zeros((BLOCK_P,), tl.int64)
    found = tl.zeros((BLOCK_P,), tl.int64)
    for start in range(0, P, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        inside = index < P
        count += tl.load(partial_ptr + index, mask=inside, other=0)
        row = tl.load(partial_ptr + P + index, mask=inside, other=NO_ROW)
        keys = tl.where(
            row < first, tl.load(partial_ptr + 2 * P + index, mask=inside, other=0), keys
        )
        first = tl.minimum(first, row)
        of_env |= tl.load(partial_ptr + 3 * P + index, mask=inside, other=0)
        of_policy |= tl.load(partial_ptr + 4 * P + index, mask=inside, other=0)
        found |= tl.load(partial_ptr + 5 * P + index, mask=inside, other=0)
    first_row = tl.min(first, axis=0)
    is_policy = (tl.max(of_policy, axis=0) > 0) & (tl.max(of_env, axis=0) == 0)
    # what was found before
    is_first = (tl.load(first_ptr) < 0) & (first_row != NO_ROW)
    new_count = tl.load(count_ptr) + tl.sum(count, axis=0)
    diverged = (tl.load(diverged_ptr) != 0) | is_policy
    tl.debug_barrier()  # every thread has read it before one writes
    tl.store(count_ptr, new_count)
    tl.store(diverged_ptr, diverged.to(tl.uint8))
    if is_first:
        tl.store(first_ptr, first_row)
        tl.store(keys_ptr, tl.sum(tl.where(first == first_row, keys, 0), axis=0))
        for start in range(0, T, BLOCK_T):
            t, row, inside = _tile_rows(start, first_row % N, T, N, BLOCK_T, 1)
            for i in tl.static_range(len(kept_ptrs)):
                for begin in range(0, EVIDENCE_WIDTHS[i], EVIDENCE_BLOCKS[i]):
                    place, mask = _numbers(
                        evidence_ptrs[i] + member * EVIDENCE_MEMBER_STRIDES[i], row, inside, begin,
                        EVIDENCE_WIDTHS[i], EVIDENCE_STRIDES[i], EVIDENCE_BLOCKS[i],
                    )  # fmt: skip
                    kept, mask = _numbers(
                        kept_ptrs[i] + member * KEPT_MEMBER_STRIDES[i], t.to(tl.int64), inside,
                        begin, EVIDENCE_WIDTHS[i], EVIDENCE_WIDTHS[i], EVIDENCE_BLOCKS[i],
                    )  # fmt: skip
                    tl.store(kept, tl.load(place, mask=mask, other=0), mask=mask)
    if tl.max(found, axis=0) > 0:
        tl.debug_barrier()  # the evidence is copied
        for part in range(0, P):
            if tl.load(partial_ptr + 5 * P + part) > 0:
                first_env = tl.cast(part, tl.int64) * BLOCK_N
                for start in range(0, T, BLOCK_T):
                    _, row, inside = _tile_rows(start, first_env, T, N, BLOCK_T, BLOCK_N)
                    for i in tl.static_range(len(ptrs)):
                        ptr = ptrs[i] + member * MEMBER_STRIDES[i]
                        for begin in range(0, WIDTHS[i], BLOCKS[i]):
                            place, mask = _numbers(
                                ptr, row, inside, begin, WIDTHS[i], STRIDES[i], BLOCKS[i]
                            )
                            x = tl.load(place, mask=mask, other=0.0)
                            tl.store(place, tl.zeros_like(x), mask=mask & _is_bad(x))


def _blocks(num_steps: int, num_envs: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_N): few environments for a program where there are few."""
    block_n = min(triton.next_power_of_2(triton.cdiv(num_envs, ENOUGH_PROGRAMS)), 16)
    return min(triton.next_power_of_2(num_steps), BLOCK // block_n), block_n


def _widths(columns: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """(numbers of a row, numbers between two rows, numbers that are loaded at once) of [..., T, N,
    D] columns.
    """
    widths = tuple(column.shape[-1] for column in columns)
    blocks = tuple(min(triton.next_power_of_2(width), 16) for width in widths)
    return widths, tuple(column.stride(-2) for column in columns), blocks


def _as_rows(column: Tensor, have_members: bool) -> Tensor:
    """[T, N, ...] -> [T, N, D], the same memory; Triton loads bytes, not bools."""
    axis = 2 + have_members
    rows = column.flatten(axis) if column.dim() > axis else column.unsqueeze(axis)
    return rows.view(torch.uint8) if rows.dtype == torch.bool else rows


def find_non_finite_triton(
    columns: Columns,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None,
    findings: Findings,
    evidence: Sequence[Evidence],
) -> tuple[Tensor, Tensor]:
    """`find_non_finite_reference` in two launches, which read each number once or twice and write
    only where one is not finite. Also of M members, each tensor with a leading axis [M, ...], of
    any stride there.
    """
    *members, num_steps, num_envs = terminated.shape
    have_members, num_members = bool(members), math.prod(members)
    block_t, block_n = _blocks(num_steps, num_envs)
    programs = triton.cdiv(num_envs, block_n)
    checked = tuple(_as_rows(column, have_members) for column in columns.values)
    widths, strides, blocks = _widths(checked)
    has_valid = valid is not None
    if valid is None:
        valid = torch.empty(terminated.shape, dtype=torch.bool, device=terminated.device)
    bad_envs = torch.empty((*members, num_envs), dtype=torch.bool, device=valid.device)
    partial = torch.empty((*members, 6, programs), dtype=torch.int64, device=valid.device)
    flags = [flag.view(torch.uint8) for flag in (terminated, truncated, valid, bad_envs)]
    strides_of_columns = tuple(member_strides(checked, have_members))
    find_kernel[(programs, num_members)](
        checked, *flags, partial, num_steps, num_envs, *member_strides(flags[:3], have_members),
        MEMBER_STRIDES=strides_of_columns,
        HAS_VALID=has_valid, WIDTHS=widths, STRIDES=strides, BLOCKS=blocks,
        NUM_SUCCESSOR=columns.num_successor, NUM_ENV=columns.num_env,
        NUM_POLICY=columns.num_policy, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=8,
    )  # fmt: skip
    sources = tuple(_as_rows(each.column, have_members) for each in evidence)
    kept = tuple(_as_rows(each.kept.unsqueeze(1 + have_members), have_members) for each in evidence)
    evidence_widths, evidence_strides, evidence_blocks = _widths(sources)
    keep_kernel[(num_members,)](
        checked, sources, kept, partial, findings.first, findings.keys, findings.count,
        findings.policy_diverged.view(torch.uint8), num_steps, num_envs, programs,
        *member_strides(findings, have_members), MEMBER_STRIDES=strides_of_columns,
        EVIDENCE_MEMBER_STRIDES=tuple(member_strides(sources, have_members)),
        KEPT_MEMBER_STRIDES=tuple(member_strides(kept, have_members)),
        WIDTHS=widths, STRIDES=strides, BLOCKS=blocks, EVIDENCE_WIDTHS=evidence_widths,
        EVIDENCE_STRIDES=evidence_strides, EVIDENCE_BLOCKS=evidence_blocks,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_P=min(BLOCK_P, triton.next_power_of_2(programs)),
        num_warps=8,
    )  # fmt: skip
    return valid, bad_envs


class FindOfMembers(ForMembers):
    """`find_non_finite_triton` of all tensors and the number of each kind. It returns the given
    `valid` no second time.
    """

    takes_strides = True

    @staticmethod
    def forward(sizes: tuple[int, ...], valid: Tensor | None, *given: Tensor) -> Any:
        num_evidence, *of_columns = sizes
        left = iter(given)
        terminated, truncated = next(left), next(left)
        findings = Findings(*itertools.islice(left, 4))
        kept = [*itertools.islice(left, num_evidence)]
        evidence = [Evidence(column, each) for each, column in zip(kept, left)]
        columns = Columns([*left], *of_columns)
        if terminated.dim() > 2:
            check_written(*findings, *kept, *([] if valid is None else [valid]))
        found, bad_envs = find_non_finite_triton(
            columns, terminated, truncated, valid, findings, evidence
        )
        return bad_envs if valid is not None else (found, bad_envs)


def find_non_finite(
    columns: Columns,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None,
    findings: Findings,
    evidence: Sequence[Evidence],
) -> tuple[Tensor, Tensor]:
    """(valid [T, N] bool without the bad rows, the given tensor if there is one; which environments
    had a bad row, [N] bool).

    terminated, truncated, valid: [T, N] bool, contiguous; valid None: all rows are. Numbers of
    `columns` that are not finite become 0, in all rows; findings and evidence are written in place.
    The columns of the evidence may be views of checked ones; both have contiguous rows, equally far
    apart.
    """
    if use_triton_for_members(terminated):
        kept = [each.kept for each in evidence]
        tensors = terminated, truncated, *findings, *kept, *(each.column for each in evidence)
        sizes = (len(evidence), *columns[1:])
        found = FindOfMembers.apply(sizes, valid, *tensors, *columns.values)  # type: ignore[no-untyped-call]
        return found if valid is None else (valid, found)
    function = choose_kernel(
        terminated, triton=find_non_finite_triton, reference=find_non_finite_reference
    )
    return function(columns, terminated, truncated, valid, findings, evidence)
