"""The page that `gpurl train ALGORITHM ENV --help` prints: settings in groups, each with its
choices, its help, its value here and its names in other libraries. tyro parses; this is only text.
"""

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpurl.checks import choices_of
from gpurl.cli.config_template import field_help
from gpurl.cli.env_options import options_class
from gpurl.envs.registry import option_help, resolve_env
from gpurl.run.members import member_settings
from gpurl.run.other_names import names_elsewhere
from gpurl.run.settings import Settings, TrainConfig

PIPE_WIDTH = 100  # letters in a line where no terminal is
MAX_WIDTH = 110  # longer lines are hard to read
MIN_COLUMNS = 76  # a narrower page has the help below the flag
FLAG_WIDTH = 34
MAX_OWN_OPTIONS = 8  # of a task, on the short page
GROUPS = {
    "Logging and checkpoints": (
        *("save_every", "keep_checkpoints", "log_every", "tag_style", "root", "run_dir", "quiet"),
        *("requeue", "eval_every", "eval_episodes", "video_every", "track", "project"),
    ),
    "Hardware": (
        *("device", "threads", "precision", "graph", "rollout", "update", "stack", "asynchronous"),
        *("compile", "deterministic"),
    ),
}
# what is changed first
COMMON = {
    *("preset", "num_envs", "population", "total_steps", "max_seconds", "stop_return"),
    *("seed", "device", "run_dir", "pbt"),
    *("horizon", "learning_rate", "gamma", "epochs", "minibatches", "entropy_coef", "clip_range"),
    *("batch_size", "updates", "learning_starts", "n_step", "temperature", "noise_std"),
    *("teacher", "dataset", "network.hidden", "network.activation", "network.memory"),
    *("actor_network.hidden", "critic_network.hidden"),
}
# options of a command that are changed seldom
RARE = {"max_restarts"}


@dataclass(frozen=True)
class Line:
    """One setting on the page."""

    name: str  # with _ and the group in front, as network.hidden
    form: str  # of its value, such as INT or {a,b}
    help: str
    value: str  # as it is typed; "" if there is none

    @property
    def flag(self) -> str:
        """`--num-envs INT`, `--[no-]quiet`."""
        group, dot, last = self.name.replace("_", "-").rpartition(".")
        negated = "[no-]" if self.form == "" else ""
        return f"--{group}{dot}{negated}{last} {self.form}".rstrip()


def help_page(settings: Settings, command: type, usage: str, is_complete: bool) -> str:
    """command: the dataclass of what the command takes beside the settings. is_complete: all
    settings, else those that are changed first.
    """
    width = min(shutil.get_terminal_size((PIPE_WIDTH, 0)).columns, MAX_WIDTH)
    groups = _groups(settings, command)
    total = sum(map(len, groups.values()))
    lines = textwrap.wrap(usage, width, subsequent_indent="    ")
    shown = 0
    for title, members in groups.items():
        if not is_complete:
            members = _common(title, members, settings, command)
        shown += len(members)
        if members:
            lines += ["", title]
            for member in members:
                lines += _lines(member, width)
    more = f"{total - shown} more settings: --help-all. " if shown < total else ""
    closing = (
        f"{more}In brackets: the value for this task. A switch is --quiet, --no-quiet or "
        f"quiet=true; a list is 64 64 or network.hidden=64,64. gpurl config {settings.algorithm} "
        f"{settings.env} writes a file of all settings for --config."
    )
    return "\n".join([*lines, "", *textwrap.wrap(closing, width)])


def setting_lines(settings: Settings, command: type) -> list[Line]:
    """All settings of the algorithm and the environment, and the options of the command."""
    return [line for lines in _groups(settings, command).values() for line in lines]


