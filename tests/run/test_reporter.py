"""What a run warns about while it trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.api import train
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.vec_env import Timestep
from tests.small_runs import SMALL, small_settings


class NeverMoves(Pendulum):
    """Marks a fraction of the steps as transitions."""

    transitions = 0

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        valid = torch.arange(self.num_envs) < self.transitions
        reward = torch.where(valid, timestep.reward, 0.0)
        info = timestep.info | {"valid": valid}
        return timestep._replace(reward=reward, info=info)


class MovesFour(NeverMoves):
    transitions = 4


@pytest.mark.parametrize(("env", "fraction"), [(NeverMoves, 0.0), (MovesFour, 0.25)])
def test_a_run_without_transitions_says_so_once(
    env: type[NeverMoves], fraction: float, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings: dict[str, Any] = SMALL | {"quiet": False, "eval_episodes": 0, "total_steps": 512}
    run = train("ppo", env, run_dir=tmp_path / "run", **settings)
    shown = capsys.readouterr().out
    assert shown.count("marked each of them as no transition") == (fraction == 0)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["rollout/valid_fraction"] for line in lines} == {fraction}


@pytest.mark.parametrize(
    ("algorithm", "settings", "times"),
    [
        # rewards of 1, whose sum over 20 steps, discounted by 0.99, is (1 - 0.99^20) / 0.01 = 18
        ("dqn", {"atoms": 11}, 1),
        ("dqn", {"atoms": 11, "v_max": 100.0}, 0),
        ("dqn", {"atoms": 11, "reward_scale": 0.1}, 0),
        ("dqn", {"atoms": 0}, 0),
        # not discounted 20 or so, at 0.9 less than 10
        ("dqn", {"atoms": 11, "gamma": 1.0}, 1),
        ("dqn", {"atoms": 11, "gamma": 0.9}, 0),
        ("dqn", {"atoms": 11, "population": 2}, 0),
        ("rainbow", {"v_max": 5.0}, 1),
        ("fast_sac", {"v_min": 0.0}, 1),
        ("flash_sac", {"v_min": 0.0}, 0),
    ],
    ids=str,
)
def test_returns_beyond_the_atoms_are_told_once(
    algorithm: str,
    settings: dict[str, float],
    times: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    values: dict[str, Any] = small_settings(algorithm) | {"device": "cpu", "log_every": 0.0}
    values |= {"num_envs": 16, "eval_episodes": 0, "total_steps": 6400, "preset": "none"}
    env = "pendulum" if "sac" in algorithm else "cart_pole"
    train(algorithm, env, run_dir=tmp_path / "run", **(values | settings))
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("set --v-min and --v-max so that all returns are within") == times


@pytest.mark.parametrize(("settings", "times"), [({}, 1), ({"temperature": 6.5e7}, 0)], ids=str)
def test_a_temperature_at_its_limit_is_told_once(
    settings: dict[str, float], times: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values: dict[str, Any] = small_settings("sac") | {"device": "cpu", "log_every": 0.0}
    values |= {"num_envs": 16, "eval_episodes": 0, "total_steps": 6400}
    values |= {"target_entropy": 9.0, "initial_temperature": 6.5e7} | settings
    train("sac", "pendulum", run_dir=tmp_path / "run", **values)
    shown = " ".join(capsys.readouterr().out.split())
    told = "the temperature has reached its limit 6.6e+07, and the entropy of the policy is still"
    assert shown.count(told) == times
