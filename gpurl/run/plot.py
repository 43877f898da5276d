"""The learning curve of one run as a picture: returns over env steps, and beside them what explains
them.
"""

import io
import itertools
import json
import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpurl.checkpoints.plain_files import (
    MAX_LINE_BYTES,
    open_regular,
    read_at_most,
    replace_file,
)
from gpurl.colors import BLUE, GREEN, INK, ORANGE, PALE, PURPLE
from gpurl.errors import GpurlError, UsageError
from gpurl.run.config_file import read_config
from gpurl.run.display import engineering
from gpurl.run.run_folder import REFERENCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

Points = tuple[list[float], list[float]]  # env steps, values (NaN where the log has null)
Series = dict[str, Points]  # by tag

PICTURES = (".png", ".svg", ".pdf")  # kinds of files

STYLE: "dict[RcKeyType, object]" = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.parse_math": False,  # a name with $ in it is no formula
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
}
# from when every environment has finished one
TRAINING_LABEL = "training: newest episode of every environment"
MAX_REFERENCES_BYTES = 1 << 20
MIN_TO_SMOOTH = 40  # points of training below which they are drawn as they are
MAX_TITLE = 90  # letters in a line
MAX_NUMBER = 1e100  # larger ones cannot be drawn
# colour, and the label of each tag that may stand there; the first tag present is drawn
SIDE_PANELS = (
    (
        PURPLE,
        {
            "train/value_loss": "value loss",
            "train/critic_loss": "critic loss",
            "train/loss": "loss",
            "train/actor_loss": "actor loss",
        },
    ),
    (
        GREEN,
        {
            "train/approx_kl": "KL",
            "train/entropy_loss": "entropy loss",
            "train/ent_coef": "entropy coef.",
        },
    ),
    (INK, {"time/fps": "env steps/s"}),
)


def plot_curve(folder: Path, out: Path | None = None) -> Path:
    """Draw `out`, by default `folder`/learning_curve.png; see `curve_figure`."""
    import matplotlib as mpl

    figure = curve_figure(folder)
    with mpl.rc_context(STYLE):
        return save_figure(figure, out or folder / "learning_curve.png")


def curve_figure(folder: Path) -> "Figure":
    """The learning curve of the run in `folder` from its metrics.jsonl, with the returns of its
    references.json as dashed lines.
    """
    import matplotlib as mpl

    series = read_metrics(folder)
    with mpl.rc_context(STYLE):
        figure = new_figure(4.6, _title(folder))
        _draw(figure, series, _read_references(folder))
    return figure


def note_references(folder: Path, returns: dict[str, float]) -> None:
    """Save `returns` such as {"scripted policy": 10.4} for the curve of the run in `folder`;
    GpurlError if they cannot be written.
    """
    path = folder / REFERENCES
    try:
        replace_file(path, f"{json.dumps(returns)}\n".encode())
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error


def _read_references(folder: Path) -> dict[str, float]:
    """The returns saved by `note_references`, {} if there are none or the file is damaged."""
    try:
        returns = json.loads(read_at_most(folder / REFERENCES, MAX_REFERENCES_BYTES))
        return {str(name): float(value) for name, value in returns.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}


def new_figure(height: float, title: str) -> "Figure":
    """An empty figure, 10.5 by `height` inches; a long title has several lines."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Figure itself, not pyplot: no global state, no window
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(10.5, height), dpi=150, layout=layout)
    lines = textwrap.wrap(title, MAX_TITLE, break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=12, fontweight="bold")
    return figure


def check_picture_path(path: Path) -> None:
    """UsageError unless `path` names a kind of picture."""
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"a picture is a file {', '.join(PICTURES)}, got {str(path)!r}")


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write the picture `path`, complete or not at all; GpurlError if it cannot be written,
    UsageError if it is none of PICTURES.
    """
    check_picture_path(path)
    try:
        replace_file(path, file_content(figure, path.suffix.lower()))
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error
    return path


@contextmanager
def place_hint() -> Iterator[None]:
    """A `with` block of a command with --out, whose errors of writing name it."""
    try:
        yield
    except GpurlError as error:
        if not str(error).startswith("cannot write"):
            raise
        raise type(error)(f"{error}; choose another place with --out") from error


