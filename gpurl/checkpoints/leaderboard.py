"""A leaderboard: a folder of the best policies so far, which several runs may fill and draw from.
`leaderboard.json` lists them, each has a checkpoint in `entries/`.

On other storage there are the same files; a folder has a copy of them, from which is loaded.
"""

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint, step_name
from gpurl.checkpoints.plain_files import make_folder, replace_file
from gpurl.checkpoints.state_files import MAX_JSON_BYTES, State, read_json
from gpurl.checkpoints.storage import Storage
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
    disk or a storage that fails.
    """

    def __init__(self, folder: Path, capacity: int, storage: Storage | None = None) -> None:
        """storage: where the leaderboard is, if `folder` is a copy of it; nothing there is locked.
        UsageError for what cannot be written.
        """
        self.folder = folder
        self.capacity = capacity
        self.storage = storage
        try:
            make_folder(folder)
            make_folder(folder / ENTRIES)
            with self._lock():
                if not (folder / FILE).exists():
                    self._write_copy(())
                if storage is not None:
                    self._begin_storage(storage)
        except (OSError, Timeout) as error:
            why = getattr(error, "strerror", None) or error
            place = folder if storage is None else storage.url
            raise UsageError(
                f"the leaderboard {place} cannot be written: {why}; choose another folder"
            ) from error

    def _begin_storage(self, storage: Storage) -> None:
        """Where there is no leaderboard yet, or none any more, begin one with what the copy has."""
        with contextlib.suppress(FileNotFoundError):
            storage.read_file(FILE, MAX_JSON_BYTES)
            return
        known = []
        for each in self._read(self.folder):
            name = f"{ENTRIES}/{each.name}/{step_name(each.step)}"
            if (self.folder / name).is_dir():
                storage.write_folder(name, self.folder / name)
                known.append(each)
        self._write(known)

    @classmethod
    def at_url(cls, url: str, capacity: int) -> "Leaderboard":
        """The one on other storage, with a temporary folder as the copy; UsageError as above."""
        copy = tempfile.TemporaryDirectory(prefix="gpurl_leaderboard_")
        board = cls(Path(copy.name), capacity, Storage(url))
        weakref.finalize(board, copy.cleanup)
        return board

    def entries(self) -> tuple[Entry, ...]:
        """The best first."""
        if self.storage is None:
            return self._read(self.folder)
        try:
            with self._lock():
                return self._current()
        except (OSError, Timeout) as error:
            raise CheckpointError(f"the leaderboard {self.storage.url}: {error}") from error

    def _current(self) -> tuple[Entry, ...]:
        """The entries; the copy is brought up to the storage. Those that another run is replacing
        are left out.
        """
        before = self._read(self.folder)
        if self.storage is None:
            return before
        # the list, then the checkpoints that are new
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=self.folder) as name:
            temporary = Path(name)
            (temporary / FILE).write_bytes(self.storage.read_file(FILE, MAX_JSON_BYTES))
            found = self._read(temporary)
            there = [each for each in found if each in before or self._fetch(each, temporary)]
        self._write_copy(there)
        for name in {each.name for each in before} - {each.name for each in there}:
            shutil.rmtree(self.folder / ENTRIES / name, ignore_errors=True)
        return tuple(there)

    def _fetch(self, entry: Entry, temporary: Path) -> bool:
        """Copy an entry's checkpoint from the storage; False if there is none."""
        assert self.storage is not None
        step = step_name(entry.step)
        fetched = temporary / entry.name / step
        fetched.mkdir(parents=True)
        try:
            self.storage.read_folder(f"{ENTRIES}/{entry.name}/{step}", fetched)
        except (FileNotFoundError, ValueError):
            return False
        place = self.folder / ENTRIES / entry.name
        shutil.rmtree(place, ignore_errors=True)
        os.replace(fetched.parent, place)
        return True

    @staticmethod
    def _read(folder: Path) -> tuple[Entry, ...]:
        file = folder / FILE
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
                before = self._current()
                after = entered(before, entry, self.capacity)
                if entry not in after:
                    return False
                # the checkpoint first: what is listed can be loaded
                place = self.folder / ENTRIES / entry.name
                path = save_checkpoint(place, entry.step, parts, keep=1, overwrite=True)
                try:
                    if self.storage is not None:
                        self.storage.write_folder(f"{ENTRIES}/{entry.name}/{path.name}", path)
                    self._write(after)
                except OSError:
                    # what the copy has of this name is no longer what is listed: fetch it again
                    if self.storage is not None:
                        self._write_copy([each for each in before if each.name != entry.name])
                    raise
                self._drop([each for each in before if each not in after], after)
        except (OSError, Timeout) as error:
            raise CheckpointError(f"the leaderboard {self.folder}: {error}") from error
        return True

    def remove(self, names: Collection[str]) -> None:
        """Take entries off the list, and delete their checkpoints."""
        try:
            with self._lock():
                before = self._current()
                after = [each for each in before if each.name not in names]
                self._write(after)
                self._drop([each for each in before if each.name in names], after)
        except (OSError, Timeout) as error:
            raise CheckpointError(f"the leaderboard {self.folder}: {error}") from error

    def load(self, entry: Entry, device: torch.device) -> dict[str, State]:
        """The checkpoint of an entry."""
        parts, _ = load_checkpoint(self.folder / ENTRIES / entry.name, device, quiet=True)
        return dict(parts)

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock", timeout=LOCK_SECONDS)

    def _drop(self, dropped: Sequence[Entry], listed: Sequence[Entry]) -> None:
        """Delete the checkpoints of entries that are on the list no more, or with another step."""
        names = {each.name for each in listed}
        kept = {(each.name, each.step) for each in listed}
        for each in dropped:
            if each.name not in names:
                shutil.rmtree(self.folder / ENTRIES / each.name, ignore_errors=True)
            if self.storage is not None and (each.name, each.step) not in kept:
                self.storage.remove_folder(f"{ENTRIES}/{each.name}/{step_name(each.step)}")

    def _write(self, entries: Sequence[Entry]) -> None:
        """The list, on the storage first."""
        if self.storage is not None:
            self.storage.write_file(FILE, _as_json(entries))
        self._write_copy(entries)

    def _write_copy(self, entries: Sequence[Entry]) -> None:
        replace_file(self.folder / FILE, _as_json(entries))


def _as_json(entries: Sequence[Entry]) -> bytes:
    content = {"format": FORMAT_VERSION, "entries": [asdict(each) for each in entries]}
    return json.dumps(content, allow_nan=False, indent=1).encode()


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
