"""What was on the machine when a run began or continued: packages, commit, changes, new source
files and the user's own modules, in a numbered folder `records/N` for each start.

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
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import FunctionType, ModuleType

import torch

from gpurl.checkpoints.plain_files import Json, make_folder, read_at_most, write_regular

RECORDS = "records"
SOURCES_FOLDER = "sources"
GIT_SECONDS = 10.0  # for all questions together
MAX_DIFF_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 18
MAX_FILES_BYTES = 1 << 22  # of all untracked files, and of all own modules
MAX_LEFT_OUT = 100  # names
MAX_ABOUT_BYTES = 1 << 20  # of git.json
SOURCES = {".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".sh", ".ipynb"}
SOURCES |= {".xml", ".urdf", ".mjcf", ".yaml", ".yml", ".toml"}
# the whole tree in a form that `git apply` takes, whatever the user's configuration says
DIFF = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-relative"]
DIFF += ["--ignore-submodules=all", "--src-prefix=a/", "--dst-prefix=b/", "--binary"]
DIFF += ["--full-index", "-U3", "HEAD"]


def write_record(folder: Path, skip: Sequence[Path] = (), kinds: Iterable[type] = ()) -> Path:
    """Write the next `folder/records/N`; returns it. OSError, for example on a full disk.

    skip: folders whose files are no sources of the run, such as that of all runs. kinds: classes of
    the run, whose modules are kept.
    """
    record = _next_folder(folder / RECORDS)
    write_regular(record / "versions.json", _as_json(versions()))
    # in no repository, or ignored by it, they would be kept nowhere
    _copy_sources(own_modules(kinds), record / SOURCES_FOLDER)
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


def own_modules(kinds: Iterable[type]) -> dict[str, Path]:
    """{`my_project/my_env.py`: its file} of the modules that define `kinds` and their bases, and of
    those that they import from the same folder; without gpurl, Python and installed packages.
    """
    defining = {base.__module__ for kind in kinds for base in kind.__mro__}
    waiting = [sys.modules[name] for name in sorted(defining) if name in sys.modules]
    files: dict[str, Path] = {}
    tops: set[Path] = set()
    while waiting:
        module = waiting.pop()
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or _is_library(path):
            continue
        # a module that another one imports must lie in the same folder
        depth = module.__name__.count(".") + (path.name == "__init__.py")
        top = path.absolute().parents[depth]
        is_defining = module.__name__ in defining
        name = path.name if module.__name__ == "__main__" else str(path.absolute().relative_to(top))
        if name in files or not (is_defining or top in tops):
            continue
        files[name] = path
        tops.add(top)
        waiting += _imported(module)
    return dict(sorted(files.items()))


def _is_library(path: Path) -> bool:
    """Whether the file belongs to gpurl, to Python or to an installed package."""
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    package = Path(__file__).resolve().parents[1]
    # gpurl/envs and gpurl/kernels may be links to folders beside gpurl
    homes = [package, *(each.resolve() for each in (package / "envs", package / "kernels"))]
    homes.append(Path(sysconfig.get_path("stdlib")).resolve())
    return any(path.resolve().is_relative_to(home) for home in homes)


def _imported(module: ModuleType) -> list[ModuleType]:
    """The modules that it uses: themselves, or classes and functions of them."""
    values = list(vars(module).values())
    names = {value.__module__ for value in values if isinstance(value, (type, FunctionType))}
    found = [sys.modules[name] for name in names if name in sys.modules]
    return found + [value for value in values if isinstance(value, ModuleType)]


def changed_sources(record: Path) -> list[str]:
    """The own modules whose content in `record` is another than in the record before; those that
    only one of them has count too.
    """
    before = record.with_name(str(int(record.name) - 1))
    old, new = (_contents(each / SOURCES_FOLDER) for each in (before, record))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _contents(folder: Path) -> dict[str, bytes]:
    files = {}
    for path in folder.rglob("*.py"):
        try:
            files[str(path.relative_to(folder))] = read_at_most(path, MAX_FILE_BYTES)
        except (OSError, ValueError):
            continue
    return files


def _next_folder(parent: Path) -> Path:
    make_folder(parent)
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
    files = {name: Path(top) / name for name in paths}
    left_out = _copy_sources(files, record / "untracked", skip)
    about["untracked left out"] = list[Json](left_out[:MAX_LEFT_OUT])
    about["number left out"] = len(left_out)
    write_regular(record / "git.json", _as_json(about))


def _copy_sources(files: Mapping[str, Path], target: Path, skip: Sequence[Path] = ()) -> list[str]:
    """Copy small source files to `target / name`; returns `name: reason` of those that were left
    out, without those in `skip`.
    """
    left_out = []
    free = MAX_FILES_BYTES
    skipped = [folder.absolute() for folder in skip]
    for name, path in files.items():
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
