"""Settings of a run: defaults, then the preset of the task, then a file, then the command line;
the last one wins.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np

from gpurl.checkpoints.plain_files import Json
from gpurl.checks import MAX_INTEGER, Choices, Dataclass, check_choices, check_numbers
from gpurl.discovery import algorithm_names
from gpurl.engine.pbt import RULES, PbtOptions
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.logger import ALIASES
from gpurl.run.members import member_configs, member_values
from gpurl.run.other_names import other_name_hint
from gpurl.run.pbt import explored_ranges, explored_spans, interval
from gpurl.run.presets.find import PRESET_NAMES, name_for_presets, preset
from gpurl.run.trackers.tracker import check_trackers

if TYPE_CHECKING:
    from gpurl.algorithms.base import AlgorithmConfig

Config = typing.TypeVar("Config", bound=Dataclass)

MINIMUMS = {
    "num_envs": 1,
    "population": 1,
    "total_steps": 1,
    "keep_checkpoints": 1,
    "threads": 1,
    "eval_every": 1,
    "video_every": 1,
    "pbt_every": 1,
    "eval_episodes": 0,
    "seed": 0,
    "log_every": 0,
}
# arguments of `gpurl.train` by other names, and what stands in its place
OF_PYTHON = {
    "callback": "gpurl.train takes callbacks=[...], a list of gpurl.Callback",
    "seeds": "gpurl.train trains one: gpurl.train_seeds(algorithm, env, seeds=5) or --seeds 5",
}
MAX_THREADS = 4096
MAX_POPULATION = 4096


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop, the same for every algorithm."""

    choices: ClassVar[Choices] = {
        "preset": PRESET_NAMES,
        "nan": ("raise", "skip", "reset-envs"),
        "tag_style": tuple(ALIASES),
        "graph": ("auto", "full", "policy", "off"),
        "rollout": ("auto", "persistent", "steps"),
        "update": ("auto", "fused", "autograd"),
        "stack": ("auto", "on", "off"),
        "precision": ("float32", "tf32", "bf16"),
        "pbt_rule": RULES,
    }

    preset: str = "auto"
    """Settings to start from, which files and flags override: auto (those found for the task),
    isaac or mjlab (ppo as Isaac Lab and mjlab configure rsl_rl; their own tasks have them anyway)
    or none.
    """
    num_envs: int = 4096
    """Environments stepped together."""
    total_steps: int = 20_000_000
    """Environment steps, summed over environments, after which training ends."""
    seed: int = 0
    """Seed of the weights, the environments and the exploration."""
    population: int = 1
    """Agents trained at once, each on num_envs environments of its own and for total_steps of its
    own, with the seeds seed, seed + 1, ...; --member.SETTING gives each of them another value.
    """
    pbt: bool = False
    """Population based training: the worst members of the population take over the weights,
    optimisers and normalisers of better ones, and go on with other settings: see --explore.SETTING.
    """
    pbt_every: int | None = None
    """Environment steps of a member between selections; by default a twentieth of total_steps."""
    pbt_rule: str = "truncation"
    """Who takes over whom: truncation (each of the worst a random one of the best), tournament
    (each another one that is better, if it draws such a one) or generation (all but the best ones
    draw anew, good members more often).
    """
    pbt_fraction: float = 0.25
    """Share of the population that counts as the worst, and as the best."""
    pbt_leaderboard: str | None = None
    """Folder of a leaderboard, which several runs may share, or a URL of fsspec (s3://bucket/board):
    members enter it and take over its entries, good ones more often, in place of each other
    (pbt_rule and pbt_fraction then mean nothing).
    """
    pbt_resample: float = 0.25
    """Probability that a member takes a new value of a setting from its range, in place of 0.8 or
    1.2 times the value that it took over.
    """
    device: str = "auto"
    """cpu, cuda, cuda:1, ..., or auto: cuda if there is a GPU."""
    max_seconds: float | None = None
    """Stop after this many seconds; a resumed run counts from 0."""
    stop_return: float | None = None
    """Stop when an evaluation reaches this mean return."""
    eval_every: int | None = None
    """Environment steps between evaluations; by default a tenth of total_steps, or more where
    evaluations on the way would take over a twentieth of the time. The last policy is evaluated in
    any case.
    """
    eval_episodes: int = 64
    """Episodes of an evaluation, played by the greedy policy in separate environments; 0: no
    evaluations.
    """
    video_every: int | None = None
    """Environment steps between videos of the greedy policy, RUN/videos/step_XXXXXXXXXXXX.mp4; the
    last policy is filmed too. None: no videos.
    """
    save_every: str = "60s"
    """Time (60s) or iterations (100i) between checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, besides the best."""
    log_every: float = 1.0
    """Seconds between log entries."""
    tag_style: str = "sb3"
    """TensorBoard names: sb3, cleanrl, rsl_rl or rl_games."""
    track: tuple[str, ...] = ()
    """Trackers beside the files of the run: wandb, trackio, mlflow."""
    project: str = "gpurl"
    """Project of the trackers."""
    nan: str = "raise"
    """If an environment gives NaN or infinity: raise an error, skip (do not train on those steps)
    or reset-envs (skip, and reset those environments before the next rollout). An optimiser step
    whose loss or gradient is not finite is always skipped, with one warning. Weights that are not
    finite always end the run; with raise, so do iterations whose steps are all skipped, at least 8
    in a row.
    """
    stagger: bool = True
    """Start environments at different clocks, so that time limits do not all fall on one step."""
    graph: str = "auto"
    """CUDA graphs: full (the whole iteration), policy (all but the environment), off, or auto: the
    most that the environment allows, on several processes none.
    """
    rollout: str = "auto"
    """persistent (one kernel plays a whole rollout), steps, or auto: persistent on a GPU if the
    task and the policy support it.
    """
    update: str = "auto"
    """fused (PPO's minibatch steps in a few kernels), autograd, or auto: fused on a GPU if the
    policy supports it.
    """
    stack: str = "auto"
    """Compute the members of a population side by side, each operation one launch for all (on), in
    turn, each by the fastest engine that it has alone (off), or auto: on on a GPU for algorithms
    and networks of gpurl, unless deterministic.
    """
    asynchronous: bool = False
    """Play the next rollout while the last one is learned from, by ppo or a2c; for simulators that
    cannot be captured in a CUDA graph. The policy that acts is one iteration old, and V-trace
    corrects the targets.
    """
    precision: str = "float32"
    """Precision of the networks' matrix products: float32, tf32 (GPU only, 3 digits) or bf16 (2
    digits, no persistent rollout). Weights and gradients stay float32."""
    compile: bool = False
    """Compile the environment's functions with torch.compile: fewer kernel launches for tasks
    without Triton functions, but a slow start.
    """
    deterministic: bool = False
    """Bit-identical results on the same device and versions: deterministic operations only, and the
    number of threads is not measured.
    """
    threads: int | None = None
    """CPU threads; by default the fastest number for the networks up to torch's, measured at the
    start, and all of torch's for MuJoCo's physics.
    """
    rank_timeout: float = 1800.0
    """With several processes: seconds that one waits for the others before the run ends."""
    root: str = "runs"
    """Folder that holds the run folders."""
    run_dir: str | None = None
    """The run folder; by default ROOT/env/algorithm/time_seed."""
    requeue: bool = False
    """Continue the run in run_dir if it has a checkpoint, else begin it: for a command that is
    started again, as by Slurm's requeue or on a machine that may be taken away.
    """
    quiet: bool = False
    """Print nothing but warnings and errors."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.eval_every == 0:
            raise UsageError(
                "eval_every must be at least 1, got 0: for no evaluations take eval_episodes 0"
            )
        above_zero = ("max_seconds", "rank_timeout", "pbt_fraction")
        check_numbers(self, MINIMUMS, above_zero, zero_to_one=("pbt_resample",))
        if self.graph == "policy" and self.rollout == "persistent":
            raise UsageError(
                "graph policy steps the environment between graphs, rollout persistent plays it in "
                "one kernel: choose one of them"
            )
        if self.asynchronous and self.rollout == "persistent":
            raise UsageError(
                "rollout persistent plays a rollout in one kernel, asynchronous plays it step by "
                "step beside the learning: choose one of them"
            )
        if self.population > 1:
            self._check_population()
        elif self.stack == "on":
            raise UsageError("stack on is for the members of a population: take --population 8")
        self._check_pbt()
        if self.stop_return is not None and self.eval_episodes == 0:
            raise UsageError(
                f"stop_return {self.stop_return} needs evaluations, but eval_episodes is 0"
            )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(f"threads must be at most {MAX_THREADS}, got {self.threads}")
        if self.requeue and self.run_dir is None:
            raise UsageError(
                "--requeue needs --run-dir FOLDER, in which the same command finds its run"
            )
        parse_interval(self.save_every)
        check_trackers(self.track)

    def _check_pbt(self) -> None:
        """UsageError for selection without members, or of more than half of them."""
        if self.pbt and self.population == 1:
            raise UsageError("pbt selects among members, population is 1: take --population 8")
        for name in ("pbt_every", "pbt_leaderboard"):
            if (value := getattr(self, name)) is not None and not self.pbt:
                raise UsageError(f"{name} {value} goes with --pbt")
        if self.pbt_fraction > 0.5:
            raise UsageError(
                f"pbt_fraction must be at most 0.5, as the worst take over the best, got "
                f"{self.pbt_fraction}"
            )

    def _check_population(self) -> None:
        """UsageError for what the engine of a population cannot do."""
        size = self.population
        if self.stack == "on" and self.update == "fused":
            raise UsageError(
                "update fused has kernels of each member, stack on operations of all: leave out one"
            )
        if size > MAX_POPULATION:
            raise UsageError(f"population must be at most {MAX_POPULATION}, got {size}")
        if self.asynchronous:
            raise UsageError(
                f"population {size} learns after collecting: leave out asynchronous, or train one "
                f"agent"
            )
        wrong = {"graph": ("full", "policy"), "rollout": ("persistent",), "nan": ("reset-envs",)}
        instead = {"graph": "auto or off", "rollout": "auto or steps", "nan": "raise or skip"}
        for name, values in wrong.items():
            if (value := getattr(self, name)) in values:
                raise UsageError(
                    f"population {size} takes {name} {instead[name]}, got {value}: change it, or "
                    f"train one agent"
                )


def parse_interval(text: str) -> tuple[float | None, int | None]:
    """(seconds, iterations) of '60', '60s' or '100i'; one of them is None."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|i|it|iterations)?", text.strip())
    in_seconds = match is not None and match[2] in (None, "s")
    if match is None or float(match[1]) <= 0 or ("." in match[1] and not in_seconds):
        raise UsageError(f"save_every is {text!r}; it must be seconds as 60s or iterations as 100i")
    return (float(match[1]), None) if in_seconds else (None, int(match[1]))


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    algorithm: str
    env: str
    train: TrainConfig
    algorithm_config: "AlgorithmConfig"  # the algorithm's own subclass
    env_options: dict[str, Any] = field(default_factory=dict)
    # settings of the algorithm that members of a population do not share: one value for each
    member: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # what population based training explores: the range of each setting; {}: the algorithm's own
    explore: dict[str, tuple[float, float]] = field(default_factory=dict)

    def check(self) -> None:
        """UsageError for settings of members, and of their selection, that do not fit."""
        self.member_configs()
        self.pbt_options()

    def pbt_options(self) -> PbtOptions | None:
        """How members are selected; None if they are not."""
        train, config = self.train, self.algorithm_config
        if not train.pbt:
            if self.explore:
                raise UsageError(f"explore.{next(iter(self.explore))} goes with --pbt")
            return None
        if len(scales := {*self.member.get("reward_scale", ())}) > 1:
            raise UsageError(
                f"member.reward_scale has {len(scales)} values: pbt copies critics from member to "
                f"member, whose values are of scaled rewards, so give all one reward_scale"
            )
        every = interval(train.pbt_every, train.total_steps, train.num_envs, config.horizon)
        spans = explored_spans(config, self.explore)
        return PbtOptions(every, train.pbt_rule, train.pbt_fraction, train.pbt_resample, spans)

    def member_configs(self) -> "list[AlgorithmConfig]":
        """The algorithm's settings of each member of the population, or of the one agent."""
        return member_configs(self.algorithm_config, self.train.population, self.member)

    def to_dict(self) -> dict[str, Json]:
        """Plain nested values, as written to config.yaml, without the run's folder and whether to
        continue what is there; `make_settings(**...)` reads them back.
        """
        values = {
            "algorithm": self.algorithm,
            "env": self.env,
            "env_options": self.env_options,
            "member": self.member,
            "explore": self.explore,
            **dataclasses.asdict(self.train),
            **dataclasses.asdict(self.algorithm_config),
        }
        del values["run_dir"], values["requeue"]
        return {name: _tuples_to_lists(value) for name, value in values.items()}


