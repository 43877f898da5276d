"""The benchmarks as a picture: environment steps a second against the number of environments, with
the limits of the hardware, and beside other trainers.
"""

import csv
import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpurl.checkpoints.plain_files import MAX_TABLE_BYTES, read_at_most
from gpurl.errors import GpurlError, UsageError
from gpurl.run.display import counted, engineering
from gpurl.run.plot import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    STYLE,
    finish_axes,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, str]

TRAINING = "chasing training"
CURVES = {  # case: (label, colour)
    "chasing env": ("environment alone", GREEN),
    "chasing env+policy": ("with policy", PURPLE),
    TRAINING: ("training", BLUE),
}
LIMIT_CASE = "chasing limit "  # beginnings of cases
PEERS_CASE = "chasing "
DASHES = ("-", "--", ":", "-.")  # one for each horizon
LABEL_DISTANCE = 0.055  # of two labels of lines, as a fraction of the axes' height


def plot_bench(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw throughput_DEVICE.png from every throughput_DEVICE.csv of `folder`, into `out` if given,
    else beside it.

    The rows of the newest commit are drawn; of older ones the training, faintly.
    """
    import matplotlib as mpl

    files = sorted(folder.glob("throughput_*.csv"))
    if not files:
        raise UsageError(f"{folder} holds no throughput_*.csv; gpurl bench writes one")
    # one picture for each device
    target = out or folder
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpurlError(f"cannot make the folder {target}: {error.strerror or error}") from error
    pictures = []
    for path in files:
        try:
            with mpl.rc_context(STYLE):
                pictures.append(_draw(path, target))
        except UsageError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{path} holds no results of gpurl bench: {type(error).__name__}: {error}"
            ) from error
    return pictures


def _draw(throughput: Path, target: Path) -> Path:
    rows = _read(throughput)
    if not rows:
        raise UsageError(f"{throughput} has no rows of env_steps/s")
    newest, older = _split_newest(rows)
    peers = _read(throughput.with_name(throughput.name.replace("throughput", "peers", 1)))
    peers, _ = _split_newest([row for row in peers if row["case"].startswith(PEERS_CASE)])

    figure = new_figure(5.2, f"PPO on Chasing, two 64×64 networks · {_device(newest)}")
    trainers = [row for row in peers if row["trainer"] != "gpurl"]
    widths = [1.5, 1.0] if trainers else [1.0]
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    # older rows first, so that the newest are drawn over them
    axes = figure.add_subplot(grid[0, 0])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw_older(axes, older)
    _draw_curves(axes, newest)
    _draw_limits(axes, newest)
    _finish(axes, rows)
    if trainers:
        _draw_trainers(figure.add_subplot(grid[0, 1]), peers)
    # below: of which program these numbers are
    figure.supxlabel(_origin(newest[0], peers), fontsize=8, alpha=0.7)
    return save_figure(figure, target / f"{throughput.stem}.png")


# ---- the rows of a file ----


def _read(path: Path) -> list[Row]:
    """The rows in env_steps/s of a results file, oldest first; none where there is no file."""
    try:
        text = read_at_most(path, MAX_TABLE_BYTES).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return [row for row in rows if row.get("unit") == "env_steps/s"]


def _split_newest(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(rows of the commit that was written last, the others)."""
    last = rows[-1]["commit"] if rows else ""
    newest = [row for row in rows if row["commit"] == last]
    return newest, [row for row in rows if row["commit"] != last]


def _device(rows: list[Row]) -> str:
    """The GPU, or the CPU and its largest number of threads."""
    if rows[0]["device"] != "cpu":
        return rows[0]["device"]
    threads = max(int(row["threads"] or 0) for row in rows)
    return f"{counted(threads, 'thread')} of {rows[0]['cpu']}"


def _horizons(rows: list[Row]) -> list[str]:
    """The horizons of the training, in their order; old rows have an empty one."""
    return list(dict.fromkeys(row["horizon"] for row in rows if row["case"] == TRAINING))


def _points(rows: list[Row], case: str, horizon: str) -> tuple[list[float], list[float]]:
    """(numbers of environments, values) of a curve, in order; of several rows for a point the last
    counts.
    """
    values = {
        float(row["num_envs"]): float(row["value"])
        for row in rows
        if row["case"] == case and row["horizon"] == horizon
    }
    sizes = sorted(values)
    return sizes, [values[size] for size in sizes]


# ---- drawing ----


def _draw_older(axes: "Axes", rows: list[Row]) -> None:
    label = "training, earlier commits"
    for commit in dict.fromkeys(row["commit"] for row in rows):
        of_commit = [row for row in rows if row["commit"] == commit]
        for horizon in _horizons(of_commit):
            points = _points(of_commit, TRAINING, horizon)
            axes.plot(*points, color=PALE, linewidth=1.2, marker="o", markersize=2.5, label=label)
            label = "_nolegend_"  # one entry for all


def _draw_curves(axes: "Axes", rows: list[Row]) -> None:
    horizons = _horizons(rows)
    for case, (name, color) in CURVES.items():
        for number, horizon in enumerate(horizons):
            sizes, values = _points(rows, case, horizon)
            if sizes:
                axes.plot(
                    sizes,
                    values,
                    label=f"{name}, horizon {horizon}" if len(horizons) > 1 else name,
                    color=color,
                    linestyle=DASHES[number % len(DASHES)],
                    linewidth=1.8,
                    marker="o",
                    markersize=4,
                )


def _draw_trainers(axes: "Axes", rows: list[Row]) -> None:
    """Bars of all trainers, the fastest above, with their values, and gpurl's ratio to each."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    rows = sorted(rows, key=lambda row: float(row["value"]))
    values = [float(row["value"]) for row in rows]
    own = max((float(row["value"]) for row in rows if row["trainer"] == "gpurl"), default=0.0)
    sizes = {row["num_envs"] for row in rows}
    names = []
    for place, (row, value) in enumerate(zip(rows, values)):
        is_own = row["trainer"] == "gpurl"
        is_long = value > 0.6 * max(values)  # the text fits into the bar
        axes.barh(place, value, height=0.6, color=BLUE if is_own else ORANGE)
        text = engineering(value)
        if own and not is_own:
            text += f"  (gpurl: {own / value:.1f}×)"
        axes.annotate(
            text,
            (value, place),
            xytext=(-4 if is_long else 4, 0),
            textcoords="offset points",
            ha="right" if is_long else "left",
            va="center",
            color="white" if is_long else INK,
            fontsize=8.5,
        )
        names.append(_trainer(row, len(sizes) > 1))
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(0, 1.05 * max(values))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    where = f"\nwith {int(next(iter(sizes))):,} environments" if len(sizes) == 1 else ""
    axes.set_xlabel(f"training, env steps a second{where}")


def _trainer(row: Row, with_size: bool) -> str:
    """ "rl_games 1.6.5 (eager)"; gpurl's version is that of the commit, and a trainer that is no
    package has torch's.
    """
    mode = row.get("note", "").removeprefix("default").removeprefix(", ")
    has_version = row["trainer"] != "gpurl" and row["version"] != row["torch"]
    name = f"{row['trainer']} {row['version']}" if has_version else row["trainer"]
    size = f", {int(row['num_envs']):,}" if with_size else ""
    return f"{name}{size}\n({mode})" if mode else f"{name}{size}"


def _draw_limits(axes: "Axes", rows: list[Row]) -> None:
    """Horizontal lines: the most that arithmetic, in the precision of the training, and the memory
    allow.
    """
    # a limit of arithmetic holds for one precision
    precisions = {row["precision"] for row in rows if row["case"] == TRAINING}
    limits = [
        row for row in rows if row["case"].startswith(LIMIT_CASE) and row["precision"] in precisions
    ]
    for number, row in enumerate(limits):
        kind = row["case"].removeprefix(LIMIT_CASE)
        axes.axhline(
            float(row["value"]),
            label=f"limit of training: {kind}, {row['precision']}",
            color="#666666",
            linestyle=DASHES[1 + number % (len(DASHES) - 1)],
            linewidth=1.2,
        )


def _finish(axes: "Axes", rows: list[Row]) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    finish_axes(axes, "environments")
    sizes = sorted({float(row["num_envs"]) for row in rows if row["num_envs"].isdigit()})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if len(sizes) > 6:
        axes.tick_params(axis="x", rotation=40)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("environment steps a second")
    _label_lines(axes)


def _label_lines(axes: "Axes") -> None:
    """The label of each line right of the axes, at the height of its last point, with its value
    and in its colour; labels that would overlap are moved apart.
    """
    axes.set_ylim(axes.get_ylim())  # fixed: heights are measured now
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [
        float(to_axes.transform((1.0, float(np.asarray(line.get_ydata())[-1])))[1])
        for line in lines
    ]
    order = sorted(range(len(lines)), key=heights.__getitem__)
    for below, above in itertools.pairwise(order):
        heights[above] = max(heights[above], heights[below] + LABEL_DISTANCE)
    # back down where they left the axes above
    top = 1.0
    for index in reversed(order):
        heights[index] = min(heights[index], top)
        top = heights[index] - LABEL_DISTANCE
    for line, height in zip(lines, heights):
        is_old = line.get_color() == PALE
        color = "#888888" if is_old else line.get_color()
        text = str(line.get_label())
        if not is_old:
            text += f" {engineering(float(np.asarray(line.get_ydata())[-1]))}"
        axes.text(
            1.01, height, text, transform=axes.transAxes, va="center", fontsize=8.5, color=color
        )


def _origin(newest: Row, peers: list[Row]) -> str:
    measured = f"commit {newest['commit']}, {newest['date']}, torch {newest['torch']}"
    if peers and peers[0]["commit"] != newest["commit"]:
        measured += f"; other trainers beside commit {peers[0]['commit']}, {peers[0]['date']}"
    return measured
