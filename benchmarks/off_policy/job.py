"""The job and the result of one process of the off-policy comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.processes import resident_mib, version_of
from benchmarks.results_table import machine
from benchmarks.timing import median_seconds
from benchmarks.training import captured

# an error that starts with it is a reason to skip a measurement on this machine, not a failure
SKIPPED = "skipped: "
Shape = tuple[int, int]  # numbers of an observation, of an action


@dataclass(frozen=True)
class Job:
    """What one process measures. A case ignores the sizes that it does not use."""

    case: str  # replay, sac or redq
    trainer: str
    mode: str = "default"  # replay: prioritized
    only_compare: bool = False
    device: str = "cpu"
    seconds: float = 1.0  # of a measurement
    seed: int = 0
    size: int = 200_000  # transitions that a replay holds
    num_envs: tuple[int, ...] = (1, 8, 64)  # of replay; the others use one
    batch_sizes: tuple[int, ...] = (256, 2048)  # of replay; the others use the first
    shapes: tuple[Shape, ...] = (
        (60, 8),
        (3, 1),
    )  # of sac (Pendulum's second); others use the first
    hidden: tuple[int, ...] = (256, 256)


@dataclass(frozen=True)
class Measurement:
    """One measured number."""

    case: str
    num_envs: str
    value: float
    unit: str


def result(job: Job, measurements: list[Measurement]) -> dict[str, Any]:
    """What compare.py reads."""
    return {
        "measurements": [list(vars(each).values()) for each in measurements],
        "version": version_of(job.trainer),
        "machine": machine(job.device),
    }


def timed(job: Job, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds a call; on a GPU gpurl's functions run as CUDA graphs, as in its training."""
    device = torch.device(job.device)
    if device.type == "cuda" and job.trainer == "gpurl":
        functions = {name: captured(function, device) for name, function in functions.items()}
    return median_seconds(functions, device, job.seconds)


def peak_mib(job: Job) -> float:
    """The highest resident memory of the process; on a GPU the peak of torch's allocator."""
    if job.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(job.device) / 2**20
    return resident_mib()