def make_settings(algorithm: str, env: str, **values: object) -> Settings:
    """Settings for `algorithm` on `env`: defaults, preset, then `values` (fields of TrainConfig and
    of the algorithm, env_options, member, explore).

    Raises UsageError for an unknown name, a value of the wrong type, and values that are out of
    range or exclude each other.
    """
    return _make_settings(algorithm, env, values, is_final=True)


def make_defaults(algorithm: str, env: str, values: Mapping[str, object]) -> Settings:
    """`make_settings` of values that flags may still change: their names and types are checked,
    ranges and combinations are not.
    """
    return _make_settings(algorithm, env, values, is_final=False)


def _make_settings(
    algorithm: str, env: str, values: Mapping[str, object], is_final: bool
) -> Settings:
    from gpurl.algorithms import config_class, resolve_algorithm
    from gpurl.envs.registry import resolve_env

    # defaults and preset, overridden by the values
    env_class, in_name = resolve_env(env)
    algorithm_class = resolve_algorithm(algorithm)
    refuse_memory(algorithm, values.get("network"))
    algorithm_preset = name_for_presets(algorithm, algorithm_class, "gpurl.algorithms")
    env_preset = name_for_presets(env, env_class, "gpurl.envs")
    if env in gymnasium.registry:  # an id alone
        env_preset = f"{env_preset}:{in_name['task']}"
    num_envs = values.get("num_envs")
    device, name = values.get("device", "auto"), values.get("preset", "auto")
    base = preset(algorithm_preset, env_preset, num_envs, device, name)
    merged = merge(base, values)
    options = _check_env_options(env, merged.pop("env_options", {}))
    of_members = merged.pop("member", {})
    ranges = merged.pop("explore", {})
    # the other settings belong to the training loop or to the algorithm
    train_names = {item.name for item in dataclasses.fields(TrainConfig)}
    of_train = {name: value for name, value in merged.items() if name in train_names}
    of_algorithm = {name: value for name, value in merged.items() if name not in train_names}
    train = build(TrainConfig, of_train, is_final=is_final)
    algorithm_config = build(
        config_class(algorithm_class), of_algorithm, known=train_names, is_final=is_final
    )
    member = member_values(type(algorithm_config), of_members)
    explore = explored_ranges(type(algorithm_config), ranges)
    settings = Settings(algorithm, env, train, algorithm_config, options, member, explore)
    if is_final:
        settings.check()
    return settings


