"""Turns the words behind `gpurl train` and `gpurl profile` into settings, by tyro and a dataclass
of all that can be set.
"""

import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

from gpurl.errors import UsageError
from gpurl.run.config_file import read_config
from gpurl.run.settings import Settings, TrainConfig, make_settings, merge

SIMPLE_TYPES = (bool, int, float, str)
SETTING = r"(?:--)?([A-Za-z_][\w.-]*)=(.*)"
OF_WEIGHTS = {  # what `gpurl.cli.convert.policy` sets itself
    *("network.hidden", "network.shared", "network.memory", "network.memory_size"),
    *("normalize_obs", "normalize_value", "asymmetric", "squash"),
}
NUMBER = r"[-+]?[\d._]+([eE][-+]?\d+)?"


def parse_train(words: list[str]) -> tuple[Settings, Path | None]:
    """(settings, run folder to resume or None)."""
    words, resume = _take_option(words, "--resume")
    words, config = _take_option(words, "--config")
    names, flags = _positionals(words)
    values: dict[str, Any] = read_config(config) if config else {}
    if resume is not None:
        if names:
            raise UsageError(
                f"--resume takes algorithm and environment from the run; leave out "
                f"{' '.join(names)}"
            )
        from gpurl.api import saved_settings

        algorithm, env, saved = saved_settings(Path(resume))
        values = merge(saved, values)
    else:
        algorithm, env = _named(names, values, "--help" in flags or "-h" in flags)
    values = {name: value for name, value in values.items() if name not in ("algorithm", "env")}
    values |= {} if not isinstance(values.get(algorithm), dict) else values.pop(algorithm)
    base = make_settings(algorithm, env, **values)
    settings = _parse_flags(
        base, [re.sub(rf"^(--)?{re.escape(algorithm)}\.", r"\1", flag) for flag in flags]
    )
    return settings, None if resume is None else Path(resume)


def parse_profile(words: list[str]) -> tuple[Settings, dict[str, Any]]:
    """(settings, the options of gpurl.cli.profile.profile)."""
    words, out = _take_option(words, "--out")
    options: dict[str, Any] = {"out": out}
    for name in ("iterations", "warm_up"):
        for flag in dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")):
            words, number = _take_option(words, flag, "a number")
            if number is not None:
                options[name] = _whole(flag, _number(number))
    settings, resume = parse_train(words)
    if resume is not None:
        raise UsageError(
            f"gpurl profile begins anew, it cannot go on with {resume}; name the algorithm and the "
            f"environment"
        )
    return settings, options


def parse_convert(words: list[str]) -> tuple[dict[str, Any], Settings | None]:
    """(FILE, out, unit_actions; settings of the run to make, None where only the tensors are
    wanted).
    """
    import argparse

    parser = argparse.ArgumentParser(prog="gpurl convert", allow_abbrev=False)
    parser.add_argument("FILE", help=".pt, .pth, .bin, .ckpt, .zip or .safetensors")
    parser.add_argument(
        "--out", default="", help="the safetensors file; by default FILE with that suffix"
    )
    parser.add_argument(
        "--algorithm",
        help="ppo or a2c: write a run with this policy instead, settings as of gpurl train behind "
        "it",
    )
    parser.add_argument("--env", help="the environment it is for")
    parser.add_argument(
        "--unit-actions",
        action="store_true",
        help="the policy's actions are in [-1, 1] (rl_games), not in the task's units",
    )
    known, rest = parser.parse_known_args(words)
    options = vars(known)
    if (known.algorithm is None) != (known.env is None) or (known.algorithm is None and rest):
        raise UsageError(
            f"a run needs --algorithm and --env, one file of tensors neither; got {' '.join(words)}"
        )
    if known.algorithm is None:
        return options, None
    if known.out:
        raise UsageError(
            f"--out {known.out} names a file of tensors; the folder of a run is --run-dir"
        )
    if not any(re.match(r"(--)?network\.activation\b", word) for word in rest):
        raise UsageError(
            "weights do not tell their activation: --network.activation tanh (stable-baselines3, "
            "cleanrl), elu (rsl_rl, rl_games) or relu"
        )
    _check_undecided(known.algorithm, rest)
    return options, parse_train([known.algorithm, known.env, *rest])[0]


