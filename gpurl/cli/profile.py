"""Where the time of a training goes: environment, policy, storing, preparing, learning and the
rest, by host, device and operators.
"""

import collections
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from gpurl.engine.eager import Eager
from gpurl.errors import GpurlError, UsageError
from gpurl.native_output import dropped_lines
from gpurl.run.display import counted
from gpurl.run.run_folder import create_run_folder
from gpurl.run.settings import Settings
from gpurl.run.setup import choose_device, make_trainer
from gpurl.run.trainer import Trainer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REST = "other"  # the loop and the gaps: what no phase of an iteration covers
# (phase, attribute of the engine that has the method, method); a call within another counts in the
# inner phase only
TIMED_METHODS = (
    ("env", "env", "step"),
    ("policy", "", "act"),
    ("store", "algorithm", "record_step"),
    ("store", "statistics", "add"),
    # without the phases above: the loop, or everything where a graph or one kernel plays a rollout
    ("rollout", "", "collect"),
    ("post", "guards", "after_rollout"),
    ("post", "algorithm", "prepare"),
    ("update", "", "learn"),
    (REST, "", "iterate"),
)
PHASES = tuple(dict.fromkeys(phase for phase, _, _ in TIMED_METHODS))
PREFIX = "gpurl/"  # of a phase's name in the trace
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories in the trace
LAUNCHES = (  # prefixes of names
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


@dataclass(frozen=True)
class Longest:
    """An operator, on a GPU a kernel with its launch; of all iterations."""

    name: str
    seconds: float  # without the operators it calls
    calls: int
    grid: str = ""  # blocks x threads of one, as "256x1x1 x 128"


@dataclass
class Phase:
    """Sums over all iterations."""

    host: float = 0.0  # seconds, without the profiler
    device: float = 0.0  # seconds of kernels
    operators: int = 0  # of torch, called from Python
    launches: int = 0  # on the device


@dataclass
class Profile:
    """The measurements."""

    title: str
    iterations: int
    horizon: int
    minibatches: int  # per iteration
    seconds: float  # per iteration, median, without the profiler
    is_cuda: bool
    trace: Path
    longest: list[Longest]  # the longest first
    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})


