"""Drawing by priority and setting priorities in Triton against the reference: blocks, bounds, what
must not be drawn or written.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpurl.kernels import prioritized as module
from gpurl.kernels.prioritized import (
    clear_priorities_kernel,
    draw_kernel,
    prioritized_draw,
    prioritized_draw_reference,
    prioritized_draw_triton,
    prioritized_update,
    prioritized_update_reference,
    prioritized_update_triton,
    raise_priorities_kernel,
)
from gpurl.kernels.random import RandomStreams, stream_constants
from tests.aimed_streams import aimed
from tests.kernels.triton.conftest import INTERPRETED, file_of_holes

BELOW_ONE = 1.0 - 2.0**-53


def stream(step: int = 0) -> RandomStreams:
    return RandomStreams(*stream_constants(3, 1, torch.zeros(0).device), torch.tensor(step))


def stream_with_uniform(uniform: float, number: int = 0) -> RandomStreams:
    return RandomStreams(*(tensor.to(torch.zeros(0).device) for tensor in aimed(uniform, number)))


def skewed(size: int) -> Tensor:
    """[S] priorities over four orders of magnitude, three in ten of them zero, at least one not."""
    generator = torch.Generator().manual_seed(size)
    priority = 10.0 ** (4.0 * torch.rand(size, generator=generator) - 2.0)
    priority[torch.rand(size, generator=generator) < 0.3] = 0.0
    priority[size // 2] = 1.0
    return priority


@pytest.fixture(params=[16, 1024])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones give the search and the prefix more to do."""
    monkeypatch.setattr(module, "BLOCK", request.param)
    monkeypatch.setattr(module, "PREFIX_BLOCK", request.param)


def assert_same(priority: Tensor, step: int, offset: int, batch_size: int) -> None:
    """Draws may differ from the reference's only where they are within rounding of a boundary, and
    there by neighbours.
    """
    got, expected = (
        draw(priority, stream(step), offset, batch_size)
        for draw in (prioritized_draw_triton, prioritized_draw_reference)
    )
    assert (got[0].dtype, got[1].dtype) == (torch.int64, torch.float32)
    if not torch.equal(got[0], expected[0]):
        running = priority.double().cumsum(0)
        low, high = torch.minimum(got[0], expected[0]), torch.maximum(got[0], expected[0])
        assert bool((running[(high - 1).clamp(min=0)] - running[low] <= 1e-12 * running[-1]).all())
        assert int((got[0] != expected[0]).sum()) < 0.01 * batch_size
    same = got[0] == expected[0]
    torch.testing.assert_close(got[1][same], expected[1][same], rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("size", [1, 5, 15, 16, 17, 255, 257])
def test_draws_are_the_references(size: int) -> None:
    for step, offset, batch_size in ((0, 0, 1), (2**33 + 1, 40, 33)):
        assert_same(skewed(size), step, offset, batch_size)


@pytest.mark.parametrize("size", [1023, 1024, 1025, 5000])
def test_draws_are_the_references_in_whole_blocks(size: int) -> None:
    assert_same(skewed(size), 7, 65_000, 40)


def test_the_prefix_takes_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFIX_BLOCK", 2)
    assert_same(skewed(13_000), 7, 0, 30)


@pytest.mark.usefixtures("_blocks")
def test_by_hand() -> None:
    priority = torch.zeros(50)
    priority[torch.tensor([1, 17, 18, 40])] = torch.tensor([3.0, 1.0, 2.0, 2.0])
    for uniform, entry in (
        (0.0, 1),
        (0.374, 1),
        (0.375, 17),
        (0.499, 17),
        (0.5, 18),
        (0.75, 40),
        (BELOW_ONE, 40),
    ):
        index, probability = prioritized_draw_triton(priority, stream_with_uniform(uniform), 0, 1)
        assert index.tolist() == [entry]
        assert probability.tolist() == [float(priority[entry]) / 8.0]


@pytest.mark.usefixtures("_blocks")
def test_the_number_may_be_the_total() -> None:
    priority = torch.zeros(70)
    priority[5:-20] = 0.1
    assert (
        int(
            prioritized_draw_triton(priority, stream_with_uniform(BELOW_ONE, number=27), 20, 8)[0][
                7
            ]
        )
        == 49
    )


@pytest.mark.usefixtures("_blocks")
def test_one_large_priority_hides_no_other() -> None:
    priority = torch.full((60,), 1e-3)
    priority[20] = 1e6
    running = priority.double().cumsum(0)
    for entry in (0, 19, 20, 21, 31, 32, 59):
        middle = float((running[entry] - priority[entry].double() / 2) / running[-1])
        assert prioritized_draw_triton(priority, stream_with_uniform(middle), 0, 1)[0].tolist() == [
            entry
        ]


@pytest.mark.usefixtures("_blocks")
def test_what_is_no_priority_is_never_drawn() -> None:
    priority = skewed(300)
    priority[::3] = torch.tensor([math.nan, math.inf, -math.inf, -1.0]).repeat(25)
    priority[64:160] = 0.0
    priority[-40:] = 0.0
    counts = (priority > 0.0) & priority.isfinite()
    index, probability = prioritized_draw_triton(priority, stream(), 0, 60)
    expected = prioritized_draw_reference(torch.where(counts, priority, 0.0), stream(), 0, 60)
    assert torch.equal(index, expected[0])
    torch.testing.assert_close(probability, expected[1], rtol=1e-6, atol=0.0)
    assert bool(counts[index].all())


@pytest.mark.usefixtures("_blocks")
def test_nothing_to_draw() -> None:
    for priority in (torch.zeros(1), torch.zeros(40), torch.full((40,), torch.nan)):
        index, probability = prioritized_draw_triton(priority, stream(), 0, 5)
        assert index.tolist() == [0] * 5
        assert probability.tolist() == [0.0] * 5


def test_a_block_that_only_rounding_found_gives_way() -> None:
    """A parallel sum may rise by a rounding where a block adds nothing: then it is an entry of the
    last block with a share.
    """
    priority = torch.zeros(64)
    priority[16:32], priority[34] = 1.0, 16.0
    sums, last = (
        torch.tensor([0.0, 16.0, 16.0, 0.0], dtype=torch.float64),
        torch.tensor([2], dtype=torch.int32),
    )
    prefix = torch.tensor(
        [4.0, 20.0, 28.0, 32.0], dtype=torch.float64
    )  # as if the first and the last block had 4
    scales = torch.tensor([32.0, 1 / 32], dtype=torch.float64)
    for uniform in (0.05, 0.95):
        index, probability = torch.empty(1, dtype=torch.int64), torch.empty(1)
        draw_kernel[(1,)](
            priority,
            sums,
            prefix,
            scales,
            last,
            *stream_with_uniform(uniform),
            index,
            probability,
            64,
            4,
            0,
            SEARCH_STEPS=3,
            BLOCK=16,
        )
        assert index.tolist() == [34]
        assert probability.tolist() == [0.5]


def test_nothing_is_read_or_written_outside() -> None:
    around = torch.full((60,), 1e30)  # would be drawn at once
    around[10:50] = skewed(40)
    index, probability = prioritized_draw_triton(around[10:50], stream(), 0, 60)
    assert torch.equal(index, prioritized_draw_reference(around[10:50].clone(), stream(), 0, 60)[0])
    assert float(probability.max()) <= 1.0
    prioritized_update_triton(around[10:50], torch.tensor([0, 39]), torch.tensor([7.0, 8.0]))
    assert around[[9, 10, 49, 50]].tolist() == [
        float(torch.tensor(1e30)),
        7.0,
        8.0,
        float(torch.tensor(1e30)),
    ]


def test_the_step_is_read_when_the_kernel_runs() -> None:
    priority, streams = skewed(500), stream(0)
    before = prioritized_draw_triton(priority, streams, 0, 20)[0]
    assert torch.equal(before, prioritized_draw_triton(priority, streams, 0, 20)[0])
    streams.step.add_(1)
    after = prioritized_draw_triton(priority, streams, 0, 20)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, prioritized_draw_reference(priority, stream(1), 0, 20)[0])