def _groups(settings: Settings, command: type) -> dict[str, list[Line]]:
    """The settings under their titles, in the order of the page."""
    group_of = {name: title for title, names in GROUPS.items() for name in names}
    groups: dict[str, list[Line]] = {"Run": list(_fields(command, None))}
    groups |= {title: [] for title in GROUPS}
    for line in _fields(TrainConfig, settings.train):
        groups[group_of.get(line.name, "Run")].append(line)
    of_algorithm = list(_fields(type(settings.algorithm_config), settings.algorithm_config))
    groups[settings.algorithm] = [line for line in of_algorithm if "." not in line.name]
    groups["Networks"] = [line for line in of_algorithm if "." in line.name]
    # the environment's options
    options = options_class(settings.env)
    help_of = option_help(resolve_env(settings.env)[0])
    values = {item.name: item.default for item in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    groups[settings.env] = [
        Line(
            f"env.{name}",
            _form(hints[name], ()),
            help_of.get(name, ""),
            _typed(settings.env_options.get(name, default)),
        )
        for name, default in values.items()
    ]
    # what members of a population have of their own
    groups["Members"] = [
        Line(
            f"member.{name}",
            "FLOAT ...",
            f"{name} of each member of the population.",
            _typed(settings.member.get(name, ())),
        )
        for name in member_settings(type(settings.algorithm_config))
    ]
    config = settings.algorithm_config
    groups["Members"] += [
        Line(
            f"explore.{name}",
            "LOW HIGH",
            f"Range of {name} in population based training.",
            _typed(settings.explore.get(name, config.explored.get(name, ()))),
        )
        for name in config.changeable
    ]
    return groups


def _fields(kind: type, values: Any, group: str = "") -> Iterator[Line]:
    """A line for each field of a dataclass, nested ones included. values: an instance, or None for
    the defaults.
    """
    help_of = field_help(kind)
    hints = typing.get_type_hints(kind)
    choices = choices_of(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        value = item.default if values is None else getattr(values, item.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _fields(hint, value, f"{group}{item.name}.")
            continue
        name = f"{group}{item.name}"
        text = help_of.get(item.name, "")
        if elsewhere := names_elsewhere(name, hints):
            text = f"{text} ({elsewhere})"
        yield Line(name, _form(hint, choices.get(item.name, ())), text, _typed(value))


def _form(hint: Any, choices: tuple[str, ...]) -> str:
    """INT, FLOAT, TEXT, {a,b}, `INT ...` for a list; empty for a switch."""
    if choices:
        return f"{{{','.join(choices)}}}"
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if hint is bool:
        return ""
    if typing.get_origin(hint) is tuple:
        return f"{_form(kinds[0], ())} ..."
    if typing.get_origin(hint) is dict:
        return "NAME VALUE ..."
    if kinds:
        return _form(kinds[0], ())
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "{True,False}"}.get(hint, "PATH")


def _typed(value: object) -> str:
    """A value as it is typed on the command line."""
    if value is None or value == "" or value == () or value == {}:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(_typed, value))
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    return str(value)


def _common(title: str, lines: list[Line], settings: Settings, command: type) -> list[Line]:
    """Those of the short page."""
    if title != settings.env:
        names = COMMON | {item.name for item in dataclasses.fields(command)} - RARE
        return [line for line in lines if line.name in names]
    if len(lines) <= MAX_OWN_OPTIONS:
        return lines
    env_class, _ = resolve_env(settings.env)
    own = vars(env_class).get("__annotations__") or env_class.declared_options()
    return [line for line in lines if line.name.removeprefix("env.") in own][:MAX_OWN_OPTIONS]


def _lines(line: Line, width: int) -> list[str]:
    """A setting: its flag, and its help beside it or, on a narrow page, below."""
    text = f"{line.help} [{line.value}]" if line.value else line.help
    if width < MIN_COLUMNS:
        indent = " " * 6
        wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
        return [f"  {line.flag}", *wrapped]
    indent = " " * FLAG_WIDTH
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    first = f"  {line.flag}"
    if len(first) <= FLAG_WIDTH - 2 and wrapped:
        return [first.ljust(FLAG_WIDTH) + wrapped[0].lstrip(), *wrapped[1:]]
    return [first, *wrapped]
