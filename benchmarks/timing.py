"""Timing for the benchmarks: functions are called in turn, and the median of their times counts."""

import math
import statistics
import time
from collections.abc import Callable

import torch

SAMPLE_SECONDS = 0.005  # shorter calls are repeated until a sample takes about this long


def now(device: torch.device) -> float:
    """The clock in seconds, after `device` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(
    functions: dict[str, Callable[[], object]], device: torch.device, budget: float
) -> dict[str, float]:
    """Median seconds a call of each function, after a call that compiles and allocates, and one
    that measures how long it takes.

    A round takes one sample of every function; the next round goes in the other direction. There
    are as many rounds as fit into `budget` seconds, at least three, but fewer if they have taken
    ten times the budget.
    """
    calls = {name: _calls_per_sample(function, device) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    rounds = 0
    began = time.perf_counter()
    while True:
        for name in order:
            samples[name].append(_sample(functions[name], calls[name], device))
        order.reverse()
        rounds += 1
        spent = time.perf_counter() - began
        if spent >= (budget if rounds >= 3 else 10 * budget):
            break
    return {name: statistics.median(values) for name, values in samples.items()}


def fastest_seconds(function: Callable[[], object], device: torch.device, budget: float) -> float:
    """The minimum of seconds a call within `budget` seconds: the speed of the hardware, whatever
    else runs on it.
    """
    calls = _calls_per_sample(function, device)
    began = time.perf_counter()
    fastest = _sample(function, calls, device)
    while time.perf_counter() - began < budget:
        fastest = min(fastest, _sample(function, calls, device))
    return fastest


def _calls_per_sample(function: Callable[[], object], device: torch.device) -> int:
    _sample(function, 1, device)  # compiles and allocates
    seconds = _sample(function, 1, device)
    return math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7))


def _sample(function: Callable[[], object], calls: int, device: torch.device) -> float:
    began = now(device)
    for _ in range(calls):
        function()
    return (now(device) - began) / calls
