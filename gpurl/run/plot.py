"""The learning curve of one run as a picture: returns against env steps, and beside it what
explains them.
"""

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurl.checkpoints.plain_files import MAX_LINE_BYTES, open_regular, read_at_most
from gpurl.errors import GpurlError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[
    str, tuple[list[float], list[float]]
]  # tag -> (env steps, values), NaN where the log has null

BLUE, ORANGE, GREEN, PURPLE, INK, PALE = (
    "#2463c2",
    "#e07b00",
    "#1a8f5a",
    "#7b4fb8",
    "#333333",
    "#d9d9d9",
)
STYLE: dict[Any, Any] = {
    **{
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#999999",
    },
    **{
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    },
}
REFERENCES = "references.json"
MAX_REFERENCES_BYTES, MAX_NUMBER = 1 << 20, 1e100
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
            "train/ent_coef": "entropy weight",
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
    """Keep `returns` such as {"scripted policy": 10.4} for the curve of the run in `folder`;
    GpurlError when the disk refuses.
    """
    path = folder / REFERENCES
    try:
        path.write_text(f"{json.dumps(returns)}\n", encoding="utf-8")
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error


def _read_references(folder: Path) -> dict[str, float]:
    """The returns kept by `note_references`, {} where there are none or the file is damaged."""
    try:
        returns = json.loads(read_at_most(folder / REFERENCES, MAX_REFERENCES_BYTES))
        return {str(name): float(value) for name, value in returns.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}


def new_figure(height: float, title: str) -> "Figure":
    """An empty figure, 10.5 by `height` inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(
        figsize=(10.5, height), dpi=150, layout=engine
    )  # Figure itself, not pyplot: no global state, no window
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write the picture `path`, whole or not at all; GpurlError when the disk refuses."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(part, format="png")
        os.replace(part, path)
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return path


def read_metrics(folder: Path) -> Series:
    """All scalars of a run's metrics.jsonl by tag; lines that are damaged or still being written
    are left out.
    """
    series: Series = {}
    try:
        with open_regular(folder / "metrics.jsonl") as file:
            for line in iter(
                lambda: file.readline(MAX_LINE_BYTES), b""
            ):  # of a longer one the pieces are no JSON
                _take_line(line, series)
    except OSError as error:
        raise UsageError(
            f"{folder} is not the folder of a run: no metrics.jsonl can be read there "
            f"({error.strerror})"
        ) from error
    return series


def _take_line(line: bytes, series: Series) -> None:
    """Append what is in a line; nothing of one that is damaged."""
    try:
        numbers = {
            tag: math.nan if value is None else float(value)
            for tag, value in json.loads(line).items()
        }
        step = numbers.pop("step")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return
    if not math.isfinite(step) or abs(step) > MAX_NUMBER:
        return
    for tag, number in numbers.items():
        steps, values = series.setdefault(tag, ([], []))
        steps.append(step)
        values.append(number if abs(number) <= MAX_NUMBER else math.nan)  # what cannot be drawn


def _title(folder: Path) -> str:
    """ "chasing · ppo · seed 3" for runs/chasing/ppo/20260102-030405_3, else the name of the
    folder.
    """
    folder = folder.resolve()
    match = re.fullmatch(r"\d{8}-\d{6}_(-?\d+)(-\d+)?", folder.name)
    return (
        f"{folder.parent.parent.name} · {folder.parent.name} · seed {match[1]}"
        if match
        else folder.name
    )


def _draw(figure: "Figure", series: Series, reference: dict[str, float]) -> None:
    side = []
    for color, labels in SIDE_PANELS:
        side += [(series[tag], label, color) for tag, label in labels.items() if tag in series][:1]
    grid = figure.add_gridspec(
        max(1, len(side)), 2 if side else 1, width_ratios=[2.2, 1] if side else [1]
    )
    returns = figure.add_subplot(grid[:, 0])
    _draw_returns(returns, series, reference)
    for row, (points, label, color) in enumerate(side):
        is_last = row == len(side) - 1
        axes = figure.add_subplot(grid[row, 1], sharex=returns)
        _line(axes, points, color=color, linewidth=1.2)
        axes.set_ylabel(label)
        finite = [value for value in points[1] if math.isfinite(value)]
        if label == "env steps/s":
            axes.set_ylim(bottom=0)
        elif finite and 0 < 100 * min(finite) < max(finite):
            axes.set_yscale("log")
        finish_axes(axes, "env steps" if is_last else "")
        axes.tick_params(labelbottom=is_last)
    returns.set_xlim(left=0)
    figure.align_ylabels(figure.axes[1:])


def _draw_returns(axes: "Axes", series: Series, reference: dict[str, float]) -> None:
    empty: tuple[list[float], list[float]] = ([], [])
    training, evaluation = (
        series.get("rollout/ep_rew_mean", empty),
        series.get("eval/mean_reward", empty),
    )
    has_training, has_evaluation = (
        any(map(math.isfinite, values)) for _, values in (training, evaluation)
    )
    if has_training:
        _line(axes, training, color=BLUE, linewidth=1.8, label="training")
    if has_evaluation:
        _line(
            axes,
            evaluation,
            color=ORANGE,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label="evaluation",
        )
        deviation = dict(zip(*series.get("eval/std_reward", empty)))
        band = [
            (s, v - deviation[s], v + deviation[s]) for s, v in zip(*evaluation) if s in deviation
        ]
        if band:
            steps, low, high = zip(*band)
            axes.fill_between(
                steps,
                low,
                high,
                color=ORANGE,
                alpha=0.18,
                linewidth=0,
                label="± 1 std over episodes",
            )
    if not has_training and not has_evaluation:
        message = (
            "no episode has ended yet:\nneither rollout/ep_rew_mean nor eval/mean_reward has a "
            "number"
        )
        axes.text(
            0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="#777777"
        )
    for (name, value), dashes in zip(reference.items(), ["--", ":", "-."] * len(reference)):
        axes.axhline(
            value, color="#666666", linestyle=dashes, linewidth=1.2, label=f"{name} ({value:.4g})"
        )
    axes.set_ylabel("episode return")
    finish_axes(axes, "env steps")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.85, edgecolor="none", loc="best")


def _line(axes: "Axes", points: tuple[list[float], list[float]], **look: Any) -> None:
    """A line, with dots where there are too few points to see one."""
    look.setdefault("marker", "o" if len(points[0]) < 3 else None)
    axes.plot(*points, **({"markersize": 4} | look))


def finish_axes(axes: "Axes", x_label: str) -> None:
    """Grid, label, and 20k or 1.5M for large numbers."""
    from matplotlib.ticker import EngFormatter

    axes.grid(color=PALE, linewidth=0.6)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.get_yscale() == "linear" and max(map(abs, axes.get_ylim())) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
