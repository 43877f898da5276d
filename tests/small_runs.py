"""Runs that take a fraction of a second, in this process or in one of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

import gpurl
from gpurl.algorithms import algorithm_names, config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.discrete_sac import DiscreteSAC
from gpurl.algorithms.dqn import DQN
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.algorithms.pqn import PQN
from gpurl.algorithms.sac import SAC
from gpurl.algorithms.vdn import VDN
from gpurl.api import train
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cli.main import main
from gpurl.envs.vec_env import VecEnv
from gpurl.run.settings import build

ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {
    "num_envs": 16,
    "horizon": 8,
    "minibatches": 2,
    "eval_episodes": 4,
    "quiet": True,
    "device": "cpu",
    "network": {"hidden": [16]},
    "log_every": 0.0,
}
ITERATION = 16 * 8


# without bc, which learns from no reward: tests/algorithms/test_bc_runs.py
OFF_POLICY = [
    name
    for name in algorithm_names()
    if issubclass(resolve_algorithm(name), OffPolicy) and name != "bc"
]


def small_settings(algorithm: str, rows: int = 8) -> dict[str, Any]:
    """Settings with which an iteration of `algorithm` takes milliseconds, and learns from the
    first; rows: of a batch.
    """
    fields = config_class(resolve_algorithm(algorithm)).__dataclass_fields__
    values: dict[str, Any] = {
        "updates": 4,
        "batch_size": rows,
        "learning_starts": rows,
        "replay_size": 16 * rows,
        "minibatches": 1,
    }
    values |= {name: {"hidden": [8]} for name in ("network", "actor_network", "critic_network")}
    if "policy_delay" in fields and fields["policy_delay"].default > 1:
        values["policy_delay"] = 2
    return {name: value for name, value in values.items() if name in fields}


def some_demonstrations(folder: Path, env: VecEnv, rows: int = 20) -> str:
    """A dataset for bc: what means nothing, of the environment's spaces."""
    actions = gymnasium.vector.utils.batch_space(env.single_action_space, rows)
    actions.seed(0)
    obs = np.zeros(
        (rows, *(env.single_observation_space.shape or ())), env.single_observation_space.dtype
    )
    np.savez(folder / "demonstrations.npz", obs=obs, action=actions.sample())
    return str(folder / "demonstrations.npz")


def takes(algorithm: str, space: gymnasium.Space, num_agents: int = 1) -> bool:
    """Whether `algorithm` is for this action space and so many agents."""
    kind = resolve_algorithm(algorithm)
    if num_agents > 1 and not kind.takes_agents:
        return False
    if issubclass(kind, VDN):
        return isinstance(space, MultiDiscrete)
    if issubclass(kind, DQN | PQN | DiscreteSAC):
        return isinstance(space, Discrete)
    if kind is SAC:
        return isinstance(space, Box | Discrete)
    return isinstance(space, Box) if issubclass(kind, OffPolicyActorCritic) else True


def small_run(
    folder: Path, iterations: int, algorithm: str = "ppo", env: str = "pendulum", **changes: Any
) -> gpurl.Run:
    minibatches = {"minibatches": 1} if algorithm == "a2c" else {}
    return train(
        algorithm,
        env,
        **{
            **SMALL,
            "run_dir": str(folder),
            "total_steps": iterations * ITERATION,
            **minibatches,
            **changes,
        },
    )


def off_policy(name: str, env: VecEnv, **settings: Any) -> OffPolicy:
    """An algorithm that replays, with small settings."""
    config = build(config_class(resolve_algorithm(name)), small_settings(name) | settings)
    algorithm = make_algorithm(
        name, config, env.single_observation_space, env.single_action_space, env.num_envs
    )
    assert isinstance(algorithm, OffPolicy)
    return algorithm


def play(
    algorithm: Algorithm, env: VecEnv, iterations: int, learns: bool = True
) -> dict[str, Tensor]:
    """The training loop without what surrounds it."""
    obs, _ = env.reset(seed=0)
    buffer, policy_state, metrics = (
        algorithm.make_buffer(),
        algorithm.initial_policy_state(env.num_envs),
        {},
    )
    for number in range(iterations):
        algorithm.schedule(number / iterations, number * env.num_envs)
        while not buffer.is_full:
            decision = algorithm.act(obs, policy_state)
            timestep = env.step(decision.action)
            algorithm.record_step(buffer, obs, decision, timestep)
            obs = timestep.obs
        data = algorithm.prepare(buffer)
        metrics = algorithm.learn(data) if learns else {}
        buffer.clear()
    return metrics


def state_of(folder: Path) -> dict[str, Any]:
    """What a run left in its newest checkpoint, without what differs from one process to the
    next.
    """
    parts, _ = load_checkpoint(folder)
    parts.pop("meta")
    for name in ("elapsed", "best_return", "evaluation", "statistics", "threads"):
        parts["trainer"].pop(name)
    return parts


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Same types, same names, same bits."""
    assert type(one) is type(other), at
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for name in one:
            assert_same(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for number, (a, b) in enumerate(zip(one, other)):
            assert_same(a, b, f"{at}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), at
    else:
        assert one == other, at


def exit_code(words: list[str]) -> int | str | None:
    """What the process would end with: tyro and argparse leave by SystemExit."""
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code


def start(arguments: list[str], module: str = "gpurl", **options: Any) -> "subprocess.Popen[str]":
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=options.pop("cwd", ROOT),
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