def refuse_memory(algorithm: str, network: object) -> None:
    """UsageError for a memory among the settings `network` of an algorithm whose policies have
    none. It names the algorithms that have one, which a list of known settings would not.
    """
    from gpurl.algorithms import algorithm_names, config_class, resolve_algorithm

    def has_memory(name: str) -> bool:
        hints = typing.get_type_hints(config_class(resolve_algorithm(name)))
        return hasattr(hints.get("network"), "memory")

    memory = network.get("memory", "none") if isinstance(network, dict) else "none"
    if memory == "none" or has_memory(algorithm):
        return
    others = " or ".join(filter(has_memory, algorithm_names()))
    raise UsageError(
        f"policies of {algorithm} have no memory, network.memory is {memory!r}: take {others}, or "
        f"leave it out"
    )


def _check_env_options(env: str, options: object) -> dict[str, Any]:
    """The task's options, each of its type, of values that a file can hold."""
    from gpurl.envs.registry import check_options, option_types, resolve_env

    env_class, _ = resolve_env(env)
    if not isinstance(options, dict):
        raise UsageError(f"env_options is {options!r}; it must be `name: value` pairs")
    check_options(env, env_class, options)
    hints = option_types(env_class)
    checked = {}
    for name, value in options.items():
        # YAML has no tuples; also tuple[int, ...] | None
        hint = hints.get(name, object)
        kinds = {typing.get_origin(each) for each in (hint, *typing.get_args(hint))}
        if isinstance(value, list) and tuple in kinds:
            value = tuple(value)
        elif isinstance(value, tuple) and list in kinds:
            value = list(value)
        checked[name] = check_type(f"env option {name}", value, hint)
        if (kind := _unwritable_type(checked[name])) is not None:
            raise UsageError(
                f"env option {name} holds a {kind}; options are saved with the run, so they must "
                f"be numbers, strings, lists and dicts. Anything else goes into a module of your "
                f"own: docs/environments.md shows one"
            )
    return checked


