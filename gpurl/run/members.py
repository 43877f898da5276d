"""The settings of a population's members: those of the run, and in their place the values that each
member has of its own.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError, UsageError, did_you_mean

# settings that make one agent of a population
ONE_AGENT: dict[str, Any] = {
    "population": 1,
    "member": {},
    "pbt": False,
    "pbt_every": None,
    "pbt_leaderboard": None,
    "explore": {},
}


def member_settings(config: type[AlgorithmConfig]) -> tuple[str, ...]:
    """The settings in which members may differ: numbers that no weight's shape depends on."""
    hints = typing.get_type_hints(config)
    return tuple(
        item.name
        for item in dataclasses.fields(config)
        if hints[item.name] in (float, float | None) and item.name not in config.fixed
    )


def is_list_of_numbers(value: object) -> TypeGuard[Sequence[float]]:
    """Whether it is a list, or a tuple, of finite numbers."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(
            isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
            for each in value
        )
    )


def member_values(config: type[AlgorithmConfig], values: object) -> dict[str, tuple[float, ...]]:
    """{setting: one number for each member} of the setting `member`; UsageError for what is none of
    `member_settings` or no list of numbers.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"member is {values!r}; it must be `setting: list of numbers` pairs")
    known = member_settings(config)
    checked = {}
    for name, numbers in values.items():
        if name not in known:
            raise UsageError(
                f"members cannot differ in {name!r}; {did_you_mean(str(name), known)}They can in "
                f"{', '.join(known)}"
            )
        if not is_list_of_numbers(numbers):
            raise UsageError(f"member.{name} is {numbers!r}; it must be a list of numbers")
        checked[str(name)] = tuple(float(each) for each in numbers)
    return checked


def member_configs(
    config: AlgorithmConfig, population: int, values: Mapping[str, Sequence[float]]
) -> list[AlgorithmConfig]:
    """The settings of each member. UsageError, with the member, for a list of another length and
    for values that a run of their own would refuse.
    """
    for name, numbers in values.items():
        if len(numbers) != population:
            raise UsageError(
                f"member.{name} needs one value for each of {population} members, got "
                f"{len(numbers)}: {' '.join(map(str, numbers))}; population is their number"
            )
    configs = []
    for k in range(population):
        own: dict[str, Any] = {name: numbers[k] for name, numbers in values.items()}
        try:
            configs.append(dataclasses.replace(config, **own) if own else config)
        except UsageError as error:
            raise UsageError(f"member {k}: {error}") from None
    return configs


def member_number(member: int | str | None) -> int | None:
    """The number that a word of the command line is; UsageError for another word."""
    if member is None or isinstance(member, int):
        return member
    if member.isascii() and member.isdecimal():
        return int(member[:18])
    raise UsageError(f"member is {member!r}; it must be a number, or all")


def choose_member(member: int | None, population: int, trainer: State) -> int:
    """The member of a checkpoint to load: `member`, by default the one that was best in the newest
    evaluation. trainer: that part of the checkpoint. UsageError if there is no such member,
    CheckpointError if it was lost.
    """
    if member is not None and not 0 <= member < population:
        wanted = f"members 0 to {population - 1}" if population > 1 else "one agent, member 0"
        raise UsageError(f"there is no member {member}: the run has {wanted}")
    lost = trainer.get("lost", {})
    if member is None:
        live = [k for k in range(population) if str(k) not in lost]
        best = int(trainer["evaluation"].get("eval/best_member", live[0]))
        return best if best in live else live[0]
    if reason := lost.get(str(member)):
        raise CheckpointError(f"member {member} was lost in training: {reason}")
    return member
