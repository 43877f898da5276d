"""The stopwatch of the benchmarks: functions are called in turn, and the median of their times
counts.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SAMPLE_SECONDS = 0.005  # a shorter call is repeated until a sample lasts about this long


def now(device: torch.device) -> float:
    """Seconds on the clock, read after `device` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(
    functions: dict[str, Callable[[], Any]], device: torch.device, budget: float
) -> dict[str, float]:
    """Median seconds a call of each function, after one call to warm up, which compiles and
    allocates, and one to see how long it takes.

    A round takes one sample of every function, the next one goes the other way. There are three
    rounds at least and as many as fit into `budget` seconds; fewer when they have taken ten times
    the budget.
    """
    calls = {name: _calls_a_sample(function, device) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order, began, rounds = list(functions), time.perf_counter(), 0
    while (
        rounds == 0
        or (spent := time.perf_counter() - began) < budget
        or (rounds < 3 and spent < 10 * budget)
    ):
        for name in order:
            samples[name].append(_sample(functions[name], calls[name], device))
        order.reverse()
        rounds += 1
    return {name: statistics.median(values) for name, values in samples.items()}


def fastest_seconds(function: Callable[[], Any], device: torch.device, budget: float) -> float:
    """The least seconds a call within `budget`: what the hardware can, whatever else runs on it."""
    calls, began = _calls_a_sample(function, device), time.perf_counter()
    fastest = _sample(function, calls, device)
    while time.perf_counter() - began < budget:
        fastest = min(fastest, _sample(function, calls, device))
    return fastest


def _calls_a_sample(function: Callable[[], Any], device: torch.device) -> int:
    """How often to call `function` in a sample."""
    _sample(function, 1, device)  # compiles and allocates
    seconds = _sample(function, 1, device)
    return math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7))


def _sample(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    began = now(device)
    for _ in range(calls):
        function()
    return (now(device) - began) / calls
