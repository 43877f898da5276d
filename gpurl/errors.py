"""The errors gpurl raises on purpose, each with the command line's exit code, and helpers for their
texts.
"""

import difflib
import importlib.metadata
import inspect
import re
import shlex
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class GpurlError(Exception):
    """Base of all errors that tell the user what was got, what was wanted and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        # it may quote a file, whose author must not control the terminal
        return visible(super().__str__(), lines=True)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message says what to do, and the traceback is of our files."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(GpurlError, ValueError):
    """A name, a size or a combination of settings that cannot work."""

    exit_code = 2


class EnvError(GpurlError):
    """An environment that breaks the contract of `gpurl.envs.vec_env`."""

    exit_code = 3


class EndlessEpisodeError(EnvError):
    """Episodes that did not end within the steps that an evaluation allows."""


class NonFiniteError(GpurlError):
    """NaN or infinity in place of a number."""

    exit_code = 4
    evidence: dict[str, Any] | None = None  # the content of its dump, a State


class DivergedError(NonFiniteError):
    """NaN or infinity that the policy itself produced."""


class CheckpointError(GpurlError):
    """A checkpoint that is damaged, newer than this program or not of gpurl, or a run without
    one.
    """

    exit_code = 5


class RankError(GpurlError):
    """Another process of the run has ended, hangs, or runs other code or settings."""

    exit_code = 6


def visible(text: str, lines: bool = False) -> str:
    """`text` with escapes for characters that a terminal would execute or not show; lines: keep
    line ends.
    """
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else ascii(each)[1:-1]
        for each in text
    )


def first_line(text: object) -> str:
    """The first line of an error or a docstring; empty if there is none."""
    return next(iter(str(text).splitlines()), "")


def raised_at(error: BaseException, owner: type) -> str:
    """`file:line: source` of the innermost line of `owner` or its bases in the traceback of
    `error`; the innermost line of all if there is none of theirs.
    """
    files = {inspect.getsourcefile(base) for base in owner.__mro__ if base.__module__ != "builtins"}
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def last_line(error: BaseException) -> str:
    """`file:line: source` of the line that raised `error`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def did_you_mean(
    name: str, known: Iterable[str], question: str = "did you mean ", cutoff: float = 0.5
) -> str:
    """`did you mean ppo or a2c? `, or "" if no name in `known` is similar; cutoff: from 0 to 1."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"{question}{' or '.join(near)}? " if near else ""


def install_extra(name: str) -> str:
    """The command that installs an optional dependency. gpurl is on no package index: from a source
    tree its extra is installed, elsewhere the packages of the extra by their own names.
    """
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        here = "." if root == Path.cwd() else root
        return f"pip install -e '{here}[{name}]'"
    wanted = re.compile(rf"""(.+?)\s*;.*extra\s*==\s*['"]{re.escape(name)}['"]""")
    lines = importlib.metadata.requires("gpurl") or []
    packages = [match[1] for match in map(wanted.match, lines) if match]
    return f"pip install {shlex.join(packages)}"
