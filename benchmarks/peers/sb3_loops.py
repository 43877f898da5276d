"""stable-baselines3's PPO on Chasing and on Gymnasium's Pendulum; it has one mode."""

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks.peers import job as cases
from benchmarks.peers.job import (
    ACTIVATIONS,
    CHASING,
    EPOCHS,
    HIDDEN,
    MINIBATCHES,
    PENDULUM,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.peers.timed_chasing import TimedChasing
from benchmarks.timing import now
from gpurl.adapters import to_sb3

MODES = {"default": None}


def sb3_settings(values: dict[str, float]) -> dict[str, Any]:
    """Our names of hyper-parameters in stable-baselines3's."""
    names = {"entropy_coef": "ent_coef", "value_coef": "vf_coef"}
    return {names.get(name, name): value for name, value in values.items()}


def chasing(job: Job) -> Outcome:
    """stable-baselines3's PPO."""
    env = TimedChasing(job)
    shape = {
        "n_steps": job.horizon,
        "batch_size": job.num_envs * job.horizon // MINIBATCHES,
        "n_epochs": EPOCHS,
    }
    network = {"net_arch": list(HIDDEN), "activation_fn": ACTIVATIONS[job.activation]}
    model = PPO(
        "MlpPolicy",
        to_sb3(env),
        **shape,
        **sb3_settings(CHASING),
        policy_kwargs=network,
        seed=None,
        device=job.device,
    )
    model.learn(rollouts(job) * job.horizon * job.num_envs)
    return env.outcome()


def pendulum(job: Job) -> Outcome:
    """stable-baselines3 on Pendulum-v1, in whichever of its vector environments is quicker."""
    marks: list[float] = []

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            marks.append(now(torch.device(job.device)))

    env = faster_vec_env(job.num_envs)
    shape = {
        "n_steps": cases.PENDULUM_HORIZON,
        "batch_size": cases.PENDULUM_BATCH,
        "n_epochs": cases.PENDULUM_EPOCHS,
    }
    network = {"net_arch": list(HIDDEN), "activation_fn": ACTIVATIONS[job.activation]}
    model = PPO(
        "MlpPolicy",
        env,
        **shape,
        **sb3_settings(PENDULUM),
        policy_kwargs=network,
        seed=job.seed,
        device=job.device,
    )
    model.learn(job.total_steps, callback=Clock())
    marks.append(now(torch.device(job.device)))
    copies = DummyVecEnv([one_pendulum] * cases.PENDULUM_EPISODES)
    score, _ = evaluate_policy(
        model, copies, n_eval_episodes=cases.PENDULUM_EPISODES, deterministic=True, warn=False
    )
    note = type(env).__name__
    env.close()
    return Outcome(marks, job.num_envs * cases.PENDULUM_HORIZON, float(score), note)


def one_pendulum() -> gymnasium.Env:
    """One Pendulum-v1; processes need a function of a module."""
    return gymnasium.make("Pendulum-v1")


def faster_vec_env(num_envs: int) -> Any:
    """stable-baselines3's vector environment, in this process or in others, that takes 200 steps
    sooner.
    """
    seconds, kept = {}, {}
    for kind in (DummyVecEnv, SubprocVecEnv):
        env = kind([one_pendulum] * num_envs)
        env.reset()
        action = np.zeros((num_envs, 1), np.float32)
        began = time.perf_counter()
        for _ in range(200):
            env.step(action)
        seconds[kind], kept[kind] = time.perf_counter() - began, env
    quicker = min(seconds, key=lambda kind: seconds[kind])
    for kind, env in kept.items():
        if kind is not quicker:
            env.close()
    return kept[quicker]
