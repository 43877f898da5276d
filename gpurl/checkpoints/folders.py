"""Checkpoints as folders that appear complete or not at all: a kill, a full disk or a damaged file
never costs an older one.

`step_000012345678/` holds the files of `state_files.py` and `manifest.json`: size and SHA-256 of
each, and the manifest's own SHA-256, computed with zeros in its place. Later formats keep this rule
and `format_version`, so that this version can name and refuse them. The checksums find damage, not
attacks: file contents are untrusted until they are decoded.
"""

import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict, cast

import torch
from filelock import FileLock
from safetensors import SafetensorError

from gpurl import __version__
from gpurl.checkpoints.plain_files import make_folder, read_at_most
from gpurl.checkpoints.run_parts import ON_HOST, Parts, check_parts
from gpurl.checkpoints.state_files import read_json, read_state_files, write_state_files
from gpurl.errors import CheckpointError, UsageError

FORMAT_VERSION = 4  # incremented when the contents of a run's parts change
LOCK_SECONDS = 60.0
STEP_FOLDER = re.compile(r"step_([0-9]{12,18})")
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
ZEROS = b"0" * 64
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


class Manifest(TypedDict):
    """What `manifest.json` holds."""

    format_version: int
    gpurl: str
    step: int
    sha256: str
    files: dict[str, dict[str, int | str]]  # size and sha256 by name


class _NewerFormatError(CheckpointError):
    """An intact checkpoint of a later gpurl: an older one must not replace it."""


class _NoCheckpointError(UsageError, CheckpointError):
    """A folder without any checkpoint: wrong use for a command. Who goes on without a damaged one
    goes on without this one too.
    """


def save_checkpoint(
    folder: Path,
    step: int,
    parts: Parts,
    *,
    keep: int = 3,
    is_best: bool = False,
    overwrite: bool = True,
    drop_best: bool = False,
) -> Path:
    """Write `parts` as checkpoint `step` of `folder` and return its path; keeps the `keep` newest
    and the best.

    If a run was resumed from an older checkpoint, checkpoints of later steps may exist. They stay
    until the run has passed them, `keep` at most.

    overwrite: replace an intact checkpoint of the same step, which comes from such an earlier
    training; it loses the mark of the best. False: keep it, and mark it as the latest (and best).
    drop_best: the best so far is of another task: no checkpoint is the best, or this one.
    CheckpointError if the disk fails: older checkpoints are not lost, and a later call may succeed.
    """
    if not 0 <= step < 10**18 or keep < 1 or not all(PART_NAME.fullmatch(name) for name in parts):
        raise CheckpointError(
            f"wanted step >= 0, keep >= 1 and parts named {PART_NAME.pattern}, got {step}, {keep}, "
            f"{list(parts)}"
        )
    path = folder / step_name(step)
    with _disk_errors(path):
        make_folder(folder)
        with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
            # nobody else writes now: temporary files are of killed processes
            for stale in folder.glob(".tmp-*"):
                _remove(stale)
            old_latest = _follow(folder / "LATEST")
            # the check comes first: it raises for a checkpoint of a newer format
            is_there = _is_intact(path)
            # BEST comes before what knows its return, LATEST or a new version of LATEST's: a run
            # that is killed between them evaluates again. In the other order it would know a best
            # return that BEST never named
            if is_best and is_there:
                _write_pointer(folder / "BEST", path.name)
            if not is_there or overwrite:
                _write_folder(path, step, parts, is_best)
            if is_best:
                _write_pointer(folder / "BEST", path.name)
            elif drop_best:
                (folder / "BEST").unlink(missing_ok=True)
            _write_pointer(folder / "LATEST", path.name)
            _prune(folder, keep, old_latest, path)
    return path


