"""Squashed draws and their way back in Triton: against float64, within their memory, with what is
not finite, and as SAC calls them.
"""

from typing import Any

import pytest
import torch

from gpurl.kernels import squash as module
from gpurl.kernels.squash import (
    squashed_backward_triton,
    squashed_sample,
    squashed_sample_triton,
)
from tests import squash_laws
from tests.kernels.triton.conftest import INTERPRETED
from tests.squash_laws import GuardedMemory, inputs

SIZES = pytest.mark.parametrize(("rows", "actions"), squash_laws.SIZES)


@SIZES
def test_both_agree_with_float64_and_write_only_where_they_must(
    rows: int, actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = GuardedMemory()
    monkeypatch.setattr(torch, "empty", memory)
    squash_laws.draws_are_those_of_float64(squashed_sample_triton, rows, actions)
    squash_laws.the_way_back_is_that_of_float64(squashed_backward_triton, rows, actions)
    memory.assert_untouched()


def test_what_is_not_finite_goes_through() -> None:
    squash_laws.what_is_not_finite_goes_through(squashed_sample_triton, squashed_backward_triton)
    squash_laws.a_broken_row_stays_in_itself(squashed_sample_triton, squashed_backward_triton)


def test_other_limits_apply() -> None:
    squash_laws.other_limits_apply(squashed_sample_triton)


def test_rows_do_not_depend_on_their_batch() -> None:
    # compiled for rows at other addresses, a kernel adds the same numbers in another order
    squash_laws.rows_do_not_depend_on_their_batch(
        squashed_sample_triton, squashed_backward_triton, 0.0 if INTERPRETED else 1e-6
    )


@pytest.mark.parametrize("tile", [(1, 4), (16, 16), (64, 8)], ids=str)
def test_every_tile_draws_the_same(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    output, noise = inputs(37, 3)
    expected = squashed_sample_triton(output, noise)
    gradient = squashed_backward_triton(expected, noise, noise[:, 0])
    monkeypatch.setattr(module, "_tile", lambda num_actions: tile)
    got = squashed_sample_triton(output, noise)
    torch.testing.assert_close(
        got, expected, rtol=1e-6, atol=1e-6
    )  # the order of a sum is the tile's
    assert torch.equal(squashed_backward_triton(expected, noise, noise[:, 0]), gradient)


def test_dispatch_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    output, noise = inputs(6, 4)
    strided = output.t().contiguous().t(), noise.t().contiguous().t()
    launched = list[str]()

    def counted(name: str) -> Any:
        real = getattr(module, name)
        return lambda *arguments: launched.append(name) or real(*arguments)

    names = ["squashed_sample_triton", "squashed_backward_triton"]
    for name in names:
        monkeypatch.setattr(module, name, counted(name))
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        leaf = strided[0].clone().requires_grad_()
        drawn = squashed_sample(leaf, strided[1])
        slopes = strided[1], noise[:, 0]
        results.append((*drawn, *torch.autograd.grad(drawn, leaf, slopes)))
        assert launched == (names if backend == "triton" else [])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert squashed_sample(output.double(), noise.double())[0].dtype == torch.float64
    assert launched == names
