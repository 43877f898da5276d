"""The projection onto atoms against its formula in float64 and rlax's numbers: ensembles, atoms met
exactly, values out of range, NaN.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpurl.kernels import categorical_projection as module
from gpurl.kernels.categorical_projection import (
    categorical_projection,
    categorical_projection_reference,
    categorical_projection_triton,
)

Projection = Callable[..., Tensor]
SHAPES = [(1, 2), (5, 51), (33, 3), (2, 3, 101), (2, 3, 4, 11)]
BOTH = pytest.mark.parametrize(
    "project", [categorical_projection_reference, categorical_projection_triton]
)


def inputs(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pmf, reward, discount (0 in a third of the rows), shift."""
    generator = torch.Generator().manual_seed(seed)
    pmf = torch.randn(shape, generator=generator).mul(2.0).softmax(-1)
    reward, shift = (
        torch.randn(shape[-2], generator=generator) * 4.0,
        torch.randn(shape[-2], generator=generator),
    )
    discount = torch.where(
        torch.arange(shape[-2]) % 3 == 1,
        0.0,
        0.9 + 0.1 * torch.rand(shape[-2], generator=generator),
    )
    return pmf, reward, discount, shift


def exact(
    pmf: Tensor,
    reward: Tensor,
    discount: Tensor,
    v_min: float,
    v_max: float,
    shift: Tensor | None = None,
) -> Tensor:
    """Equation 7 of Bellemare et al. 2017 as it stands there, float64."""
    pmf, reward, discount = pmf.double(), reward.double(), discount.double()
    atoms = torch.linspace(v_min, v_max, pmf.shape[-1], dtype=torch.float64)
    bonus = torch.zeros_like(reward) if shift is None else shift.double()
    moved = (reward[:, None] + discount[:, None] * (atoms + bonus[:, None])).clamp(v_min, v_max)
    width = (v_max - v_min) / (pmf.shape[-1] - 1)
    share = (1.0 - (moved[:, None, :] - atoms[:, None]).abs() / width).clamp(
        0.0, 1.0
    )  # [B, to, from]
    return (share * pmf.unsqueeze(-2)).sum(-1)


