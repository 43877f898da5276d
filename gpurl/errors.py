"""The errors gpurl raises on purpose, each with the command line's exit code, and helpers for their
texts.
"""

import difflib
import importlib.metadata
import inspect
import linecache
import os
import re
import shlex
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
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


class OwnCodeError(UsageError):
    """An exception in an algorithm of the user's."""


def first_line(text: object) -> str:
    """The first line of an error or a docstring; empty if there is none."""
    return next(iter(str(text).splitlines()), "")


def raised_at(error: BaseException, owner: type) -> str:
    """`file:line: source` of the line to look at for the `error` in a call of an `owner`: the
    innermost one of the user's classes among it and its bases, or the function of theirs that the
    call did not fit; else the innermost line of all its bases, or of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    function = _unfit_function(error, owner)
    for kinds in (_users_classes(owner), owner.__mro__):
        files = _files_of(kinds)
        if inside := [each for each in frames if each.filename in files]:
            return _described(inside[-1])
        if function is not None:
            return _first_line_of(function)
    return _described(frames[-1])


def users_fault(error: BaseException, owner: type) -> tuple[str, str]:
    """(method, `file:line: source`) of a class of the user's, `owner` or a base of it, that raised
    `error`; "" twice where gpurl raised it, or nothing of theirs was called.
    """
    own = _users_classes(owner)
    if not own:
        return "", ""
    ours, theirs = f"{Path(__file__).parent}{os.sep}", _files_of(own)
    frames = traceback.extract_tb(error.__traceback__)
    # neither torch nor what a user's file imports says whose the call was
    known = [each for each in frames if each.filename in theirs or each.filename.startswith(ours)]
    if known and known[-1].filename in theirs:
        names = {name for base in own for name in vars(base)}
        inside = [each for each in frames if each.filename in theirs]
        methods = [each.name for each in inside if each.name in names] or [inside[-1].name]
        return methods[-1], _described(inside[-1])
    if function := _unfit_function(error, owner):
        return function.__name__, _first_line_of(function)
    return "", ""


def _users_classes(owner: type) -> list[type]:
    """Those of `owner` and its bases that are no library's which has bases for users."""
    libraries = ("abc", "builtins", "gpurl", "gymnasium", "torch", "typing")
    return [base for base in owner.__mro__ if base.__module__.partition(".")[0] not in libraries]


def _functions_of(kind: type) -> list[FunctionType]:
    return [
        function
        for value in vars(kind).values()
        if isinstance(function := inspect.unwrap(getattr(value, "__func__", value)), FunctionType)
    ]


def _files_of(kinds: Iterable[type]) -> set[str]:
    return {function.__code__.co_filename for kind in kinds for function in _functions_of(kind)}


def _unfit_function(error: BaseException, owner: type) -> FunctionType | None:
    """The function of a user's class whose arguments a call did not fit, before it began."""
    functions = [each for base in _users_classes(owner) for each in _functions_of(base)]
    calls = {f"{each.__qualname__}()": each for each in functions}
    return calls.get(str(error).partition(" ")[0]) if isinstance(error, TypeError) else None


def _first_line_of(function: FunctionType) -> str:
    code = function.__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{code.co_filename}:{code.co_firstlineno}: {line}"


def _described(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def last_line(error: BaseException) -> str:
    """`file:line: source` of the line that raised `error`."""
    return _described(traceback.extract_tb(error.__traceback__)[-1])


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
