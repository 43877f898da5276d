"""Short learning runs: an algorithm that cannot learn an easy task in seconds is broken. Long runs stand in benchmarks/learning.py."""

from pathlib import Path
from typing import Any

import pytest

from gpurl.api import evaluate_run, train


def learned_return(folder: Path, algorithm: str, env: str, **settings: Any) -> float:
    run = train(algorithm, env, root=str(folder), quiet=True, eval_episodes=0, device="cpu", **settings)
    return evaluate_run(run.folder, episodes=64, device="cpu", best=False)["eval/mean_reward"]


def test_ppo_learns_cart_pole(tmp_path: Path) -> None:
    assert learned_return(tmp_path, "ppo", "cart_pole", total_steps=500_000) >= 400


def test_ppo_learns_pendulum(tmp_path: Path) -> None:
    assert learned_return(tmp_path, "ppo", "pendulum", total_steps=400_000) >= -300


def best_return(folder: Path, algorithm: str, env: str, wanted: float, **settings: Any) -> float:
    """Of a run that stops when an evaluation reaches `wanted`."""
    settings = {"eval_episodes": 64, "stop_return": wanted} | settings
    run = train(algorithm, env, root=str(folder), quiet=True, device="cpu", **settings)
    return run.outcome.evaluation["eval/mean_reward"]


@pytest.mark.parametrize("algorithm", ["ddpg", "td3", "sac", "mod_sac", "redq", "fast_td3", "fast_sac"])
def test_actors_learn_pendulum_from_a_replay(tmp_path: Path, algorithm: str) -> None:
    """To -200, with the networks of their presets, in benchmarks/learning.py."""
    networks = {name: {"hidden": [64, 64]} for name in ("actor_network", "critic_network")}
    assert best_return(tmp_path, algorithm, "pendulum", -300.0, eval_every=3200, **networks) >= -300


@pytest.mark.parametrize(
    ("algorithm", "settings", "wanted"),
    [
        ("dqn", {}, 450.0),
        ("dqn", {"atoms": 51, "v_min": 0.0, "v_max": 10.0}, 300.0),  # 450 and the whole family in benchmarks/learning.py
        ("dqn", {"quantiles": 10}, 300.0),
        ("rainbow", {}, 200.0),
        ("pqn", {}, 450.0),
    ],
    ids=str,
)
def test_values_learn_cart_pole(tmp_path: Path, algorithm: str, settings: dict[str, Any], wanted: float) -> None:
    assert best_return(tmp_path, algorithm, "cart_pole", wanted, eval_every=5_000, **settings) >= wanted


def test_a2c_learns_cart_pole(tmp_path: Path) -> None:
    assert learned_return(tmp_path, "a2c", "cart_pole") >= 400


@pytest.mark.parametrize(("bonus", "wanted"), [(True, 9.0), (False, 1.5)])
def test_ppo_learns_to_chase(tmp_path: Path, bonus: bool, wanted: float) -> None:
    settings = {"num_envs": 256, "minibatches": 8, "total_steps": 2_000_000, "env_options": {"bonus": bonus}}
    assert learned_return(tmp_path, "ppo", "chasing", **settings) >= wanted


@pytest.mark.parametrize(("memory", "low", "high"), [("gru", 400.0, 500.0), ("none", 0.0, 200.0)])
def test_only_a_memory_balances_without_velocities(tmp_path: Path, memory: str, low: float, high: float) -> None:
    settings = {
        "num_envs": 256,
        "horizon": 32,
        "total_steps": 1_000_000,
        "learning_rate": 1e-3,
        "network": {"memory": memory},
        "env_options": {"velocities": False},
    }
    assert low <= learned_return(tmp_path, "ppo", "cart_pole", **settings) <= high
