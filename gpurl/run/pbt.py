"""The settings of population based training: which settings of members it explores, within which
ranges, and how often it selects.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.members import is_list_of_numbers
from gpurl.selection import Span

SELECTIONS = 20  # of a run, unless the user says how often
FROM_ONE = {"gamma", "gae_lambda"}  # 0.99 and 0.995 differ as 100 and 200 steps do


def explored_ranges(
    config: type[AlgorithmConfig], values: object
) -> dict[str, tuple[float, float]]:
    """{setting: (low, high)} of the setting `explore`; UsageError for a setting that cannot change
    in a run, and for what is no range.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"explore is {values!r}; it must be `setting: [low, high]` pairs")
    known = config.changeable
    checked = {}
    for name, limits in values.items():
        if name not in known:
            raise UsageError(
                f"{name!r} cannot change in a run; {did_you_mean(str(name), known)}These can: "
                f"{', '.join(known)}"
            )
        if not is_list_of_numbers(limits):
            raise UsageError(f"explore.{name} is {limits!r}; it must be two numbers, low and high")
        if len(limits) != 2 or limits[0] >= limits[1]:
            got = " ".join(map(str, limits))
            raise UsageError(f"explore.{name} must be a low and a high number, got {got}")
        checked[str(name)] = (float(limits[0]), float(limits[1]))
    return checked


def interval(every: int | None, total_steps: int, num_envs: int, horizon: int) -> int:
    """Steps of a member between selections, by default a part of the run; UsageError for fewer than
    an iteration has.
    """
    iteration = num_envs * horizon
    if every is None:
        return max(total_steps // SELECTIONS, iteration)
    if every < iteration:
        raise UsageError(
            f"pbt_every {every:,} is less than one iteration, {iteration:,} steps (num_envs "
            f"{num_envs:,} x horizon {horizon:,})"
        )
    return every


def explored_spans(
    config: AlgorithmConfig, ranges: Mapping[str, Sequence[float]]
) -> dict[str, Span]:
    """The ranges, by default the algorithm's own, as they are explored; UsageError for one with
    values that a run would refuse.
    """
    explored = ranges or config.explored
    return {name: _span(config, name, *limits) for name, limits in explored.items()}


def _span(config: AlgorithmConfig, name: str, low: float, high: float) -> Span:
    """UsageError if the algorithm refuses a limit of the range."""
    kind = type(getattr(config, name))
    for limit in (low, high):
        changed: dict[str, Any] = {name: kind(limit)}
        try:
            dataclasses.replace(config, **changed)
        except UsageError as error:
            raise UsageError(f"explore.{name} {low:g} {high:g}: {error}") from None
    from_one = name in FROM_ONE
    is_log = high < 1.0 if from_one else low > 0.0
    return Span(low, high, is_log, kind is int, from_one)
