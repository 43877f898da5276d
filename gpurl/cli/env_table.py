"""What `gpurl envs` prints: a table of the environments, or one of them with its options; and what
a missing simulator needs.
"""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap

import gymnasium
from gymnasium.spaces import Box

from gpurl.cli.env_options import options_class
from gpurl.envs.registry import (
    env_names,
    env_options,
    make_env,
    option_help,
    resolve_env,
    user_options,
)
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import GpurlError

PIPE_WIDTH = 100  # letters in a line where no terminal is
MIN_WIDTH = 40  # of the last column; with less, its text is below the others
COLUMNS = ("name", "observation", "action", "steps", "what")


def env_table(width: int | None = None) -> str:
    """Groups of environments: tensor tasks, the tasks of each simulator's folder, adapters, which
    take the name of a task. width: letters in a line, by default those of the terminal.
    """
    width = width or shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    classes = {name: resolve_env(name)[0] for name in env_names()}
    adapters = [name for name, env_class in classes.items() if "task" in env_options(env_class)]
    folders: dict[str, list[str]] = {}
    for name, env_class in classes.items():
        if name not in adapters:
            folders.setdefault(_folder(env_class), []).append(name)
    rows = {name: _row(name, classes[name]) for names in folders.values() for name in names}
    # the columns are as wide as their longest text, and the last takes the rest
    texts = [COLUMNS, *rows.values()]
    widths = [max(len(row[column]) for row in texts) for column in range(len(COLUMNS) - 1)]
    widths.append(width - sum(widths) - 2 * len(COLUMNS))
    lines = []
    for folder, names in folders.items():
        title = f"{folder}: {_state(classes[names[0]])}" if folder else "tensor tasks, built in"
        lines += [title, *_aligned(COLUMNS, widths)]
        lines += [line for name in names for line in _aligned(rows[name], widths)]
        lines.append("")
    lines.append("adapters")
    for name in adapters:
        lines += _wrapped(f"{name}:TASK", f"{_what(classes[name])}", width)
        if (state := _state(classes[name])) != "there":
            lines += _wrapped("", state, width)
    lines += ["", "gpurl envs NAME explains one and lists its options. Your own: its module path."]
    return "\n".join(lines)


def describe_env(name: str, width: int | None = None) -> str:
    """One environment: what it is, its spaces, and its options with help and default."""
    width = width or shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    env_class, given = resolve_env(name)
    what = _what(env_class)
    lines = [f"{name}: {what}" if what else name]
    # a class without a docstring inherits none: that of a base is for who writes environments
    lines += ["", *text.splitlines()] if (text := inspect.cleandoc(env_class.__doc__ or "")) else []
    # the spaces of a task; an adapter has some only with the name of one
    options = env_options(env_class)
    if given or "task" not in options:
        _, observation, action, steps, _ = _row(name, env_class)
        spaces = f"observation {observation}, action {action}, steps {steps}"
        lines += ["", *textwrap.wrap(spaces, width)]
    if (state := _state(env_class)) != "there":
        lines += ["", state]
    # the options
    help_of = option_help(env_class)
    names = [each for each in user_options(env_class) if each not in given]
    flags = {item.name for item in dataclasses.fields(options_class(name))}
    lines += ["", "options" if names else "no options"]
    for each in names:
        default = options[each].default
        text = help_of.get(each, "")
        if default is not inspect.Parameter.empty:
            text = f"{text} (default {default})".strip()
        flag = f"--env.{each.replace('_', '-')}"
        in_file = f"{each}, in a file of --config under env_options"
        lines += _wrapped(flag if each in flags else in_file, text, width)
    return "\n".join(lines)


def simulators() -> list[str]:
    """A line for each simulator of which environments here say whether it is there."""
    found: dict[str, str] = {}
    for name in env_names():
        env_class, _ = resolve_env(name)
        if "missing" in {
            key for base in env_class.__mro__ if base is not VecEnv for key in vars(base)
        }:
            found[_folder(env_class) or name] = _state(env_class)
    return [f"{name}: {text}" for name, text in found.items()]


def _folder(env_class: type[VecEnv]) -> str:
    """mujoco of gpurl.envs.mujoco.ant, nothing of gpurl.envs.pendulum."""
    module = env_class.__module__
    return module.removeprefix("gpurl.envs.").rpartition(".")[0] if "gpurl.envs" in module else ""


def _state(env_class: type[VecEnv]) -> str:
    missing = env_class.missing()
    return f"missing: {missing}" if missing else "there"


def _what(env_class: type[VecEnv]) -> str:
    """The first sentence of its module, without its name in front."""
    paragraph = (sys.modules[env_class.__module__].__doc__ or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).partition(". ")[0].removesuffix(".")
    sentence = re.sub(r",? `make_env\(.*", "", sentence).removesuffix(":")
    name, colon, rest = sentence.partition(": ")
    return rest if colon and " " not in name else sentence


def _row(name: str, env_class: type[VecEnv]) -> tuple[str, ...]:
    """The texts of COLUMNS; the spaces take making it."""
    what = re.sub(r"^\S+-v\d+ of Gymnasium in MuJoCo: ", "", _what(env_class)).partition(";")[0]
    try:
        env = make_env(name, 1)
    except GpurlError:
        return name, "-", "-", "-", what
    agents = f"{env.num_agents} x " if env.num_agents > 1 else ""
    observation = env.single_observation_space.shape or ()
    steps = "no limit" if env.max_episode_steps is None else f"{env.max_episode_steps:,}"
    action = _space(env.single_action_space)
    env.close()
    return name, f"{agents}Box {observation[bool(agents) :]}", action, steps, what


def _space(space: gymnasium.Space) -> str:
    """`Box (8,)` of a Box, whose limits do not fit into a table."""
    return f"Box {space.shape}" if isinstance(space, Box) else str(space)


def _aligned(texts: tuple[str, ...], widths: list[int]) -> list[str]:
    """A row of the table; the last column may take several lines."""
    *cells, last = texts
    if widths[-1] < MIN_WIDTH:
        row = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
        below = [] if texts == COLUMNS else [textwrap.shorten(last, sum(widths) + 4)]
        return [f"  {row}", *(f"      {text}" for text in below)]
    lines = []
    for part in textwrap.wrap(last, widths[-1]) or [""]:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip([*cells, part], widths)))
        cells = [""] * len(cells)
    return [f"  {line}".rstrip() for line in lines]


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """`name` on a line, and the text below it, indented."""
    lines = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return [f"  {name}", *lines] if name else lines
