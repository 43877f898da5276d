"""Checkpoints as folders that appear whole or not at all: a kill, a full disk or a damaged file
never costs an older one.

`step_000012345678/` holds the files of `state_files.py` and `manifest.json`: size and SHA-256 of
each, and the manifest's own SHA-256, taken with zeros in its place. Later formats keep that rule
and `format_version`, so that this one can refuse them by name. The sums find damage, not malice:
what is read is hostile until it is decoded.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError

from gpurl.checkpoints.run_parts import check_parts
from gpurl.checkpoints.state_files import State, read_json, read_state_files, write_state_files
from gpurl.errors import CheckpointError

FORMAT_VERSION = 3  # raised by a change to what the parts of a run hold
LOCK_SECONDS = 60.0
STEP_FOLDER = re.compile(r"step_([0-9]{12,18})")
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
ZEROS = b"0" * 64


class _NewerFormatError(CheckpointError):
    """An intact checkpoint of a later gpurl: never skipped for an older one, never replaced."""


def save_checkpoint(
    folder: Path,
    step: int,
    parts: dict[str, State],
    *,
    keep: int = 3,
    is_best: bool = False,
    overwrite: bool = True,
) -> Path:
    """Writes `parts` as checkpoint `step` of `folder` and returns its path; keeps the `keep` newest
    and the best.

    Steps beyond it, of a training that was left for an older checkpoint, stay until this one has
    passed them, `keep` at most.

    overwrite: replace an intact checkpoint of the same step, which is then of another training that
    went on from the same older checkpoint; it is no longer the best. Else it is kept as it is and
    becomes the latest (and best).
    CheckpointError where the disk refuses: nothing that was there before is lost, and a later call
    may succeed.
    """
    if not 0 <= step < 10**18 or keep < 1 or not all(PART_NAME.fullmatch(name) for name in parts):
        raise CheckpointError(
            f"wanted step >= 0, keep >= 1 and parts named {PART_NAME.pattern}, got {step}, {keep}, "
            f"{list(parts)}"
        )
    folder = Path(folder)
    path = folder / f"step_{step:012d}"
    with _disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(
            folder / ".lock", timeout=LOCK_SECONDS
        ):  # who holds it owns all temporaries: others are of dead runs
            for stale in folder.glob(".tmp-*"):
                _remove(stale)
            before = _follow(folder / "LATEST")
            if not _is_intact(path) or overwrite:  # raises for a newer format
                _write_folder(path, step, parts, is_best)
            _write_pointer(folder / "LATEST", path.name)
            if is_best:
                _write_pointer(folder / "BEST", path.name)
            _prune(folder, keep, before, path)
    return path


def load_checkpoint(
    path: Path, device: str | torch.device = "cpu", best: bool = False, quiet: bool = False
) -> tuple[dict[str, State], dict[str, Any]]:
    """The parts and the manifest of a checkpoint, of a folder of checkpoints, or of a run folder
    with `checkpoints/`.

    A folder gives what LATEST names (if `best` is wanted and there is one, what BEST names), else
    its newest intact checkpoint, with a warning unless `quiet`; what lies beyond LATEST comes last,
    since it may be of a training that was left for an older checkpoint. A checkpoint named outright
    must be intact. CheckpointError in all other cases.
    """
    path = Path(path)
    torch.empty(
        0, device=device
    )  # a device that is not there is no fault of the checkpoint: torch's own error
    if STEP_FOLDER.fullmatch(path.name) or os.path.lexists(path / "manifest.json"):
        return _load(path, device)
    with _damage(path):
        latest, available = latest_checkpoint(path), list_checkpoints(path)
        until = available.index(latest) + 1 if latest in available else len(available)
        available = [*available[:until][::-1], *available[until:][::-1]]
        first = best_checkpoint(path) if best else None
    problems = (
        []
        if first or latest or not available
        else [f"LATEST in {available[0].parent} names no checkpoint"]
    )
    for candidate in dict.fromkeys(filter(None, (first, latest, *available))):
        try:
            loaded = _load(candidate, device)
        except _NewerFormatError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems and not quiet:
            logging.getLogger("gpurl").warning(
                "loaded %s instead: %s", candidate, "; ".join(problems)
            )
        return loaded
    raise CheckpointError(
        f"no checkpoint to load in {path}: "
        f"{'; '.join(problems) or 'no folder step_* there or in its checkpoints/'}"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """All `step_*` of a folder of checkpoints or of a run folder, oldest first, intact or not."""
    return _steps(_checkpoint_root(folder))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that LATEST names, None if it names none that is there."""
    return _follow(_checkpoint_root(folder) / "LATEST")


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that BEST names, None if it names none that is there."""
    return _follow(_checkpoint_root(folder) / "BEST")


def _checkpoint_root(folder: Path) -> Path:
    inner = Path(folder) / "checkpoints"
    return inner if inner.is_dir() else Path(folder)


def _steps(folder: Path) -> list[Path]:
    found = (
        [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=lambda path: int(path.name[5:]))


def _follow(pointer: Path) -> Path | None:
    name = ""
    if pointer.is_file():
        with suppress(OSError), pointer.open("rb") as stream:
            name = stream.read(64).decode(errors="replace").removesuffix("\n")
    return (
        pointer.with_name(name)
        if STEP_FOLDER.fullmatch(name) and pointer.with_name(name).is_dir()
        else None
    )


def _write_folder(path: Path, step: int, parts: dict[str, State], is_best: bool) -> None:
    """Writes the checkpoint under a temporary name and renames it to `path` when every byte is on
    the disk.
    """
    temporary, aside = (path.with_name(f".tmp-{uuid.uuid4()}") for _ in range(2))
    was_best = False
    try:
        temporary.mkdir()
        write_state_files(temporary, parts)
        mode = stat.S_IMODE(
            (temporary / "state.json").stat().st_mode
        )  # what the umask gives; safetensors writes 0600
        files = {}
        for file in sorted(temporary.iterdir()):
            file.chmod(mode)
            _fsync(file)
            files[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        manifest = {
            "format_version": FORMAT_VERSION,
            "gpurl": _gpurl_version(),
            "step": step,
            "sha256": ZEROS.decode(),
            "files": files,
        }
        unsigned = json.dumps(manifest, indent=1).encode()
        (temporary / "manifest.json").write_bytes(
            unsigned.replace(ZEROS, hashlib.sha256(unsigned).hexdigest().encode())
        )
        _fsync(temporary / "manifest.json")
        _fsync(temporary)
        if os.path.lexists(
            path
        ):  # damaged, or of another training; a kill behind this leaves the older ones
            was_best = _follow(path.with_name("BEST")) == path
            if was_best and not is_best:
                path.with_name("BEST").unlink()
            path.rename(aside)
        temporary.rename(path)
        _fsync(path.parent)
    finally:
        if os.path.lexists(aside) and not os.path.lexists(path):  # broken off between the two
            aside.rename(path)
            if was_best:
                _write_pointer(path.with_name("BEST"), path.name)
        _remove(temporary)
        _remove(aside)


def _write_pointer(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".tmp-{uuid.uuid4()}")
    try:
        temporary.write_text(name + "\n")
        _fsync(temporary)
        temporary.replace(pointer)
        _fsync(pointer.parent)
    finally:
        _remove(temporary)


def _prune(folder: Path, keep: int, before: Path | None, latest: Path) -> None:
    """Removes what nobody keeps; before: what LATEST named until now.

    A step beyond that is of a training that was left for an older checkpoint (or was not named any
    more when a process was killed): such are passed now, or lie ahead and stay.
    """
    steps = _steps(folder)
    ahead = steps[steps.index(latest) + 1 :]
    behind = [
        path
        for path in steps
        if path not in ahead and (before not in steps or path <= before or path == latest)
    ]
    kept = {*behind[-keep:], *ahead[-keep:], latest, _follow(folder / "BEST")}
    for path in steps:
        if path not in kept:
            aside = (
                folder / f".tmp-{uuid.uuid4()}"
            )  # renamed first: no half of a checkpoint is ever in the list
            path.rename(aside)
            _remove(aside)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into a CheckpointError that names `path` and the free bytes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(existing).free
        raise CheckpointError(
            f"cannot save {path}: {error} ({free} bytes free); older checkpoints are untouched"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gpurl_version() -> str:
    try:
        return importlib.metadata.version("gpurl")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _load(folder: Path, device: str | torch.device) -> tuple[dict[str, State], dict[str, Any]]:
    manifest = _check(folder)
    with _damage(folder):
        parts = read_state_files(folder, device)
        check_parts(parts)
        return parts, manifest


def _is_intact(path: Path) -> bool:
    try:
        _check(path)
    except _NewerFormatError:
        raise
    except CheckpointError:
        return False
    return True


def _check(folder: Path) -> dict[str, Any]:
    """The manifest, once every file has proved to be the one it describes and no other file is
    there.
    """
    with _damage(folder):
        manifest = _read_manifest(folder)
        named = STEP_FOLDER.fullmatch(folder.name)
        if type(manifest["step"]) is not int or (named and int(named[1]) != manifest["step"]):
            raise CheckpointError(f"manifest.json is of step {manifest['step']!r}")
        for name, expected in manifest["files"].items():
            stem, suffix = os.path.splitext(name)
            if name != "state.json" and not (
                suffix == ".safetensors" and PART_NAME.fullmatch(stem)
            ):
                raise CheckpointError(
                    f"manifest.json names {name!r}, which is no file of a checkpoint"
                )
            _want_regular(folder / name)
            if (size := (folder / name).stat().st_size) != expected["size"]:
                raise CheckpointError(f"{name} has {size} bytes, wanted {expected['size']}")
            if _sha256(folder / name) != expected["sha256"]:
                raise CheckpointError(f"{name} does not have the SHA-256 that manifest.json gives")
        if unknown := {entry.name for entry in folder.iterdir()} - {
            "manifest.json",
            *manifest["files"],
        }:
            raise CheckpointError(f"unknown files {sorted(unknown)[:3]}")
        return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    _want_regular(folder / "manifest.json")
    manifest, raw = read_json(folder / "manifest.json")
    digest, version = manifest["sha256"].encode(), manifest["format_version"]
    if (
        len(digest) != 64
        or hashlib.sha256(raw.replace(digest, ZEROS)).hexdigest().encode() != digest
    ):
        raise CheckpointError(
            f"manifest.json (format {version}, this gpurl reads {FORMAT_VERSION}) does not have "
            f"its own SHA-256"
        )
    if type(version) is not int or version < 1:
        raise CheckpointError(f"manifest.json has format {version!r}")
    if version < FORMAT_VERSION:
        raise CheckpointError(
            f"format {version} is older than {FORMAT_VERSION}, which this gpurl reads: train again"
        )
    if version > FORMAT_VERSION:
        raise _NewerFormatError(
            f"format {version} is newer than {FORMAT_VERSION}, which this gpurl reads: update gpurl"
        )
    return manifest


def _want_regular(file: Path) -> None:
    if not stat.S_ISREG(file.lstat().st_mode):
        raise CheckpointError(f"{file.name} is not a regular file")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Any error of reading, whatever its type, is a CheckpointError that names `folder`; running
    out of memory is not.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error
