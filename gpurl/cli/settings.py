"""Turns the words behind `gpurl train`, `gpurl tune`, `gpurl profile` and `gpurl convert` into
settings, by tyro and a dataclass of everything that can be set.
"""

import dataclasses
import itertools
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from gpurl.algorithms import config_class, resolve_algorithm
from gpurl.checks import Choices, check_choices, choices_of, may_be_module
from gpurl.cli.env_options import members_class, options_class, ranges_class
from gpurl.cli.flags import MODULE, WHOLE_NUMBERS, check_flags, check_known_flags, flag_name
from gpurl.cli.names_page import HELP, names_page
from gpurl.discovery import algorithm_names
from gpurl.envs.registry import check_options, resolve_env
from gpurl.errors import UsageError
from gpurl.nn.encoders import CONVOLUTIONAL
from gpurl.run.config_file import read_config
from gpurl.run.members import member_values
from gpurl.run.other_names import other_name_hint
from gpurl.run.pbt import explored_ranges
from gpurl.run.settings import Settings, TrainConfig, make_defaults, merge, refuse_memory

Options = TypeVar("Options")

SETTING = re.compile(r"(?:--)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
# settings that `gpurl.cli.convert.policy` derives from the weights
SET_BY_WEIGHTS = {
    "network.trunk",
    "network.hidden",
    "network.shared",
    "network.memory",
    "network.memory-size",
    "normalize-obs",
    "normalize-value",
    "asymmetric",
    "squash",
    "distribution",
    "std-type",
    "state-dependent-std",
}


@dataclass(frozen=True)
class TrainOptions:
    """What `gpurl train` takes beside the settings."""

    resume: Path | None = None
    """Continue the run in this folder, or one of its checkpoints in a new folder, run_dir; no
    ALGORITHM and ENV then.
    """
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    callback: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """MODULE:CLASS of a callback of your own; may be given several times."""
    seeds: int = 1
    """Train this many seeds and print their mean: as a population in one run where that is
    possible, else one after another.
    """
    jobs: int | None = None
    """With seeds: a run of its own for each, so many at a time; from two on each in a process with
    one thread, unless threads is set.
    """
    processes: int = 1
    """Train one agent on this many processes of this machine: one for each GPU, or all on the CPU.
    num_envs and batch_size are those of all together.
    """
    max_restarts: int = 0
    """With processes: how many times all start again, from the last checkpoint, if one dies; needs
    --run-dir.
    """


@dataclass(frozen=True)
class ConfigOptions:
    """What `gpurl config` takes beside the settings."""

    config: Path | None = None
    """YAML file with settings; flags win over it."""


@dataclass(frozen=True)
class ProfileOptions:
    """What `gpurl profile` takes beside the settings."""

    config: Path | None = None
    """YAML file with settings; flags win over it."""
    out: Path | None = None
    """Folder of the trace and the table."""
    iterations: int = 3
    """Iterations to measure."""
    warm_up: int = 4
    """Iterations before, which are not measured."""


@dataclass(frozen=True)
class TuneOptions:
    """What `gpurl tune` takes beside the settings, which are the same in all trials where the space
    has nothing else.
    """

    choices: ClassVar[Choices] = {"sampler": ("tpe", "random")}

    config: Path | None = None
    """YAML file with settings; flags win over it."""
    trials: int = 30
    """Trials in all, with those that the storage has already."""
    space: Path | None = None
    """YAML file of ranges, as learning_rate: {low: 1e-5, high: 1e-2, log: true}; by default usual
    ranges of the algorithm's settings.
    """
    storage: Path | None = None
    """FILE.journal or FILE.db (SQLite) of the trials, whose runs go into the folder FILE; by
    default ROOT/env/algorithm/tuning.journal. If it is there, its tuning goes on.
    """
    jobs: int = 1
    """Trainings at a time, each in a process with one thread, unless threads is set."""
    prune: bool = True
    """End trials that are worse than the median of the others at the same step."""
    sampler: str = "tpe"
    """How Optuna chooses: tpe (tree-structured Parzen estimator) or random."""
    show: Path | None = None
    """Print the trials of this storage, train nothing; no ALGORITHM and ENV then."""

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True)
class ClusterOptions:
    """What `gpurl pbt` and `gpurl tournament` take beside the settings of a population."""

    config: Path | None = None
    """YAML file with settings; flags win over it."""
    address: str | None = None
    """The cluster of Ray: auto, or HOST:PORT; by default RAY_ADDRESS, without it one of this
    machine alone.
    """
    cpus: float = 1.0
    """CPUs of a member; 0.5 lets two share one."""
    gpus: float = 0.0
    """GPUs of a member, for example 1, or 0.25 for four on each GPU; 0: it trains on CPUs."""
    synchronous: bool = False
    """All members wait for each other before they are selected, as generations always do; then the
    result does not depend on who is faster. Of pbt only.
    """


