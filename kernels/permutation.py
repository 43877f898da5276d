"""A random permutation without a sort, and the gather of rows in its order: a keyed bijection
computes the row of each position independently.

The bijection is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations
from pseudorandom functions", 1988) on a position = left b + right with left < a, right < b and a b
>= size, as in method 3 of Black and Rogaway, "Ciphers with arbitrary finite domains" (2002); k_r
are 32-bit halves, low half first, of words of gpurl.kernels.random:
    left += f(right + k_0) mod a,   right += f(left + k_1) mod b,   left += f(right + k_2) mod a ...
f is the finalizer of MurmurHash3 (Appleby 2011), scaled to [0, a) or [0, b) by a product's high
half. A number outside [0, size) is encrypted again until it falls inside ("cycle walking", method 2
of the same paper). Fewer than the square root of size need that; if left and right had whole
numbers of bits, up to every second number would.
"""

import functools
import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpurl.kernels.backend import (
    ForMembers,
    choose_kernel,
    host_sync_is_free,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import random_words_reference, splitmix_word

MULTIPLIER_1, MULTIPLIER_2, LOW_HALF = 0x85EBCA6B, 0xC2B2AE35, 0xFFFFFFFF
UNIFORMITY = 1 << 16  # the difference of two outputs is uniform to one part in this many
# words of a stream that a permutation takes at most: another one of the same step starts this much
# later
MAX_WORDS = 17
MAX_SIZE = 1 << 30
BLOCK, MAX_TILE_WIDTH = 1024, 1024

Array = TypeVar("Array", Tensor, np.ndarray)


@functools.cache
def permutation_network(size: int) -> tuple[int, int, int]:
    """(a, b, rounds) for a size: a b = size with a <= b <= 4 a where there is such a factor, else
    both next to the square root. ValueError for a size outside 1 to MAX_SIZE.

    With ideal round functions the difference of two outputs is uniform to about a**-j after 2 j + 1
    rounds: each two rounds mix all pairs but a fraction 1 / a. So small halves need many rounds.
    Five is the minimum; they withstand about a chosen positions (Patarin, "Security of random
    Feistel schemes with 5 or more rounds", 2004).
    """
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"a permutation has 1 to {MAX_SIZE} entries, not {size}")
    root = math.isqrt(size)
    factors = (a for a in range(root, max(math.isqrt((size - 1) // 4), 1), -1) if size % a == 0)
    # with a = 1 there were rotations only
    a = next(factors, root if size < 3 else max(root, 2))
    j = 2
    while a > 1 and a**j < UNIFORMITY:
        j += 1
    return a, -(-size // a), 2 * j + 1


# ---- torch ----


def _mixed_reference(x: Array) -> Array:
    """The finalizer of MurmurHash3 on the low halves of int64 `x`."""
    x = x & LOW_HALF
    x = (x ^ (x >> 16)) * MULTIPLIER_1 & LOW_HALF
    x = (x ^ (x >> 13)) * MULTIPLIER_2 & LOW_HALF
    return x ^ (x >> 16)


def _look_up(table: Array, index: Array) -> Array:
    return table.take(index) if isinstance(table, np.ndarray) else table.index_select(0, index)


def _encrypted_reference(round_keys: Array, number: Array, a: int, b: int) -> Array:
    """[a b] int64: the Feistel network at every number below a b. A half has few values, so a round
    is a look-up in a table of all of them.

    round_keys: [rounds] int64; number: 0 .. (rounds + 3) / 2 b - 1. Tensors or numpy arrays; the
    result is of the same kind.
    """
    # tables of the rounds; they are periodic, because sums are reduced at the end only
    hashed = _mixed_reference(number[:b] + round_keys[:, None])
    left_sum = number % a
    right_sum = number % b
    for_left = (hashed[0::2] * a >> 32)[:, right_sum]
    for_right = (hashed[1::2] * b >> 32)[:, left_sum]
    # the first round is an outer sum, each later one a look-up
    left = (number[:a, None] + for_left[0, :b]).reshape(-1)
    # written in place below: under torch.func.vmap batched as the keys are
    right = (number[:a, None] * 0 + number[:b] + for_left[0, :1] * 0).reshape(-1)
    for right_table, left_table in zip(for_right, for_left[1:]):
        right += _look_up(right_table, left)
        left += _look_up(left_table, right)
    return _look_up(left_sum * b, left) + _look_up(right_sum, right)


def permutation_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int
) -> Tensor:
    """The specification; arguments and result as in `permutation`. It runs in numpy on a CPU, where
    numpy's calls take less time than torch's.
    """
    # round keys from the stream
    a, b, rounds = permutation_network(size)
    words = random_words_reference(key, gamma, step, offset, (rounds + 1) // 2)
    round_keys = words.view(torch.int32)[0, :rounds].long()
    number = torch.arange((rounds + 3) // 2 * b, device=key.device)
    if host_sync_is_free(key.device):
        encrypted = _encrypted_reference(round_keys.numpy(), number.numpy(), a, b)
        return torch.from_numpy(_walked_in_numpy(encrypted, size))
    return _walked(_encrypted_reference(round_keys, number, a, b), size)


def _walked_in_numpy(encrypted: np.ndarray, size: int) -> np.ndarray:
    """[size]: the ends of the walks from the first `size` of [a b] encrypted numbers; only those
    that are outside take a step.
    """
    order = encrypted[:size]  # no walk passes through these entries, so they may be overwritten
    outside = np.flatnonzero(order >= size) if size < len(encrypted) else ()
    while len(outside):
        row = encrypted[order[outside]]
        order[outside] = row
        outside = outside[row >= size]
    return order


def _walked(encrypted: Tensor, size: int) -> Tensor:
    """The same without a host sync. A walk takes at most as many steps as there are numbers
    outside, and each look-up of all walks in themselves doubles their length.
    """
    number = torch.arange(encrypted.shape[0], device=encrypted.device)
    walk = torch.where(number < size, number, encrypted)  # numbers inside do not move
    for _ in range((encrypted.shape[0] - size).bit_length()):
        walk = walk.index_select(0, walk)
    return walk.index_select(0, encrypted[:size])


def gather_rows_reference(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """The specification; arguments and result as in `gather_rows`."""
    order = permutation_reference(key, gamma, step, offset, packed.shape[0])
    return packed.index_select(0, order[start : start + count])


# ---- Triton ----


@triton.jit
def _mixed(x):
    """The finalizer of MurmurHash3 on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _below(hashed, limit):
    """uint32 `hashed` scaled to [0, limit)."""
    return ((hashed.to(tl.uint64) * limit) >> 32).to(tl.uint32)


@triton.jit
def _sum(x, y, limit):
    """x + y mod limit, for both below it."""
    total = x + y
    return tl.where(total >= limit, total - limit, total)


@triton.jit
def _encrypted(number, key, gamma, counter, a, b, ROUNDS: tl.constexpr):
    """The Feistel network on uint32 numbers below a b; a, b: uint32."""
    left = number // b
    right = number % b
    for pair in tl.static_range(ROUNDS // 2):
        word = splitmix_word(key, gamma, counter + pair)
        left = _sum(left, _below(_mixed(right + word.to(tl.uint32)), a), a)
        right = _sum(right, _below(_mixed(left + (word >> 32).to(tl.uint32)), b), b)
    # the number of rounds is odd
    word = splitmix_word(key, gamma, counter + ROUNDS // 2)
    left = _sum(left, _below(_mixed(right + word.to(tl.uint32)), a), a)
    return left * b + right


@triton.jit
def permuted(position, key_ptr, gamma_ptr, step_ptr, offset, size, a, b, ROUNDS: tl.constexpr):
    """Rows (int64) at a block of positions, which must all lie in [0, size): a walk that starts
    outside might never end. For any kernel; a, b and ROUNDS are those of `permutation_network`.
    Sizes are no constants, so that one compilation serves them all.
    """
    size = size.to(tl.uint32)
    a = a.to(tl.uint32)
    b = b.to(tl.uint32)
    # encrypt once
    key = tl.load(key_ptr)
    gamma = tl.load(gamma_ptr)
    counter = tl.load(step_ptr) * 65536 + offset
    row = _encrypted(position.to(tl.uint32), key, gamma, counter, a, b, ROUNDS)
    # encrypt again what is outside, until the longest walk of the block has ended
    outside = row >= size
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        row = tl.where(outside, _encrypted(row, key, gamma, counter, a, b, ROUNDS), row)
        outside = row >= size
    return row.to(tl.int64)


@triton.jit(
    do_not_specialize=["offset", "size", "a", "b", "key_stride", "gamma_stride", "step_stride"]
)
def permutation_kernel(
    key_ptr, gamma_ptr, step_ptr, out_ptr, offset, size, a, b,
    key_stride, gamma_stride, step_stride,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A lane writes the row of its position to out [size] int64. Strides are from member to member,
    whose orders follow each other.
    """
    member = tl.program_id(1).to(tl.int64)
    key_ptr += member * key_stride
    gamma_ptr += member * gamma_stride
    step_ptr += member * step_stride
    out_ptr += member * size
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < size
    row = permuted(
        tl.where(inside, position, 0), key_ptr, gamma_ptr, step_ptr, offset, size, a, b, ROUNDS
    )
    tl.store(out_ptr + position, row, mask=inside)


# the stride of packed is not among these: rows keep their alignment
@triton.jit(
    do_not_specialize=[
        *("offset", "start", "count", "size", "a", "b"),
        *("key_stride", "gamma_stride", "step_stride"),
    ]
)
def gather_rows_kernel(
    packed_ptr, key_ptr, gamma_ptr, step_ptr, out_ptr, offset, start, count, size, a, b,
    packed_stride, key_stride, gamma_stride, step_stride,
    WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK_ROWS rows of packed [size, WIDTH] to out [count, WIDTH]; neighbouring
    lanes copy neighbouring columns.

    WIDTH is a constant, so that rows of a multiple of four floats move 16 bytes at a time. Strides
    are from member to member, whose rows follow each other.
    """
    member = tl.program_id(1).to(tl.int64)
    packed_ptr += member * packed_stride
    key_ptr += member * key_stride
    gamma_ptr += member * gamma_stride
    step_ptr += member * step_stride
    out_ptr += member * count * WIDTH
    # which rows
    lane = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = lane < count
    position = tl.where(inside, lane + start, 0)
    row = permuted(position, key_ptr, gamma_ptr, step_ptr, offset, size, a, b, ROUNDS)
    # copy them, BLOCK_WIDTH columns at a time
    for first in range(0, WIDTH, BLOCK_WIDTH):
        column = first + tl.arange(0, BLOCK_WIDTH)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        numbers = tl.load(packed_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + lane[:, None] * WIDTH + column[None, :], numbers, mask=mask)


def permutation_triton(key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int) -> Tensor:
    """`permutation_reference` in one launch. Also of M members, each tensor with a leading axis
    [M, ...], of any stride there.
    """
    members = key.shape[:-1]
    a, b, rounds = permutation_network(size)
    out = torch.empty((*members, size), dtype=torch.int64, device=key.device)
    permutation_kernel[(triton.cdiv(size, BLOCK), members.numel())](
        key, gamma, step, out, offset, size, a, b,
        *member_strides((key, gamma, step), bool(members)),
        ROUNDS=rounds, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def gather_rows_triton(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """`gather_rows_reference` in one launch, without a tensor of indices. Also of M members, each
    tensor with a leading axis [M, ...], of any stride there.
    """
    *members, size, width = packed.shape
    a, b, rounds = permutation_network(size)
    out = packed.new_empty(*members, count, width)
    block_width = min(triton.next_power_of_2(width), MAX_TILE_WIDTH)
    block_rows = max(BLOCK // block_width, 1)
    if out.numel():
        gather_rows_kernel[(triton.cdiv(count, block_rows), math.prod(members))](
            packed, key, gamma, step, out, offset, start, count, size, a, b,
            *member_strides((packed, key, gamma, step), bool(members)),
            WIDTH=width, ROUNDS=rounds,
            BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=4,
        )  # fmt: skip
    return out


class PermutationOfMembers(ForMembers):
    """`permutation_triton`, its arguments by position."""

    forward = staticmethod(permutation_triton)


class RowsOfMembers(ForMembers):
    """`gather_rows_triton`, its arguments by position."""

    forward = staticmethod(gather_rows_triton)


# ---- dispatch ----


def _check_gather(packed: Tensor, start: int, count: int) -> None:
    if packed.dim() != 2 or packed.dtype != torch.float32 or not packed.is_contiguous():
        raise ValueError(
            f"packed must be [S, W] float32 contiguous, got {packed.dtype} {tuple(packed.shape)} "
            f"of strides {packed.stride()}"
        )
    if start < 0 or count < 0 or start + count > packed.shape[0]:
        raise ValueError(
            f"positions {start} to {start + count} are not within {packed.shape[0]} rows"
        )


def permutation(key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int) -> Tensor:
    """[size] int64: the numbers 0 .. size-1 in random order, the same on every device.

    key, gamma: [1] int64, a stream of `stream_constants`; step: 0-d int64, read on the device, so
    the replay of a graph after `CounterRandom.advance` makes the next order. Takes words offset ..
    offset + MAX_WORDS - 1 of the step at most.
    """
    if use_triton_for_members(key):
        return PermutationOfMembers.apply(key, gamma, step, offset, size)  # type: ignore[no-untyped-call]
    function = choose_kernel(key, triton=permutation_triton, reference=permutation_reference)
    return function(key, gamma, step, offset, size)


def gather_rows(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """[count, W] float32: packed[permutation(..., S)[start : start + count]] for packed [S, W]
    float32, contiguous.

    In torch every call computes the order of all rows. To gather many pieces, one `permutation` and
    `index_select` are faster there. ValueError for positions outside the rows.
    """
    _check_gather(packed, start, count)
    if use_triton_for_members(packed):
        return RowsOfMembers.apply(packed, key, gamma, step, offset, start, count)  # type: ignore[no-untyped-call]
    function = choose_kernel(packed, triton=gather_rows_triton, reference=gather_rows_reference)
    return function(packed, key, gamma, step, offset, start, count)
