"""Short learning runs: an algorithm that cannot learn an easy task in seconds is broken. Long runs
stand in benchmarks/learning.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import AddRenderObservation, TransformObservation

from gpurl.api import evaluate_run, train
from gpurl.nn.actor_critic import MEMORIES

EnvMaker = Callable[[], gymnasium.Env]


def learned_return(folder: Path, algorithm: str, env: str, **settings: Any) -> float:
    run = train(
        algorithm, env, root=str(folder), quiet=True, eval_episodes=0, device="cpu", **settings
    )
    return evaluate_run(run.folder, episodes=64, device="cpu", best=False)["eval/mean_reward"]


def test_ppo_learns_cart_pole(tmp_path: Path) -> None:
    assert learned_return(tmp_path, "ppo", "cart_pole", total_steps=500_000) >= 400


def test_ppo_learns_pendulum(tmp_path: Path) -> None:
    assert learned_return(tmp_path, "ppo", "pendulum", total_steps=400_000) >= -300


@pytest.mark.parametrize(
    "options",
    [{"distribution": "beta"}, {"state_dependent_std": True}, {"std_type": "scalar"}],
    ids=str,
)
def test_ppo_learns_pendulum_by_other_policies(tmp_path: Path, options: dict[str, Any]) -> None:
    """From about -1200. To -155 in 400,000 steps."""
    run: dict[str, Any] = {"total_steps": 300_000, "eval_every": 60_000}
    assert best_return(tmp_path, "ppo", "pendulum", -500.0, **run, **options) >= -500


def best_return(
    folder: Path, algorithm: str, env: str | EnvMaker, expected: float, **settings: Any
) -> float:
    """Of a run that stops when an evaluation reaches `wanted`."""
    settings = {"eval_episodes": 64, "stop_return": expected} | settings
    run = train(algorithm, env, root=str(folder), quiet=True, device="cpu", **settings)
    return run.outcome.evaluation["eval/mean_reward"]


@pytest.mark.parametrize(
    "algorithm", ["td3", "sac", "mod_sac", "redq", "fast_td3", "fast_sac", "flash_sac"]
)
def test_actors_learn_pendulum_from_a_replay(tmp_path: Path, algorithm: str) -> None:
    """From about -1200. To -200, with the networks of their presets, in benchmarks/learning;
    DDPG: tests/algorithms/test_off_policy.py.
    """
    settings: dict[str, Any] = {"eval_every": 1600}
    settings |= {name: {"hidden": [64, 64]} for name in ("actor_network", "critic_network")}
    if algorithm == "flash_sac":  # its networks take three times as long as those of the others
        settings["batch_size"] = 128
    assert best_return(tmp_path, algorithm, "pendulum", -500.0, **settings) >= -500


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("dqn", {}),
        ("dqn", {"atoms": 51, "v_min": 0.0, "v_max": 10.0}),
        ("dqn", {"quantiles": 10}),
        ("rainbow", {}),
        ("pqn", {}),
    ],
    ids=str,
)
def test_values_learn_cart_pole(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """From about 20. To 450 in benchmarks/learning."""
    assert best_return(tmp_path, algorithm, "cart_pole", 150.0, eval_every=2_500, **settings) >= 150


def test_a2c_learns_cart_pole(tmp_path: Path) -> None:
    assert best_return(tmp_path, "a2c", "cart_pole", 150.0, eval_every=20_000) >= 150


def test_ppo_balances_mujocos_pendulum(tmp_path: Path) -> None:
    """From about 25. To 1000, all there is, in benchmarks/learning."""
    pytest.importorskip("mujoco_warp")
    settings = {"num_envs": 128, "eval_every": 20_000, "eval_episodes": 8, "total_steps": 200_000}
    assert best_return(tmp_path, "ppo", "inverted_pendulum", 300.0, **settings) >= 300


@pytest.mark.parametrize(("bonus", "expected"), [(True, 8.0), (False, 0.5)])
def test_ppo_learns_to_chase(tmp_path: Path, bonus: bool, expected: float) -> None:
    """From about -14 with a bonus and -35 without."""
    settings = {
        "num_envs": 256,
        "minibatches": 8,
        "total_steps": 2_000_000,
        "eval_every": 150_000,
        "env_options": {"bonus": bonus},
    }
    assert best_return(tmp_path, "ppo", "chasing", expected, **settings) >= expected


WITHOUT_VELOCITIES: dict[str, Any] = {
    "num_envs": 256,
    "horizon": 32,
    "learning_rate": 1e-3,
    "env_options": {"velocities": False},
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_balances_without_velocities(tmp_path: Path, memory: str) -> None:
    """From about 20. The first evaluation of 450 and more is after 100 to 260 thousand steps."""
    run = {"eval_every": 50_000, "total_steps": 1_000_000, "network": {"memory": memory}}
    got = best_return(tmp_path, "ppo", "cart_pole", 450.0, **WITHOUT_VELOCITIES, **run)
    assert got >= 450


def test_without_a_memory_nothing_balances_without_velocities(tmp_path: Path) -> None:
    """In three times the steps that a memory needs."""
    settings = WITHOUT_VELOCITIES | {"total_steps": 500_000}
    assert learned_return(tmp_path, "ppo", "cart_pole", **settings) <= 200


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ppo", {"num_envs": 64, "horizon": 16, "eval_every": 4096}),
        ("pqn", {"num_envs": 32, "horizon": 32, "eval_every": 4096}),
        (
            "dqn",
            {"num_envs": 16, "updates": 2, "batch_size": 64, "learning_starts": 512}
            | {"learning_rate": 1e-3, "eval_every": 2000},
        ),
    ],
    ids=["ppo", "pqn", "dqn"],
)
def test_convolutions_learn_to_catch(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    """From about -0.7. To 0.97 with 8 pixels: docs/algorithms.md."""
    network = {"hidden": [64], "layer_norm": algorithm == "pqn"}
    settings = settings | {"network": network, "env_options": {"size": 6}, "total_steps": 50_000}
    assert best_return(tmp_path, algorithm, "catch", 0.5, **settings) >= 0.5


def test_convolutions_learn_to_point(tmp_path: Path) -> None:
    """From 0.5 at most; without the number beside the picture one cannot have more than 0.85."""
    networks = {name: {"hidden": [32]} for name in ("actor_network", "critic_network")}
    settings: dict[str, Any] = {"num_envs": 32, "updates": 2, "batch_size": 64, "gamma": 0.9}
    settings |= {"learning_starts": 256, "learning_rate": 1e-3, "eval_every": 2048} | networks
    settings |= {"total_steps": 16_384, "eval_episodes": 64}
    env = "tests.picture_envs:Pointing"
    assert best_return(tmp_path, "td3", env, 0.86, **settings) >= 0.86


def frozen_lake() -> gymnasium.Env:
    """Gymnasium's lake, 3 x 3 fields, as an image of 12 x 12 pixels."""
    lake = gymnasium.make(
        "FrozenLake-v1",
        desc=["SFF", "FHF", "FFG"],
        is_slippery=False,
        max_episode_steps=20,
        render_mode="rgb_array",
    )
    shown = AddRenderObservation(lake, render_only=True)
    space = Box(0, 255, (12, 12, 3), np.uint8)
    return TransformObservation(shown, lambda image: image[8::16, 8::16], space)


def test_ppo_crosses_gymnasiums_frozen_lake_by_its_image(tmp_path: Path) -> None:
    """From about 0.1. The whole lake: docs/algorithms.md."""
    pytest.importorskip("pygame")
    settings: dict[str, Any] = {
        "num_envs": 8,
        "horizon": 32,
        "minibatches": 4,
        "epochs": 4,
        "entropy_coef": 0.02,
        "learning_rate": 1e-3,
        "network": {"hidden": [64], "shared": True},
        "eval_episodes": 16,
        "eval_every": 1024,
        "total_steps": 20_000,
    }
    assert best_return(tmp_path, "ppo", frozen_lake, 0.9, **settings) >= 0.9
