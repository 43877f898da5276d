"""Checks that settings share: every number is finite and in its range, every choice is a known
one.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Protocol

from gpurl.errors import UsageError, did_you_mean

MAX_INTEGER = (1 << 63) - 1  # of a setting: torch takes no larger one
Choices = dict[str, tuple[str, ...]]


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


def choices_of(kind: type) -> Choices:
    """{field: its possible values}, from the class attribute `choices` of a dataclass and of its
    bases.
    """
    choices: Choices = {}
    for base in reversed(kind.__mro__):
        choices |= vars(base).get("choices", {})
    return choices


def may_be_module(kind: type, name: str) -> bool:
    """Whether the field `name` takes a module of the user's own, MODULE:CLASS, besides its choices:
    a dataclass has their names in `may_be_modules`.
    """
    return name in getattr(kind, "may_be_modules", ())


def check_choices(config: object) -> None:
    """UsageError for a field of `config` that is none of its `choices`."""
    for name, known in choices_of(type(config)).items():
        value = getattr(config, name)
        is_module = ":" in str(value) and may_be_module(type(config), name)
        if value not in known and not is_module:
            # all of them follow, so only a slip of the keyboard is worth a guess
            guess = did_you_mean(str(value), known, cutoff=0.75)
            raise UsageError(f"{name} is {value!r}; {guess}it must be one of {', '.join(known)}")


def check_numbers(
    config: Dataclass,
    minimums: Mapping[str, float],
    above_zero: tuple[str, ...] = (),
    zero_to_one: tuple[str, ...] = (),
) -> None:
    """UsageError for a field of `config` that is NaN, infinite, below its minimum or out of its
    range; None is allowed.
    """
    for name in (item.name for item in dataclasses.fields(config)):
        value = getattr(config, name)
        if type(value) not in (int, float):
            continue
        if not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, got {value}")
        if name in minimums and value < minimums[name]:
            raise UsageError(f"{name} must be at least {minimums[name]}, got {value}")
        if name in above_zero and value <= 0:
            raise UsageError(f"{name} must be above 0, got {value}")
        if name in zero_to_one and not 0 <= value <= 1:
            raise UsageError(f"{name} must be from 0 to 1, got {value}")


def check_atoms(atoms: int, v_min: float, v_max: float) -> None:
    """UsageError unless `atoms` values from `v_min` to `v_max` can be a distribution's support; 0
    atoms: no distribution.
    """
    if atoms == 1 or v_min >= v_max:
        raise UsageError(
            f"atoms must be 0 or at least 2 and v_min below v_max, got {atoms}, {v_min} and {v_max}"
        )


def check_torch_defaults(device: object) -> None:
    """UsageError if torch makes other tensors by default than a run on `device` needs."""
    import torch

    dtype, default = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32:
        raise UsageError(
            f"torch's default dtype is {dtype}, gpurl computes in float32: call "
            f"torch.set_default_dtype(torch.float32) first"
        )
    if default.type not in ("cpu", torch.device(str(device)).type):
        raise UsageError(
            f"torch's default device is {default}, this is for {device}: call "
            f"torch.set_default_device({str(device)!r}) first"
        )
