"""A tuning as a picture: the return of each trial in its order, and how important each setting
is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpurl.run.display import counted
from gpurl.run.plot import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    STYLE,
    finish_axes,
    legend_above,
    new_figure,
    save_figure,
)
from gpurl.tuning.study import TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "tuning.png"


def plot_tuning(
    rows: Sequence[TrialRow], importances: Mapping[str, float], title: str, path: Path
) -> Path:
    """Draw the trials' returns over their numbers and, where there are any, the importances."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = new_figure(4.6, title)
        widths = [1.6, 1.0] if importances else [1.0]
        grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
        _draw_history(figure.add_subplot(grid[0, 0]), sorted(rows, key=lambda row: row.number))
        if importances:
            _draw_importances(figure.add_subplot(grid[0, 1]), importances)
        return save_figure(figure, path)


def _draw_history(axes: "Axes", rows: Sequence[TrialRow]) -> None:
    """Finished and pruned trials as dots, the best so far as steps, failed ones on the axis."""
    from matplotlib.ticker import MaxNLocator

    finished = [(row.number, row.value) for row in rows if row.state == "finished"]
    # a pruned trial that was never evaluated has no height
    pruned = [
        (row.number, row.value) for row in rows if row.state == "pruned" and row.value is not None
    ]
    if finished:
        numbers, values = map(list, zip(*finished))
        best = [max(values[: place + 1]) for place in range(len(values))]
        end = max(row.number for row in rows)
        axes.step(
            [*numbers, end], [*best, best[-1]], where="post", color=ORANGE, label="best so far"
        )
        axes.plot(numbers, values, "o", color=BLUE, markersize=5, label="finished")
    if pruned:
        label = "pruned: return where it ended"
        axes.plot(
            *map(list, zip(*pruned)),
            "o",
            color=BLUE,
            markerfacecolor="none",
            markersize=5,
            label=label,
        )
    failed = [row.number for row in rows if row.value is None and row.state in ("failed", "pruned")]
    if failed:
        low = axes.get_ylim()[0]
        axes.plot(
            failed,
            [low] * len(failed),
            "x",
            color=INK,
            label="failed",
            clip_on=False,
        )
    axes.set_ylabel("return of the last evaluation")
    finish_axes(axes, "trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not legend_above(axes, columns=4):
        text = f"{counted(len(rows), 'trial')}, none has ended"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=INK)


def _draw_importances(axes: "Axes", importances: Mapping[str, float]) -> None:
    """A bar for each setting, the most important above."""
    names = list(importances)[::-1]
    values = [importances[name] for name in names]
    axes.barh(range(len(names)), values, height=0.6, color=GREEN)
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.2f}",
            (value, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.2 * max(values, default=1.0) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_xlabel("importance (PED-ANOVA)")
