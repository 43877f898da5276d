"""The folder of one run: its unique name, the files to repeat the run, and the lock of the process
that trains in it.
"""

import itertools
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gpurl.checkpoints.plain_files import Json, append_regular, read_at_most, write_regular
from gpurl.errors import CheckpointError, UsageError, visible
from gpurl.run.config_file import as_yaml
from gpurl.run.records import RECORDS, write_record
from gpurl.run.trackers.process import IDS_FILE, OUTPUT_FOLDER

MAX_HOLDER_BYTES = 1000
LOCK_SECONDS = 0.3  # a run keeps its lock for hours: waiting longer does not help
RANK_LOCK_SECONDS = 60.0  # the ranks of a run read it one after another
REFERENCES = "references.json"  # what its scripted policy reaches
VIDEOS = "videos"
# the files of a run that ended before its first checkpoint
INFO_FILES = {"config.yaml", "command.txt", RECORDS}
RUN_FILES = INFO_FILES | {"run.lock", "run.pid", "metrics.jsonl", "checkpoints"}
EPISODE = "episode.png"  # the picture of `gpurl play`
ENDED_FILE = "ended.json"  # how the run ended, absent while it runs
RUN_FILES |= {ENDED_FILE, IDS_FILE, OUTPUT_FOLDER, REFERENCES, VIDEOS}
RUN_FILES |= {"non_finite", ".config.yaml.new"}  # a dump of NaN, and half a resume
EVENT_FILES = "events.out.tfevents."


def absolute(path: str | Path) -> Path:
    """`path` from the working directory and the home directory; UsageError if it needs one that
    does not exist.
    """
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} is no absolute path, and there is none here: {error}") from error


@contextmanager
def same_directory() -> Iterator[None]:
    """A `with` block after which the working directory is the caller's: an environment may change
    it.
    """
    try:
        here = os.open(".", os.O_RDONLY)
    except OSError:  # it was deleted
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.fchdir(here)
        os.close(here)


def create_run_folder(
    root: Path, env: str, algorithm: str, seed: int, name: str | None = None
) -> Path:
    """A new folder `root/<env>/<algorithm>/<YYYYmmdd-HHMMSS>_<seed>`, or the folder `name` if the
    user chose one.
    """
    try:
        place = absolute(root if name is None else name)
        os.fsencode(place).decode()  # safetensors opens no file whose path is not UTF-8
        if name is not None:
            return _chosen_folder(place)
        parent = place / safe_name(env) / safe_name(algorithm)
        parent.mkdir(parents=True, exist_ok=True)
        return _first_free(parent, f"{time.strftime('%Y%m%d-%H%M%S')}_{seed}")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        failed, why = getattr(error, "filename", name or root), getattr(error, "strerror", error)
        raise UsageError(
            f"no run folder at {failed}: {why}; choose another place with --run-dir"
        ) from error


def _chosen_folder(folder: Path) -> Path:
    """`folder`, which must be new, empty, or of a run that ended before its first checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    # a run that failed early may be replaced, files of the user may not
    entries = {entry.name for entry in folder.iterdir()}
    names = {name for name in entries if not name.startswith(EVENT_FILES)}
    # the lock comes first: a process can be killed between it and its number
    is_failed_run = bool(names & {"run.lock", "run.pid"}) and names <= RUN_FILES
    if entries and not (is_failed_run and not any(folder.glob("checkpoints/step_*"))):
        raise UsageError(
            f"{folder} already holds files: continue that run with --resume, or choose another "
            f"--run-dir"
        )
    return folder


def _first_free(parent: Path, stamp: str) -> Path:
    """`parent/stamp`, or `stamp-2`, `stamp-3` …; mkdir fails if the name exists, so two processes
    never share one.
    """
    for number in itertools.count(1):
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def run_of(path: Path) -> Path:
    """The run folder for `path`: itself, or the run of a checkpoint; for a checkpoint outside a run
    the folder around it. Pictures go there, because a checkpoint must hold the files of its
    manifest only.
    """
    path = path.absolute()
    if (path / "checkpoints").is_dir():
        return path
    folder = path if path.name == "checkpoints" else path.parent
    return folder.parent if folder.name == "checkpoints" else folder


def safe_name(name: str) -> str:
    """`name` as one folder name: "gymnasium_cpu:Pendulum-v1" becomes "gymnasium_cpu_Pendulum-v1",
    "../x" becomes "x".
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-100:].strip("._-") or "unnamed"


def write_run_info(
    folder: Path, config: Mapping[str, Json], argv: Sequence[str], kinds: Iterable[type] = ()
) -> None:
    """Write config.yaml, command.txt and the first record: what is needed to repeat the run. kinds:
    classes whose modules are kept, of environment, algorithm, networks and callbacks.
    """
    _write(folder, "config.yaml", as_yaml(config))
    _write(folder, "command.txt", _as_line(argv))
    try:
        write_record(folder, _folders_of_runs(config), kinds)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or folder / RECORDS}: {error.strerror}; choose another "
            f"place with --run-dir"
        ) from error


def note_resume(
    folder: Path, config: Mapping[str, Json], argv: Sequence[str], kinds: Iterable[type] = ()
) -> Path | None:
    """Add a line to command.txt and a record, and replace config.yaml by the resumed run's; returns
    the record. A failure, for example a full disk, is a warning and None: the run can continue.
    """
    new = folder / ".config.yaml.new"
    try:
        with append_regular(folder / "command.txt") as file:
            file.write(_as_line(argv))
        write_regular(new, as_yaml(config))
        new.replace(folder / "config.yaml")
        return write_record(folder, _folders_of_runs(config), kinds)
    except OSError as error:
        logging.getLogger("gpurl").warning("config.yaml of %s is not updated: %s", folder, error)
        return None


def _folders_of_runs(config: Mapping[str, Json]) -> list[Path]:
    """Of this run and others."""
    root = config.get("root")
    return [Path(root).expanduser()] if isinstance(root, str) else []


def _as_line(argv: Sequence[str]) -> bytes:
    return f"{shlex.join(argv)}\n".encode(errors="surrogateescape")  # as it was typed


def _write(folder: Path, name: str, content: bytes) -> None:
    try:
        write_regular(folder / name, content)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder / name}: {error.strerror}; choose another place with --run-dir"
        ) from error


@contextmanager
def lock_run(folder: Path, name: str = "run", seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """A `with` block that locks the run folder, at most until the process ends; UsageError if
    another process trains in it for `seconds` more, CheckpointError if it cannot be locked.

    name: of the lock; "tuning" is that of a folder of trials.
    """
    lock = FileLock(folder / f"{name}.lock", thread_local=False)
    holder = folder / f"{name}.pid"
    try:
        lock.acquire(timeout=seconds)
        write_regular(holder, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except Timeout as error:
        raise UsageError(
            f"{folder} is in use by {_holder(holder)}: wait for it, stop it, or start another "
            f"{name}"
        ) from error
    except OSError as error:
        lock.release()
        raise CheckpointError(f"cannot lock the {name} folder {folder}: {error}") from error
    try:
        yield
    finally:
        lock.release()


def _holder(file: Path) -> str:
    """The process that wrote `file`."""
    try:
        return visible(read_at_most(file, MAX_HOLDER_BYTES).decode(errors="replace").strip())
    except (OSError, ValueError):
        return "an unknown process"