def file_content(figure: "Figure", suffix: str = ".png") -> bytes:
    """The content of a file with this suffix, one of PICTURES."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.removeprefix("."))
    return buffer.getvalue()


def read_metrics(folder: Path) -> Series:
    """All scalars of a run's metrics.jsonl by tag; lines that are damaged or not completely
    written are skipped.
    """
    series: Series = {}
    try:
        with open_regular(folder / "metrics.jsonl") as file:
            # the pieces of a longer line are not JSON and are skipped, too
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                _add_line(series, line)
    except OSError as error:
        raise UsageError(
            f"{folder} is not a run folder: cannot read its metrics.jsonl ({error.strerror})"
        ) from error
    return series


def _add_line(series: Series, line: bytes) -> None:
    """Append the numbers of a line; none if it is damaged."""
    try:
        numbers = {
            tag: math.nan if value is None else float(value)
            for tag, value in json.loads(line).items()
        }
        step = numbers.pop("step")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return
    # numbers that cannot be drawn
    if not math.isfinite(step) or abs(step) > MAX_NUMBER:
        return
    for tag, number in numbers.items():
        steps, values = series.setdefault(tag, ([], []))
        steps.append(step)
        values.append(number if abs(number) <= MAX_NUMBER else math.nan)


def _title(folder: Path) -> str:
    """ "chasing · ppo · seed 3" from config.yaml; the folder's name where it cannot be read."""
    try:
        settings = read_config(folder / "config.yaml")
        return f"{settings['env']} · {settings['algorithm']} · seed {settings['seed']}"
    except (UsageError, KeyError):
        return folder.resolve().name


def _draw(figure: "Figure", series: Series, references: dict[str, float]) -> None:
    """Returns on the left, side panels on the right."""
    # a panel for each group that has values
    panels = []
    for color, labels in SIDE_PANELS:
        tag = next((tag for tag in labels if tag in series), None)
        if tag is not None:
            panels.append((series[tag], labels[tag], color))
    # the layout
    widths = [2.2, 1.0] if panels else [1.0]
    grid = figure.add_gridspec(max(1, len(panels)), len(widths), width_ratios=widths)
    # returns
    returns = figure.add_subplot(grid[:, 0])
    _draw_returns(returns, series, references)
    # panels, which share the x-axis
    for row, (points, label, color) in enumerate(panels):
        is_last = row == len(panels) - 1
        axes = figure.add_subplot(grid[row, 1], sharex=returns)
        _line(axes, points, color, width=1.2)
        axes.set_ylabel(label)
        # a logarithmic scale for more than two decades
        finite = [value for value in points[1] if math.isfinite(value)]
        if label == "env steps/s":
            axes.set_ylim(bottom=0)
        elif finite and 0 < 100 * min(finite) < max(finite):
            axes.set_yscale("log")
        finish_axes(axes, "env steps" if is_last else "", ticks=4)
        axes.tick_params(labelbottom=is_last)
    returns.set_xlim(left=0)
    figure.align_ylabels(figure.axes[1:])


def _draw_returns(axes: "Axes", series: Series, references: dict[str, float]) -> None:
    """Returns of training and evaluation, with references as dashed lines."""
    # the curves
    training = _finite_points(series, "rollout/ep_rew_mean")
    evaluation = _finite_points(series, "eval/mean_reward")
    if training:
        _draw_training(axes, training)
    if evaluation:
        _line(axes, evaluation, ORANGE, label="evaluation", marker="o")
        _draw_error(axes, series, evaluation)
    if last := evaluation or training:
        _note_last(axes, last, ORANGE if evaluation else BLUE)
    if message := _what_is_missing(training, evaluation):
        on_white = {"facecolor": "white", "edgecolor": "none"}  # grid lines end at the text
        axes.text(
            *(0.45, 0.7, message),
            transform=axes.transAxes,
            ha="center",
            va="center",
            color="#777777",
            bbox=on_white,
        )
    # the references
    for (name, value), dashes in zip(references.items(), itertools.cycle(("--", ":", "-."))):
        axes.axhline(
            value, color="#666666", linestyle=dashes, linewidth=1.2, label=f"{name} ({value:.4g})"
        )
    axes.set_ylabel("episode return")
    finish_axes(axes, f"env steps{_wall_time(series)}", ticks=6)
    legend_above(axes, columns=2)


def _what_is_missing(training: Points | None, evaluation: Points | None) -> str:
    """Why there is no curve to see, "" if there is one."""
    if training or (evaluation and len(evaluation[0]) > 1):
        return ""
    message = "not every environment has finished an episode:\n"
    if not evaluation:
        return f"{message}neither rollout/ep_rew_mean nor eval/mean_reward has a number"
    every = float(f"{max(evaluation[0][0] / 10, 1):.0e}")  # one digit and zeros
    return f"{message}training has no return yet. --eval-every {every:.0f} evaluates on the way"


def _finite_points(series: Series, tag: str) -> Points | None:
    """The points of `tag`; None if none of them has a finite value."""
    points = series.get(tag)
    return points if points is not None and any(map(math.isfinite, points[1])) else None


