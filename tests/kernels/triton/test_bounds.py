"""What leaves a tensor is an error, what stays inside is none."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.triton.conftest import COMPILED_ON

pytestmark = pytest.mark.skipif(COMPILED_ON is not None, reason="nothing is interpreted")


@triton.jit
def copy_kernel(x_ptr, out_ptr, first, count, size, BLOCK: tl.constexpr):
    index = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0)
    tl.store(out_ptr + index, x, mask=index < size)


@triton.jit
def count_kernel(count_ptr, index, BLOCK: tl.constexpr):
    lanes = index + tl.arange(0, BLOCK)
    tl.atomic_add(count_ptr + lanes, 1, mask=lanes < index + 1)


@triton.jit
def last_kernel(pairs, index):
    tl.store(pairs[1] + index, tl.load(pairs[0] + index))


@triton.jit
def lock_kernel(lock_ptr, index):
    tl.atomic_cas(lock_ptr + index, 0, 1)


def test_addresses_inside_are_no_error() -> None:
    x, out = torch.arange(6.0), torch.zeros(6)
    copy_kernel[(1,)](x, out, 0, 6, 6, BLOCK=8)
    assert out.tolist() == x.tolist()
    empty = torch.zeros(0)
    copy_kernel[(1,)](empty, empty, 0, 0, 0, BLOCK=8)
    counts, lock = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    count_kernel[(1,)](counts, 2, BLOCK=4)
    lock_kernel[(1,)](lock, 2)
    assert counts.tolist() == lock.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("first", "count", "size", "message"),
    [
        (0, 7, 6, "reads 1 of 7 elements"),
        (-1, 6, 6, "reads 1 of 7 elements"),
        (0, 6, 8, "writes 2 of 8 elements"),
    ],
)
def test_addresses_outside_are_an_error(first: int, count: int, size: int, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        copy_kernel[(1,)](torch.arange(6.0), torch.zeros(6), first, count, size, BLOCK=8)


def test_a_view_ends_where_it_ends() -> None:
    """Its storage is not the kernel's."""
    storage = torch.zeros(4, 6)
    with pytest.raises(InterpreterError, match="writes 2 of 8 elements"):
        copy_kernel[(1,)](torch.zeros(8), storage[1], 0, 8, 8, BLOCK=8)
    copy_kernel[(1,)](torch.ones(8), storage[1:3], 0, 8, 8, BLOCK=8)
    assert storage.sum() == 8.0


def test_atomic_operations_are_checked() -> None:
    counts = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="updates 1 of 1 elements"):
        count_kernel[(1,)](counts, 3, BLOCK=4)
    with pytest.raises(InterpreterError, match="exchanges 1 of 1 elements"):
        lock_kernel[(1,)](counts, -1)


def test_tensors_in_a_tuple_are_known() -> None:
    pair = torch.tensor([1.0, 2.0]), torch.zeros(2)
    last_kernel[(1,)](pair, 1)
    assert pair[1].tolist() == [0.0, 2.0]
    with pytest.raises(InterpreterError, match="reads 1 of 1 elements"):
        last_kernel[(1,)](pair, 2)