def build_algorithm_config(algorithm: str, saved: Mapping[str, object]) -> "AlgorithmConfig":
    """The algorithm's settings from `Settings.to_dict()`, without resolving the environment."""
    from gpurl.algorithms import config_class, resolve_algorithm

    kind = config_class(resolve_algorithm(algorithm))
    names = {item.name for item in dataclasses.fields(kind)}
    return build(kind, {name: value for name, value in saved.items() if name in names})


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`base` with the values of `over`; nested dicts are merged."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge(old, value)
        result[name] = value
    return result


def build(
    kind: type[Config],
    values: Mapping[str, object],
    known: Collection[str] = (),
    is_final: bool = True,
) -> Config:
    """A dataclass `kind` from plain values (nested dicts for nested dataclasses), each checked
    against its field's type. known: settings of other dataclasses, for error messages. is_final:
    also run the checks of `__post_init__`.
    """
    fields = {item.name: item for item in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in fields:
            raise UsageError(unknown_setting(name, {*fields, *known}))
        hint = hints[name]
        # a nested dataclass: the values override those that the field starts with
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
            factory = fields[name].default_factory
            assert factory is not dataclasses.MISSING
            try:
                inner = merge(dataclasses.asdict(factory()), value)
                value = build(hint, inner, is_final=is_final)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = check_type(name, value, hint)
    make: Callable[..., Config] = kind
    if is_final:
        return make(**arguments)
    # into an instance of the class's own defaults, past its checks
    config = make()
    for name, value in arguments.items():
        object.__setattr__(config, name, value)
    return config


def check_type(name: str, value: object, hint: object) -> object:
    """`value` if it is of the type `hint`; a whole float passes for an int, an int for a float, a
    number for a string.
    """
    import torch
    import typeguard

    # values of numpy, paths and devices as Python's
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, (PurePath, torch.device)):
        value = str(value)
    # one name for a list of them: teacher=RUN
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = (value,)
    for each in value if isinstance(value, tuple) else (value,):
        if type(each) is int and abs(each) > MAX_INTEGER:
            raise UsageError(f"{name} must be below 2^63, got a number of {each.bit_length()} bits")
    # numbers as the setting's type: total_steps=1e6, save_every: 60
    is_bool = _bool_for_number(value, hint)
    if not is_bool:
        if isinstance(value, int) and not isinstance(value, bool) and "float" in str(hint):
            value = float(value)
        elif isinstance(value, float) and value.is_integer() and hint in (int, int | None):
            value = int(value)
        elif hint is str and type(value) in (int, float):
            value = str(value)
        try:
            return typeguard.check_type(value, hint)
        except typeguard.TypeCheckError:
            pass
    raise UsageError(f"{name} is {value!r}; it must be {_describe_type(hint)}")


