"""The runs of a folder: what each is, how far it came and how it ended, read from its files without
loading a checkpoint; damaged folders are listed too.
"""

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpurl.checkpoints.plain_files import (
    MAX_LINE_BYTES,
    Json,
    open_regular,
    read_at_most,
    write_regular,
)
from gpurl.errors import UsageError
from gpurl.run.config_file import read_config
from gpurl.run.run_folder import ENDED_FILE, EVENT_FILES, RUN_FILES, lock_run
from gpurl.run.trackers.tracker import flat

MAX_ENDED_BYTES = 1 << 14
MAX_DEPTH = 8  # folders below ROOT
# pictures and pages; an exported policy is perhaps in use
PICTURES = (".png", ".gif", ".mp4", ".webm", ".html")
RETURN = b'"eval/mean_reward"'
TRAINING_RETURN = b'"rollout/ep_rew_mean"'


@dataclass
class RunEntry:
    """One run; None for what its files do not say."""

    folder: Path
    name: str  # below ROOT
    env: str | None = None
    algorithm: str | None = None
    steps: int | None = None
    best_return: float | None = None  # of evaluations
    last_return: float | None = None  # of the newest training episodes
    state: str = "failed"  # running, finished, stopped, failed
    reason: str = ""  # how it ended
    age: float = 0.0  # seconds since it wrote anything
    size: int = 0  # bytes
    settings: dict[str, str] = field(default_factory=dict)


def note_end(folder: Path, reason: str, steps: int) -> None:
    """Write how the run ended; a full disk is no error, the run then counts as failed."""
    try:
        content = json.dumps({"reason": reason, "steps": steps}).encode()
        write_regular(folder / ENDED_FILE, content)
    except OSError:
        return


def find_runs(root: Path) -> list[RunEntry]:
    """The runs in `root` and its folders, also `root` itself; UsageError if it does not exist."""
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}; gpurl runs ROOT lists the runs in ROOT")
    return [_entry(folder, root) for folder in _run_folders(root)]


def is_run(folder: Path) -> bool:
    """Whether `folder` is the folder of a run, also of one that ended at once."""
    return not folder.is_symlink() and (
        (folder / "run.lock").is_file()
        or ((folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file())
    )


def _run_folders(root: Path) -> Iterator[Path]:
    for text, folders, _ in os.walk(root):
        folder = Path(text)
        depth = len(folder.relative_to(root).parts)
        if is_run(folder):
            yield folder
        if is_run(folder) or depth >= MAX_DEPTH:
            folders.clear()
        folders.sort()


def _entry(folder: Path, root: Path) -> RunEntry:
    entry = RunEntry(folder, str(folder.relative_to(root)))
    # its settings
    try:
        config = read_config(folder / "config.yaml")
    except UsageError:
        config = {}
    entry.settings = {name: str(value) for name, value in flat(config)}
    entry.env = entry.settings.get("env")
    entry.algorithm = entry.settings.get("algorithm")
    # how far it came
    entry.steps, entry.best_return, entry.last_return = _progress(folder)
    entry.size, newest = _size_and_newest(folder)
    entry.age = max(time.time() - newest, 0.0)
    # how it ended
    ended = _ended(folder)
    entry.reason = str(ended.get("reason", ""))
    if _is_locked(folder):
        entry.state = "running"
    elif entry.reason == "signal":
        entry.state = "stopped"
    elif entry.reason and not entry.reason.startswith("error"):
        entry.state = "finished"
    elif not entry.reason and (entry.steps or 0) >= _total_steps(config):
        entry.state = "finished"  # by a version that did not write how
    return entry


def _total_steps(config: Mapping[str, Json]) -> float:
    value = config.get("total_steps")
    return value if isinstance(value, int) and value > 0 else math.inf


def has_checkpoint(entry: RunEntry) -> bool:
    """Whether something of the training is kept."""
    return any(entry.folder.glob("checkpoints/step_*"))


def _progress(folder: Path) -> tuple[int | None, float | None, float | None]:
    """(env steps, best return of an evaluation, last return of training episodes) in metrics.jsonl,
    as far as it can be read.
    """
    steps: int | None = None
    best: float | None = None
    last = b""
    trained = b""
    try:
        with open_regular(folder / "metrics.jsonl") as file:
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                if line.endswith(b"\n"):
                    last = line
                if TRAINING_RETURN in line:
                    trained = line
                if RETURN in line:
                    value = _number(line, "eval/mean_reward")
                    if value is not None and (best is None or value > best):
                        best = value
    except OSError:
        pass
    if (value := _number(last, "step")) is not None:
        steps = int(value)
    return steps, best, _number(trained, "rollout/ep_rew_mean")


def _number(line: bytes, name: str) -> float | None:
    try:
        value = json.loads(line)[name]
        return float(value) if math.isfinite(value) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _size_and_newest(folder: Path) -> tuple[int, float]:
    """(bytes of all files, time of the newest), without following links."""
    size, newest = 0, 0.0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(Path(parent) / name)
            except OSError:  # a running run deletes files
                continue
            size += status.st_size
            newest = max(newest, status.st_mtime)
    return size, newest


def _ended(folder: Path) -> Mapping[str, Json]:
    try:
        ended = json.loads(read_at_most(folder / ENDED_FILE, MAX_ENDED_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return ended if isinstance(ended, dict) else {}


def _is_locked(folder: Path) -> bool:
    """Whether a process trains in it."""
    try:
        file = open_regular(folder / "run.lock")
    except OSError:
        return False
    with file:
        try:
            # shared, and given back at once: a training that begins now waits longer than this
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False


# ---- deleting ----


def obstacle_to_delete(entry: RunEntry) -> str:
    """Why the folder cannot be deleted, or ""."""
    if entry.state == "running" or _is_locked(entry.folder):
        return "it is running"
    if not is_run(entry.folder):
        return "it is no run"
    others = sorted(
        path.name
        for path in entry.folder.iterdir()
        if path.name not in RUN_FILES
        and not path.name.startswith(EVENT_FILES)
        and path.suffix not in PICTURES
        and not (path.name.startswith(".") and path.suffix == ".tmp")  # half written
    )
    return f"it holds other files: {', '.join(others)}" if others else ""


def delete_run(entry: RunEntry) -> None:
    """Delete the folder, locked, so that no training begins in it. UsageError if one is there, or
    if it is none that may be deleted.
    """
    if obstacle := obstacle_to_delete(entry):
        raise UsageError(f"{entry.folder} stays: {obstacle}")
    with lock_run(entry.folder):
        # the folder itself, not what links in it lead to
        shutil.rmtree(entry.folder)
