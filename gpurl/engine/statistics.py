"""Episode statistics and timings that stay on the device until the logger reads them."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.envs.vec_env import FAILURE_COUNTS, Timestep
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.newest_episodes import keep_newest

MARKS_AHEAD = 12  # four iterations


class EpisodeStatistics:
    """The newest finished episode of each environment, and sums of the env's own info["log"] terms
    since the last `read`.

    max_episode_steps: the time limit of the environments, None if it is not known. of_all: how many
    environments all ranks have; by default these.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        max_episode_steps: int | None = None,
        of_all: int | None = None,
    ) -> None:
        self.num_envs = of_all or num_envs
        # [3, N] return, length and number of episodes of each environment
        self.newest = torch.zeros(3, num_envs, device=device)
        # env steps, summed over environments, at which the first of these episodes began
        self.began = 0
        # episodes that log entries have counted
        self.logged_episodes = 0.0
        self.max_episode_steps = max_episode_steps
        # [2] sum and count of each name of info["log"] whose values are tensors
        self.terms: dict[str, Tensor] = {}
        # the same of names whose values the host has: Python's numbers and numpy's arrays
        self.host_terms: dict[str, list[float]] = {}
        # counts of failures that have not been 0
        self.failures: set[str] = set()
        # [2] number of steps that were transitions and of all, if the environments say which
        self.transitions: Tensor | None = None

    def add(self, timestep: Timestep) -> None:
        """Add one step's finished episodes and log terms."""
        info = timestep.info
        if "episode" in info and not (
            host_sync_is_free(self.newest.device) and not bool(info["_episode"].any())
        ):
            keep_newest(self.newest, info["_episode"], info["episode"]["r"], info["episode"]["l"])
        if "valid" in info:
            self._count_transitions(info["valid"])
        self.add_log(info)

    def _count_transitions(self, valid: Tensor) -> None:
        """valid: [N] bool."""
        if self.transitions is None:
            self.transitions = torch.zeros(2, device=self.newest.device)
        self.transitions[0] += valid.sum()
        self.transitions[1] += len(valid)

    def add_log(self, info: dict[str, Any]) -> None:
        """Add the environment's own log terms: of a name with a mask "_name" [N] bool, as Gymnasium
        has them, those of its environments; of another one the mean, each step weighs the same.
        """
        log = info.get("log", {})
        for name, value in log.items():
            if name[:1] == "_" and name[1:] in log:
                continue
            mask = log.get(f"_{name}")
            if isinstance(value, Tensor):
                self._add_on_device(name, value, mask)
            else:
                self._add_on_host(name, value, mask)

    def _add_on_device(self, name: str, value: Tensor, mask: Tensor | None) -> None:
        if name not in self.terms:
            self.terms[name] = torch.zeros(2, device=self.newest.device)
        # on a CPU most steps end no episode
        if mask is not None and host_sync_is_free(mask.device) and not bool(mask.any()):
            return
        value = value.to(self.newest.device, torch.float32)
        if mask is None:
            total = value.mean()
            count = torch.ones_like(total)
        else:
            total = torch.where(mask, value, 0.0).sum()
            count = mask.sum(dtype=torch.float32)
        self.terms[name] += torch.stack((total, count))

    def _add_on_host(self, name: str, value: Any, mask: np.ndarray | None) -> None:
        term = self.host_terms.setdefault(name, [0.0, 0.0])
        if mask is None:
            term[0] += float(np.mean(value))
            term[1] += 1.0
        else:
            term[0] += float(np.add.reduce(value, where=mask, dtype=np.float64))
            term[1] += float(np.count_nonzero(mask))

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors, to be moved to the host with all other metrics and then passed to `read`."""
        # sums over environments; return and length are 0 where no episode has finished
        returns, lengths, episodes = self.newest.double().sum(1).unbind()
        metrics = {
            "finished envs": self.newest[2].count_nonzero(),
            "returns": returns,
            "lengths": lengths,
            "episodes": episodes,
        }
        for name, term in self.terms.items():
            metrics[f"sum {name}"], metrics[f"count {name}"] = term.clone().unbind()
        if self.transitions is not None:
            metrics["transitions"], metrics["steps"] = self.transitions.clone().unbind()
        return metrics

    def host_metrics(self) -> dict[str, float]:
        """Numbers that the host has already, beside those of `metrics`."""
        metrics = {}
        for name, (total, count) in self.host_terms.items():
            metrics[f"sum {name}"], metrics[f"count {name}"] = total, count
        return metrics

    def read(self, values: dict[str, float], steps: int) -> dict[str, float]:
        """Log entries from the host values of `metrics()` and `host_metrics()`, summed over ranks;
        starts the next interval of the terms.
        steps: env steps so far, summed over environments.

        The means are over the newest finished episode of each environment. There are none before
        every environment has finished one, at the latest after two time limits: the episodes that
        finish first are the short ones, and a first episode with a staggered clock does not count.
        """
        # means over the newest episodes
        finished = values["finished envs"]
        means = {}
        if finished and (finished == self.num_envs or self._limits_have_passed(steps)):
            means = {
                "rollout/ep_rew_mean": values["returns"] / finished,
                "rollout/ep_len_mean": values["lengths"] / finished,
            }
        episodes = values["episodes"] - self.logged_episodes
        self.logged_episodes = values["episodes"]
        # means of the environment's own terms
        names = [name.removeprefix("sum ") for name in values if name.startswith("sum ")]
        sums = {name: (values[f"sum {name}"], values[f"count {name}"]) for name in names}
        self.failures |= {name for name, (total, _) in sums.items() if total} & FAILURE_COUNTS
        silent = FAILURE_COUNTS - self.failures
        terms = {
            f"env/{name}": total / count
            for name, (total, count) in sums.items()
            if count and name not in silent
        }
        for term in self.terms.values():
            term.zero_()
        self.host_terms = {name: [0.0, 0.0] for name in self.host_terms}
        # transitions
        if self.transitions is not None and values.get("steps"):
            means["rollout/valid_fraction"] = values["transitions"] / values["steps"]
            self.transitions.zero_()
        return {**means, "rollout/episodes": episodes, **terms}

    def _limits_have_passed(self, steps: int) -> bool:
        """Whether every environment has had time for a staggered and a whole episode."""
        if self.max_episode_steps is None:
            return False
        return steps - self.began >= 2 * self.max_episode_steps * self.num_envs

    def state_dict(self) -> dict[str, Any]:
        return {
            "newest": self.newest,
            "began": self.began,
            "logged_episodes": self.logged_episodes,
            "terms": dict(self.terms),
            "host_terms": {
                name: torch.tensor(term, dtype=torch.float64)
                for name, term in self.host_terms.items()
            },
            "failures": sorted(self.failures),
        }

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Continue at env step `steps`; with another number of environments, without episodes."""
        if state["newest"].shape == self.newest.shape:
            self.newest.copy_(state["newest"])
            self.began = state["began"]
            self.logged_episodes = state["logged_episodes"]
        else:
            self.newest.zero_()
            self.began = steps
            self.logged_episodes = 0.0
        for term in self.terms.values():
            term.zero_()
        for name, term in state["terms"].items():
            self.terms.setdefault(name, torch.zeros_like(term)).copy_(term)
        host_terms = state.get("host_terms", {})  # a checkpoint may be older
        self.host_terms = {name: term.tolist() for name, term in host_terms.items()}
        self.failures = set(state.get("failures", ()))


