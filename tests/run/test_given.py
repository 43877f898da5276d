"""Environments and algorithms given as classes, instances, functions and ids; presets by class."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import gpurl
from gpurl.algorithms.ppo import PPO
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.errors import EndlessEpisodeError, UsageError
from gpurl.run.evaluator import Player
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.small_runs import ITERATION, assert_same, small_run, small_settings, state_of
from tests.tiny_envs import RandomWalk

SMALL: dict[str, Any] = {
    "num_envs": 2,
    "horizon": 8,
    "minibatches": 1,
    "epochs": 1,
    "schedule": "constant",
    "total_steps": 32,
    "eval_episodes": 2,
    "device": "cpu",
    "quiet": True,
    "threads": 1,
}


class MyGym(GymnasiumCpu):
    """As docs/environments.md shows it."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed, env=lambda: gymnasium.make("CartPole-v1"))


class MyPPO(PPO):
    """Nothing of its own."""


def train(tmp_path: Path, env: Any, algorithm: Any = "ppo", **changes: Any) -> gpurl.Run:
    return gpurl.train(algorithm, env, run_dir=tmp_path / "run", **(SMALL | changes))


def test_a_class(tmp_path: Path) -> None:
    run = train(tmp_path, RandomWalk)
    assert run.outcome.steps == 32
    assert gpurl.resume(run.folder, total_steps=64, quiet=True).outcome.steps == 64
    assert run.policy().settings["env"] == "tests.tiny_envs:RandomWalk"


def test_a_class_that_was_defined_in_a_function(tmp_path: Path) -> None:
    class Local(RandomWalk):
        pass

    run = train(tmp_path, Local)
    assert "Local" in run.policy().settings["env"]
    assert gpurl.resume(run.folder, total_steps=64, quiet=True).outcome.steps == 64


def test_environments_that_exist_already_are_evaluated_after_the_training(tmp_path: Path) -> None:
    env = make_env("cart_pole", 4)
    run = train(tmp_path, env, num_envs=4)
    assert (run.outcome.steps, run.outcome.evaluation["at_step"]) == (32, 32)
    env.reset(seed=0)  # it was not closed
    with pytest.raises(UsageError, match=r"num_envs is 7, the given environment's is 4"):
        train(tmp_path / "other", env, num_envs=7)


@pytest.mark.parametrize("ends", ["normally", "early"])
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_their_evaluation_leaves_no_trace_in_the_checkpoint(
    name: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plays in the training environments; the run continues as if it had its own."""
    settings: dict[str, Any] = {
        **small_settings(name),
        "num_envs": 4,
        "horizon": 8,
        "total_steps": 64,
        "eval_episodes": 4,
        "eval_every": 10**9,
        "deterministic": True,
        "device": "cpu",
        "quiet": True,
    }
    if name == "sac":
        settings["save_replay"] = True

    def breaks(player: Player, *_: object, **__: object) -> None:
        player.env.reset(seed=0)
        raise EndlessEpisodeError("an evaluation that breaks off")

    if ends == "early":
        monkeypatch.setattr(Player, "play", breaks)
    states = []
    for folder, env in (("named", "pendulum"), ("given", make_env("pendulum", 4))):
        run = gpurl.train(name, env, run_dir=tmp_path / folder, **settings)
        assert bool(run.outcome.evaluation) == (ends == "normally")
        after_training = state_of(run.folder)
        gpurl.resume(run.folder, total_steps=96)
        states.append((after_training, state_of(run.folder)))
    named, given = states
    assert_same(given, named)


@pytest.mark.parametrize("kind", ["maker", "class", "single", "vector", "id"])
def test_environments_of_gymnasium(kind: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "maker": lambda: gymnasium.make("CartPole-v1"),
        "class": CartPoleEnv,
        "single": gymnasium.make("CartPole-v1"),
        "vector": SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP
        ),
        "id": "CartPole-v1",
    }
    changes = {"num_envs": 1, "total_steps": 16} if kind == "single" else {}
    if kind == "class":
        changes = {"max_seconds": 5.0, "eval_episodes": 0}  # it has no time limit
    assert train(tmp_path, given[kind], **changes).outcome.steps == (16 if kind == "single" else 32)


def test_an_algorithm_as_a_class(tmp_path: Path) -> None:
    run = train(tmp_path, "cart_pole", MyPPO)
    assert run.policy().settings["algorithm"] == f"{__name__}:MyPPO"
    with pytest.raises(UsageError, match="an algorithm is a name or a class"):
        train(tmp_path, "cart_pole", 3)


def test_what_is_no_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"an environment is a name, .*, got 3"):
        train(tmp_path, 3)


def test_presets_go_by_class() -> None:
    """A subclass of an adapter is no task of 4096 tensor environments, nor is that of an algorithm
    without a preset."""
    mine = make_settings("ppo", f"{__name__}:MyGym")
    theirs = make_settings("ppo", "gymnasium_cpu:CartPole-v1")
    assert mine.train == theirs.train
    assert mine.algorithm_config == theirs.algorithm_config
    assert mine.train.num_envs == 8
    assert make_settings("ppo", "CartPole-v1").train == theirs.train
    own = make_settings(f"{__name__}:MyPPO", "pendulum")
    assert own.algorithm_config == make_settings("ppo", "pendulum").algorithm_config
    assert make_settings("a2c", "chasing").algorithm_config.horizon == 16


def test_an_iteration_larger_than_the_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path / "run", 1, total_steps=ITERATION - 1)
    assert f"one iteration is {ITERATION} steps" in capsys.readouterr().err


class Pictures(RandomWalk):
    """Shows pictures."""

    single_observation_space = Box(0, 255, (4, 4, 3), np.uint8)

    def observe(self, state: State) -> torch.Tensor:
        rows = super().observe(state)
        return torch.zeros(len(rows), 4, 4, 3, dtype=torch.uint8)


def test_pictures_are_flattened_and_it_is_said(tmp_path: Path) -> None:
    settings = make_settings("ppo", f"{__name__}:Pictures", **SMALL)
    notes = make_trainer(settings, torch.device("cpu")).engine.notes
    (said,) = (note for note in notes if "images" in note)
    assert "(4, 4, 3) look like images; they are flattened into rows of 48 numbers" in said
    assert train(tmp_path, Pictures).outcome.steps == 32
