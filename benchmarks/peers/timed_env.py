"""The environments of the other trainers, which measure their own time."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.job import Job, Outcome
from benchmarks.peers.pursuit import Pursuit
from benchmarks.timing import now
from gpurl.engine.eager import STAGGER_SEED
from gpurl.envs.chasing import Chasing
from gpurl.envs.torch_env import TorchEnv
from gpurl.kernels.random import CounterRandom


class TimedEnv(TorchEnv):
    """Reads the clock and the mean reward after every `horizon` steps, in the same way for all
    trainers.

    Its episodes start at different clocks, so that time limits are not all in the same step.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.num_envs, job.device, job.seed)
        self.horizon = job.horizon
        self.clock_seed = job.seed + STAGGER_SEED  # as in gpurl
        self.marks: list[float] = []
        self.mean_reward = float("nan")
        self._rewards: list[Tensor] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        start = super().reset(seed=seed, options=options)
        random = CounterRandom(self.clock_seed, self.num_envs, self.device)
        self.stagger(random.integers(0, self.max_episode_steps or 1))
        return start

    def step(self, actions: Tensor) -> Any:
        timestep = super().step(actions)
        self._rewards.append(timestep.reward)
        if len(self._rewards) == self.horizon:
            self.marks.append(now(self.device))
            self.mean_reward = float(torch.stack(self._rewards).mean())
            self._rewards.clear()
        return timestep

    def outcome(self) -> Outcome:
        """The measurements so far."""
        return Outcome(self.marks, self.num_envs * self.horizon, self.mean_reward)


class TimedChasing(TimedEnv, Chasing):
    """Of the case chasing."""


class TimedPursuit(TimedEnv, Pursuit):
    """Of the case pursuit."""


def timed_env(job: Job) -> TimedEnv:
    """The environment of a job."""
    return {"chasing": TimedChasing, "pursuit": TimedPursuit}[job.case](job)
