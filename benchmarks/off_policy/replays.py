"""Replay buffers: the time to add one step of all environments and to sample a batch. First the
sampled transitions are compared with those that were added.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.off_policy.job import SKIPPED, Job, Measurement, peak_mib, timed
from gpurl.errors import GpurlError

ALPHA, BETA = 0.6, 0.4  # of prioritised replay, as in Schaul et al. 2016
PREPARED = 64  # steps that are added again and again while timing
FILL_FRACTION = 1.1  # steps that are added before, as a fraction of the size: the ring wraps around
CHECKED = 2048  # transitions of the batch that is compared
MAX_DEVIATIONS = 6.0  # of the mean draw, in standard deviations
Step = dict[str, Tensor]


class Contestant(Protocol):
    """The replay buffer of a library, with steps in the form that it takes."""

    def fill(self) -> None:
        """Add all steps."""

    def add(self) -> None:
        """Add the next one of the prepared steps."""

    def sample(self, batch_size: int) -> Any:
        """A batch; a prioritised buffer also updates its priorities."""

    def columns_of(self, batch: Any) -> Step:
        """The columns of a batch, with the names of `make_steps`."""

    def set_priorities(self, priority: Tensor) -> None:
        """Set the priorities of all entries, in the order of their places."""

    def held_bytes(self) -> int:
        """The memory of the transitions."""


def make_steps(job: Job, num_envs: int) -> Step:
    """name -> [T, N, ...]: obs, action, reward, next_obs, terminated, truncated. The first number
    of an observation is t N + n.

    next_obs is the obs of the next step, except where an episode ended: the environments reset in
    the same step.
    """
    obs_size, action_size = job.shapes[0]
    num_steps = int(job.size * FILL_FRACTION) // num_envs + 1
    generator = torch.Generator().manual_seed(job.seed)
    device = torch.device(job.device)
    obs = torch.randn(num_steps + 1, num_envs, obs_size, generator=generator)
    obs[..., 0] = torch.arange((num_steps + 1) * num_envs).view(-1, num_envs)
    chance = torch.rand(num_steps, num_envs, generator=generator)
    terminated, truncated = chance < 0.01, (chance >= 0.01) & (chance < 0.02)
    final_obs = torch.randn(num_steps, num_envs, obs_size, generator=generator)
    next_obs = torch.where((terminated | truncated).unsqueeze(2), final_obs, obs[1:])
    action = torch.rand(num_steps, num_envs, action_size, generator=generator) * 2 - 1
    reward = torch.randn(num_steps, num_envs, generator=generator)
    steps = {
        "obs": obs[:-1],
        "action": action,
        "reward": reward,
        "next_obs": next_obs,
        "terminated": terminated,
        "truncated": truncated,
    }
    return {name: column.to(device) for name, column in steps.items()}


# ---- the contestants ----


class GpurlReplay:
    """gpurl's Replay, or PrioritizedReplay."""

    def __init__(self, job: Job, num_envs: int, steps: Step) -> None:
        from gpurl.buffers.prioritized import PrioritizedReplay
        from gpurl.buffers.replay import Replay

        obs_size, action_size = job.shapes[0]
        columns = {"reward": (), "action": (action_size,)}
        device = torch.device(job.device)
        arguments: Any = (job.size, num_envs, (obs_size,), columns, device, job.seed)
        self.prioritized = job.mode == "prioritized"
        self.replay = Replay(*arguments)
        if self.prioritized:
            self.replay = PrioritizedReplay(*arguments, alpha=ALPHA, beta=BETA)
        self.columns = {
            "final_obs" if name == "next_obs" else name: column for name, column in steps.items()
        }
        self.prepared = itertools.cycle(
            [{name: c[t : t + 1] for name, c in self.columns.items()} for t in range(PREPARED)]
        )
        self.errors = prepared_errors(job)

    def fill(self) -> None:
        block = self.replay.num_rows
        for first in range(0, len(self.columns["obs"]), block):
            self.replay.add(
                {name: column[first : first + block] for name, column in self.columns.items()}
            )

    def add(self) -> None:
        self.replay.add(next(self.prepared))

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        batch = self.replay.sample(batch_size, 0.99, reuse=True)  # as in its training
        if self.prioritized:
            self.replay.update_priorities(batch["index"], self.errors[batch_size])  # type: ignore[attr-defined]
        return batch

    def columns_of(self, batch: dict[str, Tensor]) -> Step:
        columns = {name: batch[name] for name in ("obs", "action", "next_obs", "reward")}
        return columns | {"terminated": batch["discount"] == 0.0}

    def set_priorities(self, priority: Tensor) -> None:
        self.replay.update_priorities(torch.arange(len(priority), device=priority.device), priority)  # type: ignore[attr-defined]

    def held_bytes(self) -> int:
        return self.replay.bytes


