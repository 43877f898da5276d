"""Replay buffers: a turn adds one step of all environments and draws a batch. First what comes out
is compared with what went in.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.off_policy.job import SKIPPED, Job, Measurement, peak_mib, timed
from gpurl.errors import GpurlError

EXPONENT, IMPORTANCE = 0.6, 0.4  # of prioritised replay, as Schaul et al. 2016 have them
PREPARED = 64  # steps that are added over and over when time is taken
MORE = 1.1  # steps that are added before, as a share of the size: a ring has gone around
CHECKED = 2048  # transitions of the batch that is compared
SAME_DRAWS = 6.0  # standard deviations that the mean draw may be off
Step = dict[str, Tensor]


class Contestant(Protocol):
    """A library's replay buffer, fed in the form that it takes."""

    def fill(self) -> None:
        """Add all steps."""

    def add(self) -> None:
        """Add one more of some steps that lie ready."""

    def sample(self, batch_size: int) -> Any:
        """A batch; where draws go by priority, new priorities of it are set too."""

    def seen(self, batch: Any) -> Step:
        """What a batch holds, by the names of `make_steps`."""

    def set_priorities(self, priority: Tensor) -> None:
        """Of all entries, oldest place first, with draws by priority."""

    def held_bytes(self) -> int:
        """Memory that the transitions take."""