@pytest.mark.parametrize("batch_size", [0, 1, 100])
def test_updates_are_the_references(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPDATE_BLOCK", 16)
    index, value = torch.randint(40, (batch_size,)), torch.rand(batch_size)
    for place, wrong in enumerate((math.nan, -math.nan, math.inf, -math.inf, -1.0, -0.0)):
        value[place::20] = wrong
    got = torch.rand(50) + 5.0
    expected = got.clone()
    prioritized_update_triton(got, index, value)
    prioritized_update_reference(expected, index, value)
    assert torch.equal(got, expected)
    assert bool((got[40:] > 5.0).all())
    assert bool((got >= 0.0).all())


@pytest.mark.skipif(not INTERPRETED, reason="a file of holes is memory of the CPU")
def test_offsets_beyond_two_to_the_31(tmp_path: Path) -> None:
    size, block = 2**31 + 5, 1024
    priority = file_of_holes(tmp_path / "priority", size)
    index, value = torch.tensor([size - 3, size - 1, size - 1]), torch.tensor([1.0, 2.0, 3.0])
    clear_priorities_kernel[(1,)](priority.view(torch.int32), index, 3, BLOCK=16)
    raise_priorities_kernel[(1,)](priority.view(torch.int32), index, value, 3, BLOCK=16)
    assert priority[-5:].tolist() == [0.0, 0.0, 1.0, 0.0, 3.0]
    num_blocks = size // block + 1
    sums, scales = (
        torch.zeros(num_blocks, dtype=torch.float64),
        torch.tensor([0.5, 0.25], dtype=torch.float64),
    )
    sums[-1] = 4.0
    last = torch.tensor([num_blocks - 1], dtype=torch.int32)
    drawn, probability = torch.empty(8, dtype=torch.int64), torch.empty(8)
    draw_kernel[(8,)](
        priority,
        sums,
        sums,
        scales,
        last,
        *stream(),
        drawn,
        probability,
        size,
        num_blocks,
        0,
        SEARCH_STEPS=num_blocks.bit_length(),
        BLOCK=block,
    )
    assert drawn.tolist() == [size - 3] * 2 + [size - 1] * 6
    assert probability.tolist() == [0.25] * 2 + [0.75] * 6


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    priority, launched = skewed(100), []
    for name in ("prioritized_draw_triton", "prioritized_update_triton"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, real=real: launched.append(1) or real(*arguments)
        )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        index, probability = prioritized_draw(priority, stream(), 0, 30)
        assert torch.equal(index, prioritized_draw_reference(priority, stream(), 0, 30)[0])
        updated = priority.clone()
        prioritized_update(updated, index, probability)
        torch.testing.assert_close(updated[index], probability)
        assert len(launched) == 2 * (backend == "triton")
