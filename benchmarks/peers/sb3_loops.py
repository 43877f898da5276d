"""stable-baselines3's PPO on Chasing, Pursuit and Gymnasium's Pendulum."""

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
    PENDULUM,
    TENSOR_TASK,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.peers.timed_env import timed_env
from benchmarks.timing import now
from gpurl.adapters import to_sb3

MODES = {"default": None}


def settings(job: Job, values: dict[str, float], **sizes: int) -> dict[str, Any]:
    """The arguments of stable-baselines3's PPO for hyper-parameters with gpurl's names."""
    names = {"entropy_coef": "ent_coef", "value_coef": "vf_coef"}
    network = {"net_arch": list(job.hidden), "activation_fn": ACTIVATIONS[job.activation]}
    renamed = {names.get(name, name): value for name, value in values.items()}
    return {**renamed, **sizes, "policy_kwargs": network, "device": job.device}


def tensor_task(job: Job) -> Outcome:
    """stable-baselines3 on Chasing."""
    env = timed_env(job)
    batch_size = job.num_envs * job.horizon // job.minibatches
    sizes = {"n_steps": job.horizon, "batch_size": batch_size, "n_epochs": job.epochs}
    model = PPO("MlpPolicy", to_sb3(env), seed=None, **settings(job, TENSOR_TASK, **sizes))
    model.learn(rollouts(job) * job.horizon * job.num_envs)
    return env.outcome()


def pendulum(job: Job) -> Outcome:
    """stable-baselines3 on Pendulum-v1, in the faster one of its vector environments."""
    marks: list[float] = []

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            marks.append(now(torch.device(job.device)))

    env = faster_vec_env(job.num_envs)
    sizes = {
        "n_steps": cases.PENDULUM_HORIZON,
        "batch_size": cases.PENDULUM_BATCH,
        "n_epochs": cases.PENDULUM_EPOCHS,
    }
    model = PPO("MlpPolicy", env, seed=job.seed, **settings(job, PENDULUM, **sizes))
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
    """One Pendulum-v1; a function of the module, because worker processes import it."""
    return gymnasium.make("Pendulum-v1")


def faster_vec_env(num_envs: int) -> Any:
    """The faster one of stable-baselines3's vector environments, in this process or in others, over
    200 steps.
    """
    seconds, envs = {}, {}
    for kind in (DummyVecEnv, SubprocVecEnv):
        env = kind([one_pendulum] * num_envs)
        env.reset()
        action = np.zeros((num_envs, 1), np.float32)
        began = time.perf_counter()
        for _ in range(200):
            env.step(action)
        seconds[kind] = time.perf_counter() - began
        envs[kind] = env
    slow, fast = sorted(envs, key=lambda kind: seconds[kind], reverse=True)
    envs[slow].close()
    return envs[fast]
