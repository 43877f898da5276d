"""Gymnasium's autoreset modes, for adapters: reading the mode of an environment, ends of episodes,
resets of some environments.

SAME_STEP starts the next episode in the step that ended one and also returns the true last
observation; NEXT_STEP starts it in the step after, which is no transition; DISABLED leaves it to
the adapter.
"""

from typing import TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpurl.errors import EnvError, UsageError

Array = TypeVar("Array", np.ndarray, Tensor)


def check_autoreset_mode(name: str, mode: object) -> AutoresetMode:
    """`mode`, from the metadata of the environment `name`; UsageError unless it is one."""
    if isinstance(mode, AutoresetMode):
        return mode
    raise UsageError(
        f"{name} does not say how it resets: set env.metadata['autoreset_mode'] to "
        f"gymnasium.vector.AutoresetMode.SAME_STEP, NEXT_STEP or DISABLED; it is {mode!r}"
    )


def find_ends(
    terminated: Array, truncated: Array, valid: Array | None = None
) -> tuple[Array, Array, Array]:
    """(terminated, truncated, done), all [N] bool; the first two are never True together. Where
    `valid` is False the environment only restarted and no episode ended.
    """
    # both in one step count as a termination: the value after it is zero
    truncated = truncated & ~terminated
    if valid is not None:
        terminated = terminated & valid
        truncated = truncated & valid
    return terminated, truncated, terminated | truncated


def check_partial_reset(name: str, mask: Array, rows: Array, before: Array, requests: str) -> None:
    """EnvError if a reset of the environments in mask [N] changed other ones. before, rows:
    observations [N, ...] before and after it; requests: the arguments of the reset, for the
    message.
    """
    # NaN counts as unchanged where it was NaN before
    is_same = (rows == before) | ((rows != rows) & (before != before))
    if not bool((is_same.reshape(len(mask), -1).all(1) | mask).all()):
        raise EnvError(
            f"{name} cannot reset some environments only: it ignores {requests} and has reset all "
            f"of them"
        )