def load_checkpoint(
    path: Path,
    device: str | torch.device = "cpu",
    best: bool = False,
    quiet: bool = False,
    without: Collection[str] = (),
) -> tuple[Parts, Manifest]:
    """The parts and the manifest of a checkpoint, of a folder of checkpoints, or of a run folder
    with `checkpoints/`.

    A folder gives the checkpoint that LATEST names (with `best` the one that BEST names, if any),
    else its newest intact checkpoint, with a warning unless `quiet`. Checkpoints beyond LATEST come
    last: they may be of a training that a resume from an older checkpoint replaced. A checkpoint
    given directly must be intact. CheckpointError in all other cases, which is a UsageError too for
    a folder without any checkpoint.

    without: large parts that are not needed, such as the replay buffer; they come as {}, and may be
    damaged.
    """
    torch.empty(0, device=device)  # a device that does not exist is torch's error
    if is_checkpoint(path):
        return _load(path, device, without)
    # candidates: the newest up to LATEST first, then those beyond it
    with _name_damage(path):
        latest = latest_checkpoint(path)
        available = list_checkpoints(path)
        count = available.index(latest) + 1 if latest in available else len(available)
        candidates = [*available[:count][::-1], *available[count:][::-1]]
        first = best_checkpoint(path) if best else None
    problems = []
    if candidates and not first and not latest:
        problems.append(f"LATEST in {candidates[0].parent} names no checkpoint")
    # the first that is intact
    for candidate in dict.fromkeys(filter(None, (first, latest, *candidates))):
        try:
            loaded = _load(candidate, device, without)
        except _NewerFormatError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems and not quiet:
            text = "; ".join(problems)
            logging.getLogger("gpurl").warning("loaded %s instead: %s", candidate, text)
        return loaded
    kind = CheckpointError if problems or not path.is_dir() else _NoCheckpointError
    reason = "; ".join(problems) or "no folder step_* there or in its checkpoints/"
    raise kind(f"no checkpoint to load in {path}: {reason}{_newest_run_hint(path)}")