class Spans:
    """Wraps methods of an engine: each call is a range in the trace, and its time without the
    ranges inside is added to its phase.
    """

    def __init__(self, engine: Eager) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inner_seconds: list[float] = []  # for every open range: seconds of the ranges in it
        for phase, attribute, method in TIMED_METHODS:
            owner = getattr(engine, attribute) if attribute else engine
            setattr(owner, method, self._timed(phase, getattr(owner, method)))

    def watch_graphs(self, engine: Eager) -> None:
        """Time the replays too, once the graphs are captured."""
        if engine.stages is not engine:
            for phase, method in (("rollout", "collect"), ("post", "prepare"), ("update", "learn")):
                setattr(engine.stages, method, self._timed(phase, getattr(engine.stages, method)))

    def _timed(
        self, phase: str, method: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        @functools.wraps(method)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            self._inner_seconds.append(0.0)
            start = time.perf_counter()
            try:
                with torch.profiler.record_function(PREFIX + phase):
                    return method(*arguments, **options)
            finally:
                # the time of the ranges inside belongs to their phases
                seconds = time.perf_counter() - start
                self.seconds[phase] += seconds - self._inner_seconds.pop()
                if self._inner_seconds:
                    self._inner_seconds[-1] += seconds

        return call


def profile(
    settings: Settings, iterations: int = 3, warm_up: int = 4, out: Path | None = None
) -> Profile:
    """Train `warm_up` iterations, then `iterations` with a clock, then as many under torch's
    profiler. Writes trace.json for Chrome to the folder `out`, else to a new one in ROOT/profile.
    """
    config = settings.train
    threads = torch.get_num_threads()
    device = choose_device(config.device)
    min_warm_up = 4 if device.type == "cuda" else 0  # graphs are captured in the fourth iteration
    if config.asynchronous:
        raise UsageError(
            "profile measures one part of an iteration after the other: leave out asynchronous"
        )
    if config.run_dir is not None:
        raise UsageError("profile makes no run: --out is its folder, leave out run_dir")
    if iterations < 1:
        raise UsageError(f"iterations must be at least 1, got {iterations}")
    if warm_up < min_warm_up:
        raise UsageError(f"warm_up must be at least {min_warm_up}, got {warm_up}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"no folder {out}: {error.strerror}; choose another place with --out"
            ) from error
    # no folder is left behind where the settings do not work
    trainer = make_trainer(settings, device)
    try:
        root = Path(config.root) / "profile"
        folder = out or create_run_folder(root, settings.env, settings.algorithm, config.seed)
        trainer.start()
        return _measure(trainer, iterations, warm_up, folder)
    finally:
        trainer.env.close()
        torch.set_num_threads(threads)


def _measure(trainer: Trainer, iterations: int, warm_up: int, folder: Path) -> Profile:
    engine = trainer.engine
    device = trainer.env.device
    is_cuda = device.type == "cuda"
    spans = Spans(engine)

    # warm up; an algorithm with a replay buffer acts by its policy and learns from the start
    engine.steps = engine.stored = trainer.algorithm.learning_starts
    for _ in range(warm_up):
        trainer.iterate()
    spans.watch_graphs(engine)

    # with a clock
    seconds, host_seconds = _time_iterations(trainer, spans, iterations)

    # under the profiler
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    with dropped_lines("USDT:"):
        profiler.start()
    try:
        for _ in range(iterations):
            trainer.iterate()
        _wait(device)
    finally:
        with dropped_lines("USDT:"):
            profiler.stop()
    trace = folder / "trace.json"
    try:
        profiler.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        raise GpurlError(f"cannot write {trace}: {error}") from error

    settings = trainer.settings
    config = trainer.algorithm.config
    epochs_minibatches = getattr(config, "epochs", 1) * getattr(config, "minibatches", 1)
    result = Profile(
        f"{settings.algorithm} on {settings.env}, "
        f"{counted(settings.train.num_envs, 'environment')}, "
        f"{_device_name(device)}",
        iterations,
        engine.buffer.horizon,
        getattr(config, "updates", epochs_minibatches),
        seconds,
        is_cuda,
        trace,
        _kernels(trace) if is_cuda else _operators(profiler),
    )
    _count(result, profiler.events() or ())
    for name, phase in result.phases.items():
        phase.host = host_seconds[name]
    return result


def _time_iterations(
    trainer: Trainer, spans: Spans, iterations: int
) -> tuple[float, dict[str, float]]:
    """(median seconds of an iteration, the device's work included; host seconds of each phase,
    summed over the iterations).
    """
    seconds = []
    spans.seconds = dict.fromkeys(PHASES, 0.0)
    for _ in range(iterations):
        _wait(trainer.env.device)
        start = time.perf_counter()
        trainer.iterate()
        _wait(trainer.env.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), dict(spans.seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {counted(torch.get_num_threads(), 'thread')}"


# ---- reading the profiler's events ----


def _count(result: Profile, events: Iterable[FunctionEvent]) -> None:
    """Add every operator, launch and second on the device to the phase in which the host called
    it. By time, not by the parent event: on a GPU autograd calls operators from a thread of its
    own.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    on_host.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    open_ranges: list[FunctionEvent] = []  # phases around the present event, the innermost last
    for event in on_host:
        while open_ranges and open_ranges[-1].time_range.end <= event.time_range.start:
            open_ranges.pop()
        if event.name.startswith(PREFIX):
            open_ranges.append(event)
        phase = result.phases[open_ranges[-1].name.removeprefix(PREFIX) if open_ranges else REST]
        # an operator called by another operator does not count
        parent = event.cpu_parent
        is_outermost = parent is None or parent.name.startswith(PREFIX)
        phase.operators += event.name.startswith("aten::") and is_outermost
        phase.launches += event.name.startswith(LAUNCHES)
        # a range has kernels too: those without an operator, as of Triton and graphs, and the range
        # itself on the device's timeline, which is none
        kernels = (kernel for kernel in event.kernels if not kernel.name.startswith(PREFIX))
        phase.device += sum(kernel.duration for kernel in kernels) / 1e6


def _operators(profiler: torch.profiler.profile) -> list[Longest]:
    """The operators on the host, each without those it calls."""
    operators = [
        Longest(average.key, average.self_cpu_time_total / 1e6, average.count)
        for average in profiler.key_averages()
        if average.device_type == DeviceType.CPU and not average.key.startswith(PREFIX)
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)


def _kernels(trace: Path) -> list[Longest]:
    """The kernels and copies on the GPU, by name and launch: only the trace has the launches."""
    seconds = collections.Counter[tuple[str, str]]()
    calls = collections.Counter[tuple[str, str]]()
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") not in DEVICE_EVENTS:
            continue
        launch = event.get("args", {})
        grid = ""
        if "grid" in launch and "block" in launch:
            blocks = "x".join(map(str, launch["grid"]))
            grid = f"{blocks} x {math.prod(launch['block'])}"
        seconds[event["name"], grid] += event["dur"] / 1e6
        calls[event["name"], grid] += 1
    return [
        Longest(name, total, calls[name, grid], grid)
        for (name, grid), total in seconds.most_common()
    ]