def _check_undecided(algorithm: str, words: list[str]) -> None:
    """UsageError for a setting among `words`, or in their --config, that the weights decide."""
    words, config = _take_option(words, "--config")
    words = _spelled_out(words, set())
    given = {
        word.removeprefix("--")
        .removeprefix(f"{algorithm}.")
        .replace("-", "_")
        .replace("no_", "", 1)
        for word in words
        if word[:2] == "--"
    }
    values = read_config(config) if config else {}
    for each in (values, values.get(algorithm)):
        if isinstance(each, dict):
            inner = each.get("network")
            given |= each.keys() | (
                {f"network.{name}" for name in inner} if isinstance(inner, dict) else set()
            )
    if both := sorted(given & OF_WEIGHTS):
        raise UsageError(
            f"{', '.join(both)} of a converted policy follows from its weights: leave it out"
        )


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number, got {text}") from None


def _spelled_out(words: list[str], texts: set[str]) -> list[str]:
    """`key=value` as `--key value`, `1e6` as 1000000, `--quiet false` as `--no-quiet`; the value of
    one in `texts` stays as it is.
    """
    result: list[str] = []
    for word in words:
        match = re.fullmatch(SETTING, word, re.DOTALL)
        if result and _name(result[-1]) in texts and not word.startswith("--"):
            result[-1] += f"={word}"
        elif match and _name(f"--{match[1]}") in texts:
            result.append(f"--{match[1]}={match[2]}")
        elif word in ("--no-graph", "--no_graph"):
            result.append("--graph=off")
        elif match and match[2].lower() in ("true", "false"):
            result.append(_switch(match[1], match[2]))
        elif match:
            parts = [part.strip() for part in match[2].strip("[]()").split(",")]
            if match[2][:1] not in ("[", "(") and not all(
                re.fullmatch(NUMBER, part) for part in parts
            ):
                parts = [match[2]]  # some text that holds a comma
            result += [f"--{match[1]}", *map(_number, parts)]
        elif word.lower() in ("true", "false") and result and result[-1].startswith("--"):
            result[-1] = _switch(result[-1][2:], word)
        else:
            result.append(_number(word))
    return result


def _name(flag: str) -> str:
    """`run-dir` of `--run_dir`; empty where the word is no flag."""
    return flag[2:].replace("_", "-") if flag.startswith("--") else ""


def _texts(kind: type, before: str = "") -> set[str]:
    """Names, as `_name` has them, of the settings of a dataclass that are a text."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(kind).items():
        name = before + name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            found |= _texts(typing.cast(type, hint), f"{name}.")
        elif hint is str or set(typing.get_args(hint)) == {str, type(None)}:
            found.add(name)
    return found


def _switch(name: str, value: str) -> str:
    head, dot, last = name.rpartition(".")
    return f"--{head}{dot}{'' if value.lower() == 'true' else 'no-'}{last}"


def _number(word: str) -> str:
    """`1e6` as 1000000, for settings that are whole numbers."""
    is_whole = re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", word) and float(word).is_integer()
    return str(int(float(word))) if is_whole else word


def take_callbacks(words: list[str]) -> tuple[list[str], list[str]]:
    """(the other words, the module paths behind each --callback)."""
    names = list[str]()
    while True:
        words, name = _take_option(words, "--callback", "a module path")
        if name is None:
            return words, names
        names.append(name)


def _take_option(
    words: list[str], option: str, what: str = "a path"
) -> tuple[list[str], str | None]:
    """`option VALUE`, `option=VALUE` or that without dashes, taken out of the words."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_value = (
            at > 0 and words[at - 1].startswith("--env.") and "=" not in words[at - 1]
        )  # --env.overrides "config=..."
        if equals and value and (name == option or (name == option[2:] and not is_value)):
            return words[:at] + words[at + 1 :], value
        if word == option:
            if at + 1 < len(words) and not words[at + 1].startswith("--"):
                return words[:at] + words[at + 2 :], words[at + 1]
            raise UsageError(f"{option} needs {what} behind it")
    return words, None


