"""The Triton random numbers against the torch reference: uniforms bit for bit, normals to
rounding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import random
from gpurl.kernels.random import (
    CounterRandom,
    random_kernel,
    random_normal,
    random_normal_reference,
    random_normal_triton,
    random_uniform,
    random_uniform_reference,
    random_uniform_triton,
    stream_constants,
)
from tests.kernels.triton.conftest import DEVICE, Counted

SHAPES = [(1, 1), (1, 2), (3, 5), (7, 1), (64, 16), (129, 33), (1025, 3)]
STEPS = [0, 1, 2**31 + 5, 2**40 + 3]


def inputs(
    num_streams: int, step: int, seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*stream_constants(seed, num_streams, DEVICE), torch.tensor(step, device=DEVICE))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not write stays NaN."""
    real = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: real(*size, **options).fill_(float("nan"))
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("num_streams", "count"), SHAPES)
def test_uniforms_are_bit_equal(num_streams: int, count: int, step: int) -> None:
    key, gamma, now = inputs(num_streams, step)
    for offset in (0, 1, 12_345, 65_000):
        got = random_uniform_triton(key, gamma, now, offset, count)
        assert torch.equal(got, random_uniform_reference(key, gamma, now, offset, count))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("num_streams", "count"), SHAPES)
def test_normals_agree_to_rounding(num_streams: int, count: int, step: int) -> None:
    key, gamma, now = inputs(num_streams, step)
    for offset in (0, 7, 65_000):
        got = random_normal_triton(key, gamma, now, offset, count)
        torch.testing.assert_close(
            got, random_normal_reference(key, gamma, now, offset, count), rtol=1e-6, atol=1e-6
        )


def test_nothing_is_written_beyond_an_odd_last_number() -> None:
    key, gamma, now = inputs(5, 1)
    memory = torch.full((2000,), float("nan"), device=DEVICE)
    shape, strides = (0, 3, 10, 2, 5), (0, 0, 0)
    random_kernel[(1,)](key, gamma, now, memory, *shape, *strides, NORMAL=False, BLOCK=512)
    assert torch.equal(memory[:15].reshape(5, 3), random_uniform_reference(key, gamma, now, 0, 3))
    assert bool(memory[15:].isnan().all())


@pytest.mark.parametrize("draw", [random_uniform, random_normal])
@pytest.mark.parametrize("is_differentiated", [False, True])
def test_members_of_a_stack_draw_in_one_launch(
    draw: Any, is_differentiated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as alone, to the bit, though the memory of one member lies between the others'."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    members = [inputs(129, step, seed) for seed, step in ((3, 0), (4, 7), (5, 2**31 + 5))]
    memory = torch.zeros(3, 1000, dtype=torch.int64, device=DEVICE)
    views = memory[:, 8:137], memory[:, 300:429], memory[:, 999]
    for view, values in zip(views, zip(*members)):
        view.copy_(torch.stack(values))
    grids = list[Any]()
    monkeypatch.setattr(random, "random_kernel", Counted(random_kernel, grids))

    def drawn(key: Tensor, gamma: Tensor, step: Tensor) -> Tensor:
        return draw(key, gamma, step, 5, 3)

    def differentiated(key: Tensor, gamma: Tensor, step: Tensor) -> Tensor:
        """The derivative by what multiplies it."""
        factor = torch.ones(129, 3, device=DEVICE)
        return torch.func.grad(lambda x: (x * drawn(key, gamma, step)).sum())(factor)

    got = torch.func.vmap(differentiated if is_differentiated else drawn)(*views)
    assert grids == [(1, 3)]
    for k, streams in enumerate(members):
        assert torch.equal(got[k], drawn(*streams))


def test_members_whose_memory_interleaves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would draw the numbers of other streams."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    key, gamma, step = inputs(6, 1)
    columns = key.view(2, 3), gamma.view(2, 3)

    def drawn(key: Tensor, gamma: Tensor) -> Tensor:
        return random_uniform(key, gamma, step, 0, 1)

    with pytest.raises(AssertionError, match=r"\(3, 2\), \(1, 3\)"):
        torch.func.vmap(drawn, in_dims=1)(*columns)


def test_no_numbers_of_no_streams() -> None:
    key, gamma, now = inputs(4, 0)
    assert random_uniform_triton(key[:0], gamma[:0], now, 0, 3).shape == (0, 3)
    assert random_uniform_triton(key, gamma, now, 0, 0).shape == (4, 0)


def test_a_generator_takes_the_triton_path(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        rng = CounterRandom(9, 21, DEVICE)
        for _ in range(2):
            rng.advance()
        part = rng.subset(torch.tensor([20, 3], device=DEVICE))
        drawn.append((rng.uniform(-1.0, 1.0, (3,)), rng.integers(0, 100, (2, 2)), part.uniform()))
    for reference, triton in zip(*drawn):
        assert torch.equal(reference, triton)
