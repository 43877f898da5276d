"""The learning curve of one run as a picture: returns over env steps, and beside them what explains
them.
"""

import contextlib
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpurl.checkpoints.plain_files import MAX_LINE_BYTES, open_regular, read_at_most
from gpurl.errors import GpurlError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

Points = tuple[list[float], list[float]]  # env steps, values (NaN where the log has null)
Series = dict[str, Points]  # by tag

BLUE = "#2463c2"
ORANGE = "#e07b00"
GREEN = "#1a8f5a"
PURPLE = "#7b4fb8"
INK = "#333333"
PALE = "#d9d9d9"
STYLE: "dict[RcKeyType, object]" = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
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
REFERENCES = "references.json"
MAX_REFERENCES_BYTES = 1 << 20
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
            "train/ent_coef": "entropy coefficient",
        },
    ),
    (INK, {"time/fps": "env steps/s"}),
)


def plot_curve(folder: Path) -> Path:
    """Draw `folder`/learning_curve.png from its metrics.jsonl, with the returns of its
    references.json as dashed lines.
    """
    import matplotlib as mpl

    series = read_metrics(folder)
    with mpl.rc_context(STYLE):
        figure = new_figure(4.6, _title(folder))
        _draw(figure, series, _read_references(folder))
        return save_figure(figure, folder / "learning_curve.png")


def note_references(folder: Path, returns: dict[str, float]) -> None:
    """Save `returns` such as {"scripted policy": 10.4} for the curve of the run in `folder`;
    GpurlError if they cannot be written.
    """
    path = folder / REFERENCES
    try:
        path.write_text(f"{json.dumps(returns)}\n", encoding="utf-8")
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
    """An empty figure, 10.5 by `height` inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Figure itself, not pyplot: no global state, no window
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(10.5, height), dpi=150, layout=layout)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write the picture `path`, complete or not at all; GpurlError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


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
    """The folder's name; of runs/chasing/ppo/20260102-030405_3 "chasing · ppo · seed 3"."""
    folder = folder.resolve()
    match = re.fullmatch(r"\d{8}-\d{6}_(-?\d+)(-\d+)?", folder.name)
    if match is None:
        return folder.name
    return f"{folder.parent.parent.name} · {folder.parent.name} · seed {match[1]}"


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
        finish_axes(axes, "env steps" if is_last else "")
        axes.tick_params(labelbottom=is_last)
    returns.set_xlim(left=0)
    figure.align_ylabels(figure.axes[1:])


def _draw_returns(axes: "Axes", series: Series, references: dict[str, float]) -> None:
    """Returns of training and evaluation, with references as dashed lines."""
    # the curves
    training = _finite_points(series, "rollout/ep_rew_mean")
    evaluation = _finite_points(series, "eval/mean_reward")
    if training:
        _line(axes, training, BLUE, label=TRAINING_LABEL)
    if evaluation:
        _line(axes, evaluation, ORANGE, label="evaluation", marker="o")
        _draw_deviation(axes, series, evaluation)
    if not training and not evaluation:
        message = (
            "not every environment has finished an episode:\nneither rollout/ep_rew_mean nor "
            "eval/mean_reward has a number"
        )
        axes.text(
            0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="#777777"
        )
    # the references
    for (name, value), dashes in zip(references.items(), itertools.cycle(("--", ":", "-."))):
        axes.axhline(
            value, color="#666666", linestyle=dashes, linewidth=1.2, label=f"{name} ({value:.4g})"
        )
    axes.set_ylabel("episode return")
    finish_axes(axes, "env steps")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.85, edgecolor="none", loc="best")


def _finite_points(series: Series, tag: str) -> Points | None:
    """The points of `tag`; None if none of them has a finite value."""
    points = series.get(tag)
    return points if points is not None and any(map(math.isfinite, points[1])) else None


def _draw_deviation(axes: "Axes", series: Series, evaluation: Points) -> None:
    """A band of one standard deviation around the evaluations that have one."""
    deviation = dict(zip(*series.get("eval/std_reward", ([], []))))
    points = [(step, value) for step, value in zip(*evaluation) if step in deviation]
    if points:
        axes.fill_between(
            [step for step, _ in points],
            [value - deviation[step] for step, value in points],
            [value + deviation[step] for step, value in points],
            color=ORANGE,
            alpha=0.18,
            linewidth=0,
            label="± 1 std over episodes",
        )


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


def finish_axes(axes: "Axes", x_label: str) -> None:
    """Grid, label, and 20k or 1.5M for large numbers."""
    from matplotlib.ticker import EngFormatter

    axes.grid(color=PALE, linewidth=0.6)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.get_yscale() == "linear" and max(map(abs, axes.get_ylim())) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