def _draw_training(axes: "Axes", points: Points) -> None:
    """The returns of training: as they are if they are few, else thin under their moving mean."""
    if len(points[0]) < MIN_TO_SMOOTH:
        _line(axes, points, BLUE, label=TRAINING_LABEL)
        return
    axes.plot(*points, color=BLUE, linewidth=0.7, alpha=0.4)
    _line(axes, (points[0], moving_mean(points[1])), BLUE, label=TRAINING_LABEL)


def moving_mean(values: list[float]) -> list[float]:
    """The mean of each value and its neighbours, a fortieth of all on either side; at the ends of
    as many as there are on both. NaN stays NaN and counts for none of the others.
    """
    half = max(len(values) // 40, 1)
    column = np.array(values, np.float64)
    is_finite = np.isfinite(column)
    # sums and counts of all before each value: a long run has a million of them. A huge value must
    # not round those after it
    sums, counts = (
        np.concatenate([[0.0], np.cumsum(each, dtype=np.longdouble)])
        for each in (np.where(is_finite, column, 0.0), is_finite)
    )
    index = np.arange(len(column))
    reach = np.minimum(half, np.minimum(index, len(column) - 1 - index))
    first, end = index - reach, index + reach + 1
    near = np.maximum(counts[end] - counts[first], 1.0)
    means = np.where(is_finite, (sums[end] - sums[first]) / near, math.nan)
    return list(map(float, means))


def _draw_error(axes: "Axes", series: Series, evaluation: Points) -> None:
    """A band of one standard error around the evaluations, a bar around a single one: the
    uncertainty of the mean. One standard deviation would contain returns that do not exist.
    """
    deviation = dict(zip(*series.get("eval/std_reward", ([], []))))
    episodes = dict(zip(*series.get("eval/episodes", ([], []))))
    points = [
        (step, value, deviation[step] / math.sqrt(episodes[step]))
        for step, value in zip(*evaluation)
        if step in deviation and episodes.get(step, 0) >= 1
    ]
    if not points:
        return
    steps, values, errors = map(list, zip(*points))
    label = "± standard error of the evaluation"
    if len(points) == 1:  # a band of one step has no width
        axes.errorbar(
            steps, values, errors, fmt="none", ecolor=ORANGE, alpha=0.5, capsize=3, label=label
        )
        return
    low = [value - error for value, error in zip(values, errors)]
    high = [value + error for value, error in zip(values, errors)]
    axes.fill_between(steps, low, high, color=ORANGE, alpha=0.25, linewidth=0, label=label)


def _note_last(axes: "Axes", points: Points, color: str) -> None:
    """The last finite value, beside its point, legible on lines."""
    from matplotlib.patheffects import withStroke

    step, value = [pair for pair in zip(*points) if math.isfinite(pair[1])][-1]
    axes.annotate(
        f"{value:.4g}",
        (step, value),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontweight="bold",
        fontsize=9,
        annotation_clip=False,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def _wall_time(series: Series) -> str:
    """ " (20.0M in 1:02:03)": steps and seconds of the training; "" if they are unknown."""
    steps, seconds = series.get("time/time_elapsed", ([], []))
    if not steps or not math.isfinite(seconds[-1]):
        return ""
    return f" ({engineering(steps[-1])} in {timedelta(seconds=int(seconds[-1]))})"


def _line(
    axes: "Axes",
    points: Points,
    color: str,
    width: float = 1.8,
    label: str | None = None,
    marker: str | None = None,
) -> None:
    """A line, with dots if there are too few points to see one."""
    size = 4.0 if marker is None else 3.5
    if len(points[0]) < 3:
        marker = "o"
    axes.plot(*points, color=color, linewidth=width, label=label, marker=marker, markersize=size)


def legend_above(axes: "Axes", columns: int) -> bool:
    """A legend above the axes, where it hides neither curves nor grid; False if nothing has a
    label.
    """
    if not axes.get_legend_handles_labels()[0]:
        return False
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        frameon=False,
        ncols=columns,
        fontsize=8.5,
    )
    return True


def plain_labels(axes: "Axes") -> None:
    """Numbers beside logarithmic axes: their own labels are formulas, see STYLE. Axes of less than
    two decades have some between the powers of ten, too.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            subs = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())


def finish_axes(axes: "Axes", x_label: str, ticks: int | None = None) -> None:
    """Grid, label, and 20k or 1.5M for large numbers. ticks: at most so many intervals along x."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.grid(color=PALE, linewidth=0.6)
    plain_labels(axes)
    if ticks is not None:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
    axes.set_xlabel(x_label)
    # 0.5 minutes are not 500m
    if axes.get_xscale() == "linear" and max(map(abs, axes.get_xlim())) >= 1e3:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.get_yscale() == "linear" and max(map(abs, axes.get_ylim())) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