@dataclass(frozen=True)
class ConvertOptions:
    """Convert the weights of another trainer: to a safetensors file, or to a run. Settings of the
    run are those of `gpurl train`.
    """

    file: tyro.conf.Positional[Path]
    """.pt, .pth, .bin, .ckpt, .zip or .safetensors"""
    out: Path | None = None
    """The safetensors file; by default FILE with that suffix."""
    algorithm: str | None = None
    """ppo or a2c: write a run with this policy instead of a safetensors file."""
    env: str | None = None
    """The environment of the run."""
    unit_actions: bool = False
    """The policy's actions are in [-1, 1] (rl_games), not in the task's units."""
    config: Path | None = None
    """YAML file with settings of the run."""


def parse_train(words: list[str]) -> tuple[Settings, TrainOptions]:
    """The settings of a run, and the options of `gpurl train`."""
    options, words = _split_options(TrainOptions, words, "train")
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    if options.seeds > 1 and options.resume:
        raise UsageError("--seeds trains new runs, --resume continues one: leave out one of them")
    for name, least in (("processes", 1), ("max_restarts", 0), ("jobs", 1)):
        if (number := getattr(options, name)) is not None and number < least:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be at least {least}, got {number}")
    if options.processes > 1 and options.seeds > 1:
        raise UsageError(
            f"--processes {options.processes} trains one agent, --seeds {options.seeds} several: "
            f"leave out one of them"
        )
    if options.jobs is not None and options.seeds == 1:
        raise UsageError(f"--jobs {options.jobs} goes with --seeds")
    if options.max_restarts and options.processes == 1:
        raise UsageError(f"--max-restarts {options.max_restarts} goes with --processes")
    settings = _parse_settings(words, options.config, options.resume, "train", options)
    if options.processes > 1 and settings.train.population > 1:
        raise UsageError(
            f"--processes {options.processes} trains one agent on several processes, population "
            f"{settings.train.population} several in one: leave out one of them"
        )
    return settings, options


def parse_config(words: list[str]) -> Settings:
    """The settings that `gpurl config` writes."""
    options, words = _split_options(ConfigOptions, words, "config")
    return _parse_settings(words, options.config, None, "config", options)


def parse_profile(words: list[str]) -> tuple[Settings, ProfileOptions]:
    """The settings of a run, and the options of `gpurl profile`."""
    options, words = _split_options(ProfileOptions, words, "profile")
    return _parse_settings(words, options.config, None, "profile", options), options


def parse_tune(words: list[str]) -> tuple[Settings | None, TuneOptions]:
    """What the trials of a tuning have in common, None with --show; and the options."""
    options, rest = _split_options(TuneOptions, words, "tune")
    if options.show is not None:
        if rest:
            raise UsageError(f"--show prints a storage and takes no settings, got {' '.join(rest)}")
        return None, options
    return _parse_settings(rest, options.config, None, "tune", options), options


def parse_population(words: list[str], command: str) -> tuple[Settings, ClusterOptions]:
    """The settings of a population whose members are selected, and the options of `gpurl pbt` or
    `gpurl tournament`.
    """
    options, rest = _split_options(ClusterOptions, words, command)
    if options.cpus < 0 or options.gpus < 0 or options.cpus + options.gpus == 0:
        raise UsageError(
            f"a member takes --cpus {options.cpus:g} and --gpus {options.gpus:g}: they must be at "
            f"least 0, and not both 0"
        )
    # behind the names, in front of the other flags
    if HELP.isdisjoint(rest):
        rest = [*rest, "--pbt"]
        # members' device decides the preset, not that of the machine where the command runs
        values = read_config(options.config, follows=True) if options.config else {}
        names = {flag_name(word.partition("=")[0]) for word in rest}
        if "device" not in names and values.get("device", "auto") == "auto":
            rest = [*rest, "--device", "cuda" if options.gpus else "cpu"]
    settings = _parse_settings(rest, options.config, None, command, options)
    device = settings.train.device
    if options.gpus and device == "cpu":
        raise UsageError(f"--gpus {options.gpus:g} with device cpu: leave out one of them")
    if not options.gpus and device.startswith("cuda"):
        raise UsageError(
            f"device {device} without --gpus: a member sees the GPUs of its share only"
        )
    return settings, options


