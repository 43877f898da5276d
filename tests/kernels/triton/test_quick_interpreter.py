"""The quickened interpreter computes what torch computes, and still refuses what Triton refuses."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.triton.conftest import COMPILED_ON

pytestmark = pytest.mark.skipif(COMPILED_ON is not None, reason="nothing is interpreted")


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def combine(decay, value, later_decay, later_value):
    return decay * later_decay, value * later_decay + later_value


@triton.jit
def many_kinds_kernel(
    x_ptr, byte_ptr, long_ptr, out_ptr, scan_ptr, wrapped_ptr, ROWS: tl.constexpr
):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, 16)
    x = tl.load(x_ptr + columns)
    byte = tl.load(byte_ptr + rows)
    long = tl.load(long_ptr + rows)
    grid = doubled(x)[None, :] * byte[:, None] + long[:, None] - 3
    place = rows[:, None] * 16 + columns[None, :]
    tl.store(out_ptr + place, tl.where(grid > 0, grid, grid / 2))
    decay = tl.full((ROWS, 16), 0.5, tl.float32)
    _, scanned = tl.associative_scan((decay, grid), 1, combine, reverse=True)
    tl.store(scan_ptr + place, scanned)
    tl.store(wrapped_ptr + rows, (rows + 0x7FFFFFFF) * 2)


@pytest.mark.parametrize("rows", [4, 16])
def test_numbers_are_torchs(rows: int) -> None:
    x, byte = torch.randn(16), torch.arange(rows, dtype=torch.uint8)
    long = torch.randint(-5, 5, (rows,))
    out, scan = torch.empty(2, rows, 16)
    wrapped = torch.empty(rows, dtype=torch.int32)
    many_kinds_kernel[(1,)](x, byte, long, out, scan, wrapped, ROWS=rows)
    grid = 2 * x * byte[:, None] + long[:, None] - 3
    torch.testing.assert_close(out, torch.where(grid > 0, grid, grid / 2))
    expected = grid.clone()
    for t in reversed(range(15)):
        expected[:, t] += 0.5 * expected[:, t + 1]
    torch.testing.assert_close(scan, expected)
    # an overflow of 32 bits wraps around, as on a GPU
    expected = (torch.arange(rows) + 0x7FFFFFFF) * 2
    assert torch.equal(wrapped, expected.to(torch.int32))


@triton.jit
def blocks_that_do_not_fit_kernel(x_ptr):
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 8)) + tl.arange(0, 16)))


@triton.jit
def block_of_three_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 3), 0.0)


@triton.jit
def unsigned_minus_one_kernel(x_ptr):
    tl.store(x_ptr, tl.program_id(0).to(tl.uint32) + -1)


@triton.jit
def pointers_added_kernel(x_ptr):
    tl.store(x_ptr + x_ptr, 0.0)


@triton.jit
def unlike_sizes_stored_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 8), tl.zeros((16,), tl.float32))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (blocks_that_do_not_fit_kernel, "incompatible dimensions at index 0: 8 and 16"),
        (block_of_three_kernel, "power of 2"),
        (unsigned_minus_one_kernel, "unsigned tensor and a negative scalar"),
        (pointers_added_kernel, "cannot add pointers together"),
        (unlike_sizes_stored_kernel, "incompatible dimensions at index 0: 8 and 16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mistakes_are_refused(kernel: Any, reason: str) -> None:
    for _ in range(2):  # also when the shapes are known
        with pytest.raises(InterpreterError, match=reason):
            kernel[(1,)](torch.zeros(16))
