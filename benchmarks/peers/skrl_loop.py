"""skrl's PPO in its SequentialTrainer on Chasing or Pursuit."""

import itertools
from typing import Any

import torch
from skrl.agents.torch.ppo import PPO
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import Tensor, nn

from benchmarks.peers.job import (
    ACTIVATIONS,
    TENSOR_TASK,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.peers.timed_env import timed_env
from gpurl.adapters import to_skrl
from gpurl.envs.vec_env import VecEnv

MODES = {"default": None}


def skrl_models(env: VecEnv, job: Job) -> dict[str, Any]:
    """Policy and value networks as in skrl's examples."""
    spaces = {
        "observation_space": env.single_observation_space,
        "action_space": env.single_action_space,
        "device": env.device,
    }

    def network(inputs: int, outputs: int) -> nn.Sequential:
        sizes = (inputs, *job.hidden)
        layers = list[nn.Module]()
        for size, next_size in itertools.pairwise(sizes):
            layers += [nn.Linear(size, next_size), ACTIVATIONS[job.activation]()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    class Policy(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self)
            self.net = network(self.num_observations, self.num_actions)
            self.log_std = nn.Parameter(torch.zeros(self.num_actions))

        def compute(
            self, inputs: dict[str, Tensor], role: str = ""
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = network(self.num_observations, 1)

        def compute(
            self, inputs: dict[str, Tensor], role: str = ""
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(inputs["observations"]), {}

    return {"policy": Policy(), "value": Value()}


def tensor_task(job: Job) -> Outcome:
    """skrl's PPO in its SequentialTrainer."""
    env = timed_env(job)
    settings = {
        "rollouts": job.horizon,
        "learning_epochs": job.epochs,
        "mini_batches": job.minibatches,
        "discount_factor": TENSOR_TASK["gamma"],
        "gae_lambda": TENSOR_TASK["gae_lambda"],
        "learning_rate": TENSOR_TASK["learning_rate"],
        "grad_norm_clip": TENSOR_TASK["max_grad_norm"],
        "ratio_clip": TENSOR_TASK["clip_range"],
        "value_clip": 0.0,
        "value_loss_scale": TENSOR_TASK["value_coef"],
        "entropy_loss_scale": TENSOR_TASK["entropy_coef"],
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    agent = PPO(
        models=skrl_models(env, job),
        memory=RandomMemory(memory_size=job.horizon, num_envs=job.num_envs, device=env.device),
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        device=env.device,
        cfg=settings,
    )
    limits = {
        "timesteps": rollouts(job) * job.horizon,
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    }
    SequentialTrainer(env=to_skrl(env), agents=agent, cfg=limits).train()
    return env.outcome()