def parse_convert(words: list[str]) -> tuple[ConvertOptions, Settings | None]:
    """What to convert, and the settings of the run to write; None where tensors are written."""
    options, rest = _split_options(ConvertOptions, words, "convert", add_help=True)
    # a file of tensors needs no settings
    if options.algorithm is None and options.env is None and not rest:
        return options, None
    if options.algorithm is None or options.env is None:
        raise UsageError(
            f"a run needs --algorithm and --env, one file of tensors neither; got {' '.join(words)}"
        )
    if options.out:
        raise UsageError(
            f"--out {options.out} names a file of tensors; the folder of a run is --run-dir"
        )
    # nothing in a file shows the activation, and everything else in the network follows from it
    if not any(re.match(r"(--)?network\.activation\b", word) for word in rest):
        raise UsageError(
            "weights do not show their activation: --network.activation tanh (stable-baselines3, "
            "cleanrl), elu (rsl_rl, rl_games) or relu"
        )
    _refuse_set_by_weights(rest, options.config)
    names = [options.algorithm, options.env]
    return options, _parse_settings([*names, *rest], options.config, None, "convert", options)


def _split_options(
    kind: type[Options], words: list[str], command: str, add_help: bool = False
) -> tuple[Options, list[str]]:
    """(the options of a command, the other words in their order)."""
    check_known_flags(words, _kinds(kind), f"gpurl {command}")
    return tyro.cli(
        kind,
        args=words,
        prog=f"gpurl {command}",
        return_unknown_args=True,
        add_help=add_help,
        registry=WHOLE_NUMBERS,
    )


def _parse_settings(
    words: list[str], config: Path | None, resume: Path | None, command: str, options: object
) -> Settings:
    """Settings from the words `ALGORITHM ENV [settings]`, over those of the file `config`, over
    those of the run `resume`. options: those of the command, which its help page shows too.
    """
    # the names come first, then flags and `key=value`
    is_setting = [word.startswith("-") or bool(SETTING.fullmatch(word)) for word in words]
    num_names = is_setting.index(True) if True in is_setting else len(words)
    names = words[:num_names]
    flags = words[num_names:]

    # the values over those of the preset: of the resumed run, then of the file
    values: Mapping[str, object] = read_config(config, follows=True) if config else {}
    if resume is None:
        algorithm, env = _names(names, values, command, bool(HELP & {*flags}))
    elif names:
        raise UsageError(
            f"--resume takes algorithm and environment from the run; leave out {' '.join(names)}"
        )
    else:
        from gpurl.api import saved_settings

        algorithm, env, saved = saved_settings(resume)
        values = merge(saved, values)
    values = {name: value for name, value in values.items() if name not in ("algorithm", "env")}
    defaults = make_defaults(algorithm, env, values)
    if asked := HELP & {*flags}:
        from gpurl.cli.help_page import help_page

        usage = f"usage: gpurl {command} {algorithm} {env} [settings]"
        print(help_page(defaults, type(options), usage, is_complete="--help-all" in asked))
        sys.exit(0)
    settings = _parse_flags(defaults, flags, command, options)
    # the preset depends on its name, the number of environments and the device
    given = {
        name: getattr(settings.train, name)
        for name in ("preset", "num_envs", "device")
        if getattr(settings.train, name) != getattr(defaults.train, name)
    }
    if given and resume is None:
        defaults = make_defaults(algorithm, env, {**values, **given})
        settings = _parse_flags(defaults, flags, command, options)
    return settings


def _names(
    names: list[str], values: Mapping[str, Any], command: str, wants_help: bool
) -> tuple[str, str]:
    """Algorithm and environment from the command line, else from the config file."""
    if len(names) > 2:
        raise UsageError(
            f"gpurl {command} takes one algorithm and one environment, got {' '.join(names)}"
        )
    # names on the command line win over those of the file
    algorithm = names[0] if names else values.get("algorithm")
    env = names[1] if len(names) > 1 else values.get("env")
    if algorithm is None or env is None:
        text = names_page(command)
        if wants_help:
            print(text)
            sys.exit(0)
        got = " ".join(names) or "neither in front of the settings"
        raise UsageError(f"an algorithm and an environment are needed, got {got}: {text}")
    for name in (algorithm, env):
        if not isinstance(name, str):
            raise UsageError(f"algorithm and env must be names, got {name!r}")
    if env in algorithm_names() and algorithm not in algorithm_names():
        raise UsageError(
            f"{env} is an algorithm and comes first: gpurl {command} {env} {algorithm}"
        )
    return algorithm, env


