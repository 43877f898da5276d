"""A random permutation without a sort, and the gather of rows in its order: a keyed bijection tells
each position its row by itself.

The bijection is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations
from pseudorandom functions", 1988) on a position = left b + right with left < a, right < b and a b
>= size, as in method 3 of Black and Rogaway, "Ciphers with arbitrary finite domains" (2002); k_r
are 32-bit halves, low half first, of words of gpurl.kernels.random:
    left += f(right + k_0) mod a,   right += f(left + k_1) mod b,   left += f(right + k_2) mod a,
                                    ...
f is the finalizer of MurmurHash3 (Appleby 2011), scaled to [0, a) or [0, b) by a product's high
half. A number outside [0, size) is encrypted again until it falls inside ("cycle walking", method 2
of the same paper): fewer than the square root of size need that, where halves of whole bits would
send up to every second one around.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels.backend import host_sync_is_free, use_triton
from gpurl.kernels.random import random_words_reference, splitmix_word

MULTIPLIER_1, MULTIPLIER_2, LOW_HALF = 0x85EBCA6B, 0xC2B2AE35, 0xFFFFFFFF
CLOSENESS = 1 << 16  # one over how far from uniform the difference of two outputs may be
# words of a stream that a permutation may take, whatever its size: another one of the same step
# starts so much later
MAX_WORDS = 17
MAX_SIZE = 1 << 30
BLOCK, WIDEST_TILE = 1024, 1024


@functools.cache
def _network(size: int) -> tuple[int, int, int]:
    """(a, b, rounds) for a size: a b = size with a <= b <= 4 a where there is such a factor, else
    both next to the square root.

    With ideal round functions the difference of two outputs is uniform to about a**-j after 2 j + 1
    rounds: each two rounds mix all pairs but a share 1 / a. So narrow halves need many rounds. Five
    are the least; they withstand about a chosen positions (Patarin, "Security of random Feistel
    schemes with 5 or more rounds", 2004).
    """
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"a permutation has 1 to {MAX_SIZE} entries, not {size}")
    root = math.isqrt(size)
    factors = (a for a in range(root, max(math.isqrt((size - 1) // 4), 1), -1) if size % a == 0)
    a = next(
        factors, root if size < 3 else max(root, 2)
    )  # of a single row left there were rotations only
    j = 2
    while a > 1 and a**j < CLOSENESS:
        j += 1
    return a, -(-size // a), 2 * j + 1


# ---- torch ----


def _mixed_reference(x: Any) -> Any:
    """The finalizer of MurmurHash3 on the low halves of int64 `x`."""
    x = x & LOW_HALF
    x = (x ^ (x >> 16)) * MULTIPLIER_1 & LOW_HALF
    x = (x ^ (x >> 13)) * MULTIPLIER_2 & LOW_HALF
    return x ^ (x >> 16)


def _look_up(table: Any, index: Any) -> Any:
    return table.take(index) if isinstance(table, np.ndarray) else table.index_select(0, index)


def _encrypted_reference(round_keys: Any, number: Any, a: int, b: int) -> Any:
    """[a b] int64: the Feistel network at every number below a b. A half has few values, so a round
    is a table of them and a look-up.

    round_keys: [rounds] int64; number: 0 .. (rounds + 3) / 2 b - 1. Both are tensors or both are
    numpy's, and so is the result.
    """
    hashed = _mixed_reference(number[:b] + round_keys[:, None])
    left_sum, right_sum = (
        number % a,
        number % b,
    )  # sums are reduced at the end only, so tables repeat themselves
    for_left = (hashed[0::2] * a >> 32)[:, right_sum]
    for_right = (hashed[1::2] * b >> 32)[:, left_sum]
    left = (number[:a, None] + for_left[0, :b]).reshape(-1)
    right = (number[:a, None] * 0 + number[:b]).reshape(-1)
    for right_table, left_table in zip(for_right, for_left[1:]):
        right += _look_up(right_table, left)
        left += _look_up(left_table, right)
    return _look_up(left_sum * b, left) + _look_up(right_sum, right)


def permutation_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int
) -> Tensor:
    """The specification; arguments and result as in `permutation`. In numpy where the host may
    look: its calls are short.
    """
    a, b, rounds = _network(size)
    words = random_words_reference(key, gamma, step, offset, (rounds + 1) // 2)
    round_keys = words.view(torch.int32)[0, :rounds].long()
    number = torch.arange((rounds + 3) // 2 * b, device=key.device)
    if host_sync_is_free(key.device):
        return torch.from_numpy(
            _walked_in_numpy(_encrypted_reference(round_keys.numpy(), number.numpy(), a, b), size)
        )
    return _walked(_encrypted_reference(round_keys, number, a, b), size)


def _walked_in_numpy(encrypted: np.ndarray, size: int) -> np.ndarray:
    """[size]: where the first `size` of [a b] encrypted numbers walk to; only those that are
    outside take a step.
    """
    order = encrypted[:size]  # no walk passes through these entries, so they may be overwritten
    outside = np.flatnonzero(order >= size) if size < len(encrypted) else ()
    while len(outside):
        row = encrypted[order[outside]]
        order[outside] = row
        outside = outside[row >= size]
    return order


def _walked(encrypted: Tensor, size: int) -> Tensor:
    """The same without a look at a number: no walk is longer than the numbers outside are many, and
    a walk looked up in itself doubles.
    """
    number = torch.arange(encrypted.shape[0], device=encrypted.device)
    walk = torch.where(number < size, number, encrypted)  # it stays where it is inside
    for _ in range((encrypted.shape[0] - size).bit_length()):
        walk = walk.index_select(0, walk)
    return walk.index_select(0, encrypted[:size])


def gather_rows_reference(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """The specification; arguments and result as in `gather_rows`."""
    _check_gather(packed, start, count)
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
def _encrypted(number, key, gamma, counter, A: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr):
    """The Feistel network on uint32 numbers below A B."""
    left = number // B
    right = number % B
    for pair in tl.static_range(ROUNDS // 2):
        word = splitmix_word(key, gamma, counter + pair)
        left = _sum(left, _below(_mixed(right + word.to(tl.uint32)), A), A)
        right = _sum(right, _below(_mixed(left + (word >> 32).to(tl.uint32)), B), B)
    word = splitmix_word(key, gamma, counter + ROUNDS // 2)  # rounds are odd in number
    left = _sum(left, _below(_mixed(right + word.to(tl.uint32)), A), A)
    return left * B + right


@triton.jit
def permuted(
    position,
    key_ptr,
    gamma_ptr,
    step_ptr,
    offset,
    SIZE: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Rows (int64) at a block of positions, all in [0, SIZE): a walk that starts outside might
    never come in. For any kernel.
    """
    key = tl.load(key_ptr)
    gamma = tl.load(gamma_ptr)
    counter = tl.load(step_ptr) * 65536 + offset
    row = _encrypted(position.to(tl.uint32), key, gamma, counter, A, B, ROUNDS)
    if SIZE < A * B:
        outside = row >= SIZE
        while tl.max(outside.to(tl.int32), axis=0) > 0:  # for the longest walk of the block
            row = tl.where(outside, _encrypted(row, key, gamma, counter, A, B, ROUNDS), row)
            outside = row >= SIZE
    return row.to(tl.int64)


@triton.jit(do_not_specialize=["offset"])
def permutation_kernel(
    key_ptr, gamma_ptr, step_ptr, out_ptr, offset,
    SIZE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A lane writes the row of its position to out [SIZE] int64."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < SIZE
    row = permuted(
        tl.where(inside, position, 0), key_ptr, gamma_ptr, step_ptr, offset, SIZE, A, B, ROUNDS
    )
    tl.store(out_ptr + position, row, mask=inside)


@triton.jit(do_not_specialize=["offset", "start", "count"])
def gather_rows_kernel(
    packed_ptr, key_ptr, gamma_ptr, step_ptr, out_ptr, offset, start, count,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK_ROWS rows of packed [SIZE, WIDTH] to out [count, WIDTH]; neighbouring
    lanes copy neighbouring columns.

    WIDTH is a constant, so that rows of a multiple of four floats move 16 bytes at a time.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = lane < count
    position = tl.where(inside, lane + start, 0)
    row = permuted(position, key_ptr, gamma_ptr, step_ptr, offset, SIZE, A, B, ROUNDS)
    for first in range(0, WIDTH, BLOCK_WIDTH):
        column = first + tl.arange(0, BLOCK_WIDTH)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        numbers = tl.load(packed_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + lane[:, None] * WIDTH + column[None, :], numbers, mask=mask)


def permutation_triton(key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int) -> Tensor:
    """`permutation_reference` in one launch."""
    a, b, rounds = _network(size)
    out = torch.empty(size, dtype=torch.int64, device=key.device)
    permutation_kernel[(triton.cdiv(size, BLOCK),)](
        key, gamma, step, out, offset, SIZE=size, A=a, B=b, ROUNDS=rounds, BLOCK=BLOCK, num_warps=4
    )
    return out


def gather_rows_triton(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """`gather_rows_reference` in one launch, which neither makes nor reads an index."""
    _check_gather(packed, start, count)
    size, width = packed.shape
    a, b, rounds = _network(size)
    out = packed.new_empty(count, width)
    block_width = min(triton.next_power_of_2(width), WIDEST_TILE)
    block_rows = max(BLOCK // block_width, 1)
    if out.numel():
        gather_rows_kernel[(triton.cdiv(count, block_rows),)](
            packed, key, gamma, step, out, offset, start, count, SIZE=size, WIDTH=width, A=a, B=b,
            ROUNDS=rounds,
            BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=4,
        )  # fmt: skip
    return out


# ---- dispatch ----


def _check_gather(packed: Tensor, start: int, count: int) -> None:
    if packed.dim() != 2 or packed.dtype != torch.float32 or not packed.is_contiguous():
        raise ValueError(
            f"packed must be [S, W] float32 contiguous, got {packed.dtype} {tuple(packed.shape)} "
            f"of strides {packed.stride()}"
        )
    if start < 0 or count < 0 or start + count > packed.shape[0]:
        raise ValueError(
            f"positions {start} to {start + count} do not lie within {packed.shape[0]} rows"
        )


def permutation(key: Tensor, gamma: Tensor, step: Tensor, offset: int, size: int) -> Tensor:
    """[size] int64: the numbers 0 .. size-1 in random order; a function of its arguments, on every
    device.

    key, gamma: [1] int64, a stream of `stream_constants`; step: 0-d int64, read on the device, so
    the replay of a graph after `CounterRandom.advance` makes the next order. Takes words offset ..
    offset + MAX_WORDS - 1 of the step at most.
    """
    return (permutation_triton if use_triton(key) else permutation_reference)(
        key, gamma, step, offset, size
    )


def gather_rows(
    packed: Tensor, key: Tensor, gamma: Tensor, step: Tensor, offset: int, start: int, count: int
) -> Tensor:
    """[count, W] float32: packed[permutation(..., S)[start : start + count]] for packed [S, W]
    float32, contiguous.

    In torch every call makes the whole order: who takes many pieces there does better with one
    `permutation` and `index_select`.
    """
    function = gather_rows_triton if use_triton(packed) else gather_rows_reference
    return function(packed, key, gamma, step, offset, start, count)
