"""The results of a case on disk: NAME.csv has for each seed the points of its learning curve and a
last row with the final return, how it was trained and where.
"""

import csv
import datetime
import importlib.metadata
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

import gpurl
from benchmarks.learning.case import Case
from benchmarks.results_table import RESULTS, Row, commit, machine, read_rows

FOLDER = RESULTS / "learning"
POINT = ("seed", "kind", "steps", "seconds", "return")
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "rsl-rl-lib", "mjlab")
LOCK_SECONDS = 60.0
END_EPISODES = 100  # of the last evaluation, at least
CURVE, END = "curve", "end"


@dataclass(frozen=True)
class Point:
    """A greedy evaluation during a training or at its end."""

    steps: int  # environment steps so far, summed over environments
    seconds: float  # of wall clock so far, evaluations included
    mean_return: float


@dataclass(frozen=True)
class Seed:
    """The results of one training; `last` is the row of its end, with all columns."""

    seed: int
    curve: tuple[Point, ...]
    end: Point
    last: Row


def path_of(case: Case, folder: Path = FOLDER) -> Path:
    """The file of a case."""
    return folder / f"{case.name}.csv"


def provenance(settings: str, device: str = "cpu") -> Row:
    """The columns that say how a training was made, for a training of this process on `device`."""
    columns = {"episodes": str(END_EPISODES), "settings": settings, "commit": commit()}
    columns["date"] = str(datetime.date.today())
    columns["gpurl"] = gpurl.__version__
    for package in PACKAGES:
        try:
            columns[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            columns[package] = "-"
    return columns | machine(device)


def add(
    case: Case, seed: int, curve: Sequence[Point], end: Point, columns: Row, folder: Path = FOLDER
) -> Path:
    """Write the rows of a finished training in place of those that this seed had; returns the path.
    columns: of `provenance`. Processes may add to one file at the same time; one that is killed
    leaves the old file or the new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(case, folder)
    new = [_row(seed, CURVE, point) for point in curve]
    new.append(_row(seed, END, end) | columns)
    with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
        kept = [row for row in read_rows(path) if row["seed"] != str(seed)]
        rows = sorted(kept + new, key=_order)
        names = dict.fromkeys([*POINT, *(name for row in rows for name in row)])
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _write(path, text.getvalue())
    return path


def read(case: Case, folder: Path = FOLDER) -> list[Seed]:
    """The finished trainings of a case, by seed."""
    rows: dict[int, list[Row]] = {}
    for row in read_rows(path_of(case, folder)):
        rows.setdefault(int(row["seed"]), []).append(row)
    return [_seed(number, of_seed) for number, of_seed in sorted(rows.items())]


def is_stale(found: Seed, case: Case) -> bool:
    """Whether a training had other settings than the case has now."""
    return found.last["settings"] != case.resolved_settings()


def changes_since(found: Seed, case: Case) -> str:
    """The settings that a training had and the case has not, and the reverse."""
    then, now = (json.loads(text) for text in (found.last["settings"], case.resolved_settings()))
    return ", ".join(
        f"{name} {then.get(name, 'unset')} then, {now.get(name, 'unset')} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    )


def finished(case: Case, folder: Path = FOLDER) -> set[int]:
    """The seeds that need no training: with an end, by the settings of now."""
    return {each.seed for each in read(case, folder) if not is_stale(each, case)}


def _row(seed: int, kind: str, point: Point) -> Row:
    values = (f"{point.steps}", f"{point.seconds:.1f}", f"{point.mean_return:.3f}")
    return dict(zip(POINT, (f"{seed}", kind, *values)))


def _order(row: Row) -> tuple[int, bool, int]:
    return int(row["seed"]), row["kind"] == END, int(row["steps"])


def _seed(number: int, rows: list[Row]) -> Seed:
    last = next(row for row in rows if row["kind"] == END)
    curve = tuple(_point(row) for row in rows if row["kind"] == CURVE)
    return Seed(number, curve, _point(last), last)


def _point(row: Row) -> Point:
    return Point(int(row["steps"]), float(row["seconds"]), float(row["return"]))


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