def _with_network(flags: list[str], kinds: Mapping[str, object]) -> list[str]:
    """`--network cnn`, `--network impala` and modules as network.encoder, also of actors and
    critics; modules as network.trunk where there is one.
    """
    named = list(flags)
    for place, (word, value) in enumerate(itertools.pairwise((*flags, ""))):
        if word not in ("--network", "--actor-network", "--critic-network"):
            continue
        trunk, encoder = f"{word}.trunk", f"{word}.encoder"
        if trunk[2:] in kinds and value not in CONVOLUTIONAL:
            named[place] = trunk
        elif encoder[2:] in kinds and not value.startswith("--"):
            named[place] = encoder
    return named


def _refuse_hidden_layers(flags: list[str]) -> None:
    """UsageError for settings of the hidden layers beside the module that replaces them."""
    given = {flag_name(word.partition("=")[0]) for word in flags}
    if "network.trunk" in given and (
        without_effect := given & {"network.hidden", "network.activation"}
    ):
        names = " and ".join(f"--{name}" for name in sorted(without_effect))
        raise UsageError(
            f"{names} would change nothing: the module of --network replaces the hidden layers; "
            f"give it its own with --network.options NAME VALUE"
        )


def _parse_flags(base: Settings, flags: list[str], command: str, of_command: object) -> Settings:
    """`base`, whose combinations are not checked yet, with the changes that the flags make; tyro
    makes the configs anew, which checks them. of_command: the command's own options.
    """
    options = options_class(base.env)
    config_type = type(base.algorithm_config)
    of_members = members_class(config_type)
    kinds = _kinds(TrainConfig) | _kinds(config_type) | _kinds(options, "env.")
    ranges = ranges_class(config_type)
    kinds |= _kinds(of_members, "member.") | _kinds(ranges, "explore.")
    _refuse_other_names(flags, kinds)
    _refuse_memory(flags, base.algorithm, kinds)
    _refuse_unknown_options(flags, base.env, {item.name for item in dataclasses.fields(options)})
    flags = _with_network(flags, kinds)
    _refuse_hidden_layers(flags)

    # one dataclass of all settings, with `base` as its defaults
    all_settings = dataclasses.make_dataclass(
        "AllSettings",
        [
            ("train", Annotated[TrainConfig, tyro.conf.arg(name="")]),
            ("algorithm", Annotated[config_type, tyro.conf.arg(name="")]),
            ("env", options),
            ("member", of_members),
            ("explore", ranges),
        ],
    )
    names = {item.name for item in dataclasses.fields(options)}
    env_default = options(
        **{name: value for name, value in base.env_options.items() if name in names}
    )
    words = _as_flags(flags, kinds)
    prog = f"gpurl {command} {base.algorithm} {base.env}"
    # the settings of a converted run are those of a training
    with_help = prog.replace("gpurl convert", "gpurl train")
    check_flags(words, kinds | _kinds(type(of_command)), with_help, _algorithms_with)
    parsed: Any = tyro.cli(  # an instance of the class above
        all_settings,
        args=words,
        default=all_settings(
            base.train,
            base.algorithm_config,
            env_default,
            of_members(**base.member),
            ranges(**base.explore),
        ),
        prog=prog,
        registry=WHOLE_NUMBERS,
    )

    # only options that were given are written to the run's configuration
    changed = {
        name: value
        for name, value in dataclasses.asdict(parsed.env).items()
        if value != getattr(env_default, name)
    }
    given, explored = (
        {name: value for name, value in dataclasses.asdict(each).items() if value}
        for each in (parsed.member, parsed.explore)
    )
    settings = dataclasses.replace(
        base,
        train=parsed.train,
        algorithm_config=parsed.algorithm,
        env_options=base.env_options | changed,
        member=member_values(config_type, given),
        explore=explored_ranges(config_type, explored),
    )
    settings.check()
    return settings


def _refuse_other_names(flags: list[str], kinds: dict[str, object]) -> None:
    """UsageError for a setting by its name in another library."""
    known = {kind.replace("-", "_") for kind in kinds}
    for word in flags:
        name = flag_name(word.partition("=")[0])
        is_setting = word.startswith("--") or bool(SETTING.fullmatch(word))
        is_known = name in kinds or name.removeprefix("no-") in kinds
        if is_setting and not is_known and (text := other_name_hint(name, known, _as_flag)):
            raise UsageError(f"no setting is called {name!r}; {text}")


def _as_flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _algorithms_with(name: str) -> list[str]:
    """Those that have the setting `name`, in the form of `flag_name`."""
    kinds = {each: _kinds(config_class(resolve_algorithm(each))) for each in algorithm_names()}
    return [each for each, known in kinds.items() if name.removeprefix("no-") in known]


