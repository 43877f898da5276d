"""The errors gpurl raises on purpose, each with the exit code that the command line returns for it;
and the near names they tell.
"""

import difflib
import inspect
import traceback
from collections.abc import Iterable
from typing import Any


class GpurlError(Exception):
    """Base of all errors that tell the user what was got, what was wanted and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        return visible(
            super().__str__(), lines=True
        )  # it may quote a file, and whoever wrote that does not command the terminal


class UsageError(GpurlError, ValueError):
    """A name, a size or a combination of settings that cannot work."""

    exit_code = 2


class EnvError(GpurlError):
    """An environment that breaks the contract of `gpurl.envs.vec_env`."""

    exit_code = 3


class EndlessEpisodeError(EnvError):
    """Episodes that did not end within the steps an evaluation waits for them."""


class NonFiniteError(GpurlError):
    """NaN or infinity where a number was needed."""

    exit_code = 4
    evidence: dict[str, Any] | None = None  # what a dump of it holds


class DivergedError(NonFiniteError):
    """NaN or infinity that the policy made itself."""


class CheckpointError(GpurlError):
    """A checkpoint that is damaged, missing, newer than this program, or made for something
    else.
    """

    exit_code = 5


def visible(text: str, lines: bool = False) -> str:
    """`text` with escapes for what a terminal would obey or not show; lines: its line ends stay."""
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else ascii(each)[1:-1]
        for each in text
    )


def first_line(text: object) -> str:
    """Of an error's words, a docstring; empty where there are none."""
    return next(iter(str(text).splitlines()), "")


def raised_at(error: BaseException, owner: type) -> str:
    """`file:line: source` where the code of `owner` or of a base was when `error` came, not what it
    called; the innermost line where none of its code was running.
    """
    own = {inspect.getsourcefile(base) for base in owner.__mro__ if base.__module__ != "builtins"}
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename in own), frames[-1])
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean ppo or a2c? `, or nothing where no name of `known` is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""
