"""Settings of a run: defaults, then the preset of the task, then a file, then what the user typed;
the last one wins.
"""

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from gpurl.checkpoints.plain_files import read_at_most
from gpurl.checks import check_choices, check_numbers
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.logger import ALIASES

LEAST = {
    **{"num_envs": 1, "total_steps": 1, "keep_checkpoints": 1, "threads": 1, "eval_every": 1},
    **{"eval_episodes": 0, "seed": 0, "log_every": 0},
}


MAX_THREADS = 4096
CHOICES: dict[str, tuple[str, ...]] = {
    "nan": ("raise", "skip", "reset-envs"),
    "tag_style": tuple(ALIASES),
    "graph": ("auto", "full", "policy", "off"),
    "rollout": ("auto", "persistent", "steps"),
    "precision": ("float32", "tf32", "bf16"),
}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop, the same for every algorithm."""

    num_envs: int = 4096
    """Environments stepped together."""
    total_steps: int = 20_000_000
    """Environment steps, summed over environments, after which training ends."""
    seed: int = 0
    """Seed of the weights, the environments and the exploration."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ..., or auto: cuda if there is one."""
    max_seconds: float | None = None
    """Stop after this much wall-clock time, counted anew when a run is resumed."""
    stop_return: float | None = None
    """Stop when an evaluation reaches this mean return."""
    eval_every: int | None = None
    """Environment steps between evaluations; by default a tenth of total_steps."""
    eval_episodes: int = 64
    """Episodes of an evaluation, greedy, in environments of their own; 0 evaluates never."""
    save_every: str = "60s"
    """Time (60s) or iterations (100i) between checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside the best."""
    log_every: float = 1.0
    """Seconds between log entries."""
    tag_style: str = "sb3"
    """TensorBoard names: sb3, cleanrl, rsl_rl or rl_games."""
    nan: str = "raise"
    """What to do about NaN or infinity from an environment: raise an error, skip (those steps are
    not trained on) or reset-envs (and their environments restart before the next rollout). An
    optimiser step whose gradient or loss is not finite is always left out and told once; all steps
    of an iteration, 8 at least, end the run only with raise, weights that are not finite always.
    """
    stagger: bool = True
    """Start environments at different clocks, so that time limits do not all fall on one step."""
    graph: str = "auto"
    """CUDA graphs: full (the whole iteration), policy (all but the environment), off, or auto, the
    most that the environment allows.
    """
    rollout: str = "auto"
    """persistent (one kernel plays a whole rollout), steps, or auto: persistent where the task and
    the policy have it, on a GPU.
    """
    precision: str = "float32"
    """Of the networks' products: float32, tf32 (a GPU's, 3 digits) or bf16 (2 digits, no persistent
    rollout); weights and gradients stay float32."""
    compile: bool = False
    """Compile the environment's own functions with torch.compile: fewer launches for tasks without
    Triton functions, a slow start.
    """
    deterministic: bool = False
    """The same bits every time on the same device and versions: deterministic operations only, and
    threads not chosen by the clock.
    """
    threads: int | None = None
    """CPU threads; by default measured at the start: the quickest number up to what torch
    chooses.
    """
    root: str = "runs"
    """Folder under which the run folder is made."""
    run_dir: str | None = None
    """The run folder itself; by default ROOT/env/algorithm/time_seed."""
    quiet: bool = False
    """Print nothing but errors."""

    def __post_init__(self) -> None:
        check_choices(self, CHOICES)
        check_numbers(self, LEAST, above_zero=("max_seconds",))
        if self.graph == "policy" and self.rollout == "persistent":
            raise UsageError(
                "graph policy steps the environment between graphs, rollout persistent plays it in "
                "one kernel: take one of them"
            )
        if self.stop_return is not None and self.eval_episodes == 0:
            raise UsageError(
                f"stop_return {self.stop_return} needs evaluations, but eval_episodes is 0: they "
                f"would never be played"
            )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(f"threads must be at most {MAX_THREADS}, got {self.threads}")
        parse_interval(self.save_every)


