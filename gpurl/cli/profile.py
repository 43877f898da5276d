"""Where the time of a training goes: environment, policy, storing, preparing, learning and the
rest, by host, device and operators.
"""

import bisect
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpurl.engine.eager import Eager
from gpurl.errors import GpurlError, UsageError
from gpurl.run.run_folder import create_run_folder
from gpurl.run.settings import Settings
from gpurl.run.setup import choose_device, make_trainer
from gpurl.run.trainer import Trainer

REST = "other"  # of an iteration what no phase has: the loop, the gaps
# (phase, where the object is that has the method, method); what is called in another part counts
# there only
PARTS = (
    ("env", "env", "step"),
    ("policy", "", "act"),
    ("store", "algorithm", "record_step"),
    ("store", "statistics", "add"),
    (
        "rollout",
        "",
        "collect",
        # beside the three above: the loop, or all of it where a graph or one kernel plays the
        # rollout
    ),
    ("post", "guards", "after_rollout"),
    ("post", "algorithm", "prepare"),
    ("update", "", "learn"),
    (REST, "", "iterate"),
)
PHASES = tuple(dict.fromkeys(phase for phase, _, _ in PARTS))
PREFIX = "gpurl/"  # of a phase's name in the trace
TOP = 10
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)  # and those that begin so


@dataclass
class Phase:
    """Sums over all iterations."""

    host: float = 0.0  # seconds, without the profiler
    device: float = 0.0  # seconds of kernels
    operators: int = 0  # of torch, called from Python
    launches: int = 0  # on the device


@dataclass
class Profile:
    """What was measured."""

    title: str
    iterations: int
    horizon: int
    minibatches: int  # an iteration
    seconds: float  # an iteration, median, without the profiler
    is_cuda: bool
    trace: Path
    top: list[
        tuple[str, float, int]
    ]  # operator, or kernel on a GPU; its own seconds and its calls, of all iterations
    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})


class Spans:
    """Wraps the parts of an engine: each call is a range in the trace, and its time without the
    ranges inside is the phase's.
    """

    def __init__(self, engine: Eager) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inside: list[float] = []  # of every open range the seconds of the ranges within it
        for phase, place, method in PARTS:
            owner: Any = getattr(engine, place) if place else engine
            setattr(owner, method, self._timed(phase, getattr(owner, method)))

    def watch_graphs(self, engine: Eager) -> None:
        """Time the replays too, once there are graphs."""
        if engine.stages is not engine:
            for phase, method in (("rollout", "collect"), ("post", "prepare"), ("update", "learn")):
                setattr(engine.stages, method, self._timed(phase, getattr(engine.stages, method)))

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                with torch.profiler.record_function(PREFIX + phase):
                    return method(*arguments, **options)
            finally:
                lasted = time.perf_counter() - began
                self.seconds[phase] += lasted - self._inside.pop()
                if self._inside:
                    self._inside[-1] += lasted

        return call


def profile(
    settings: Settings, iterations: int = 3, warm_up: int = 4, out: Path | None = None
) -> Profile:
    """Train for a few iterations: first to warm up, then with a clock, then under torch's profiler.
    Writes trace.json for Chrome.

    `iterations` are those with the clock, and again those under the profiler. The folder is `out`,
    else a new one under ROOT/profile.
    """
    config, threads = settings.train, torch.get_num_threads()
    device = choose_device(config.device)
    # graphs are made in the fourth iteration
    for name, value, least in (
        ("iterations", iterations, 1),
        ("warm_up", warm_up, 4 if device.type == "cuda" else 0),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    trainer = make_trainer(settings, device)
    folder = (
        _made(out)
        if out
        else create_run_folder(
            Path(config.root) / "profile", settings.env, settings.algorithm, config.seed
        )
    )
    try:
        trainer.start()
        return _measured(trainer, iterations, warm_up, folder)
    finally:
        trainer.env.close()
        torch.set_num_threads(threads)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"no folder {folder}: {error.strerror}; choose another place with --out"
        ) from error
    return folder