def _refuse_memory(flags: list[str], algorithm: str, kinds: dict[str, object]) -> None:
    """UsageError for the memory of an algorithm that has none, and for one outside of `network`."""
    for word, after in zip(flags, [*flags[1:], ""]):
        name, has_value, value = word.partition("=")
        if flag_name(name) not in ("memory", "network.memory") or flag_name(name) in kinds:
            continue
        refuse_memory(algorithm, {"memory": value if has_value else after})
        if "network.memory" in kinds:
            raise UsageError("no setting is called 'memory'; here it is --network.memory")


def _refuse_unknown_options(flags: list[str], env: str, known: set[str]) -> None:
    """UsageError for `--env.NAME` that is no option of the environment, or none that a flag can
    set; known: those that flags set.
    """
    for before, word in zip(["", *flags], flags):
        match = re.fullmatch(r"(--)?env\.([\w-]+)(\.[\w.-]+)?(=.*)?", word, re.DOTALL)
        is_value = before.startswith("--") and "=" not in before
        if match is None or not (match[1] or (match[4] and not is_value)):
            continue
        name = match[2].replace("-", "_")
        if match[3] is None and {name, name.removeprefix("no_")} & known:
            continue
        if name in ("num_envs", "device", "seed"):
            setting = name.replace("_", "-")
            raise UsageError(f"{name} is a setting of the run: --{setting}, not {word}")
        env_class, _ = resolve_env(env)
        check_options(env, env_class, [name])
        raise UsageError(
            f"{word} cannot be set by a flag; in a file of --config, under env_options: {name}"
        )


# ---- spellings ----


def _as_flags(words: list[str], kinds: dict[str, object]) -> list[str]:
    """The words as tyro reads them. `key=value` and, of a switch, `--key true` become `--key` or
    `--no-key` for a switch, `--key 1 2` for the list `key=1,2`, else `--key=value`.
    """
    flags: list[str] = []
    for word in words:
        has_flag = bool(flags) and flags[-1].startswith("--")
        previous_kind = kinds.get(flag_name(flags[-1])) if has_flag else None
        if previous_kind is bool and word.lower() in ("true", "false"):
            word = f"{flags.pop()}={word}"
        # the word after a flag that takes a value is this value, even with a "=" in it
        match = SETTING.fullmatch(word) if previous_kind in (None, bool) else None
        if match is None:
            flags.append(word)
            continue
        name, value = match.groups()
        kind = kinds.get(flag_name(name))
        if kind is bool and value.lower() in ("true", "false"):
            group, dot, last = name.rpartition(".")
            flags.append(f"--{group}{dot}{'' if value.lower() == 'true' else 'no-'}{last}")
        elif typing.get_origin(kind) is tuple:
            flags += [f"--{name}", *value.strip("[]()").replace(",", " ").split()]
        else:
            flags.append(f"--{name}={value}")
    return flags


def _kinds(config: type, group: str = "") -> dict[str, object]:
    """{name in the form of `flag_name`: type} of all settings of a dataclass, nested ones too; one
    of known values has a Literal of them, with MODULE where it may be a module.
    """
    kinds: dict[str, object] = {}
    choices = choices_of(config)
    marked = typing.get_type_hints(config, include_extras=True)
    for name, hint in typing.get_type_hints(config).items():
        flag = group + flag_name(name)
        # one value each time it is given
        if tyro.conf.UseAppendAction in getattr(marked[name], "__metadata__", ()):
            hint, *_ = typing.get_args(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            kinds |= _kinds(hint, f"{flag}.")
        elif name in choices:
            others = (MODULE,) if may_be_module(config, name) else ()
            kinds[flag] = typing.Literal[choices[name] + others]
        elif typing.get_origin(hint) is not ClassVar:
            kinds[flag] = hint
    return kinds


def _refuse_set_by_weights(words: list[str], config: Path | None) -> None:
    """UsageError for a setting, among `words` or in the file `config`, that the weights decide."""
    # --no-squash decides too
    names = {flag_name(word.partition("=")[0]).removeprefix("no-") for word in words}
    values: Mapping[str, object] = read_config(config, follows=True) if config else {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {}
        names |= {flag_name(name), *(f"{flag_name(name)}.{flag_name(key)}" for key in inner)}
    if given := sorted(names & SET_BY_WEIGHTS):
        raise UsageError(
            f"{', '.join(given)} of a converted policy follows from its weights: leave it out"
        )
