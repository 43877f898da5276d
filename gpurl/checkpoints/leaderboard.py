"""A leaderboard: a folder of the best policies so far, which several runs may fill and draw from.
`leaderboard.json` lists them, each has a checkpoint in `entries/`.
"""

import json
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.checkpoints.plain_files import make_folder, replace_file
from gpurl.checkpoints.state_files import State, read_json
from gpurl.errors import CheckpointError, UsageError
from gpurl.selection import draw, softmax_of_z

FILE, ENTRIES = "leaderboard.json", "entries"
LOCK_SECONDS = 60.0
FORMAT_VERSION = 1
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a folder, too
FIELDS = {"name": (str,), "score": (float, int), "step": (int,), "settings": (dict,)}


@dataclass(frozen=True)
class Entry:
    """A policy that was good."""

    name: str  # unique
    score: float  # its mean return, finite
    step: int  # environment steps of its training
    settings: Mapping[str, float]  # those that were explored


def entered(entries: Sequence[Entry], entry: Entry, capacity: int) -> tuple[Entry, ...]:
    """The entries after `entry`, the best first, of equal scores the earlier one. It replaces that
    of its name, and on a full leaderboard the worst one, only if it is better.
    """
    if not math.isfinite(entry.score):
        return tuple(entries)
    if any(old.name == entry.name and old.score >= entry.score for old in entries):
        return tuple(entries)
    others = [old for old in entries if old.name != entry.name]
    return tuple(sorted((*others, entry), key=lambda each: -each.score)[:capacity])


def draw_entry(entries: Sequence[Entry], uniform: float) -> Entry | None:
    """The entry that a uniform number in [0, 1) draws, good ones more often: by the softmax of
    z-scores (Liu et al. 2021, "ElegantRL-Podracer", arXiv 2112.05923). None without entries.
    """
    if not entries:
        return None
    return entries[draw(softmax_of_z([each.score for each in entries]), uniform)]


class Leaderboard:
    """The folder. Its methods raise CheckpointError for what another program has spoiled, and for a
    disk that fails.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        """UsageError for a folder that cannot be written."""
        self.folder = folder
        self.capacity = capacity
        try:
            make_folder(folder)
            make_folder(folder / ENTRIES)
            with self._lock():
                if not (folder / FILE).exists():
                    self._write(())
        except (OSError, Timeout) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"the leaderboard {folder} cannot be written: {why}; choose another folder"
            ) from error

    def entries(self) -> tuple[Entry, ...]:
        """The best first."""
        file = self.folder / FILE
        try:
            content, _ = read_json(file)
            if content.keys() != {"format", "entries"} or content["format"] != FORMAT_VERSION:
                raise ValueError(f"wanted format {FORMAT_VERSION} and entries")
            found = tuple(map(_entry, content["entries"]))  # type: ignore[arg-type]
            if len({each.name for each in found}) < len(found):
                raise ValueError("two entries have one name")
        except (
            OSError, ValueError, TypeError, RecursionError, OverflowError, CheckpointError
        ) as error:  # fmt: skip
            raise CheckpointError(f"{file} is no leaderboard: {error}") from error
        return found

    def submit(self, entry: Entry, parts: dict[str, State]) -> bool:
        """Enter a policy, if it is good enough; returns whether it was. parts: its checkpoint."""
        if not NAME.fullmatch(entry.name):  # a path would lead elsewhere
            raise CheckpointError(
                f"the name of an entry is {entry.name[:80]!r}, wanted {NAME.pattern}"
            )
        try:
            with self._lock():
                before = self.entries()
                after = entered(before, entry, self.capacity)
                if entry not in after:
                    return False
                # the checkpoint first: what is listed can be loaded
                place = self.folder / ENTRIES / entry.name
                save_checkpoint(place, entry.step, parts, keep=1, overwrite=True)
                self._write(after)
                for name in {each.name for each in before} - {each.name for each in after}:
                    shutil.rmtree(self.folder / ENTRIES / name, ignore_errors=True)
        except (OSError, Timeout) as error:
            raise CheckpointError(f"the leaderboard {self.folder}: {error}") from error
        return True

    def remove(self, names: Collection[str]) -> None:
        """Take entries off the list, and delete their checkpoints."""
        try:
            with self._lock():
                before = self.entries()
                self._write([each for each in before if each.name not in names])
                for each in before:
                    if each.name in names:
                        shutil.rmtree(self.folder / ENTRIES / each.name, ignore_errors=True)
        except (OSError, Timeout) as error:
            raise CheckpointError(f"the leaderboard {self.folder}: {error}") from error

    def load(self, entry: Entry, device: torch.device) -> dict[str, State]:
        """The checkpoint of an entry."""
        parts, _ = load_checkpoint(self.folder / ENTRIES / entry.name, device, quiet=True)
        return dict(parts)

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock", timeout=LOCK_SECONDS)

    def _write(self, entries: Sequence[Entry]) -> None:
        content = {"format": FORMAT_VERSION, "entries": [asdict(each) for each in entries]}
        text = json.dumps(content, allow_nan=False, indent=1)
        replace_file(self.folder / FILE, text.encode())


def _entry(value: Any) -> Entry:
    """ValueError for what is none."""
    if not isinstance(value, dict) or value.keys() != FIELDS.keys():
        raise ValueError(f"an entry has {', '.join(FIELDS)}")
    for name, kinds in FIELDS.items():
        if type(value[name]) not in kinds:
            raise ValueError(f"{name} of an entry is a {type(value[name]).__name__}")
    numbers = [value["score"], *value["settings"].values()]
    if not all(type(each) in (float, int) and math.isfinite(each) for each in numbers):
        raise ValueError("a score or a setting is no finite number")
    if not NAME.fullmatch(value["name"]) or value["step"] < 0:
        raise ValueError(f"the name {value['name'][:80]!r} or the step of an entry is none")
    return Entry(**value)


def same_form(one: object, other: object) -> bool:
    """Whether two states have the same names, and tensors of the same shapes and types."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same_form(one[name], other[name]) for name in one)
        )
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    return type(one) is type(other)
