"""Packed rows in Triton against the reference and float64: plain columns of every dtype, scaled and
clipped ones, advantages by their moments.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import pack_rows as module
from gpurl.kernels.pack_rows import (
    Column,
    Scaled,
    Standardized,
    pack_rows,
    pack_rows_reference,
    pack_rows_triton,
    scaled,
)

FORMS = [pack_rows_reference, pack_rows_triton]


def columns_of(num_steps: int, num_envs: int, width: int) -> list[Column]:
    """As PPO packs them: observations, action, two values, advantage, choice, valid."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_steps, num_envs, *shape, generator=generator) * 3.0

    shift, scale = normal(width)[0, 0], normal(width)[0, 0].abs() + 0.1
    advantage = normal()
    variance, mean = torch.var_mean(advantage, correction=0)
    return [
        Scaled(normal(width), shift, scale, 5.0),
        normal(2),
        Scaled(normal(), torch.tensor([0.5]), torch.tensor([2.0]), 5.0),
        Standardized(advantage, torch.stack((mean, variance, mean))),
        torch.randint(0, 2**24, (num_steps, num_envs), generator=generator),
        torch.rand(num_steps, num_envs, generator=generator) < 0.5,
    ]


def in_float64(column: Column) -> Tensor:
    if isinstance(column, Scaled):
        x, shift, scale, clip = column
        x = (x.double() - shift.double()) * scale.double()
        return x.clamp(-clip, clip) if x.dim() == 3 else x
    if isinstance(column, Standardized):
        mean, variance, _ = column.moments.double().unbind()
        return (column.column.double() - mean) / (variance.sqrt() + 1e-8)
    return column.double()


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize(
    ("num_steps", "num_envs", "width"), [(1, 1, 1), (3, 5, 2), (4, 33, 8), (2, 70, 61)]
)
def test_rows_hold_every_column_in_order(
    function: Any, num_steps: int, num_envs: int, width: int
) -> None:
    columns = columns_of(num_steps, num_envs, width)
    used = width + 6
    packed = function(columns, used + 3)
    assert packed.shape == (num_steps * num_envs, used + 3)
    assert packed.dtype == torch.float32
    expected = torch.cat(
        [in_float64(each).reshape(num_steps * num_envs, -1) for each in columns], dim=1
    )
    torch.testing.assert_close(packed[:, :used].double(), expected, rtol=1e-6, atol=1e-6)
    assert not packed[:, used:].any()
    # what is not scaled is the same
    exact = [width, width + 1, width + 4, width + 5]
    assert torch.equal(packed[:, exact].double(), expected[:, exact])


@pytest.mark.parametrize("function", FORMS)
def test_no_column_is_scaled(function: Any) -> None:
    column = torch.randn(2, 3, 40)
    assert torch.equal(function([column], 40), column.flatten(0, 1))


@pytest.mark.parametrize("function", FORMS)
def test_nan_stays_nan_and_infinity_is_clipped(function: Any) -> None:
    x = torch.tensor([[[torch.nan, torch.inf, -torch.inf, 1.0]]])
    (row,) = function([Scaled(x, torch.zeros(4), torch.ones(4), 5.0)], 4)
    assert bool(row[0].isnan())
    assert row[1:].tolist() == [5.0, -5.0, 1.0]


@pytest.mark.parametrize("function", FORMS)
def test_a_column_that_is_a_view_is_read_as_it_is(function: Any) -> None:
    """Every other environment of a larger buffer."""
    whole = torch.randn(4, 6, 3)
    assert torch.equal(function([whole[1:, ::2]], 3), whole[1:, ::2].reshape(-1, 3))


def test_equal_advantages_become_zero() -> None:
    column = Standardized(torch.full((2, 3), 7.0), torch.tensor([7.0, 0.0, 6.0]))
    assert scaled(column).tolist() == [[0.0] * 3] * 2
    assert pack_rows_triton([column], 4).tolist() == [[0.0] * 4] * 6


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    real = module.pack_rows_triton
    monkeypatch.setattr(
        module, "pack_rows_triton", lambda *words: launched.append(1) or real(*words)
    )
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        results.append(pack_rows(columns_of(2, 3, 4), 12))
    torch.testing.assert_close(*results)
    assert launched == [1]
