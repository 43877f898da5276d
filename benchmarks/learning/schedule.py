"""Runs the trainings of the suite, each in a process of its own, each thread on a core of its own.
A stop, by Ctrl-C or by the time limit, saves the trainings that can be resumed and waits for the
others.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.learning.case import Case
from benchmarks.processes import host_environment
from benchmarks.results_table import ROOT

POLL_SECONDS = 0.2
LOG_TAIL = 1500  # characters of a failed training's output that are shown
# by trainer
MODULES = {
    "gpurl": "benchmarks.learning.one_run",
    "sb3": "benchmarks.learning.sb3_run",
    "rsl_rl": "benchmarks.learning.rsl_rl_run",
}


@dataclass(frozen=True, eq=False)
class Job:
    """One training; two are never equal."""

    case: Case
    seed: int

    @property
    def name(self) -> str:
        """For messages and files."""
        return f"{self.case.name} seed {self.seed}"


@dataclass(frozen=True)
class Places:
    """Where trainings read and write, and what runs them."""

    out: Path  # the CSV files
    work: Path  # unfinished trainings and their output
    python: Path  # of gpurl
    peers: Path  # the Python of the other trainers
    scale: float = 1.0  # of the steps

    def log_of(self, job: Job) -> Path:
        """The output of a training."""
        return self.work / job.case.name / f"seed_{job.seed}.log"

    def start(self, job: Job) -> "subprocess.Popen[bytes]":
        """Begin or resume a training in a session of its own, which a Ctrl-C does not reach."""
        log = self.log_of(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        python = self.peers if job.case.is_in_peers else self.python
        words = [str(python), "-m", MODULES[job.case.trainer], job.case.name, str(job.seed)]
        words += ["--out", str(self.out), "--work", str(self.work), "--scale", str(self.scale)]
        with log.open("ab") as file:
            return subprocess.Popen(
                words,
                cwd=ROOT,
                env=host_environment(job.case.threads, "brief"),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )


class Stop:
    """A `with` block in which the first Ctrl-C or SIGTERM sets `is_wanted`; a second one, or the
    same as ever outside, raises KeyboardInterrupt.
    """

    def __init__(self, seconds: float | None) -> None:
        """seconds: after which a stop is wanted too."""
        self._end = None if seconds is None else time.monotonic() + seconds
        self._signalled = False
        self._handlers: dict[int, object] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether no more trainings are to begin."""
        return self._signalled or (self._end is not None and time.monotonic() >= self._end)

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True


def in_order(cases: Sequence[Case], seeds: Callable[[Case], Sequence[int]]) -> list[Job]:
    """The trainings: the first seed of every case, then the second, ...: what a time limit leaves
    out are seeds, not cases.
    """
    jobs = [Job(case, seed) for case in cases for seed in seeds(case)]
    return sorted(jobs, key=lambda job: job.seed)


def run_all(
    jobs: Sequence[Job], places: Places, cores: int, stop: Stop, report: Callable[[str], object]
) -> list[Job]:
    """Run all jobs, at a time as many as have `cores` threads together, until a stop is wanted;
    returns those that failed.
    """
    waiting = list(jobs)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed = []
    was_told = False
    try:
        while running or (waiting and not stop.is_wanted):
            # begin
            while waiting and not stop.is_wanted:
                threads = sum(job.case.threads for job in running)
                if running and threads + waiting[0].case.threads > cores:
                    break
                job = waiting.pop(0)
                running[job] = places.start(job)
                log = os.path.relpath(places.log_of(job))
                report(f"{job.name}: begins, its output is in {log}")
            # stop
            if stop.is_wanted and not was_told:
                was_told = True
                report(_stop(running))
            # end
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                was_stopped = was_told and code == -signal.SIGINT
                if code and not was_stopped:
                    failed.append(job)
                report(f"{job.name}: {_ending(places.log_of(job), code, was_stopped)}")
            time.sleep(POLL_SECONDS)
    finally:
        # a second Ctrl-C: also what cannot be resumed
        for process in running.values():
            process.terminate()
    return failed


def _stop(running: dict[Job, "subprocess.Popen[bytes]"]) -> str:
    """Let the trainings that can be resumed save and end; returns what to tell the user."""
    kept = []
    for job, process in running.items():
        if job.case.is_resumable:
            process.send_signal(signal.SIGINT)
        else:
            kept.append(job.name)
    wait = f"; waiting for {', '.join(kept)}, which cannot be resumed" if kept else ""
    return f"stopping: the same command continues later{wait}"


def _ending(log: Path, code: int, was_stopped: bool) -> str:
    """How a training ended, from its output."""
    text = log.read_text(errors="replace").strip()
    if was_stopped:
        return "stopped"
    if code:
        return f"failed with code {code}:\n{text[-LOG_TAIL:]}"
    return text.splitlines()[-1] if text else "finished"
