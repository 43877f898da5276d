"""Numbers in the infos of a numpy vector environment, by name, for the log."""

from typing import Any

import numpy as np

Info = dict[str, Any]
# whether an episode has reached its goal, as many tasks tell in every step
SUCCESS = ("success", "is_success")
AT_END = "_at_end"
NUMBERS = "biuf"  # kinds of numpy's dtypes
NUMBER_TYPES = (bool, int, float, np.bool_, np.number)
NOT_METRICS = ("env_id", "elapsed_step")  # of EnvPool


def log_of_infos(info: Info, done: np.ndarray, valid: np.ndarray | None) -> Info:
    """info["log"] of a step: the arrays of numbers [N] in `info`, each with a mask "_name" [N].

    A number counts where the environment gave it: in `info` and its mask "_name", where Gymnasium
    has one, or in info["final_info"], which then holds the last step of the episodes that ended.
    done, valid: [N] bool. Success is also logged as of the episodes that ended, `*_at_end`.
    """
    final = info.get("final_info")
    log: Info = {}
    # steps that are no transitions do not count
    counts = np.ones(len(done), bool) if valid is None else valid
    if not isinstance(final, dict):
        _add(log, info, counts)
    else:
        # where an episode ended, `info` is that of the reset
        _add(log, info, counts & ~done)
        _add(log, final, counts & done)
    for name in SUCCESS:
        if name in log:
            log[name + AT_END] = log[name]
            log[f"_{name}{AT_END}"] = log[f"_{name}"] & done
    return log


def _add(log: Info, info: Info, counts: np.ndarray) -> None:
    """Add the numbers of `info` to `log`, where counts [N] bool."""
    for name, value in info.items():
        if (
            name[:1] == "_"
            or not isinstance(value, np.ndarray)
            or value.shape != counts.shape
            or name in NOT_METRICS
        ):
            continue
        given = info.get(f"_{name}")
        is_given = given if isinstance(given, np.ndarray) else np.ones(len(counts), bool)
        value = _numbers(value, is_given)
        if value is None:
            continue
        mask = counts & is_given
        if (before := log.get(name)) is None:
            log[name] = value
            log[f"_{name}"] = mask
        else:
            log[name] = np.where(mask, value, before)
            log[f"_{name}"] = log[f"_{name}"] | mask


def _numbers(values: np.ndarray, given: np.ndarray) -> np.ndarray | None:
    """`values` [N] if they are numbers, also those that Gymnasium keeps as objects: it does so for
    numpy's booleans. None for others. given: [N] bool, where there are values.
    """
    if values.dtype.kind in NUMBERS:
        return values
    if values.dtype != object or not all(isinstance(x, NUMBER_TYPES) for x in values[given]):
        return None
    numbers = np.zeros(len(values), np.float32)
    numbers[given] = values[given].astype(np.float32)
    return numbers
