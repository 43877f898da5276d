"""Trainings of several seeds beside each other, each in a process of its own."""

import dataclasses
import json
import logging
import queue
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gpurl.api import Run, run
from gpurl.errors import GpurlError, UsageError
from gpurl.run.callbacks import RunView, make_callbacks
from gpurl.run.child import Child, EndsWithParent, how_it_died, reports_of_child, send
from gpurl.run.interrupt import StopRequest
from gpurl.run.settings import Settings, make_settings
from gpurl.run.terminal import ProgressLine
from gpurl.run.trainer import Outcome

log = logging.getLogger("gpurl")
POLL_SECONDS, REPORT_SECONDS = 0.2, 1.0


# ---- the processes ----


class Steps(EndsWithParent):
    """Tells the parent how far the training is."""

    def __init__(self, answers: IO[str], reports: IO[str]) -> None:
        super().__init__(answers, reports)
        self._next = 0.0

    def after_iteration(self, run: RunView, metrics: object) -> None:
        super().after_iteration(run, metrics)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            send(self.reports, {"steps": run.steps})


def main() -> int:
    """Train as the job on standard input says; returns the exit code. Only warnings and errors are
    printed.
    """
    reports = reports_of_child(is_silent=True)
    job = json.loads(sys.stdin.readline())
    try:
        callbacks = [*make_callbacks(job["callbacks"]), Steps(sys.stdin, reports)]
        settings = make_settings(**job["settings"], **job["place"])
        one = run(settings, command=job["command"], callbacks=callbacks, is_quiet=True)
    except GpurlError as error:
        send(reports, {"error": str(error), "is_usage": isinstance(error, UsageError)})
        return error.exit_code
    result = {"folder": str(one.folder), "baseline": one.baseline}
    send(reports, result | {"outcome": dataclasses.asdict(one.outcome)})
    return 0


# ---- their parent ----


class Training:
    """One of the processes."""

    def __init__(self, settings: Settings, job: dict[str, Any], messages: "queue.Queue[Any]"):
        self.seed = settings.train.seed
        self.total_steps = settings.train.total_steps
        self.steps = 0
        self._result: dict[str, Any] = {}
        try:
            self.child = Child("gpurl.runs_beside:main", self, messages)
        except OSError as error:
            raise GpurlError(f"cannot begin seed {self.seed}: {error}") from error
        place = {"run_dir": settings.train.run_dir, "requeue": settings.train.requeue}
        job |= {"settings": settings.to_dict(), "place": place}
        self.child.send(json.dumps(job))

    def receive(self, message: dict[str, Any]) -> None:
        """Of the process."""
        if "steps" in message:
            self.steps = message["steps"]
        else:
            self._result = message

    def end(self) -> Run | GpurlError:
        """What the process left, which has ended."""
        code, result = self.child.close(), self._result
        if "folder" in result:
            outcome = Outcome(**result["outcome"])
            return Run(Path(result["folder"]), outcome, result["baseline"])
        kind = UsageError if result.get("is_usage") else GpurlError
        error = kind(result.get("error") or how_it_died(code))
        error.exit_code = code if code > 0 else 128 - code
        return error

    def __str__(self) -> str:
        return f"seed {self.seed} {self.steps / self.total_steps:.0%}"


def run_beside(
    settings: Sequence[Settings],
    jobs: int,
    command: Sequence[str],
    callbacks: Sequence[str],
    after: Callable[[Run], object],
) -> tuple[list[Run], list[GpurlError]]:
    """As `gpurl.seeds.run_seeds`, with `jobs` trainings at a time; each has one thread unless its
    settings name more.
    """
    job = {"command": list(command), "callbacks": list(callbacks)}
    messages: queue.Queue[tuple[Training, Any]] = queue.Queue()
    waiting, running = [_with_threads(each) for each in settings], list[Training]()
    ended: dict[int, Run | GpurlError] = {}
    is_stopping, is_quiet = False, settings[0].train.quiet
    with StopRequest() as stop, ProgressLine() as line:
        try:
            while waiting or running:
                # begin, or pass a signal on once: a second one would end a process at once
                while waiting and len(running) < jobs:
                    running.append(Training(waiting.pop(0), job, messages))
                if stop.signal_number is not None and not is_stopping:
                    is_stopping = True
                    waiting.clear()
                    for training in running:
                        training.child.stop(stop.signal_number)
                # what they say
                with suppress(queue.Empty):
                    training, message = messages.get(timeout=POLL_SECONDS)
                    if message is None:
                        running.remove(training)
                        line.clear()
                        ended[training.seed] = _ended(training, after)
                    else:
                        training.receive(message)
                if not is_quiet:
                    shares = [*map(str, running), f"{len(ended)} of {len(settings)} finished"]
                    line.show(", ".join(shares))
        finally:
            if not is_stopping:
                for training in running:
                    training.child.stop()
            for training in running:
                training.child.close()
    in_order = [ended[each.train.seed] for each in settings if each.train.seed in ended]
    failed = [one for one in in_order if isinstance(one, GpurlError)]
    return [one for one in in_order if isinstance(one, Run)], failed


def _with_threads(settings: Settings) -> Settings:
    train = dataclasses.replace(settings.train, threads=settings.train.threads or 1)
    return dataclasses.replace(settings, train=train)


def _ended(training: Training, after: Callable[[Run], object]) -> Run | GpurlError:
    """What it left, told. A UsageError, which is every seed's, is raised."""
    one = training.end()
    if isinstance(one, UsageError):
        raise one
    if isinstance(one, GpurlError):
        log.error("seed %d failed: %s", training.seed, one)
    else:
        after(one)
    return one