def make_steps(job: Job, num_envs: int) -> Step:
    """name -> [T, N, ...]: obs, action, reward, next_obs, terminated, truncated. The first number
    of an observation is t N + n.

    next_obs is the next step's obs but where an episode ended, as environments have it that start
    anew in the same step.
    """
    obs_size, action_size = job.shapes[0]
    num_steps = int(job.size * MORE) // num_envs + 1
    generator, device = torch.Generator().manual_seed(job.seed), torch.device(job.device)
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
    """gpurl's rings."""

    def __init__(self, job: Job, num_envs: int, steps: Step) -> None:
        from gpurl.buffers.prioritized import PrioritizedReplay
        from gpurl.buffers.replay import Replay

        device, (obs_size, action_size) = torch.device(job.device), job.shapes[0]
        arguments: Any = (
            job.size,
            num_envs,
            (obs_size,),
            {"reward": (), "action": (action_size,)},
            device,
            job.seed,
        )
        self.prioritized = job.mode == "prioritized"
        self.replay = Replay(*arguments)
        if self.prioritized:
            self.replay = PrioritizedReplay(*arguments, alpha=EXPONENT, beta=IMPORTANCE)
        self.columns = {
            "final_obs" if name == "next_obs" else name: column for name, column in steps.items()
        }
        self.prepared = itertools.cycle(
            [{name: c[t : t + 1] for name, c in self.columns.items()} for t in range(PREPARED)]
        )
        self.errors = prepared_errors(job)

    def fill(self) -> None:
        num_steps, most = len(self.columns["obs"]), self.replay.num_rows
        for first in range(0, num_steps, most):
            self.replay.add(
                {name: column[first : first + most] for name, column in self.columns.items()}
            )

    def add(self) -> None:
        self.replay.add(next(self.prepared))

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        batch = self.replay.sample(batch_size, 0.99, reuse=True)  # as its training draws
        if self.prioritized:
            self.replay.update_priorities(batch["index"], self.errors[batch_size])  # type: ignore[attr-defined]
        return batch

    def seen(self, batch: dict[str, Tensor]) -> Step:
        return {name: batch[name] for name in ("obs", "action", "next_obs", "reward")} | {
            "terminated": batch["discount"] == 0.0
        }

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
            {"TimeLimit.truncated": True} if cut else {} for cut in at["truncated"]
        ]
        return (
            at["obs"],
            at["next_obs"],
            at["action"],
            at["reward"],
            at["terminated"] | at["truncated"],
            infos,
        )

    def fill(self) -> None:
        for t in range(len(self.arrays["obs"])):
            self.buffer.add(*self._step(t))

    def add(self) -> None:
        self.buffer.add(*next(self.prepared))

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def seen(self, batch: Any) -> Step:
        found = {
            "obs": batch.observations,
            "action": batch.actions,
            "next_obs": batch.next_observations,
        }
        return found | {
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
            by_priority = {"alpha": EXPONENT, "beta": IMPORTANCE} if self.prioritized else {}
            self.buffer = (
                TensorDictPrioritizedReplayBuffer if self.prioritized else TensorDictReplayBuffer
            )(**options, **by_priority)
        except RuntimeError as error:  # it says so and goes on, up to here
            reason = (
                f"the compiled part of this torchrl is for another torch than {torch.__version__}; "
                f"built from its source it will do"
            )
            raise GpurlError(f"{SKIPPED}{reason} ({error})") from None
        self.steps, self.num_envs, self.errors = steps, num_envs, prepared_errors(job)
        self.prepared = itertools.cycle([self._rows(t, t + 1) for t in range(PREPARED)])

    def _rows(self, first: int, last: int) -> Any:
        """Steps as torchrl's collectors lay them out: flags and rewards are columns of the next
        state.
        """
        from tensordict import TensorDict

        rows = {name: column[first:last].flatten(0, 1) for name, column in self.steps.items()}
        flags = {name: rows[name].unsqueeze(1) for name in ("reward", "terminated", "truncated")}
        done, count = flags["terminated"] | flags["truncated"], len(rows["obs"])
        after = TensorDict({"observation": rows["next_obs"], "done": done} | flags, [count])
        return TensorDict(
            {"observation": rows["obs"], "action": rows["action"], "next": after}, [count]
        )

    def fill(self) -> None:
        num_steps, most = len(self.steps["obs"]), len(self.steps["obs"]) // 4
        for first in range(0, num_steps, most):
            self.buffer.extend(self._rows(first, min(first + most, num_steps)))

    def add(self) -> None:
        self.buffer.extend(next(self.prepared))

    def sample(self, batch_size: int) -> Any:
        batch = self.buffer.sample(batch_size)
        if self.prioritized:
            batch["td_error"] = self.errors[batch_size]
            self.buffer.update_tensordict_priority(batch)
        return batch

    def seen(self, batch: Any) -> Step:
        after = batch["next"]
        found = {
            "obs": batch["observation"],
            "action": batch["action"],
            "next_obs": after["observation"],
        }
        return found | {name: after[name].squeeze(1) for name in ("reward", "terminated")}

    def set_priorities(self, priority: Tensor) -> None:
        self.buffer.update_priority(torch.arange(len(priority)), priority)

    def held_bytes(self) -> int:
        columns = self.buffer[:].items(include_nested=True, leaves_only=True)
        return sum(column.nbytes for _, column in columns)


CONTESTANTS: dict[str, Any] = {"gpurl": GpurlReplay, "sb3": Sb3Replay, "torchrl": TorchrlReplay}


def prepared_errors(job: Job) -> dict[int, Tensor]:
    """Errors that a batch of each size is said to have."""
    generator = torch.Generator().manual_seed(job.seed)
    return {
        size: torch.rand(size, generator=generator).to(job.device)
        for size in (*job.batch_sizes, CHECKED)
    }


# ---- comparing and measuring ----


def check(job: Job, contestant: Contestant, steps: Step) -> None:
    """GpurlError unless what comes out of the filled buffer went in, is of the newest transitions,
    and is drawn as it should be.
    """
    num_steps, num_envs = steps["reward"].shape
    held = job.size // num_envs * num_envs
    number = _compared(job, contestant, steps)
    if job.mode == "prioritized":
        _check_draws_by_priority(job, contestant, held)
        return
    center, spread = num_steps * num_envs - (held + 1) / 2, held / 12**0.5
    if abs(number.double().mean() - center) > SAME_DRAWS * spread / CHECKED**0.5:
        raise GpurlError(f"{job.trainer}: draws are not uniform over the newest {held} transitions")


def _compared(job: Job, contestant: Contestant, steps: Step) -> Tensor:
    """[B] the numbers of the transitions of a batch, after comparing it with what went in."""
    found = {
        name: column.cpu() for name, column in contestant.seen(contestant.sample(CHECKED)).items()
    }
    number, (num_steps, num_envs) = found["obs"][:, 0].long(), steps["reward"].shape
    oldest = (num_steps - job.size // num_envs) * num_envs
    if int(number.min()) < oldest or int(number.max()) >= num_steps * num_envs:
        raise GpurlError(
            f"{job.trainer}: transitions {number.min()} to {number.max()} came out, not of "
            f"{oldest} on, so nothing is timed"
        )
    for name, column in found.items():
        if not torch.equal(column, steps[name].cpu().flatten(0, 1)[number]):
            raise GpurlError(
                f"{job.trainer}: {name} that comes out is not what went in, so nothing is timed"
            )
    return number


def _check_draws_by_priority(job: Job, contestant: Contestant, held: int) -> None:
    """GpurlError unless entries with a priority are drawn and others are not; leaves all with
    priorities of their own.
    """
    place = torch.arange(held, device=job.device)
    contestant.set_priorities((place < held // 4).float())
    batch = contestant.seen(contestant.sample(CHECKED))["obs"][:, 0].cpu().long() % held
    if (
        float((batch < held // 4).float().mean()) < 0.99
        or len(batch.unique()) < min(CHECKED, held) // 8
    ):
        raise GpurlError(f"{job.trainer}: draws do not follow the priorities, so nothing is timed")
    contestant.set_priorities(
        torch.rand(held, generator=torch.Generator().manual_seed(job.seed)).to(job.device)
    )


def measure(job: Job) -> list[Measurement]:
    """Microseconds of a turn, and of its two halves, at every size."""
    return [each for num_envs in job.num_envs for each in _measured(job, num_envs)] + [
        Measurement(_name(job, "process"), "-", peak_mib(job), "peak MiB")
    ]


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
