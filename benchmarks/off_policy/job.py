"""What one process of the comparison measures and gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.processes import resident_mib, version_of
from benchmarks.results_table import machine
from benchmarks.timing import median_seconds
from benchmarks.training import captured

# an error that begins so is a reason why something is not measured here, not a failure
SKIPPED = "left out: "
Shape = tuple[int, int]  # numbers of an observation, of an action


@dataclass(frozen=True)
class Job:
    """What one process measures. Sizes that a case has no use for are left alone."""

    case: str  # replay, sac or redq
    trainer: str
    mode: str = "default"  # replay: prioritized
    only_compare: bool = False  # time nothing
    device: str = "cpu"
    seconds: float = 1.0  # a measurement
    seed: int = 0
    size: int = 200_000  # transitions that a replay holds
    num_envs: tuple[int, ...] = (1, 8, 64)  # of replay; the others have one
    batch_sizes: tuple[int, ...] = (256, 2048)  # of replay; the others have the first
    shapes: tuple[Shape, ...] = (
        (60, 8),
        (3, 1),
    )  # of sac: the second is Pendulum's; the others have the first
    hidden: tuple[int, ...] = (256, 256)


@dataclass(frozen=True)
class Measurement:
    """One number: of what, with how many environments, how much of what."""

    case: str
    num_envs: str
    value: float
    unit: str


def result(job: Job, measurements: list[Measurement]) -> dict[str, Any]:
    """What compare.py reads."""
    found = [list(vars(each).values()) for each in measurements]
    return {
        "measurements": found,
        "version": version_of(job.trainer),
        "machine": machine(job.device),
    }


def timed(job: Job, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds a call; gpurl's run as its training runs them, on a GPU as CUDA graphs."""
    device = torch.device(job.device)
    if device.type == "cuda" and job.trainer == "gpurl":
        functions = {name: captured(function, device) for name, function in functions.items()}
    return median_seconds(functions, device, job.seconds)


def peak_mib(job: Job) -> float:
    """The process's highest resident memory; on a GPU the most that torch's allocator had in
    use.
    """
    if job.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(job.device) / 2**20
    return resident_mib()
