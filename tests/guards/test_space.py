"""Observations outside their space give one warning a run, and nothing waits for the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.pendulum import Pendulum
from gpurl.guards import space
from gpurl.guards.space import SpaceGuard
from gpurl.kernels.backend import no_host_syncs
from tests.small_runs import small_run

WIDTH = 3
LIMITS = Box(np.array([-1.0, -np.inf, 0.0]), np.array([1.0, 5.0, np.inf]), dtype=np.float32)


class Fake:
    """What the guard needs of an environment."""

    device = torch.device("cpu")

    def __init__(self, observations: Any = LIMITS) -> None:
        self.single_observation_space = observations


def make(observations: Any = LIMITS) -> SpaceGuard:
    return SpaceGuard("walk", Fake(observations))  # type: ignore[arg-type]


def numbers(guard: SpaceGuard, obs: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in guard.metrics(obs).items()}


def test_what_is_outside_is_what_the_space_says() -> None:
    """Against Box.contains, row by row; the worst number is the one that is furthest outside."""
    obs = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(0)) * 3.0
    values = numbers(make(), obs)
    assert values["rows outside"] == sum(not LIMITS.contains(row) for row in obs.numpy()) > 100
    excess = np.maximum(LIMITS.low - obs.numpy(), obs.numpy() - LIMITS.high)
    row, place = np.unravel_index(excess.argmax(), excess.shape)
    assert values["worst place"] == place
    assert values["worst number"] == float(obs[row, place])


def test_rounding_infinity_of_no_limit_and_nan_are_inside() -> None:
    obs = torch.tensor([[1.000005, -torch.inf, 0.0], [torch.nan, 5.00002, 7.0]])
    assert numbers(make(), obs)["rows outside"] == 0
    assert make().report(numbers(make(), obs)) == []
    obs[0, 0] = 1.0001
    assert numbers(make(), obs)["rows outside"] == 1


@pytest.mark.parametrize("count", [1, 7, 10])
def test_samples_reach_every_environment(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "MAX_NUMBERS", count * WIDTH)
    for env in range(10):
        obs = torch.zeros(10, WIDTH)
        obs[env, 2] = -9.0
        guard = make()
        found = [numbers(guard, obs)["rows outside"] for _ in range(2 * -(-10 // count))]
        half = len(found) // 2
        assert max(found[:half]) == max(found[half:]) == 1  # in each round
    monkeypatch.setattr(space, "MAX_NUMBERS", 1)  # less than a row: one row
    assert numbers(make(), torch.zeros(10, WIDTH))["rows of the sample"] == 1


@pytest.mark.parametrize(
    "observations",
    [
        Box(-np.inf, np.inf, (WIDTH,), np.float32),
        Box(0, 255, (3, 8, 8), np.uint8),
        Box(0, 9, (WIDTH,), np.int64),
        Discrete(4),
    ],
)
def test_it_is_off_where_nothing_can_be_outside(observations: Any) -> None:
    guard = make(observations)
    assert guard.metrics(torch.full((4, *observations.shape), 1e9)) == {}
    assert guard.report({}) == []


def test_a_sample_waits_for_nothing() -> None:
    guard = make()
    with no_host_syncs():
        metrics = guard.metrics(torch.zeros(4, WIDTH))
    assert all(value.dim() == 0 for value in metrics.values())


class TooFast(Pendulum):
    """Its third observation has limits that the pendulum exceeds."""

    single_observation_space = Box(
        np.array([-1.0, -1.0, -1.0]), np.array([1.0, 1.0, 0.25]), dtype=np.float32
    )


@pytest.mark.parametrize(("env", "warnings"), [(TooFast, 1), (Pendulum, 0)])
def test_a_run_warns_once(
    env: type[Pendulum], warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    small_run(tmp_path / "run", 4, env=env, eval_episodes=0)  # type: ignore[arg-type]
    shown = capsys.readouterr().err
    assert shown.count("leave their space") == warnings
    if warnings:
        assert "element 2 of one was " in shown
        assert "single_observation_space allows -1 to " in shown