class Sb3Replay:
    """stable-baselines3's ReplayBuffer, which takes and keeps numpy arrays."""

    def __init__(self, job: Job, num_envs: int, steps: Step) -> None:
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import ReplayBuffer

        obs_space, action_space = (
            Box(low, -low, (size,), np.float32) for low, size in zip((-np.inf, -1.0), job.shapes[0])
        )
        self.buffer = ReplayBuffer(job.size, obs_space, action_space, job.device, num_envs)
        self.arrays = {name: column.cpu().numpy() for name, column in steps.items()}
        self.prepared = itertools.cycle([self._step(t) for t in range(PREPARED)])

    def _step(self, t: int) -> tuple[Any, ...]:
        at = {name: array[t] for name, array in self.arrays.items()}
        infos: list[dict[str, Any]] = [
            {"TimeLimit.truncated": True} if truncated else {} for truncated in at["truncated"]
        ]
        done = at["terminated"] | at["truncated"]
        return at["obs"], at["next_obs"], at["action"], at["reward"], done, infos

    def fill(self) -> None:
        for t in range(len(self.arrays["obs"])):
            self.buffer.add(*self._step(t))

    def add(self) -> None:
        self.buffer.add(*next(self.prepared))

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def columns_of(self, batch: Any) -> Step:
        return {
            "obs": batch.observations,
            "action": batch.actions,
            "next_obs": batch.next_observations,
            "reward": batch.rewards.squeeze(1),
            "terminated": batch.dones.squeeze(1) != 0.0,
        }

    def held_bytes(self) -> int:
        return sum(
            value.nbytes for value in vars(self.buffer).values() if isinstance(value, np.ndarray)
        )


class TorchrlReplay:
    """torchrl's TensorDictReplayBuffer, or the prioritised one, on a LazyTensorStorage."""

    def __init__(self, job: Job, num_envs: int, steps: Step) -> None:
        from torchrl.data import (
            LazyTensorStorage,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )

        options: dict[str, Any] = {"storage": LazyTensorStorage(job.size, device=job.device)}
        self.prioritized = job.mode == "prioritized"
        try:
            by_priority = {"alpha": ALPHA, "beta": BETA} if self.prioritized else {}
            self.buffer = (
                TensorDictPrioritizedReplayBuffer if self.prioritized else TensorDictReplayBuffer
            )(**options, **by_priority)
        except RuntimeError as error:  # raised where its compiled part is used first
            reason = (
                f"the compiled part of this torchrl is for another torch than {torch.__version__}; "
                f"build it from source"
            )
            raise GpurlError(f"{SKIPPED}{reason} ({error})") from None
        self.steps = steps
        self.errors = prepared_errors(job)
        self.prepared = itertools.cycle([self._rows(t, t + 1) for t in range(PREPARED)])

    def _rows(self, first: int, last: int) -> Any:
        """Steps in the form of torchrl's collectors: flags and rewards are columns of the next
        state.
        """
        from tensordict import TensorDict

        rows = {name: column[first:last].flatten(0, 1) for name, column in self.steps.items()}
        flags = {name: rows[name].unsqueeze(1) for name in ("reward", "terminated", "truncated")}
        done = flags["terminated"] | flags["truncated"]
        count = len(rows["obs"])
        after = TensorDict({"observation": rows["next_obs"], "done": done} | flags, [count])
        return TensorDict(
            {"observation": rows["obs"], "action": rows["action"], "next": after}, [count]
        )

    def fill(self) -> None:
        num_steps = len(self.steps["obs"])
        block = num_steps // 4
        for first in range(0, num_steps, block):
            self.buffer.extend(self._rows(first, min(first + block, num_steps)))

    def add(self) -> None:
        self.buffer.extend(next(self.prepared))

    def sample(self, batch_size: int) -> Any:
        batch = self.buffer.sample(batch_size)
        if self.prioritized:
            batch["td_error"] = self.errors[batch_size]
            self.buffer.update_tensordict_priority(batch)
        return batch

    def columns_of(self, batch: Any) -> Step:
        after = batch["next"]
        columns = {
            "obs": batch["observation"],
            "action": batch["action"],
            "next_obs": after["observation"],
        }
        return columns | {name: after[name].squeeze(1) for name in ("reward", "terminated")}

    def set_priorities(self, priority: Tensor) -> None:
        self.buffer.update_priority(torch.arange(len(priority)), priority)

    def held_bytes(self) -> int:
        columns = self.buffer[:].items(include_nested=True, leaves_only=True)
        return sum(column.nbytes for _, column in columns)