def _measured(trainer: Trainer, iterations: int, warm_up: int, folder: Path) -> Profile:
    device, config = trainer.env.device, trainer.algorithm.config
    spans = Spans(trainer.engine)
    # however little a replay holds: learn, act by the policy
    trainer.engine.steps = trainer.engine.stored = trainer.algorithm.learning_starts
    for _ in range(warm_up):
        trainer.iterate()
    spans.watch_graphs(trainer.engine)
    lasted, host = _clocked(trainer, spans, iterations)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(iterations):
            trainer.iterate()
        _wait(device)
    trace = folder / "trace.json"
    try:
        profiler.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        raise GpurlError(f"cannot write {trace}: {error}") from error
    settings = trainer.settings
    title = (
        f"{settings.algorithm} on {settings.env}, {settings.train.num_envs} environments, "
        f"{_device_name(device)}"
    )
    minibatches = getattr(
        config, "updates", getattr(config, "epochs", 1) * getattr(config, "minibatches", 1)
    )
    is_cuda = device.type == "cuda"
    found = Profile(
        title,
        iterations,
        trainer.engine.buffer.horizon,
        minibatches,
        lasted,
        is_cuda,
        trace,
        _top(profiler, is_cuda),
    )
    _count(found, list(profiler.events() or ()))
    for name, seconds in host.items():
        found.phases[name].host = seconds
    return found


def _clocked(trainer: Trainer, spans: Spans, iterations: int) -> tuple[float, dict[str, float]]:
    """(median seconds of an iteration, the device's work included; host seconds of each phase in
    all).
    """
    lasted, host = list[float](), dict.fromkeys(PHASES, 0.0)
    for _ in range(iterations):
        _wait(trainer.env.device)
        spans.seconds = dict.fromkeys(PHASES, 0.0)
        began = time.perf_counter()
        trainer.iterate()
        _wait(trainer.env.device)
        lasted.append(time.perf_counter() - began)
        host = {name: host[name] + seconds for name, seconds in spans.seconds.items()}
    return statistics.median(lasted), host


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU with {torch.get_num_threads()} threads"
    )


# ---- reading the profiler's events ----


def _count(found: Profile, events: list[Any]) -> None:
    """Give every operator, launch and second on the device to the phase in which the host called
    it.
    """
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    phase_at = _timeline([event for event in on_host if event.name.startswith(PREFIX)])
    for event in on_host:
        phase = found.phases[phase_at(event.time_range.start)]
        phase.launches += event.name.startswith(LAUNCHES)
        phase.operators += event.name.startswith("aten::") and not _within_operator(event)
        # a range has kernels too: those that no operator launched, as Triton and graphs do; and
        # itself, as the device's timeline shows it
        phase.device += (
            sum(kernel.duration for kernel in event.kernels if not kernel.name.startswith(PREFIX))
            / 1e6
        )


def _top(profiler: Any, is_cuda: bool) -> list[tuple[str, float, int]]:
    """The operators, on a GPU the kernels, that take longest by themselves."""
    kind = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    own = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    found = [
        each
        for each in profiler.key_averages()
        if each.device_type == kind and not each.key.startswith(PREFIX)
    ]
    found.sort(key=lambda each: getattr(each, own), reverse=True)
    return [(each.key, getattr(each, own) / 1e6, each.count) for each in found[:TOP]]


def _within_operator(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is not None and not parent.name.startswith(PREFIX)


def _timeline(ranges: list[Any]) -> Callable[[float], str]:
    """A function from a time to the innermost range that is open then."""
    edges = sorted(
        [(each.time_range.start, 1, each.name) for each in ranges]
        + [(each.time_range.end, 0, each.name) for each in ranges]
    )
    times, names, open_names = list[float](), list[str](), [PREFIX + REST]
    for at, is_start, name in edges:
        if is_start:
            open_names.append(name)
        else:
            open_names.reverse()
            open_names.remove(name)  # the innermost of that name
            open_names.reverse()
        times.append(at)
        names.append(open_names[-1].removeprefix(PREFIX))

    def phase_at(time_of_event: float) -> str:
        place = bisect.bisect_right(times, time_of_event) - 1
        return names[place] if place >= 0 else REST

    return phase_at
