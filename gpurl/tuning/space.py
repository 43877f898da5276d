"""What a tuning samples: ranges and choices of settings, from a YAML file or from the settings'
types and the table of ranges here.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.checkpoints.plain_files import Json
from gpurl.checks import choices_of
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.config_file import read_config
from gpurl.run.members import member_settings
from gpurl.run.settings import (
    Settings,
    TrainConfig,
    check_type,
    make_settings,
    merge,
    unknown_setting,
)

Range = dict[str, Json]

# the ranges in which settings are usually sought; `default_space` takes those that an algorithm has
RANGES: dict[str, Range] = {
    "learning_rate": {"low": 3e-5, "high": 1e-2, "log": True},
    "gamma": {"choices": [0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999]},
    # on rollouts
    "gae_lambda": {"low": 0.8, "high": 1.0},
    "q_lambda": {"low": 0.5, "high": 1.0},
    "clip_range": {"low": 0.1, "high": 0.4},
    "entropy_coef": {"low": 1e-5, "high": 0.1, "log": True},
    "epochs": {"low": 1, "high": 10},
    "minibatches": {"choices": [1, 2, 4, 8, 16, 32]},
    "horizon": {"choices": [8, 16, 32, 64, 128]},
    # on a replay buffer
    "batch_size": {"choices": [64, 128, 256, 512]},
    "n_step": {"low": 1, "high": 5},
    "tau": {"low": 1e-3, "high": 0.1, "log": True},
    "noise_std": {"low": 0.05, "high": 0.5},
    "epsilon_fraction": {"low": 0.05, "high": 0.5},
}
OF_ROLLOUTS = "minibatches"  # a setting of those algorithms alone whose horizon is a rollout's
MIN_ITERATIONS = 8  # of a training, for a horizon to be tried by default
OF_TRAINING = ("num_envs",)  # of TrainConfig, which can be sampled too
KEYS = ("low", "high", "log", "choices")


@dataclass(frozen=True)
class Dimension:
    """One setting of the space: a range of numbers, or choices."""

    name: str  # with a point for a group, as network.hidden
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()

    def distribution(self) -> Any:
        """Optuna's own form."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution([_as_text(each) for each in self.choices])
        if self.is_whole:
            return distributions.IntDistribution(int(self.low), int(self.high), self.log)
        return distributions.FloatDistribution(self.low, self.high, self.log)

    def value(self, sampled: object) -> Any:
        """The setting's value for what Optuna has sampled; UsageError for what is not in the
        dimension, as a changed storage may give.
        """
        if self.choices:
            for each in self.choices:
                if type(_as_text(each)) is type(sampled) and _as_text(each) == sampled:
                    return each
        elif type(sampled) in (int, float) and self.low <= typing.cast(float, sampled) <= self.high:
            return int(typing.cast(int, sampled)) if self.is_whole else sampled
        raise UsageError(f"{sampled!r} is not in {self.name}, {self.as_dict()}")

    def as_dict(self) -> dict[str, Json]:
        """As it is written in a file."""
        if self.choices:
            return {"choices": [list(x) if isinstance(x, tuple) else x for x in self.choices]}
        number = int if self.is_whole else float
        ends: Range = {"low": number(self.low), "high": number(self.high)}
        return ends | {"log": True} if self.log else ends


Space = dict[str, Dimension]


def _as_text(choice: Any) -> Any:
    """A choice as Optuna stores it, which has no lists."""
    return json.dumps(choice) if isinstance(choice, tuple) else choice


def default_space(settings: Settings) -> Space:
    """The ranges of RANGES that the algorithm has and accepts; of a population those in which its
    members may differ.
    """
    config, train = settings.algorithm_config, settings.train
    known = {item.name for item in dataclasses.fields(config)}
    names = known & RANGES.keys()
    if OF_ROLLOUTS not in known:
        names.discard("horizon")
    if train.population > 1:
        names &= {*member_settings(type(config))}
    space = {}
    for name in filter(names.__contains__, RANGES):
        given = dict(RANGES[name])
        # rollouts that are divided evenly, and more than a few of them
        if name == "minibatches":
            given["choices"] = [x for x in given["choices"] if train.num_envs % x == 0]  # type: ignore[union-attr, operator]
        if name == "horizon":
            most = train.total_steps / (train.num_envs * MIN_ITERATIONS)
            given["choices"] = [x for x in given["choices"] if x <= most]  # type: ignore[union-attr, operator]
        if given.get("choices") == []:
            continue
        dimension = _dimension(name, given, type(config), "the default space")
        try:  # a2c takes no epochs
            end = dimension.choices[-1] if dimension.choices else dimension.high
            dataclasses.replace(config, **{name: dimension.value(end)})
        except UsageError:
            continue
        space[name] = dimension
    return space


