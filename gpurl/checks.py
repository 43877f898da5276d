"""Checks that settings share: every number is finite and in its range, every choice is one of those
there are.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from gpurl.errors import UsageError


def check_choices(config: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
    """UsageError for a field of the dataclass `config` that is none of its `choices`."""
    for name, known in choices.items():
        if (value := getattr(config, name)) not in known:
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def check_numbers(
    config: Any,
    least: Mapping[str, float],
    above_zero: tuple[str, ...] = (),
    zero_to_one: tuple[str, ...] = (),
) -> None:
    """UsageError for a number of the dataclass `config` that is NaN, infinite, below its `least` or
    out of its range; None is no number.
    """
    for name in (item.name for item in dataclasses.fields(config)):
        value = getattr(config, name)
        if type(value) not in (int, float):
            continue
        if not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, got {value}")
        if name in least and value < least[name]:
            raise UsageError(f"{name} must be at least {least[name]}, got {value}")
        if name in above_zero and value <= 0:
            raise UsageError(f"{name} must be above 0, got {value}")
        if name in zero_to_one and not 0 <= value <= 1:
            raise UsageError(f"{name} must be from 0 to 1, got {value}")


def check_atoms(config: Any) -> None:
    """UsageError unless `atoms` values between `v_min` and `v_max` are a distribution's, or none at
    all.
    """
    if config.atoms == 1 or config.v_min >= config.v_max:
        raise UsageError(
            f"atoms must be 0 or at least 2 and v_min below v_max, got {config.atoms}, "
            f"{config.v_min} and {config.v_max}"
        )
