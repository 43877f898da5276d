"""A YAML file of all settings, each under the line that explains it, for `gpurl config`."""

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from typing import Any

from gpurl.cli.env_options import options_class
from gpurl.envs.registry import option_help, resolve_env
from gpurl.run.config_file import as_yaml
from gpurl.run.settings import Settings, TrainConfig

WIDTH = 100
NOT_IN_FILES = ("run_dir", "requeue")  # a file serves many runs


def config_template(settings: Settings) -> str:
    """`settings` as a file for --config."""
    values = settings.to_dict()
    lines = [
        f"# gpurl config {settings.algorithm} {settings.env}; to train: gpurl train --config FILE",
        *_yaml_lines({"algorithm": settings.algorithm, "env": settings.env}),
        "",
        f"# ---- options of {settings.env}; behind # what it has by default ----",
        "",
        *_option_lines(settings),
        "",
        "# ---- the run ----",
        *_commented(TrainConfig, values, ""),
        "",
        f"# ---- {settings.algorithm} ----",
        *_commented(type(settings.algorithm_config), values, ""),
        "",
        "# ---- what members of a population have of their own: a list, one number for each ----",
        "",
        *_member_lines(settings),
        "",
        "# ---- the settings that pbt explores, and their ranges; by default some of the algorithm "
        "----",
        "",
        *_range_lines(settings),
    ]
    return "\n".join(lines) + "\n"


def _option_lines(settings: Settings) -> list[str]:
    """The options of the environment that are set, and as comments the others."""
    given = settings.env_options
    others = {
        item.name: item.default
        for item in dataclasses.fields(options_class(settings.env))
        if item.name not in given
    }
    lines = _yaml_lines({"env_options": given}) if given else ["# env_options:"]
    help_of = option_help(resolve_env(settings.env)[0])
    for name, value in others.items():
        for line in textwrap.wrap(help_of.get(name, ""), WIDTH - 6):
            lines.append(f"#   # {line}")
        lines += [f"#   {line}" for line in _yaml_lines({name: value})]
    return lines if others or given else []


def _member_lines(settings: Settings) -> list[str]:
    """The settings that members have of their own; without any an example, as a comment."""
    if settings.member:
        return _yaml_lines({"member": settings.to_dict()["member"]})
    return ["# member:", "#   learning_rate: [0.001, 0.0003]"]


def _range_lines(settings: Settings) -> list[str]:
    """The ranges that are explored; without any those that pbt takes by itself, as a comment."""
    if settings.explore:
        return _yaml_lines({"explore": settings.to_dict()["explore"]})
    own = {name: [*limits] for name, limits in settings.algorithm_config.explored.items()}
    return [f"# {line}" for line in _yaml_lines({"explore": own})]


def _commented(config: type, values: dict[str, Any], indent: str) -> list[str]:
    """The lines of one dataclass: of each field its help and its value."""
    lines = []
    help_of = field_help(config)
    for item in dataclasses.fields(config):
        if item.name in NOT_IN_FILES:
            continue
        comment = f"{indent}# "
        text = help_of.get(item.name, "")
        lines += [
            "",
            *textwrap.wrap(text, WIDTH, initial_indent=comment, subsequent_indent=comment),
        ]
        value = values[item.name]
        nested = _dataclass_of(config, item.name)
        if nested is not None and isinstance(value, dict):
            lines += [f"{indent}{item.name}:", *_commented(nested, value, f"{indent}  ")]
        else:
            lines += [f"{indent}{line}" for line in _yaml_lines({item.name: value})]
    return lines


def _yaml_lines(values: dict[str, Any]) -> list[str]:
    return as_yaml(values).decode().splitlines()


def _dataclass_of(config: type, name: str) -> type | None:
    hint = typing.get_type_hints(config)[name]
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


@functools.cache
def field_help(config: type) -> dict[str, str]:
    """{field: the string under it} of a dataclass; a subclass that only changes the default keeps
    the help of its base.
    """
    found: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for before, after in zip(tree.body, tree.body[1:]):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[before.target.id] = " ".join(after.value.value.split())
    return found