def read_space(path: Path, settings: Settings) -> Space:
    """The space of a YAML file, `setting: {low: 1e-5, high: 1e-2, log: true}`, `{choices: [...]}`
    or `{}` for what is known of the setting; UsageError for what names no setting or is no range.
    """
    config = type(settings.algorithm_config)
    space = {}
    for name, given in read_config(path, follows=True).items():
        space[name] = _dimension(name, given, config, str(path))
        if settings.train.population > 1 and name not in member_settings(config):
            raise UsageError(
                f"{path}: members of a population cannot differ in {name}; they can in "
                f"{', '.join(member_settings(config))}. Without --population each trial is a run "
                f"of its own"
            )
    if not space:
        raise UsageError(f"{path} names no setting: a line is `gamma: {{low: 0.9, high: 0.999}}`")
    return space


def _dimension(name: str, given: Json, config: type[AlgorithmConfig], source: str) -> Dimension:
    """One line of a space; source: the file, for errors."""
    try:
        hint, known_choices = _type_of(name, config)
        if given is None or given == {}:
            given = _known_range(name, hint, known_choices)
        if not isinstance(given, dict):
            raise UsageError(
                f"{name} is {given!r}; it must be {{low: ..., high: ...}} or {{choices: [...]}}"
            )
        for key in given:
            if key not in KEYS:
                raise UsageError(
                    f"{name} has {key!r}; {did_you_mean(str(key), KEYS)}a range has low, high and "
                    f"log, or choices"
                )
        if "choices" in given:
            return _choices(name, given, hint, known_choices)
        return _range(name, given, hint)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _choices(name: str, given: Range, hint: object, known: tuple[str, ...]) -> Dimension:
    values = given["choices"]
    if len(given) > 1:
        raise UsageError(f"{name} has choices and {', '.join(given)}: leave out one of them")
    if not isinstance(values, list) or not values:
        raise UsageError(f"{name} has the choices {values!r}; they must be a list, not empty")
    checked = [check_type(name, tuple(x) if isinstance(x, list) else x, hint) for x in values]
    for value in checked:
        if known and value not in known:
            guess = did_you_mean(str(value), known)
            raise UsageError(
                f"{name} has the choice {value!r}; {guess}it can be {', '.join(known)}"
            )
        if isinstance(value, dict):
            raise UsageError(f"{name} has the choice {value!r}; it must be a value or a list")
    return Dimension(name, choices=tuple(dict.fromkeys(checked)))


def _range(name: str, given: Range, hint: object) -> Dimension:
    kinds = {*(typing.get_args(hint) or (hint,))} - {NoneType}
    if not kinds <= {int, float}:
        raise UsageError(f"{name} is no number: give {{choices: [...]}}")
    if missing := [key for key in ("low", "high") if key not in given]:
        raise UsageError(f"{name} has no {' and no '.join(missing)}: {given}")
    number = int if kinds == {int} else float
    low, high = (check_type(f"{key} of {name}", given[key], number) for key in ("low", "high"))
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise UsageError(f"log of {name} is {log!r}; it must be true or false")
    low, high = typing.cast(float, low), typing.cast(float, high)
    if not low < high or high - low == float("inf"):
        raise UsageError(f"{name} goes from {low} to {high}: low must be below high")
    if log and low <= 0:
        raise UsageError(f"{name} goes from {low} on a logarithmic scale: low must be above 0")
    return Dimension(name, low, high, log, number is int)


def _known_range(name: str, hint: object, choices: tuple[str, ...]) -> Range:
    """What is known of a setting that a file names without a range."""
    if name in RANGES:
        return RANGES[name]
    if choices:
        return {"choices": list(choices)}
    if hint is bool:
        return {"choices": [False, True]}
    raise UsageError(f"{name} has no range of its own: give {{low: ..., high: ...}} or choices")


def _type_of(name: str, config: type) -> tuple[object, tuple[str, ...]]:
    """(type, known choices) of the setting `name`, with points for groups."""
    if name in OF_TRAINING:
        return int, ()
    if name in {item.name for item in dataclasses.fields(TrainConfig)}:
        raise UsageError(f"{name} cannot be searched: give it as --{name.replace('_', '-')}")
    *groups, last = name.split(".")
    kind: Any = config
    for group in groups:
        hints = typing.get_type_hints(kind)
        if group not in hints:
            raise UsageError(unknown_setting(group, {*hints, *OF_TRAINING}))
        kind = hints[group]
        if not dataclasses.is_dataclass(kind):
            raise UsageError(f"{group} is no group of settings, got {name}")
    known = {item.name for item in dataclasses.fields(kind)}
    if last not in known:
        raise UsageError(unknown_setting(last, known if groups else {*known, *OF_TRAINING}))
    hint = typing.get_type_hints(kind)[last]
    if dataclasses.is_dataclass(hint):
        example = dataclasses.fields(hint)[0].name
        raise UsageError(f"{name} is a group of settings: write {name}.{example}")
    return hint, choices_of(kind).get(last, ())


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`settings` with sampled values in their place; UsageError for a combination that excludes
    itself.
    """
    changes: dict[str, object] = {}
    for name, value in values.items():
        for group in reversed(name.split(".")):
            value = {group: value}
        changes = merge(changes, value)
    saved = settings.to_dict()
    algorithm, env = (str(saved.pop(key)) for key in ("algorithm", "env"))
    return make_settings(algorithm, env, **merge(saved, changes))
