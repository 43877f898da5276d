"""The pictures of docs/results.md: learning curves with the interquartile mean over seeds as a line
and its 95 % interval as a band.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.learning.outcomes import Outcome
from benchmarks.learning.published import published
from benchmarks.learning.results import Point
from gpurl.run.plot import STYLE, plain_labels
from gpurl.run.scores import Array, band, interpolate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (
    *("#2463c2", "#e07b00", "#1a8f5a", "#7b4fb8", "#c23b3b"),
    *("#4aa3b5", "#8a6d3b", "#d46bb0", "#8fae2b", "#666666"),
)
MAX_SPREAD = 4.0  # of the ends of lines on a linear axis
PANELS_A_ROW = 3
PANEL = (4.0, 2.9)  # inches
DPI = 110
Axis = Callable[[Point], float]


def in_steps(point: Point) -> float:
    """Millions of environment steps."""
    return point.steps / 1e6


def in_minutes(point: Point) -> float:
    """Minutes of wall clock."""
    return point.seconds / 60


AXES: dict[str, tuple[str, Axis]] = {
    "steps": ("million environment steps", in_steps),
    "time": ("minutes", in_minutes),
}


def has_curves(outcome: Outcome) -> bool:
    """Whether every seed has a line to draw."""
    return min(len(seed.curve) for seed in outcome.seeds) > 1


def draw(outcomes: Sequence[Outcome], path: Path, axis: str = "steps") -> bool:
    """A panel for each task, a line for each case; False, and no file, if there is nothing to draw.
    axis: steps or time. Published means are dashed.
    """
    panels: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if has_curves(outcome):
            panels.setdefault(_panel(outcome), []).append(outcome)
    if not panels:
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        columns = min(PANELS_A_ROW, len(panels))
        rows = -(-len(panels) // columns)
        size = (PANEL[0] * columns, PANEL[1] * rows)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        for each in axes.flat[len(panels) :]:
            each.set_visible(False)
        for each, (title, members) in zip(axes.flat, panels.items()):
            _draw_panel(each, title, members, axis)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
        pyplot.close(figure)
    return True


def _panel(outcome: Outcome) -> str:
    """The title of the panel: the task, with what else tells panels apart."""
    case = outcome.case
    size = (
        f", {case.settings['num_envs']} environments"
        if "num_envs" in case.settings and (case.env == "chasing" or case.group == "presets")
        else ""
    )
    prefix = f"{case.algorithm} on " if case.group == "peers" else ""
    return f"{prefix}{case.task}{size}"


def _draw_panel(axes: "Axes", title: str, members: list[Outcome], axis: str) -> None:
    label, coordinate = AXES[axis]
    ends = []
    for color, outcome in zip(itertools.cycle(COLORS), members):
        x, values = at_the_same_steps(outcome, coordinate)
        ends.append(x[-1])
        line, low, high = band(values)
        name = outcome.case.trainer if outcome.case.group == "peers" else _line(outcome)
        axes.plot(x, line, color=color, linewidth=1.6, label=name)
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    # the publications, for one line
    if len(members) == 1:
        case = members[0].case
        for column in case.published:
            if (found := published(column, case.task)) is not None:
                axes.axhline(found[0], color="#999999", linestyle="--", linewidth=0.8)
    else:
        axes.legend(frameon=False, fontsize=7)
    # short trainings beside long ones
    if max(ends) > MAX_SPREAD * min(ends):
        axes.set_xscale("log")
        plain_labels(axes)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(label)
    axes.set_ylabel("return")


def at_the_same_steps(outcome: Outcome, coordinate: Axis) -> tuple[Array, Array]:
    """(x [P], returns [S, P]) of S seeds at P steps; x: the median over seeds of a coordinate at
    them, so that a fast seed does not end the line of slow ones.
    """

    def by_steps(of_point: Axis) -> Array:
        curves = [
            [(point.steps, of_point(point)) for point in each.curve] for each in outcome.seeds
        ]
        return interpolate(curves)[1]

    return np.median(by_steps(coordinate), axis=0), by_steps(lambda point: point.mean_return)


def _line(outcome: Outcome) -> str:
    """The case's name without the task."""
    case = outcome.case
    if case.group in ("wall_clock", "presets"):
        return case.algorithm
    return case.name.replace(f"-{case.task}", "")
