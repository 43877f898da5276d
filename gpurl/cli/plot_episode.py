"""One episode as a picture: what the policy saw, did and got, step by step."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

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

MAX_LINES = 12  # more cannot be told apart
COLORS = (
    BLUE,
    ORANGE,
    GREEN,
    PURPLE,
    "#c0392b",
    "#12a5b5",
    "#8c564b",
    "#d65db1",
    "#8a8f00",
    "#7f7f7f",
    "#1b2a6b",
    "#f09a90",
)


def plot_episode(
    path: Path, title: str, obs: np.ndarray, action: np.ndarray, reward: np.ndarray
) -> Path:
    """Draw the picture `path` of one episode; obs: [T, D], action: [T, A], reward: [T]. Of D and A
    at most the first 12 are drawn.
    """
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(STYLE):
        figure = new_figure(8.0, f"{title} · {len(reward)} steps · return {reward.sum():.6g}")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=[2.4, 1.6, 1, 1])
        _draw_lines(panels[0], obs, "observation")
        _draw_lines(
            panels[1],
            action,
            "action",
            is_discrete=bool((np.mod(action, 1) == 0).all() and (action >= 0).all()),
        )
        _draw_lines(panels[2], reward[:, None], "reward", GREEN)
        _draw_lines(panels[3], reward.cumsum()[:, None], "return so far", INK)
        for axes in panels:
            finish_axes(axes, "step" if axes is panels[-1] else "")
        panels[0].set_xlim(0, max(len(reward) - 1, 1))
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # for all, they share it
        figure.align_ylabels(panels)
        return save_figure(figure, path)


def _draw_lines(
    axes: "Axes", values: np.ndarray, name: str, color: str = BLUE, is_discrete: bool = False
) -> None:
    """The columns of values [T, D] over time, with a legend where there are several; integers as
    steps.
    """
    from matplotlib.ticker import MaxNLocator

    num_steps, width = values.shape
    for column in range(min(width, MAX_LINES)):
        axes.plot(
            values[:, column],
            color=color if width == 1 else COLORS[column],
            linewidth=1.3,
            drawstyle="steps-post" if is_discrete else "default",
            marker="o" if num_steps < 3 else None,
            markersize=4,
            label=str(column),
        )
    axes.set_ylabel(name if width <= MAX_LINES else f"{name}\n(first {MAX_LINES} of {width})")
    if is_discrete:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if width > 1:
        axes.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
            ncols=1 if width <= 7 else 2,
        )