def parse_interval(text: str) -> tuple[float | None, int | None]:
    """(seconds, iterations), one of them None: '60', '60s' or '100i'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|i|it|iterations)?", text.strip())
    if match is None or (match[2] not in (None, "s") and "." in match[1]) or float(match[1]) <= 0:
        raise UsageError(f"save_every is {text!r}; it must be seconds as 60s or iterations as 100i")
    return (float(match[1]), None) if match[2] in (None, "s") else (None, int(match[1]))


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    algorithm: str
    env: str
    train: TrainConfig
    algorithm_config: Any  # the algorithm's own dataclass
    env_options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, as written to config.yaml, without the run's folder;
        `make_settings(**...)` takes them back.
        """
        values = {
            "algorithm": self.algorithm,
            "env": self.env,
            "env_options": _plain(dict(self.env_options)),
        }
        values |= dataclasses.asdict(self.train) | _plain(dataclasses.asdict(self.algorithm_config))
        del values["run_dir"]
        return values


def make_settings(algorithm: str, env: str, **values: Any) -> Settings:
    """Settings for `algorithm` on `env`: defaults, preset, then `values` (fields of TrainConfig and
    of the algorithm, env_options).

    Raises UsageError for a name that nothing has, or a value of the wrong kind.
    """
    from gpurl.algorithms import config_class, resolve_algorithm
    from gpurl.envs.registry import check_options, option_types, resolve_env
    from gpurl.run.presets import name_for_presets, preset

    env_class, _ = resolve_env(env)
    algorithm_class = resolve_algorithm(algorithm)
    algorithm_config = config_class(algorithm_class)
    of_algorithm = name_for_presets(algorithm, algorithm_class, "gpurl.algorithms")
    of_env = name_for_presets(env, env_class, "gpurl.envs")
    merged = merge(preset(of_algorithm, of_env), values)
    options = merged.pop("env_options", {})
    if not isinstance(options, dict):
        raise UsageError(f"env_options is {options!r}; it must be `name: value` pairs")
    options = dict(options)
    check_options(env, env_class, options)
    hints = option_types(env_class)
    for name, value in options.items():
        if isinstance(value, list) and typing.get_origin(hints.get(name)) is tuple:
            value = tuple(value)  # as YAML gives it
        options[name] = _checked(f"env option {name}", value, hints.get(name, Any))
        if (kind := _unwritable(options[name])) is not None:
            raise UsageError(
                f"env option {name} holds a {kind}; a run is written down to be resumed, so its "
                f"options are Python's numbers, texts, and "
                "lists and dicts of them. What cannot be written goes into a module of your own: "
                "docs/environments.md shows one"
            )
    train_fields = {item.name for item in dataclasses.fields(TrainConfig)}
    train = build(
        TrainConfig, {name: value for name, value in merged.items() if name in train_fields}
    )
    rest = {name: value for name, value in merged.items() if name not in train_fields}
    return Settings(
        algorithm, env, train, build(algorithm_config, rest, also=train_fields), dict(options)
    )


def build_algorithm_config(algorithm: str, saved: dict[str, Any]) -> Any:
    """The algorithm's settings out of `Settings.to_dict()`, without looking for the environment."""
    from gpurl.algorithms import config_class, resolve_algorithm

    kind = config_class(resolve_algorithm(algorithm))
    names = {item.name for item in dataclasses.fields(kind)}
    return build(kind, {name: value for name, value in saved.items() if name in names})


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, nested dicts merged."""
    result = dict(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merge(result[name], value) if both else value
    return result


def build(kind: type, values: dict[str, Any], also: set[str] | None = None) -> Any:
    """A dataclass `kind` from plain values (nested dicts for nested dataclasses), each checked
    against the field's type.
    """
    hints = _hints(kind)
    nested: dict[str, Any] = {item.name: item.default_factory for item in dataclasses.fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UsageError(_unknown_setting(name, kind, set(hints) | (also or set())))
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            try:
                value = build(
                    hints[name], merge(dataclasses.asdict(nested[name]()), value)
                )  # over what this dataclass starts it with
            except UsageError as error:  # which cannot know what it is called here
                raise UsageError(f"{name}: {error}") from None
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = _checked(name, value, hints[name])
    return kind(**arguments)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the type `hint`; a whole float passes for an int, an int for a float."""
    import torch
    import typeguard

    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, (PurePath, torch.device)):
        value = str(value)  # run_dir, device
    if _is_stray_bool(value, hint):
        raise UsageError(f"{name} is {value!r}; it must be {_in_words(hint)}")
    if isinstance(value, int) and not isinstance(value, bool) and "float" in str(hint):
        value = float(value)
    elif isinstance(value, float) and value.is_integer() and hint in (int, int | None):
        value = int(value)  # total_steps=1e6
    elif hint is str and type(value) in (int, float):
        value = str(value)  # save_every: 60 in YAML
    try:
        return typeguard.check_type(value, hint)
    except typeguard.TypeCheckError:
        raise UsageError(f"{name} is {value!r}; it must be {_in_words(hint)}") from None


