"""The benchmarks as a picture: environment steps a second against the number of environments, with
other trainers and the limits of the hardware.
"""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from gpurl.checkpoints.plain_files import MAX_TABLE_BYTES, read_at_most
from gpurl.errors import GpurlError, UsageError
from gpurl.run.display import counted
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
    "chasing env+policy": ("gpurl, + policy", PURPLE),
    TRAINING: ("gpurl, training", BLUE),
}
LIMIT_CASE = "chasing limit "  # beginnings of cases
PEERS_CASE = "chasing "
DASHES = ("-", "--", ":", "-.")  # one for each horizon
MARKERS = "sD^vPXphd<>8"
# peers with the same number of environments stand side by side, apart by this factor
PEERS_DISTANCE = 1.06


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

    # older rows first, so that the newest are drawn over them
    figure = new_figure(5.6, f"PPO on Chasing, two 64×64 networks · {_device(newest)}")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw_older(axes, older)
    _draw_curves(axes, newest)
    _draw_peers(axes, [row for row in peers if row["trainer"] != "gpurl"])
    _draw_limits(axes, newest)
    _finish(axes, rows, newest[0], peers)
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
    label = "gpurl, training, earlier commits"
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


def _draw_peers(axes: "Axes", rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        mode = row.get("note", "").removeprefix("default").removeprefix(", ")
        shift = PEERS_DISTANCE ** (number - (len(rows) - 1) / 2)
        axes.plot(
            [float(row["num_envs"]) * shift],
            [float(row["value"])],
            label=f"{row['trainer']} {row['version']}{f' ({mode})' if mode else ''}",
            color=ORANGE,
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            markersize=7,
            markeredgecolor="white",
        )


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


def _finish(axes: "Axes", rows: list[Row], newest: Row, peers: list[Row]) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    finish_axes(axes, "environments")
    sizes = sorted({float(row["num_envs"]) for row in rows if row["num_envs"].isdigit()})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("environment steps a second")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    # below the axes: of which program these numbers are
    measured = f"commit {newest['commit']}, {newest['date']}, torch {newest['torch']}"
    if peers and peers[0]["commit"] != newest["commit"]:
        measured += f"; peers beside commit {peers[0]['commit']}, {peers[0]['date']}"
    axes.text(0.0, -0.16, measured, transform=axes.transAxes, fontsize=8, color=INK, alpha=0.7)