@pytest.mark.parametrize("has_shift", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_agree_with_the_formula_in_float64(shape: tuple[int, ...], has_shift: bool) -> None:
    pmf, reward, discount, shift = inputs(shape)
    arguments = (pmf, reward, discount, -10.0, 8.0, shift if has_shift else None)
    expected = exact(*arguments)
    doubles = [item.double() if isinstance(item, Tensor) else item for item in arguments]
    torch.testing.assert_close(
        categorical_projection_reference(*doubles), expected, rtol=0.0, atol=1e-12
    )
    for project in (categorical_projection_reference, categorical_projection_triton):
        got = project(*arguments)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.sum(-1), torch.ones(shape[:-1]), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("has_shift", [False, True])
def test_rlax_gives_the_same(has_shift: bool) -> None:
    peer = json.loads((Path(__file__).parents[2] / "rlax_value_learning.json").read_text())[
        "projection"
    ]
    pmf, reward, discount, shift = (
        torch.tensor(peer[name], dtype=torch.float64)
        for name in ("pmf", "reward", "discount", "shift")
    )
    arguments = pmf, reward, discount, peer["v_min"], peer["v_max"], shift if has_shift else None
    expected = torch.tensor(
        peer["with_shift" if has_shift else "without_shift"], dtype=torch.float64
    )
    torch.testing.assert_close(
        categorical_projection_reference(*arguments), expected, rtol=0.0, atol=1e-12
    )
    torch.testing.assert_close(
        categorical_projection_triton(*arguments).double(), expected, rtol=1e-6, atol=1e-6
    )


@BOTH
def test_by_hand(project: Projection) -> None:
    """Atoms -1, 0, 1, 2: the values move to -0.75, -0.25, 0.25, 0.75, and with a bonus of 1 each
    half a unit further.
    """
    pmf = torch.tensor([[0.5, 0.25, 0.0, 0.25]])
    reward, discount, bonus = torch.tensor([-0.25]), torch.tensor([0.5]), torch.tensor([1.0])
    assert project(pmf, reward, discount, -1.0, 2.0).tolist() == [
        [0.375 + 0.0625, 0.125 + 0.1875 + 0.0625, 0.1875, 0.0]
    ]
    assert project(pmf, reward, discount, -1.0, 2.0, bonus).tolist() == [
        [0.125, 0.375 + 0.1875, 0.0625 + 0.1875, 0.0625]
    ]


@BOTH
@pytest.mark.parametrize("steps", [0, 3, -5, 20, -40])
def test_whole_atoms_keep_their_mass(project: Projection, steps: int) -> None:
    """Floor and ceil of a whole number are the same atom, where shares by both distances are zero.
    What would leave stays at the end.
    """
    pmf, atoms = inputs((3, 21))[0], torch.arange(21)
    expected = torch.zeros(3, 21).index_add_(1, (atoms + steps).clamp(0, 20), pmf)
    got = project(pmf, torch.full((3,), float(steps)), torch.ones(3), -10.0, 10.0)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@BOTH
def test_a_terminal_reward_on_an_atom_is_that_atom(project: Projection) -> None:
    atoms = torch.linspace(-10.0, 10.0, 26)  # 0.8 apart, which no float32 is
    got = project(inputs((26, 26))[0], atoms, torch.zeros(26), -10.0, 10.0)
    torch.testing.assert_close(got, torch.eye(26), rtol=0.0, atol=1e-5)
    assert bool((got >= 0.0).all())


@BOTH
def test_values_out_of_range_go_to_the_ends(project: Projection) -> None:
    pmf, _, _, _ = inputs((4, 5))
    reward = torch.tensor([1e6, -1e6, torch.inf, -torch.inf])
    got = project(pmf, reward, torch.full((4,), 0.99), -1.0, 1.0)
    for row, atom in enumerate((4, 0, 4, 0)):
        torch.testing.assert_close(got[row], torch.eye(5)[atom])


@BOTH
def test_the_mean_moves_as_the_value_does(project: Projection) -> None:
    pmf, reward, discount, shift = inputs((2, 9, 41))
    atoms = torch.linspace(-100.0, 100.0, 41)
    pmf = torch.where(atoms.abs() < 60.0, pmf, 0.0)
    pmf = pmf / pmf.sum(-1, keepdim=True)
    got = project(pmf, reward, discount, -100.0, 100.0, shift)
    torch.testing.assert_close(
        got @ atoms, reward + discount * (pmf @ atoms + shift), rtol=1e-4, atol=1e-4
    )


@BOTH
@pytest.mark.parametrize("place", ["pmf", "reward", "discount", "shift"])
def test_nan_is_seen_in_its_own_row_only(project: Projection, place: str) -> None:
    arguments = dict(zip(("pmf", "reward", "discount", "shift"), inputs((6, 11))))
    broken = arguments[place]
    (broken[2] if place == "pmf" else broken)[2] = torch.nan
    got = project(**arguments, v_min=-2.0, v_max=2.0)
    assert bool(got[2].isnan().any())
    assert bool(got[torch.arange(6) != 2].isfinite().all())


@BOTH
def test_half_precision_is_raised_before_positions_are_taken(project: Projection) -> None:
    pmf, reward, discount, _ = inputs((4, 33))
    short = pmf.bfloat16()
    got = project(short, reward, discount, -16.0, 16.0)
    assert got.dtype == torch.float32
    # on a GPU the reference adds in no fixed order
    expected = project(short.float(), reward, discount, -16.0, 16.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tile", [(1, 16), (16, 16), (2, 64)], ids=str)
def test_every_tile_gives_the_same_bits(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pmf, reward, discount, shift = inputs((2, 9, 13))
    expected = categorical_projection_triton(pmf, reward, discount, -3.0, 3.0, shift)
    monkeypatch.setattr(module, "_tile", lambda num_atoms: tile)
    assert torch.equal(
        categorical_projection_triton(pmf, reward, discount, -3.0, 3.0, shift), expected
    )


def test_dispatch_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    pmf, reward, discount, shift = inputs((2, 6, 9))
    expected = exact(pmf, reward, discount, -3.0, 3.0, shift)
    columns = torch.stack((reward, discount, shift), 1)
    strided = (
        pmf.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        columns[:, 0],
        columns[:, 1],
        -3.0,
        3.0,
        columns[:, 2],
    )
    launched = []
    monkeypatch.setattr(
        module,
        "categorical_projection_triton",
        lambda *args: launched.append(1) or categorical_projection_triton(*args),
    )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        torch.testing.assert_close(
            categorical_projection(*strided).double(), expected, rtol=1e-5, atol=1e-5
        )
        assert len(launched) == (backend == "triton")
