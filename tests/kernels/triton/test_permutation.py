"""Permutation and gather in Triton against the reference, bit for bit: walks, masks, offsets beyond
2**31, what must not be written.
"""

from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from gpurl.kernels import permutation as module
from gpurl.kernels.permutation import (
    gather_rows,
    gather_rows_kernel,
    gather_rows_reference,
    gather_rows_triton,
    permutation,
    permutation_kernel,
    permutation_reference,
    permutation_triton,
)
from gpurl.kernels.random import stream_constants
from tests.kernels.triton.conftest import DEVICE, INTERPRETED, file_of_holes

SIZES = [1, 2, 3, 5, 17, 64, 1000, 4096, 65_536, 131_072, 100_003]


def stream(step: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """key [1], gamma [1], step 0-d."""
    return (*stream_constants(seed, 1, DEVICE), torch.tensor(step))


@pytest.fixture
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program costs the same for any block. Compiled ones of this size spill."""
    if INTERPRETED:
        monkeypatch.setattr(module, "BLOCK", 32_768)


@pytest.mark.usefixtures("_large_blocks")
@pytest.mark.parametrize("size", SIZES)
def test_permutations_are_bit_equal(size: int) -> None:
    for step, offset in ((0, 0), (2**40 + 3, 12_345)):
        got = permutation_triton(*stream(step), offset, size)
        assert got.dtype == torch.int64
        assert torch.equal(got, permutation_reference(*stream(step), offset, size))


@pytest.mark.parametrize("block", [8, 16, 1024])
def test_every_block_gives_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    for size in (37, 64):  # 37 = 6 x 7 - 5: some walk
        assert torch.equal(
            permutation_triton(*stream(8), 2, size), permutation_reference(*stream(8), 2, size)
        )


def test_long_walks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "permutation_network", lambda size: (13, 17, 5)
    )  # 11 of 221: nearly all are outside
    assert torch.equal(
        permutation_triton(*stream(1), 0, 11), permutation_reference(*stream(1), 0, 11)
    )


@pytest.mark.parametrize("width", [1, 3, 8, 16, 21, 96, 130])
def test_rows_are_gathered(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 64 * triton.next_power_of_2(width))
    packed = torch.randn(211, width)
    for start, count, step in ((0, 211, 0), (5, 100, 2**31 + 5), (210, 1, 2**31 + 5), (7, 0, 0)):
        got = gather_rows_triton(packed, *stream(step), 9, start, count)
        expected = packed[permutation_reference(*stream(step), 9, 211)[start : start + count]]
        assert torch.equal(got, expected)
        assert torch.equal(gather_rows_reference(packed, *stream(step), 9, start, count), expected)


@pytest.mark.parametrize("size", [1, 2, 64, 1000])
def test_rows_of_every_size(size: int) -> None:
    packed = torch.randn(size, 5)
    assert torch.equal(
        gather_rows_triton(packed, *stream(6), 0, 0, size),
        packed[permutation_reference(*stream(6), 0, size)],
    )


def test_rows_wider_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TILE_WIDTH", 32)
    packed = torch.randn(40, 75)
    assert torch.equal(
        gather_rows_triton(packed, *stream(6), 0, 3, 30),
        packed[permutation_reference(*stream(6), 0, 40)[3:33]],
    )


def test_nothing_is_read_or_written_outside() -> None:
    key, gamma, step = stream(4)
    around = torch.full((50, 7), torch.nan)
    around[10:31] = torch.randn(21, 7)
    order = permutation_reference(key, gamma, step, 0, 21)
    a, b, rounds = module.permutation_network(21)
    memory = torch.full((30, 7), torch.nan)
    gather_rows_kernel[(2,)](
        around[10:31],
        key,
        gamma,
        step,
        memory,
        0,
        2,
        13,
        21,
        a,
        b,
        *[0] * 4,
        WIDTH=7,
        ROUNDS=rounds,
        BLOCK_ROWS=16,
        BLOCK_WIDTH=8,
    )
    assert torch.equal(memory[:13], around[10:31][order[2:15]])
    assert bool(memory[13:].isnan().all())
    numbers = torch.full((40,), -1)
    permutation_kernel[(2,)](
        key, gamma, step, numbers, 0, 21, a, b, 0, 0, 0, ROUNDS=rounds, BLOCK=16
    )
    assert torch.equal(numbers[:21], order)
    assert bool((numbers[21:] == -1).all())


@pytest.mark.skipif(not INTERPRETED, reason="a file of holes is memory of the CPU")
def test_offsets_beyond_two_to_the_31(tmp_path: Path) -> None:
    size, width = 8300, 1 << 18
    packed = file_of_holes(tmp_path / "packed", size * width).view(size, width)
    start = int((permutation_reference(*stream(0), 0, size) == size - 1).nonzero())
    packed[-1] = torch.arange(width)
    assert torch.equal(gather_rows_triton(packed, *stream(0), 0, start, 1)[0], packed[-1])


def test_the_step_is_read_when_the_kernel_runs() -> None:
    key, gamma, step = stream(0)
    before = permutation_triton(key, gamma, step, 0, 100)
    step += 1
    after = permutation_triton(key, gamma, step, 0, 100)
    assert not torch.equal(before, after)
    assert torch.equal(after, permutation_reference(*stream(1), 0, 100))


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, launched = torch.randn(30, 6), []
    for name in ("permutation_triton", "gather_rows_triton"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, real=real: launched.append(1) or real(*arguments)
        )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        order = permutation(*stream(2), 0, 30)
        assert torch.equal(order, permutation_reference(*stream(2), 0, 30))
        assert torch.equal(gather_rows(packed, *stream(2), 0, 4, 20), packed[order[4:24]])
        assert len(launched) == 2 * (backend == "triton")
        for wrong in (torch.randn(6, 30).t(), packed.double(), packed[0]):
            with pytest.raises(ValueError, match="packed must be"):
                gather_rows(wrong, *stream(2), 0, 0, 1)
        for start, count in ((-1, 2), (0, 31), (30, 1), (3, -1)):
            with pytest.raises(ValueError, match="within 30 rows"):
                gather_rows(packed, *stream(2), 0, start, count)
        for size in (0, 2**30 + 1):
            with pytest.raises(ValueError, match="entries"):
                permutation(*stream(2), 0, size)
