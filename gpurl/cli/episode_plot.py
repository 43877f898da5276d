"""The picture of one episode: observations, actions and rewards over its steps, by their names and
with their limits, a panel for each agent.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpurl.envs.names import names_of
from gpurl.envs.vec_env import VecEnv
from gpurl.run.display import counted
from gpurl.run.plot import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    STYLE,
    finish_axes,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 10  # more lines in one panel cannot be told apart
MAX_PANELS = 4  # of the observations of one agent
MAX_AGENTS = 6
MAX_CHOICES = 12  # with a tick each
MAX_JOINED = 150  # changes of a discrete action: lines that join more of them are a solid area
MORE_COLORS = "#c23b3b #12a5b5 #8c564b #d65db1 #8a8f00 #1b2a6b"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, *MORE_COLORS.split())
LIMIT_COLOR = "#999999"
# reward: values that are this many times as far away as the others would flatten them
FAR = 20.0


@dataclass(frozen=True)
class Signals:
    """What the numbers of an episode are, of one agent with D observations and A actions."""

    observation_names: Sequence[str]  # [D]
    action_names: Sequence[str]  # [A]
    choices: Sequence[str] = ()  # names of the choices of a discrete action
    num_choices: int = 0  # of a discrete action; 0: it is continuous
    limits: np.ndarray | None = None  # [2, agents, A] least and largest action
    has_image: bool = False  # the observation is one, which is not drawn


@dataclass(frozen=True)
class Episode:
    """T steps of G agents."""

    obs: np.ndarray  # [T + 1, G, D], the last one after the last step
    action: np.ndarray  # [T, G, A]
    reward: np.ndarray  # [T, G]
    end: str  # "terminated", "time limit", or "" if it did not end


def signals_of(env: VecEnv) -> Signals:
    """Of the tasks `env`; EnvError for names that do not fit."""
    names = names_of(env)
    space = env.single_action_space
    limits = None
    num_choices = 0
    if isinstance(space, Box):
        limits = np.stack((space.low, space.high)).reshape(2, env.num_agents, -1)
    elif isinstance(space, Discrete):
        num_choices = int(space.n)
    elif isinstance(space, MultiDiscrete):
        num_choices = int(space.nvec.max())
    has_image = env.single_observation_space.dtype == np.uint8
    return Signals(names.observation, names.action, names.choices, num_choices, limits, has_image)


@dataclass(frozen=True)
class _Panel:
    """One panel: `label` at its axis, and [T] or [T + 1, L] values with a name for each line."""

    label: str
    values: np.ndarray
    names: Sequence[str]


def plot_episode(path: Path, title: str, episode: Episode, signals: Signals) -> Path:
    """Draw the picture `path`. Of wide observations the first are drawn, of many agents too, and
    the labels say so.
    """
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    num_steps = len(episode.reward)
    total = episode.reward.mean(1).sum()
    title = f"{title} · {counted(num_steps, 'step')} · return {total:.6g}"
    observed = [] if signals.has_image else list(_observations(episode, signals))
    acted = list(_actions(episode, signals))
    heights = [_height(panel, 0) for panel in observed]
    heights += [_height(panel, signals.num_choices) for panel in acted]
    heights += [1.1, 1.1]
    with mpl.rc_context(STYLE):
        figure = new_figure(sum(heights) + 1.2, title)
        panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for axes, panel in zip(panels, observed):
            _draw_lines(axes, panel, np.arange(num_steps + 1))
            _pad_constant(axes, panel.values)
        for axes, panel in zip(panels[len(observed) :], acted):
            if signals.num_choices:
                _draw_choices(axes, panel, signals)
            else:
                _draw_lines(axes, panel, np.arange(num_steps))
                _draw_limits(axes, panel.values, signals.limits)
        _draw_rewards(panels[-2], episode.reward)
        so_far = np.concatenate(([0.0], episode.reward.mean(1).cumsum()))[:, None]
        _draw_lines(
            panels[-1], _Panel("return so far", so_far, [""]), np.arange(num_steps + 1), INK
        )
        for axes in panels:
            finish_axes(axes, "step" if axes is panels[-1] else "")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")  # 1,000, not 1k
        _mark_end(panels, num_steps, episode.end)
        panels[0].set_xlim(0, num_steps * 1.005)
        steps = MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10])
        panels[0].xaxis.set_major_locator(steps)  # the panels share the axis
        figure.align_ylabels(panels)
        return save_figure(figure, path)


# ---- what stands in which panel ----


def _observations(episode: Episode, signals: Signals) -> Iterator[_Panel]:
    """One agent: up to four panels of up to ten lines. Several: a panel for each."""
    _, num_agents, width = episode.obs.shape
    for agent in range(min(num_agents, MAX_AGENTS)):
        for first, end in _pieces(width, MAX_PANELS if num_agents == 1 else 1):
            label = _label("observation", agent, num_agents, first, end, width)
            names = signals.observation_names[first:end]
            yield _Panel(label, episode.obs[:, agent, first:end], names)


def _actions(episode: Episode, signals: Signals) -> Iterator[_Panel]:
    """One panel, in which several agents with one number each have a line each; else one for each
    agent.
    """
    _, num_agents, width = episode.action.shape
    if num_agents > 1 and width == 1:
        agents = range(min(num_agents, MAX_AGENTS))
        label = "action" if num_agents <= MAX_AGENTS else f"action\n{MAX_AGENTS} of {num_agents}"
        lines = [_agent(agent) for agent in agents]
        yield _Panel(label, episode.action[:, : len(agents), 0], lines)
        return
    for agent in range(min(num_agents, MAX_AGENTS)):
        for first, end in _pieces(width, MAX_PANELS if num_agents == 1 else 1):
            label = _label("action", agent, num_agents, first, end, width)
            names = signals.action_names[first:end]
            yield _Panel(label, episode.action[:, agent, first:end], names)


def _pieces(width: int, max_panels: int) -> list[tuple[int, int]]:
    """(first, end) of the columns in each panel: nearly equal numbers, the first ones smaller."""
    count = min(math.ceil(width / MAX_LINES), max_panels)
    drawn = min(width, count * MAX_LINES)
    ends = [drawn * (panel + 1) // count for panel in range(count)]
    return list(zip([0, *ends], ends))


def _label(what: str, agent: int, num_agents: int, first: int, end: int, width: int) -> str:
    """ "observation", its agent, and its columns where they are not all."""
    lines = [what]
    if num_agents > 1:
        lines.append(_agent(agent, num_agents))
    if end - first < width:
        lines.append(f"{first + 1} to {end} of {width}")
    return "\n".join(lines)


def _agent(agent: int, num_agents: int = 0) -> str:
    return f"agent {agent + 1}" + (f" of {num_agents}" if num_agents > MAX_AGENTS else "")


def _height(panel: _Panel, num_choices: int) -> float:
    """Inches: room for the legend, and for the ticks of discrete actions."""
    legend = 0.18 * len(panel.names) + 0.1 if len(panel.names) > 1 else 0.0
    if num_choices:
        return max(0.5 + 0.2 * min(num_choices, MAX_CHOICES), legend)
    return max(1.7, legend)


# ---- drawing ----


def _draw_lines(axes: "Axes", panel: _Panel, steps: np.ndarray, color: str = BLUE) -> None:
    """A line for each column of values; names in the legend, or that of one at the axis."""
    width = panel.values.shape[1]
    for column in range(width):
        axes.plot(
            steps,
            panel.values[:, column],
            color=color if width == 1 else COLORS[column],
            linewidth=1.3,
            marker="o" if len(steps) < 4 else None,
            markersize=4,
            label=panel.names[column],
        )
    _name(axes, panel)


def _name(axes: "Axes", panel: _Panel) -> None:
    """The label of the panel, and the names of its lines."""
    is_alone = len(panel.names) == 1 and panel.names[0] not in ("", "0", panel.label)
    axes.set_ylabel(f"{panel.label}\n{panel.names[0]}" if is_alone else panel.label)
    if len(panel.names) > 1:
        axes.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
            borderaxespad=0.3,
            labelspacing=0.25,
        )


def _draw_choices(axes: "Axes", panel: _Panel, signals: Signals) -> None:
    """Discrete actions: a bar at each choice for as long as it is taken, and thin lines from one to
    the next where they are few. Bars of several columns lie beside each other.
    """
    num_steps, width = panel.values.shape
    count = signals.num_choices
    thickness = 0.6 / width
    for column in range(width):
        color = BLUE if width == 1 else COLORS[column]
        values = panel.values[:, column]
        shift = ((width - 1) / 2 - column) * thickness  # the first above, as in the legend
        # runs of equal choices
        starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
        ends = np.concatenate((starts[1:], [num_steps]))
        axes.barh(
            values[starts] + shift,
            ends - starts,
            left=starts,
            height=thickness,
            color=color,
            linewidth=0,
            label=panel.names[column],
        )
        if len(starts) <= MAX_JOINED:
            axes.step(
                np.append(np.arange(num_steps), num_steps),
                np.append(values, values[-1]) + shift,
                where="post",
                color=color,
                linewidth=0.8,
                alpha=0.6,
            )
    # an axis of all choices, taken or not
    axes.set_ylim(-0.5, count - 0.5)
    if count <= MAX_CHOICES:
        names = signals.choices or [str(choice) for choice in range(count)]
        labels = [name if name == str(i) else f"{i} {name}" for i, name in enumerate(names)]
        axes.set_yticks(range(count), labels)
    else:
        from matplotlib.ticker import MaxNLocator

        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    _name(axes, panel)


def _draw_limits(axes: "Axes", values: np.ndarray, limits: np.ndarray | None) -> None:
    """Thin lines at the least and the largest action, unless they are so far away that the actions
    would be flat.
    """
    largest = np.nanmax(np.abs(values), initial=0.0)
    near = set[float]()
    if limits is not None:
        finite = np.unique(limits[np.isfinite(limits)])
        near = {float(limit) for limit in finite if abs(limit) <= max(FAR * largest, 1.0)}
    for limit in near:
        axes.axhline(limit, color=LIMIT_COLOR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    if near:
        low, high = min(*near, np.nanmin(values)), max(*near, np.nanmax(values))
        margin = 0.08 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    else:
        _pad_constant(axes, values)


def _draw_rewards(axes: "Axes", reward: np.ndarray) -> None:
    """The reward [T, G] of each step at its end; a line for each agent if they differ."""
    drawn = reward[:, :MAX_AGENTS]
    if (reward == reward[:, :1]).all():
        drawn = reward[:, :1]
    panel = _Panel("reward", drawn, [_agent(i) for i in range(drawn.shape[1])])
    if drawn.shape[1] == 1:
        panel = _Panel("reward", drawn, [""])
    _draw_lines(axes, panel, np.arange(1, len(drawn) + 1), GREEN)
    if not _leave_out_far(axes, drawn):
        _pad_constant(axes, drawn)


def _leave_out_far(axes: "Axes", values: np.ndarray) -> bool:
    """Where few values [T, L] are far from all others, an axis of the others, with the far ones as
    triangles and numbers at its edge; returns whether there are such values.
    """
    finite = values[np.isfinite(values)]
    if len(finite) < 20:
        return False
    low, high = np.percentile(finite, (2, 98))
    reach = FAR * (high - low)
    is_far = (values > high + reach) | (values < low - reach)
    number = int(is_far.sum())
    if not 0 < number <= 5 or not high > low:
        return False
    near = values[np.isfinite(values) & ~is_far]
    margin = 0.15 * float(np.ptp(near))
    axes.set_ylim(near.min() - margin, near.max() + margin)
    for step, line in np.argwhere(is_far):
        is_above = values[step, line] > high
        axes.annotate(
            f"{'▲' if is_above else '▼'} {values[step, line]:.4g}",
            (step + 1, 1.0 if is_above else 0.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3, -3 if is_above else 3),
            textcoords="offset points",
            ha="right" if step > len(values) / 2 else "left",
            va="top" if is_above else "bottom",
            fontsize=8,
            color=GREEN,
        )
    return True


def _pad_constant(axes: "Axes", values: np.ndarray) -> None:
    """An axis from 0 for values that do not change: matplotlib's would magnify nothing."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return
    low, high = float(finite.min()), float(finite.max())
    if high - low > 1e-5 * max(abs(low), abs(high)):
        return
    size = max(abs(low), abs(high)) or 1.0
    low, high = min(low, 0.0), max(high, 0.0)
    axes.set_ylim(low - 0.2 * size, high + 0.2 * size)


def _mark_end(panels: "Sequence[Axes]", num_steps: int, end: str) -> None:
    """A line where the episode ended: solid where it terminated, dashed at the time limit."""
    for axes in panels:
        if end:
            dashes = "-" if end == "terminated" else "--"
            axes.axvline(num_steps, color=INK, linewidth=1.2, linestyle=dashes, clip_on=False)
    panels[0].annotate(
        end or "it goes on",
        (num_steps, 1.0),
        xycoords=panels[0].get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
    )
