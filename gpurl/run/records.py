"""What was on the machine when a run began or continued: packages, commit, changes and new source
files, in a numbered folder `records/N` for each start.

Asking git in a stranger's repository executes nothing of it: no filter, hook, monitor or diff
program, and nothing is fetched.
"""

import importlib.metadata
import json
import os
import platform
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch

from gpurl.checkpoints.plain_files import Json, read_at_most, write_regular

RECORDS = "records"
GIT_SECONDS = 10.0  # for all questions together
MAX_DIFF_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 18
MAX_FILES_BYTES = 1 << 22  # of all untracked files
MAX_LEFT_OUT = 100  # names
MAX_ABOUT_BYTES = 1 << 20  # of git.json
SOURCES = {".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".sh", ".ipynb"}
SOURCES |= {".xml", ".urdf", ".mjcf", ".yaml", ".yml", ".toml"}
# the whole tree in a form that `git apply` takes, whatever the user's configuration says
DIFF = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-relative"]
DIFF += ["--ignore-submodules=all", "--src-prefix=a/", "--dst-prefix=b/", "--binary"]
DIFF += ["--full-index", "-U3", "HEAD"]


def write_record(folder: Path, skip: Sequence[Path] = ()) -> Path:
    """Write the next `folder/records/N`; returns it. OSError, for example on a full disk.

    skip: folders whose files are no sources of the run, such as that of all runs.
    """
    record = _next_folder(folder / RECORDS)
    write_regular(record / "versions.json", _as_json(versions()))
    git = Git(time.monotonic() + GIT_SECONDS)
    _write_repository(git, record, [folder, *skip])
    return record


def last_commit(folder: Path) -> str | None:
    """The git commit of the newest record of the run in `folder`, None if none is recorded."""
    numbers = [int(each.name) for each in (folder / RECORDS).glob("*") if each.name.isdecimal()]
    if not numbers:
        return None
    try:
        about = json.loads(
            read_at_most(folder / RECORDS / str(max(numbers)) / "git.json", MAX_ABOUT_BYTES)
        )
    except (OSError, ValueError):
        return None
    commit = about.get("commit") if isinstance(about, dict) else None
    is_hash = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40,64}", commit)
    return commit if is_hash else None


def _next_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    number = 0
    while True:
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            number += 1
            continue
        return parent / str(number)


def _as_json(values: dict[str, Json]) -> bytes:
    return f"{json.dumps(values, indent=1)}\n".encode()


def versions() -> dict[str, Json]:
    """Python, all packages, the system and its devices."""
    packages: dict[str, Json] = {}
    for distribution in importlib.metadata.distributions():
        # the first on the path is the one that is imported
        if (name := distribution.name) and name not in packages:
            packages[name] = distribution.version
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: list[Json] = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": gpus or ["cpu"],
        "threads": torch.get_num_threads(),
        "packages": {name: packages[name] for name in sorted(packages, key=str.lower)},
    }


class Git:
    """git in the working directory, until `deadline` (time.monotonic)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.environment = os.environ | {
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
        }
        # settings through the environment: names of filters may hold any character
        off = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
        self._configure(off)
        # reading the configuration executes nothing
        for key in self.ask("config", "--list", "--name-only", "-z").decode().split("\0"):
            if key.startswith("filter."):
                is_flag = key.endswith(".required")
                off[key] = "false" if is_flag else ""
        self._configure(off)

    def _configure(self, settings: dict[str, str]) -> None:
        self.environment["GIT_CONFIG_COUNT"] = str(len(settings))
        for number, (key, value) in enumerate(settings.items()):
            self.environment[f"GIT_CONFIG_KEY_{number}"] = key
            self.environment[f"GIT_CONFIG_VALUE_{number}"] = value

    def ask(self, *words: str, limit: int = MAX_FILES_BYTES) -> bytes:
        """What git prints, at most `limit` bytes and one more; b"" without git, repository or
        commit, or where the time is over.
        """
        # on disk: it may be too large for memory
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(  # noqa: S603 - no shell
                    ["git", *words],  # noqa: S607 - the user's
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    env=self.environment,
                    timeout=max(self.deadline - time.monotonic(), 0.1),
                    check=False,
                )
            except (OSError, subprocess.SubprocessError):
                return b""
            output.seek(0)
            return b"" if done.returncode else output.read(limit + 1)


def _write_repository(git: Git, record: Path, skip: Sequence[Path]) -> None:
    """git.json, git.diff and untracked/, if the working directory is in a repository."""
    top = git.ask("rev-parse", "--show-toplevel").decode(errors="surrogateescape").rstrip("\n")
    if not top:
        return
    about: dict[str, Json] = {"commit": git.ask("rev-parse", "HEAD").decode().strip() or None}
    # changes of files that git knows
    if about["commit"] is not None:
        diff = git.ask(*DIFF, limit=MAX_DIFF_BYTES)
        if len(diff) > MAX_DIFF_BYTES:
            about["git.diff"] = f"left out: it has more than {MAX_DIFF_BYTES} bytes"
        else:
            write_regular(record / "git.diff", diff)
    # files that it does not know
    names = git.ask("-C", top, "ls-files", "--others", "--exclude-standard", "-z")
    paths = names.decode(errors="surrogateescape").split("\0")[:-1]
    left_out = _copy_sources(Path(top), paths, record / "untracked", skip)
    about["untracked left out"] = list[Json](left_out[:MAX_LEFT_OUT])
    about["number left out"] = len(left_out)
    write_regular(record / "git.json", _as_json(about))


def _copy_sources(top: Path, names: Sequence[str], target: Path, skip: Sequence[Path]) -> list[str]:
    """Copy small source files; returns `name: reason` of those that were left out, without those in
    `skip`.
    """
    left_out = []
    free = MAX_FILES_BYTES
    skipped = [folder.absolute() for folder in skip]
    for name in names:
        path = top / name
        if ".." in PurePosixPath(name).parts or any(path.is_relative_to(each) for each in skipped):
            continue
        text = ascii(name)[1:-1]
        if path.suffix not in SOURCES:
            left_out.append(f"{text}: no source file")
            continue
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                left_out.append(f"{text}: no regular file")
                continue
            content = read_at_most(path, min(MAX_FILE_BYTES, free))
        except ValueError:
            left_out.append(f"{text}: too large")
            continue
        except OSError as error:
            left_out.append(f"{text}: {error.strerror}")
            continue
        free -= len(content)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_regular(target / name, content)
    return left_out
