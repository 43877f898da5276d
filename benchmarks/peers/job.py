"""The job and the result of one process of the PPO comparison, and the hyper-parameters that all
trainers share.
"""

import dataclasses
import itertools
import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.processes import resident_mib, version_of
from benchmarks.results_table import machine

# of the cases on tensors
TENSOR_TASK = {
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "entropy_coef": 0.0,
    "value_coef": 1.0,
    "max_grad_norm": 1.0,
}
# rl-zoo's PPO on Pendulum-v1, without state-dependent exploration
PENDULUM = {
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
}
PENDULUM_HORIZON, PENDULUM_EPOCHS, PENDULUM_BATCH, PENDULUM_EPISODES = 1024, 10, 64, 50
# (hidden layers, epochs, minibatches) of a case; pursuit has those of Isaac Lab's quadrupeds
SHAPES = {
    "chasing": ((64, 64), 4, 4),
    "pursuit": ((512, 256, 128), 5, 4),
    "pendulum": ((64, 64), PENDULUM_EPOCHS, 0),
}
ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU, "relu": nn.ReLU}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    case: str  # chasing, pursuit or pendulum
    trainer: str
    mode: str = "default"  # of the trainer, one of MODES in its file
    num_envs: int = 4096
    horizon: int = 32  # not of pendulum
    iterations: int = 12  # timed ones, not of pendulum
    warm_up: int = 3  # iterations not timed
    total_steps: int = 100_000  # of pendulum, rounded up to whole iterations
    activation: str = "tanh"
    device: str = "cpu"
    seed: int = 0

    @property
    def hidden(self) -> tuple[int, ...]:
        return SHAPES[self.case][0]

    @property
    def epochs(self) -> int:
        return SHAPES[self.case][1]

    @property
    def minibatches(self) -> int:
        return SHAPES[self.case][2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The measurements of one training."""

    marks: list[float]  # the clock after each iteration
    steps: int  # environment steps of an iteration
    # mean reward of a step in the last rollout; pendulum: mean return of greedy episodes
    score: float
    note: str = ""


def rollouts(job: Job) -> int:
    """The number of rollouts of a job on tensors: the first one only starts the clock."""
    return 1 + job.warm_up + job.iterations


def result(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What compare.py reads."""
    seconds = [after - before for before, after in itertools.pairwise(outcome.marks)][job.warm_up :]
    is_cuda = job.device.startswith("cuda")
    return {
        "steps_per_second": outcome.steps / statistics.median(seconds),
        "score": outcome.score,
        "note": job.mode + (f", {outcome.note}" if outcome.note else ""),
        "peak_mib": resident_mib(),
        "gpu_mib": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else 0.0,
        "version": version_of(job.trainer),
        "machine": machine(job.device),
    }