CONTESTANTS: dict[str, Any] = {"gpurl": GpurlReplay, "sb3": Sb3Replay, "torchrl": TorchrlReplay}


def prepared_errors(job: Job) -> dict[int, Tensor]:
    """name -> TD errors for a batch of each size."""
    generator = torch.Generator().manual_seed(job.seed)
    return {
        size: torch.rand(size, generator=generator).to(job.device)
        for size in (*job.batch_sizes, CHECKED)
    }


# ---- comparing and measuring ----


def check(job: Job, contestant: Contestant, steps: Step) -> None:
    """GpurlError unless the transitions sampled from the filled buffer equal those that were added,
    are among the newest, and have the right distribution.
    """
    num_steps, num_envs = steps["reward"].shape
    held = job.size // num_envs * num_envs
    number = _compared(job, contestant, steps)
    if job.mode == "prioritized":
        _check_draws_by_priority(job, contestant, held)
        return
    center, spread = num_steps * num_envs - (held + 1) / 2, held / 12**0.5
    if abs(number.double().mean() - center) > MAX_DEVIATIONS * spread / CHECKED**0.5:
        raise GpurlError(f"{job.trainer}: draws are not uniform over the newest {held} transitions")


def _compared(job: Job, contestant: Contestant, steps: Step) -> Tensor:
    """[B] the numbers of the transitions of a batch; GpurlError unless they equal those that were
    added.
    """
    batch = contestant.columns_of(contestant.sample(CHECKED))
    columns = {name: column.cpu() for name, column in batch.items()}
    number = columns["obs"][:, 0].long()
    num_steps, num_envs = steps["reward"].shape
    oldest = (num_steps - job.size // num_envs) * num_envs
    if int(number.min()) < oldest or int(number.max()) >= num_steps * num_envs:
        raise GpurlError(
            f"{job.trainer}: sampled transitions {number.min()} to {number.max()}, wanted only "
            f"from {oldest} on, so nothing is timed"
        )
    for name, column in columns.items():
        if not torch.equal(column, steps[name].cpu().flatten(0, 1)[number]):
            raise GpurlError(
                f"{job.trainer}: sampled {name} differs from what was added, so nothing is timed"
            )
    return number


def _check_draws_by_priority(job: Job, contestant: Contestant, held: int) -> None:
    """GpurlError unless only entries with a priority are drawn; sets random priorities of all
    entries afterwards.
    """
    place = torch.arange(held, device=job.device)
    contestant.set_priorities((place < held // 4).float())
    batch = contestant.columns_of(contestant.sample(CHECKED))["obs"][:, 0].cpu().long() % held
    hits = float((batch < held // 4).float().mean())
    if hits < 0.99 or len(batch.unique()) < min(CHECKED, held) // 8:
        raise GpurlError(f"{job.trainer}: draws do not follow the priorities, so nothing is timed")
    priority = torch.rand(held, generator=torch.Generator().manual_seed(job.seed))
    contestant.set_priorities(priority.to(job.device))


def measure(job: Job) -> list[Measurement]:
    """Microseconds to add a step, to sample a batch, and of both, at every size."""
    measurements = [each for num_envs in job.num_envs for each in _measured(job, num_envs)]
    peak = Measurement(_name(job, "process"), "-", peak_mib(job), "peak MiB")
    return [*measurements, peak]


def _measured(job: Job, num_envs: int) -> Iterator[Measurement]:
    steps = make_steps(job, num_envs)
    contestant: Contestant = CONTESTANTS[job.trainer](job, num_envs, steps)
    contestant.fill()
    yield Measurement(_name(job, "memory"), str(num_envs), contestant.held_bytes() / 2**20, "MiB")
    check(job, contestant, steps)
    functions: dict[str, Any] = {"add": contestant.add}
    for size in job.batch_sizes:
        functions[f"sample {size}"] = lambda size=size: contestant.sample(size)
        functions[f"add + sample {size}"] = lambda size=size: (
            contestant.add(),
            contestant.sample(size),
        )
    with torch.inference_mode():
        for name, seconds in timed(job, functions).items():
            yield Measurement(_name(job, name), str(num_envs), seconds * 1e6, "us")


def _name(job: Job, what: str) -> str:
    kind = "prioritized replay" if job.mode == "prioritized" else "replay"
    return f"{kind} {job.size}x{job.shapes[0][0]}+{job.shapes[0][1]}: {what}"