def _bool_for_number(value: object, hint: object) -> bool:
    """Whether True or False stands for a number; Python itself allows it."""
    kinds = typing.get_args(hint)
    if isinstance(value, tuple):
        is_tuple = typing.get_origin(hint) is tuple
        return is_tuple and any(_bool_for_number(item, kinds[0]) for item in value)
    kinds = (hint, *kinds)
    return isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds)


def _describe_type(hint: object) -> str:
    """`int`, `float or None`, `a list of int`."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) in (tuple, list):
        return f"a list of {_describe_type(kinds[0])}"
    if kinds and typing.get_origin(hint) is not dict:
        return " or ".join(map(_describe_type, kinds))
    return "None" if hint is NoneType else str(getattr(hint, "__name__", hint))


def unknown_setting(name: str, known: set[str]) -> str:
    if name in algorithm_names():
        return f"no setting is called {name!r}; those of {name} have no block: learning_rate: 0.001"
    if name in OF_PYTHON:
        return f"no setting is called {name!r}; {OF_PYTHON[name]}"
    # its name elsewhere, a flag's, or a similar one
    text = other_name_hint(name, known, _as_argument)
    if not text and name.partition(".")[0] in known:
        text = f"here it is {_as_argument(name)}"
    text = f"{text}. " if text else did_you_mean(name, known)
    # all names only where none of them is meant
    rest = "gpurl config ALGORITHM ENV prints all" if text else f"Known: {', '.join(sorted(known))}"
    return f"no setting is called {name!r}; {text}{rest}"


def _as_argument(setting: str) -> str:
    """`horizon`, or `network={"hidden": ...}`."""
    group, dot, name = setting.partition(".")
    return f'{group}={{"{name}": ...}}' if dot else setting


def _unwritable_type(value: object) -> str | None:
    """The type of the first thing in `value` that YAML and JSON cannot hold, None if they can hold
    it all.
    """
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                return f"key of type {type(name).__name__}"
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next(filter(None, map(_unwritable_type, value)), None)
    return None if type(value) in (bool, int, float, str, NoneType) else type(value).__name__


def _tuples_to_lists(value: object) -> Json:
    """YAML and JSON have no tuples."""
    if isinstance(value, dict):
        return {name: _tuples_to_lists(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_tuples_to_lists(item) for item in value]
    return typing.cast(Json, value)