def _positionals(words: list[str]) -> tuple[list[str], list[str]]:
    """The names in front, and the settings behind them."""
    count = next(
        (
            at
            for at, word in enumerate(words)
            if word.startswith("-") or re.fullmatch(SETTING, word, re.DOTALL)
        ),
        len(words),
    )
    return words[:count], words[count:]


def _named(names: list[str], values: dict[str, Any], wants_help: bool) -> tuple[str, str]:
    """Algorithm and environment from the command line, else from the config file."""
    algorithm = names[0] if names else values.get("algorithm")
    env = names[1] if len(names) > 1 else values.get("env")
    if len(names) > 2:
        raise UsageError(
            f"gpurl train takes one algorithm and one environment, got {' '.join(names)}"
        )
    if algorithm is None or env is None:
        from gpurl.algorithms import algorithm_names
        from gpurl.envs.registry import env_names

        text = (
            "gpurl train ALGORITHM ENV [settings], for example gpurl train ppo chasing\n"
            f"  algorithms: {', '.join(algorithm_names())}\n  environments: "
            f"{', '.join(env_names())}, or the module path of your own\n"
            "  gpurl train ALGORITHM ENV --help lists the settings"
        )
        if wants_help:
            print(text)
            sys.exit(0)
        got = " ".join(names) or "neither in front of the settings"
        raise UsageError(f"an algorithm and an environment are needed, got {got}: {text}")
    for name in (algorithm, env):
        if not isinstance(name, str):
            raise UsageError(f"algorithm and env must be names, got {name!r}")
    return algorithm, env


def _parse_flags(base: Settings, flags: list[str]) -> Settings:
    """`base` with what the flags change; tyro prints help and names near flags."""
    import tyro

    options = _options_class(base.env)
    texts = _texts(TrainConfig) | _texts(type(base.algorithm_config)) | _texts(options, "env.")
    if "network.trunk" in texts:  # --network my_project.nets:MyTrunk
        flags = [re.sub(r"^(--)?network(=|$)", r"\1network.trunk\2", flag) for flag in flags]
    flags = _spelled_out(flags, texts)
    combined = dataclasses.make_dataclass(
        "Settings",
        [
            ("train", Annotated[TrainConfig, tyro.conf.arg(name="")]),
            ("algorithm", Annotated[type(base.algorithm_config), tyro.conf.arg(name="")]),
            ("env", options),
        ],
    )
    known = {item.name for item in dataclasses.fields(options)}
    default = combined(
        base.train,
        base.algorithm_config,
        options(**{name: value for name, value in base.env_options.items() if name in known}),
    )
    try:
        parsed: Any = tyro.cli(
            combined,
            args=flags,
            default=default,
            prog=f"gpurl train {base.algorithm} {base.env}",
            description="Train.",
        )
    except SystemExit as stop:
        sys.exit(2 if stop.code else 0)
    chosen = dataclasses.asdict(parsed.env)
    standard = dataclasses.asdict(options())
    env_options = base.env_options | {
        name: value
        for name, value in chosen.items()
        if value != standard[name] or name in base.env_options
    }
    return dataclasses.replace(
        base, train=parsed.train, algorithm_config=parsed.algorithm, env_options=env_options
    )


def _options_class(env: str) -> type:
    """A dataclass of the environment's own options, from its constructor's signature."""
    from gpurl.envs.registry import env_options, option_types, resolve_env

    env_class, named = resolve_env(env)
    hints = option_types(env_class)
    fields = []
    for name, parameter in env_options(env_class).items():
        kind = hints.get(name, type(parameter.default))
        parts = [part for part in (typing.get_args(kind) or (kind,)) if part is not type(None)]
        if (
            name not in named
            and all(part in SIMPLE_TYPES for part in parts)
            and parameter.default is not parameter.empty
        ):
            fields.append((name, kind, dataclasses.field(default=parameter.default)))
    return dataclasses.make_dataclass("EnvOptions", fields)