def _is_stray_bool(value: Any, hint: Any) -> bool:
    """Whether True or False stands for a number, which it is to Python."""
    parts = typing.get_args(hint)
    if isinstance(value, tuple):
        return (
            any(_is_stray_bool(item, parts[0]) for item in value)
            if typing.get_origin(hint) is tuple
            else False
        )
    return (
        isinstance(value, bool)
        and any(kind in (int, float) for kind in (hint, *parts))
        and bool not in (hint, *parts)
    )


def _in_words(hint: Any) -> str:
    """`int`, `float or None`, `a list of int`."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"a list of {_in_words(parts[0])}"
    if parts and typing.get_origin(hint) is not dict:
        return " or ".join(map(_in_words, parts))
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))


def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def _unknown_setting(name: str, kind: type, known: set[str]) -> str:
    return (
        f"no setting is called {name!r}; {did_you_mean(name, known)}Known: "
        f"{', '.join(sorted(known))}"
    )


def _unwritable(value: Any) -> str | None:
    """The type of the first thing in `value` that YAML and JSON cannot hold, None where they can
    hold all.
    """
    if isinstance(value, dict):
        keys = (f"key of type {type(name).__name__}" for name in value if not isinstance(name, str))
        return next(keys, None) or _unwritable(list(value.values()))
    if isinstance(value, list | tuple):
        return next(filter(None, map(_unwritable, value)), None)
    return None if value is None or type(value) in (bool, int, float, str) else type(value).__name__


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML reads back what was written."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


MAX_CONFIG_BYTES, MAX_CONFIG_VALUES = 1 << 20, 10_000


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2 and everywhere else; to PyYAML it is text.
    Without merge keys.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for name, _ in node.value:
            if (
                name.tag == "tag:yaml.org,2002:merge"
            ):  # some hundred bytes of them would be multiplied to millions of values
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "merge keys (<<) are not taken, write the values out",
                    name.start_mark,
                )
        super().flatten_mapping(node)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )  # type: ignore[attr-defined]


def as_yaml(values: dict[str, Any]) -> bytes:
    """A file that `read_config` reads as `values`: dicts and lists of None, bool, int, float and
    printable str.
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


def read_config(path: str | Path) -> dict[str, Any]:
    """Values of a YAML file of settings; UsageError says what is wrong with it."""
    try:
        text = read_at_most(Path(path), MAX_CONFIG_BYTES)
        values = _Loader(text.decode("utf-8")).get_single_data()
        _count(values, MAX_CONFIG_VALUES)
    except FileNotFoundError:
        raise UsageError(f"there is no config file {path}") from None
    except (yaml.YAMLError, ValueError, TypeError, OSError, RecursionError) as error:
        raise UsageError(f"cannot read {path} as YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path} must hold `name: value` lines, got {type(values).__name__}")
    return values


def _count(value: Any, left: int) -> int:
    """`left` less the values in `value`; ValueError where they are more, as of aliases that name
    each other over and over.
    """
    items = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    left -= 1
    if left < 0:
        raise ValueError(f"it stands for more than {MAX_CONFIG_VALUES} values")
    for item in items:
        left = _count(item, left)
    return left
