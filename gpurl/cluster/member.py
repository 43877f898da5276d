"""Trains one slice of a member: an ordinary run, which goes on from its latest checkpoint or from
an entry of the board, is evaluated and enters the board.
"""

import logging
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpurl.api import Run, run
from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.checkpoints.leaderboard import ENTRIES, Entry
from gpurl.cluster.board import Board
from gpurl.cluster.schedule import Job, Result
from gpurl.engine.pbt import Source, fitting_state, take_over
from gpurl.errors import CheckpointError, GpurlError
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.run_folder import lock_run
from gpurl.run.settings import make_settings

SECONDS_TO_END = 120.0  # that an earlier process of this member may need
MAX_NOTES = 10


class SliceEnd(Callback):
    """Begins a slice from its source, and ends it at its last step."""

    def __init__(self, job: Job, entries: Path) -> None:
        self.job = job
        self.entries = entries
        self.took_over = False
        self.settings: dict[str, float] = {}  # that the run has at its end
        self.notes: list[str] = []

    def on_start(self, run: RunView) -> None:
        job = self.job
        # an attempt that came to the end, of which nobody has heard
        if run.steps >= job.until and run.steps > job.begin:
            run.stop("slice")
        if not job.source:
            return
        # an attempt that came further has gone on from the source already
        if run.steps > job.begin:
            self.took_over = True
            return
        algorithm = run.algorithm
        try:
            folder = self.entries / job.source
            parts, _ = load_checkpoint(folder, algorithm.device, quiet=True)
            model, training = fitting_state(algorithm, parts)
        except CheckpointError as error:
            self.notes.append(f"did not take over entry {job.source}: {error}")
            return
        settings = dict(job.source_settings)
        source = Source(job.source, -1, job.source_score, model, training, settings)
        take_over(algorithm, source, job.settings)
        self.took_over = True

    def after_iteration(self, run: RunView, metrics: object) -> None:
        if run.steps >= self.job.until:
            run.stop("slice")

    def on_end(self, run: RunView) -> None:
        config = run.algorithm.config
        self.settings = {name: getattr(config, name) for name in self.job.settings}


def train_slice(
    job: Job, settings: Mapping[str, Any], folder: Path, board_folder: Path, board: Board
) -> Result:
    """Train a slice and return how it ended; errors are results, too.

    settings: of the run, as `make_settings` takes them. folder: that of the schedule, with the run
    of each member. board_folder: where the board keeps its entries.
    """
    place = folder / job.folder
    callback = SliceEnd(job, board_folder / ENTRIES)
    with _warnings() as notes:
        try:
            finished = _run(job, settings, place, callback)
        except GpurlError as error:
            return _failed(place, callback, notes, str(error), error.exit_code)
        except Exception as error:
            traceback.print_exc()
            return _failed(place, callback, notes, f"{type(error).__name__}: {error}", 1)
        outcome = finished.outcome
        if outcome.signal_number is not None:
            text = f"its process got signal {outcome.signal_number}"
            return _failed(place, callback, notes, text, 1)
        if outcome.unsaved:
            return _failed(place, callback, notes, outcome.unsaved, CheckpointError.exit_code)
        score = finished.final_evaluation.get("eval/mean_reward")
        has_score = score is not None and math.isfinite(score)
        entry = Entry(job.entry, float(score or 0.0), outcome.steps, callback.settings)
        entered = has_score and _enter(entry, place, board, notes)
    return {
        "steps": outcome.steps,
        "score": score if has_score else None,
        "entered": entered,
        "took_over": callback.took_over,
        "settings": callback.settings,
        "unreadable": False,
        "notes": [*callback.notes, *notes][:MAX_NOTES],
        "error": "",
        "code": 0,
    }


def _run(job: Job, settings: Mapping[str, Any], place: Path, callback: SliceEnd) -> Run:
    values = dict(settings)
    command = values.pop("command", ())
    values |= {"seed": job.seed, "total_steps": job.total, "run_dir": str(place)}
    made = make_settings(**values)
    if place.is_dir():
        with lock_run(place, seconds=SECONDS_TO_END):
            pass
    resumed = place if latest_checkpoint(place) is not None or _has_steps(place) else None
    # the curve is drawn once, at the end of the last slice
    return run(made, resumed, command, callbacks=[callback], draws=job.until >= job.total)


def _has_steps(place: Path) -> bool:
    return any((place / "checkpoints").glob("step_*"))


def _enter(entry: Entry, place: Path, board: Board, notes: list[str]) -> bool:
    """Whether the member's state is on the board; a failure is noted, the training goes on."""
    try:
        return board.submit(asdict(entry), str(latest_checkpoint(place)))
    except CheckpointError as error:
        notes.append(f"is not on the board: {error}")
        return False


def _failed(place: Path, callback: SliceEnd, notes: list[str], error: str, code: int) -> Result:
    """The result of a slice that ended early, with how far the run is on storage."""
    steps, unreadable = 0, False
    if _has_steps(place):
        try:
            steps = load_checkpoint(place, quiet=True, without=("replay",))[1]["step"]
        except CheckpointError:
            unreadable = True
    return {
        "steps": steps,
        "score": None,
        "entered": False,
        "took_over": False,
        "settings": {},
        "unreadable": unreadable,
        "notes": [*callback.notes, *notes][:MAX_NOTES],
        "error": error,
        "code": code,
    }


class _Collects(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """A `with` block whose warnings of gpurl go into the list that it gets."""
    texts: list[str] = []
    handler = _Collects(texts)
    log = logging.getLogger("gpurl")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