def _newest_run_hint(folder: Path) -> str:
    """For a folder of runs: which of them saved last; "" if there is none or it cannot be read."""
    try:
        saved = [path for path in folder.glob("*/checkpoints") if any(path.glob("step_*"))]
        newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:  # it may be removed meanwhile
        return ""
    return "" if newest is None else f"; it holds runs, of which {newest.parent} saved last"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint itself, no folder of several."""
    return bool(STEP_FOLDER.fullmatch(path.name)) or os.path.lexists(path / "manifest.json")


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step_{step:012d}"


def check_exists(path: Path, option: str = "") -> None:
    """UsageError if there is nothing at `path`; it names the option that asked for it."""
    if not os.path.lexists(path):
        raise UsageError(
            f"{option} {path} does not exist: give the folder of a run, which gpurl runs lists, or "
            f"of one of its checkpoints".lstrip()
        )


def list_checkpoints(folder: Path) -> list[Path]:
    """All `step_*` of a folder of checkpoints or of a run folder, lowest step first, intact or
    not.
    """
    return _steps(_checkpoint_root(folder))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that LATEST names, None if it does not exist."""
    return _follow(_checkpoint_root(folder) / "LATEST")


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that BEST names, None if it does not exist."""
    return _follow(_checkpoint_root(folder) / "BEST")


def _checkpoint_root(folder: Path) -> Path:
    inner = folder / "checkpoints"
    return inner if inner.is_dir() else folder


def _steps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def _follow(pointer: Path) -> Path | None:
    """The checkpoint that the file `pointer` names, None if it does not exist."""
    name = ""
    with suppress(OSError, ValueError):
        name = read_at_most(pointer, 64).decode(errors="replace").removesuffix("\n")
    path = pointer.with_name(name) if STEP_FOLDER.fullmatch(name) else None
    return path if path is not None and path.is_dir() else None


def _write_folder(path: Path, step: int, parts: Parts, is_best: bool) -> None:
    """Write the checkpoint under a temporary name and rename it to `path` once every byte is on the
    disk.
    """
    temporary = path.with_name(f".tmp-{uuid.uuid4()}")
    aside = path.with_name(f".tmp-{uuid.uuid4()}")
    best = path.with_name("BEST")
    was_best = False
    try:
        # the files, with the permissions that the umask gives; safetensors writes 0600
        temporary.mkdir()
        write_state_files(temporary, parts)
        mode = stat.S_IMODE((temporary / "state.json").stat().st_mode)
        files: dict[str, dict[str, int | str]] = {}
        for file in sorted(temporary.iterdir()):
            file.chmod(mode)
            _fsync(file)
            files[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        # the manifest, with its own checksum
        manifest: Manifest = {
            "format_version": FORMAT_VERSION,
            "gpurl": __version__,
            "step": step,
            "sha256": ZEROS.decode(),
            "files": files,
        }
        unsigned = json.dumps(manifest, indent=1).encode()
        digest = hashlib.sha256(unsigned).hexdigest().encode()
        (temporary / "manifest.json").write_bytes(unsigned.replace(ZEROS, digest))
        _fsync(temporary / "manifest.json")
        _fsync(temporary)
        # replace what is there: damaged, or of another training
        if os.path.lexists(path):
            was_best = _follow(best) == path
            if was_best and not is_best:
                best.unlink()
            if _exchange(temporary, path):
                temporary, aside = aside, temporary
            else:
                path.rename(aside)
        if os.path.lexists(temporary):
            temporary.rename(path)
        _fsync(path.parent)
    finally:
        # an error between the two renames: undo the first one
        if os.path.lexists(aside) and not os.path.lexists(path):
            aside.rename(path)
            if was_best:
                _write_pointer(best, path.name)
        _remove(temporary)
        _remove(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step, so that a kill leaves none without its name; False where
    the system or the file system cannot.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def _write_pointer(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".tmp-{uuid.uuid4()}")
    try:
        temporary.write_text(name + "\n")
        _fsync(temporary)
        temporary.replace(pointer)
        _fsync(pointer.parent)
    finally:
        _remove(temporary)


def _prune(folder: Path, keep: int, old_latest: Path | None, latest: Path) -> None:
    """Remove all but the best, the `keep` newest up to `latest`, and `keep` beyond it.

    Steps beyond `old_latest`, which LATEST named until now, are of a training that a resume from an
    older checkpoint replaced, or of a killed process: up to `latest` they are removed.
    """
    # what stays
    steps = _steps(folder)
    ahead = steps[steps.index(latest) + 1 :]
    behind = [
        path
        for path in steps
        if path not in ahead and (old_latest not in steps or path <= old_latest or path == latest)
    ]
    kept = {*behind[-keep:], *ahead[-keep:], latest, _follow(folder / "BEST")}
    for path in steps:
        if path not in kept:
            # renamed first, so that no half of a checkpoint is ever listed
            aside = folder / f".tmp-{uuid.uuid4()}"
            path.rename(aside)
            _remove(aside)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a CheckpointError that names `path` and the free bytes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = ""
        for parent in path.parents:
            with suppress(OSError):  # it may be missing, or closed to us
                free = f" ({shutil.disk_usage(parent).free} bytes free)"
                break
        raise CheckpointError(
            f"cannot save {path}: {error}{free}; older checkpoints are unchanged"
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


def _load(
    folder: Path, device: str | torch.device, without: Collection[str]
) -> tuple[Parts, Manifest]:
    manifest = _check(folder, without)
    with _name_damage(folder):
        parts = read_state_files(folder, device, without, ON_HOST)
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


def _check(folder: Path, without: Collection[str] = ()) -> Manifest:
    """The manifest, after checking that the folder holds exactly the files that it describes, of
    the parts `without` only their sizes.
    """
    with _name_damage(folder):
        # the manifest is of this folder
        manifest = _read_manifest(folder)
        match = STEP_FOLDER.fullmatch(folder.name)
        if type(manifest["step"]) is not int or (match and int(match[1]) != manifest["step"]):
            raise CheckpointError(f"manifest.json is of step {manifest['step']!r}")
        # every file is as described
        for name, expected in manifest["files"].items():
            stem, suffix = os.path.splitext(name)
            is_part = suffix == ".safetensors" and PART_NAME.fullmatch(stem)
            if name != "state.json" and not is_part:
                raise CheckpointError(
                    f"manifest.json names {name!r}, which is no file of a checkpoint"
                )
            file = folder / name
            _require_regular(file)
            if (size := file.stat().st_size) != expected["size"]:
                raise CheckpointError(f"{name} has {size} bytes, wanted {expected['size']}")
            if stem not in without and _sha256(file) != expected["sha256"]:
                raise CheckpointError(f"{name} does not have the SHA-256 that manifest.json gives")
        # there are no other files
        names = {entry.name for entry in folder.iterdir()}
        if unknown := names - {"manifest.json", *manifest["files"]}:
            raise CheckpointError(f"unknown files {sorted(unknown)[:3]}")
        return manifest


def _read_manifest(folder: Path) -> Manifest:
    _require_regular(folder / "manifest.json")
    content, raw = read_json(folder / "manifest.json")
    manifest = cast(Manifest, content)
    # its own checksum, computed with zeros in its place
    digest = manifest["sha256"].encode()
    version = manifest["format_version"]
    expected_digest = hashlib.sha256(raw.replace(digest, ZEROS)).hexdigest().encode()
    if len(digest) != 64 or digest != expected_digest:
        raise CheckpointError(
            f"manifest.json (format {version}, this gpurl reads {FORMAT_VERSION}) does not have "
            f"its own SHA-256"
        )
    # a format that this version reads
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


def _require_regular(file: Path) -> None:
    if not stat.S_ISREG(file.lstat().st_mode):
        raise CheckpointError(f"{file.name} is not a regular file")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _name_damage(folder: Path) -> Iterator[None]:
    """Turn every error of reading into a CheckpointError that names `folder`, except running out of
    memory.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error
