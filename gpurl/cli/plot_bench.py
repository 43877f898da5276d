"""The benchmarks as a picture: environment steps a second against the number of environments, with
the peers and what is possible.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurl.checkpoints.plain_files import MAX_TABLE_BYTES, read_at_most
from gpurl.errors import GpurlError, UsageError
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

CURVES = {  # case: (label, colour)
    "chasing env": ("environment alone", GREEN),
    "chasing env+policy": ("gpurl, + policy", PURPLE),
    "chasing training": ("gpurl, training", BLUE),
}
TRAINING = "chasing training"
LIMIT, PEERS_CASE = "chasing limit ", "chasing "
DASHES = ("-", "--", ":", "-.")  # of the horizons
MARKERS, APART = (
    "sD^vPXphd<>8",
    1.06,
)  # peers with the same number of environments stand side by side, by this factor


def plot_bench(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw throughput_DEVICE.png from every throughput_DEVICE.csv of `folder`, into `out` if given,
    else beside it.

    The rows of the newest commit are drawn; of older ones the training, faintly.
    """
    import matplotlib as mpl

    files = sorted(folder.glob("throughput_*.csv"))
    if not files:
        raise UsageError(f"{folder} holds no throughput_*.csv; gpurl bench writes one")
    target = out or folder
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpurlError(f"cannot make the folder {target}: {error.strerror or error}") from error
    with mpl.rc_context(STYLE):
        return [_drawn(path, target) for path in files]


def _drawn(throughput: Path, target: Path) -> Path:
    try:
        return _picture(
            throughput,
            throughput.with_name(throughput.name.replace("throughput", "peers", 1)),
            target,
        )
    except (KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise UsageError(
            f"{throughput} holds no results of gpurl bench: {type(error).__name__}: {error}"
        ) from error
    except ValueError as error:
        raise (
            error
            if isinstance(error, UsageError)
            else UsageError(f"{throughput} holds no results of gpurl bench: {error}")
        ) from error


def _picture(throughput: Path, peers: Path, target: Path) -> Path:
    rows = _read(throughput)
    if not rows:
        raise UsageError(f"{throughput} has no rows of env_steps/s")
    newest, older = _newest(rows)
    peer_rows, _ = _newest([row for row in _read(peers) if row["case"].startswith(PEERS_CASE)])
    figure = new_figure(5.6, f"PPO on Chasing, two 64×64 networks · {_device(newest)}")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw_older(axes, older)
    _draw_curves(axes, newest)
    _draw_peers(axes, [row for row in peer_rows if row["trainer"] != "gpurl"])
    _draw_limits(axes, newest)
    _finish(axes, rows, newest[0], peer_rows)
    return save_figure(figure, target / f"{throughput.stem}.png")


def _read(path: Path) -> list[Row]:
    """The rows in env_steps/s of a results file, oldest first; none where there is no file."""
    try:
        text = read_at_most(path, MAX_TABLE_BYTES).decode("utf-8")
        return [
            row
            for row in csv.DictReader(io.StringIO(text, newline=""))
            if row.get("unit") == "env_steps/s"
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _newest(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(rows of the commit that was written last, the others)."""
    last = rows[-1]["commit"] if rows else ""
    return [row for row in rows if row["commit"] == last], [
        row for row in rows if row["commit"] != last
    ]


def _device(rows: list[Row]) -> str:
    """The GPU, or the CPU and the most threads that a row took of it."""
    threads = max(int(row["threads"] or 0) for row in rows)
    return (
        f"{threads} threads of {rows[0]['cpu']}"
        if rows[0]["device"] == "cpu"
        else rows[0]["device"]
    )


def _horizons(rows: Sequence[Row]) -> list[str]:
    """The horizons of the training, as they come; files from before the column have one, called
    "".
    """
    return list(dict.fromkeys(row.get("horizon") or "" for row in rows if row["case"] == TRAINING))


def _points(rows: Sequence[Row], case: str, horizon: str) -> tuple[list[float], list[float]]:
    """(numbers of environments, values) of a curve, in order; the last of rows for the same point
    counts.
    """
    found = {
        float(row["num_envs"]): float(row["value"])
        for row in rows
        if row["case"] == case and (row.get("horizon") or "") == horizon
    }
    return list(dict(sorted(found.items()))), [found[size] for size in sorted(found)]


# ---- drawing ----


def _draw_older(axes: "Axes", rows: list[Row]) -> None:
    label = "gpurl, training, earlier commits"
    for commit in dict.fromkeys(row["commit"] for row in rows):
        of_commit = [row for row in rows if row["commit"] == commit]
        for horizon in _horizons(of_commit):
            axes.plot(
                *_points(of_commit, TRAINING, horizon),
                color=PALE,
                linewidth=1.2,
                marker="o",
                markersize=2.5,
                label=label,
            )
            label = "_nolegend_"


def _draw_curves(axes: "Axes", rows: list[Row]) -> None:
    horizons = _horizons(rows)
    for case, (name, color) in CURVES.items():
        for number, horizon in enumerate(horizons):
            label = f"{name}, horizon {horizon}" if len(horizons) > 1 else name
            look: dict[str, Any] = {
                "color": color,
                "linestyle": DASHES[number % len(DASHES)],
                "marker": "o",
            }
            if (points := _points(rows, case, horizon))[0]:
                axes.plot(*points, label=label, linewidth=1.8, markersize=4, **look)


def _draw_peers(axes: "Axes", rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        mode = row.get("note", "").removeprefix("default").removeprefix(", ")
        look: dict[str, Any] = {
            "color": ORANGE,
            "linestyle": "none",
            "marker": MARKERS[number % len(MARKERS)],
            "markeredgecolor": "white",
        }
        place = float(row["num_envs"]) * APART ** (number - (len(rows) - 1) / 2)
        label = f"{row['trainer']} {row['version']}{f' ({mode})' if mode else ''}"
        axes.plot([place], [float(row["value"])], label=label, markersize=7, **look)


def _draw_limits(axes: "Axes", rows: list[Row]) -> None:
    """Lines across: what arithmetic in the training's precision, and the memory, allow at most."""
    precisions = {row.get("precision", "") for row in rows if row["case"] == TRAINING}
    limits = [
        row for row in rows if row["case"].startswith(LIMIT) and row.get("precision") in precisions
    ]
    for row, dashes in zip(limits, DASHES[1:] * len(limits)):
        kind = row["case"].removeprefix(LIMIT)
        text = f"limit of training: {kind}, {row['precision']}"
        axes.axhline(
            float(row["value"]), color="#666666", linestyle=dashes, linewidth=1.2, label=text
        )


def _finish(axes: "Axes", rows: list[Row], newest: Row, peer_rows: list[Row]) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    finish_axes(axes, "environments")
    sizes = sorted({float(row["num_envs"]) for row in rows if row["num_envs"].isdigit()})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("environment steps a second")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    measured = f"commit {newest['commit']}, {newest['date']}, torch {newest['torch']}"
    if peer_rows and peer_rows[0]["commit"] != newest["commit"]:
        measured += f"; peers beside commit {peer_rows[0]['commit']}, {peer_rows[0]['date']}"
    axes.text(0.0, -0.16, measured, transform=axes.transAxes, fontsize=8, color=INK, alpha=0.7)