class Stopwatch:
    """Seconds spent collecting and updating; on a GPU by events that are read later, so that
    nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}  # of each phase since the last `read`
        self.marks: list[tuple[str, Any]] = []  # those that are not in it yet, and the newest

    def mark(self, phase: str) -> None:
        """Start `phase`, which ends the phase before. Waits if Python is more than a few
        iterations ahead of the GPU, so that a signal is handled soon.
        """
        if self.is_cuda:
            if len(self.marks) >= MARKS_AHEAD:
                self._add_first()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))
            if len(self.marks) > 1:
                self._add_first()

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last `read`."""
        while len(self.marks) > 1:
            self._add_first()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _add_first(self) -> None:
        """Add the oldest phase; waits for its end."""
        phase, begin = self.marks.pop(0)
        end = self.marks[0][1]
        if self.is_cuda:
            end.synchronize()
            duration = begin.elapsed_time(end) / 1000.0
        else:
            duration = end - begin
        self.seconds[phase] = self.seconds.get(phase, 0.0) + duration


def to_host(metrics: dict[str, Tensor]) -> dict[str, float]:
    """0-d tensors as numbers, in one transfer: the only one of a logging interval."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().to(torch.float64) for value in metrics.values()]).tolist()
    return dict(zip(metrics, values))
