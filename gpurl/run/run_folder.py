"""The folder of one run: its unique name, the files to repeat the run, and the lock of the process
that trains in it.
"""

import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from gpurl.checkpoints.plain_files import Json, append_regular, read_at_most, write_regular
from gpurl.errors import CheckpointError, UsageError, visible
from gpurl.run.config_file import as_yaml
from gpurl.run.trackers.process import IDS_FILE, OUTPUT_FOLDER

MAX_DIFF_BYTES = 1 << 20
GIT_SECONDS = 10.0
MAX_HOLDER_BYTES = 1000
LOCK_SECONDS = 0.3  # a run keeps its lock for hours: waiting longer does not help
# the files of a run that ended before its first checkpoint
INFO_FILES = {"config.yaml", "command.txt", "versions.json", "git.diff"}
RUN_FILES = INFO_FILES | {"run.lock", "run.pid", "metrics.jsonl", "checkpoints"}
ENDED_FILE = "ended.json"  # how the run ended, absent while it runs
RUN_FILES |= {ENDED_FILE, IDS_FILE, OUTPUT_FOLDER}
EVENT_FILES = "events.out.tfevents."
PACKAGES = ("torch", "triton", "gpurl", "gymnasium", "numpy")


def create_run_folder(
    root: Path, env: str, algorithm: str, seed: int, name: str | None = None
) -> Path:
    """A new folder `root/<env>/<algorithm>/<YYYYmmdd-HHMMSS>_<seed>`, or the folder `name` if the
    user chose one.
    """
    try:
        if name is not None:
            return _chosen_folder(Path(name).expanduser())
        parent = Path(root).expanduser() / _safe_name(env) / _safe_name(algorithm)
        parent.mkdir(parents=True, exist_ok=True)
        return _first_free(parent, f"{time.strftime('%Y%m%d-%H%M%S')}_{seed}")
    except OSError as error:
        raise UsageError(
            f"no run folder at {error.filename}: {error.strerror}; choose another place with "
            f"--run-dir"
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


def _safe_name(name: str) -> str:
    """`name` as one folder name: "gymnasium_cpu:Pendulum-v1" becomes "gymnasium_cpu_Pendulum-v1",
    "../x" becomes "x".
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-100:].strip("._-") or "unnamed"


def write_run_info(folder: Path, config: Mapping[str, Json], argv: Sequence[str]) -> None:
    """Write config.yaml, command.txt, versions.json and, inside a git repository, git.diff: what is
    needed to repeat the run.
    """
    _write(folder, "config.yaml", as_yaml(config))
    _write(folder, "command.txt", _as_line(argv))
    _write(folder, "versions.json", f"{json.dumps(_versions(), indent=1)}\n".encode())
    if (diff := _git_diff()) is not None:
        _write(folder, "git.diff", diff)


def note_resume(folder: Path, config: Mapping[str, Json], argv: Sequence[str]) -> None:
    """Add a line to command.txt and replace config.yaml by the resumed run's. A failure, for
    example a full disk, is a warning: the run can continue.
    """
    new = folder / ".config.yaml.new"
    try:
        with append_regular(folder / "command.txt") as file:
            file.write(_as_line(argv))
        write_regular(new, as_yaml(config))
        new.replace(folder / "config.yaml")
    except OSError as error:
        logging.getLogger("gpurl").warning("config.yaml of %s is not updated: %s", folder, error)


def _as_line(argv: Sequence[str]) -> bytes:
    return f"{shlex.join(argv)}\n".encode()


def _write(folder: Path, name: str, content: bytes) -> None:
    try:
        write_regular(folder / name, content)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder / name}: {error.strerror}; choose another place with --run-dir"
        ) from error


def _versions() -> dict[str, Json]:
    """Python, the packages that influence results (None: not installed), the system and its
    devices.
    """
    # packages
    versions: dict[str, Json] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # the machine
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: list[Json] = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    versions |= {
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": gpus or ["cpu"],
        "threads": torch.get_num_threads(),
    }
    return versions


def _git_diff() -> bytes | None:
    """The commit of the working directory's repository and the changes since; None without git,
    repository or commit.
    """
    # without running code that the repository configures
    git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    diff_command = [*git, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD"]
    try:
        # the commit
        commit = subprocess.run(  # noqa: S603 - git, no shell
            [*git, "rev-parse", "HEAD"], capture_output=True, timeout=GIT_SECONDS
        )
        if commit.returncode != 0:
            return None
        # the changes, on disk: they may be too large for memory
        with tempfile.TemporaryFile() as diff:
            subprocess.run(  # noqa: S603 - git, no shell
                diff_command,
                stdout=diff,
                stderr=subprocess.DEVNULL,
                timeout=GIT_SECONDS,
                check=True,
            )
            size = diff.tell()
            if size > MAX_DIFF_BYTES:
                note = f"the changes since are omitted: {size} bytes, the limit is {MAX_DIFF_BYTES}"
                return commit.stdout + f"{note}\n".encode()
            diff.seek(0)
            return commit.stdout + diff.read()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """A `with` block that locks the run folder, at most until the process ends; CheckpointError if
    another process trains in it.
    """
    lock = FileLock(folder / "run.lock", thread_local=False)
    holder = folder / "run.pid"
    try:
        lock.acquire(timeout=LOCK_SECONDS)
        write_regular(holder, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except Timeout as error:
        raise CheckpointError(
            f"{folder} is in use by {_holder(holder)}: wait for it, stop it, or start another run"
        ) from error
    except OSError as error:
        lock.release()
        raise CheckpointError(f"cannot lock the run folder {folder}: {error}") from error
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
