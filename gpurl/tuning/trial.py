"""The process of one training of a tuning: one trial, or a population of them. It reports each
evaluation and is told whether to go on; when the tuning is gone it saves and ends.

Messages are lines of JSON: the job comes on standard input, reports go to standard output.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gpurl.api import run
from gpurl.checkpoints.folders import latest_checkpoint
from gpurl.errors import GpurlError, OwnCodeError, UsageError
from gpurl.run.callbacks import RunView
from gpurl.run.child import EndsWithParent, reports_of_child, send
from gpurl.run.run_folder import lock_run
from gpurl.run.settings import make_settings

GO_ON, STOP = "go on", "stop"
# a training whose tuning was killed notices after its iteration, and saves
SECONDS_TO_END = 120.0


def main() -> int:
    """Train as the job on standard input says; returns the exit code."""
    # what is printed is no message: it goes into the trial's log
    reports = reports_of_child()
    job = json.loads(sys.stdin.readline())
    outcome = train(job, sys.stdin, reports)
    send(reports, outcome)
    return int(outcome.get("code", 0))


def train(job: Mapping[str, Any], answers: IO[str], reports: IO[str]) -> dict[str, Any]:
    """{"returns": of each trial}, {"stopped": true} or {"error": text, "code": exit code}."""
    folder = Path(job["run_dir"])
    try:
        settings = make_settings(**job["settings"], run_dir=job["run_dir"])
        reporter = Reporter(settings.train.population, settings.train.total_steps, answers, reports)
        if folder.is_dir():
            _wait_for_the_last_process(folder)
        resumed = folder if latest_checkpoint(folder) is not None else None
        finished = run(settings, resumed, job["command"], callbacks=[reporter])
    except OwnCodeError as error:  # no settings that exclude each other
        traceback.print_exc()
        return {"error": str(error), "code": 1}
    except GpurlError as error:
        return {"error": str(error), "code": error.exit_code}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "code": 1}
    if finished.outcome.signal_number is not None:
        return {"stopped": True}
    return {"returns": returns_of(finished.final_evaluation, settings.train.population)}


def _wait_for_the_last_process(folder: Path) -> None:
    """Of this trial. GpurlError if it does not end: its settings are not to blame, as those of a
    UsageError are.
    """
    try:
        with lock_run(folder, seconds=SECONDS_TO_END):
            pass
    except UsageError as error:
        raise GpurlError(str(error)) from error


def returns_of(values: Mapping[str, float], population: int) -> list[float | None]:
    """The evaluated return of each member, None for a lost one; of an evaluation as it is
    logged.
    """
    if population == 1:
        return [values.get("eval/mean_reward")]
    return [values.get(f"members/{k}/eval_reward") for k in range(population)]


class Reporter(EndsWithParent):
    """Sends evaluations to the tuning and ends the run if it says so, or is gone."""

    def __init__(
        self, population: int, total_steps: int, answers: IO[str], reports: IO[str]
    ) -> None:
        super().__init__(answers, reports)
        self.population = population
        self.total_steps = total_steps

    def after_evaluation(self, run: RunView, values: dict[str, float]) -> None:
        message = {"steps": run.steps, "returns": returns_of(values, self.population)}
        is_last = run.steps >= self.total_steps
        if not send(self.reports, message | {"asks": not is_last}):
            self.end_alone()
        elif not is_last:
            answer = self.answers.readline().strip()
            if answer == STOP:
                run.stop("pruned")
            elif answer != GO_ON:
                self.end_alone()
