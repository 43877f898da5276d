"""The linear recurrence in Triton: against float64, within its memory, with what is not finite, in
every tile, and as memories call it.
"""

from typing import Any

import pytest
import torch

from gpurl.kernels import linear_scan as module
from gpurl.kernels.linear_scan import (
    linear_scan,
    linear_scan_backward_reference,
    linear_scan_backward_triton,
    linear_scan_reference,
    linear_scan_triton,
)
from tests import scan_laws
from tests.scan_laws import inputs
from tests.squash_laws import GuardedMemory

SHAPES = pytest.mark.parametrize("shape", scan_laws.SHAPES, ids=str)


@SHAPES
def test_it_agrees_with_float64_and_writes_only_where_it_must(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = GuardedMemory()
    monkeypatch.setattr(torch, "empty", memory)
    scan_laws.states_are_those_of_a_loop(linear_scan_triton, shape)
    scan_laws.gradients_are_those_of_autograd(
        linear_scan_triton, linear_scan_backward_triton, shape
    )
    memory.assert_untouched()


def test_an_episode_that_is_not_finite_stays_in_itself() -> None:
    forms = linear_scan_triton, linear_scan_backward_triton
    scan_laws.an_episode_that_is_not_finite_stays_in_itself(*forms)
    scan_laws.by_hand(*forms)


@pytest.mark.parametrize("tile", [(8, 32, 1), (64, 32, 8), (16, 1, 4)], ids=str)
def test_every_tile_gives_the_same(
    tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, initial = inputs((37, 40))
    monkeypatch.setattr(module, "_tile", lambda steps, columns: tile)
    state = linear_scan_triton(a, b, initial)
    torch.testing.assert_close(state, linear_scan_reference(a, b, initial), rtol=2e-6, atol=2e-6)
    gradients = (
        backward(a, initial, state, b)
        for backward in (linear_scan_backward_triton, linear_scan_backward_reference)
    )
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def noted(name: str, function: Any, calls: list[str]) -> Any:
    """`function`, which notes its name in `calls`."""
    return lambda *given: calls.append(name) or function(*given)  # type: ignore[func-returns-value]


def test_dispatch_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, initial = (each.requires_grad_() for each in inputs((9, 6, 14)))
    strided = [each.detach().mT.contiguous().mT.requires_grad_() for each in (a, b)]
    # of a sum the gradient is one number, expanded
    expected = torch.autograd.grad(linear_scan_reference(a, b, initial).sum(), (b, initial))
    for backend in ("torch", "triton"):
        launched = list[str]()
        with monkeypatch.context() as patch:
            for name in ("linear_scan_triton", "linear_scan_backward_triton"):
                real = getattr(module, name)
                patch.setattr(module, name, noted(name, real, launched))
            patch.setattr("gpurl.kernels.backend.choice", backend)
            state = linear_scan(*strided, initial)
            got = torch.autograd.grad(state.sum(), (strided[1], initial))
        for mine, other in zip(got, expected):
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(
            state, linear_scan_reference(a, b, initial), rtol=2e-6, atol=2e-6
        )
        wanted = ["linear_scan_triton", "linear_scan_backward_triton"]
        assert launched == (wanted if backend == "triton" else [])
