"""Episode statistics and timings that stay on the device until the logger reads them."""

import time
from typing import Any

import torch
from torch import Tensor

from gpurl.envs.vec_env import Timestep
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.episode_sums import add_episodes

MARKS_AHEAD = 12  # four iterations


class EpisodeStatistics:
    """Sums over finished episodes since the last `read`: returns, lengths, and the env's own
    info["log"] terms.
    """

    def __init__(self, device: torch.device) -> None:
        # episodes, sum of returns, sum of lengths
        self.sums = torch.zeros(3, device=device)
        # sum and count of each name of info["log"]
        self.terms: dict[str, Tensor] = {}
        # what was logged for the last interval that had a finished episode
        self.last: dict[str, float] = {}
        # names of info["log"] whose values are Python numbers, not tensors
        self.python_numbers: set[str] = set()

    def add(self, timestep: Timestep) -> None:
        """Add one step's finished episodes and log terms."""
        info = timestep.info
        if "episode" in info and not (
            host_sync_is_free(self.sums.device) and not bool(info["_episode"].any())
        ):
            add_episodes(self.sums, info["_episode"], info["episode"]["r"], info["episode"]["l"])
        self.add_log(info)

    def add_log(self, info: dict[str, Any]) -> None:
        """Add the environment's own log terms."""
        for name, value in info.get("log", {}).items():
            if not isinstance(value, Tensor):
                self.python_numbers.add(name)
            mean = torch.as_tensor(value, dtype=torch.float32, device=self.sums.device).mean()
            if name not in self.terms:
                self.terms[name] = torch.zeros(2, device=self.sums.device)
            self.terms[name] += torch.stack((mean, torch.ones_like(mean)))

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors, to be moved to the host with all other metrics and then passed to `read`."""
        count, returns, lengths = self.sums.clone().unbind()
        metrics = {"episodes": count, "returns": returns, "lengths": lengths}
        for name, term in self.terms.items():
            metrics[f"sum {name}"], metrics[f"count {name}"] = term.clone().unbind()
        return metrics

    def read(self, values: dict[str, float]) -> dict[str, float]:
        """Log entries from the host values of `metrics()`; resets the sums. Without a finished
        episode the last means are repeated.
        """
        # means over the episodes
        episodes = values["episodes"]
        if episodes > 0:
            self.last = {
                "rollout/ep_rew_mean": values["returns"] / episodes,
                "rollout/ep_len_mean": values["lengths"] / episodes,
            }
        # start the next interval
        self.sums.zero_()
        for term in self.terms.values():
            term.zero_()
        # means of the environment's own terms
        means = {
            f"env/{name}": values[f"sum {name}"] / count
            for name in self.terms
            if (count := values[f"count {name}"])
        }
        return {**self.last, "rollout/episodes": episodes, **means}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "last": dict(self.last), "terms": dict(self.terms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])
        self.last = dict(state["last"])
        for term in self.terms.values():
            term.zero_()
        for name, term in state["terms"].items():
            self.terms.setdefault(name, torch.zeros_like(term)).copy_(term)


class Stopwatch:
    """Seconds spent collecting and updating; on a GPU by events that are read later, so that
    nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Start `phase`, which ends the phase before. Waits if Python is more than a few
        iterations ahead of the GPU, so that a signal is handled soon.
        """
        if self.is_cuda:
            if len(self.marks) >= MARKS_AHEAD:
                self.marks[-MARKS_AHEAD][1].synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last `read`."""
        if self.is_cuda and self.marks:
            self.marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(self.marks, self.marks[1:]):
            duration = begin.elapsed_time(end) / 1000.0 if self.is_cuda else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + duration
        self.marks = self.marks[-1:]
        return seconds


def to_host(metrics: dict[str, Tensor]) -> dict[str, float]:
    """0-d tensors as numbers, in one transfer: the only one of a logging interval."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().to(torch.float64) for value in metrics.values()]).tolist()
    return dict(zip(metrics, values))
