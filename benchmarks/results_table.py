"""Rows of measurements: the columns of the machine, one CSV file for each script and device, and
tables to print.
"""

import argparse
import csv
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# columns in which two measurements of the same case may differ
MEASURED = ("value", "lowest", "highest", "rounds", "seconds", "date")
Row = dict[str, str]


def machine(device: str) -> Row:
    """The columns of the machine, for measurements of this process on `device` ("cpu",
    "cuda:0").
    """
    import torch

    is_cuda = device.startswith("cuda")
    spin = f"spin {os.environ.get('GOMP_SPINCOUNT', 'default')}"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "driver": driver_version() if is_cuda else "-",
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "threads": str(torch.get_num_threads()),
        "waits": os.environ.get("OMP_WAIT_POLICY", spin).lower(),
    }


@functools.cache
def driver_version() -> str:
    """The version of NVIDIA's driver, "unknown" if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.machine()


def commit() -> str:
    """The commit that is checked out, with a + if files were changed since. Outside git the value
    of GPURL_COMMIT, else "unknown".
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        name = git("rev-parse", "--short", "HEAD")
        changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
        return f"{name}+" if changes else name
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GPURL_COMMIT", "unknown")


def _stamp() -> Row:
    """The columns of the code."""
    return {"commit": commit(), "date": str(datetime.date.today())}


def save(
    script: str, rows: list[Row], folder: Path = RESULTS, instead_of: Sequence[Row] = ()
) -> Path:
    """Add `rows` to the file of `script` and their device; returns its path. They replace rows that
    measure the same case at the same commit, and those of `instead_of`. A process that is killed
    leaves the old file or the new one.

    The columns of all rows, old and new, are kept; they are empty in rows without them.
    """
    stamp = _stamp()
    rows, removed = ([stamp | row for row in group] for group in (rows, instead_of))
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub("[^a-z0-9]+", "_", (rows or removed)[0]["device"].lower()).strip("_")
    path = folder / f"{script}_{device}.csv"
    replaced = {_same(row) for row in (*rows, *removed)}
    kept = [row for row in read_rows(path) if _same(row) not in replaced]
    columns = dict.fromkeys(name for row in (*rows, *kept) for name in row)
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)
    new.replace(path)
    return path


class Turns:
    """Saves the rows of a comparison after each turn: what fails in a later one has none then."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script = script
        self.folder = folder
        self._saved: list[Row] = []
        self._stamp = _stamp()  # of the code that runs, whatever is committed meanwhile

    def save(self, rows: list[Row]) -> Path:
        """Save `rows` instead of those of the turns before; returns the path of the file."""
        rows = [row | self._stamp for row in rows]
        path = save(self.script, rows, self.folder, self._saved)
        self._saved = rows
        return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, oldest first; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _same(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((name, value) for name, value in row.items() if value and name not in MEASURED)
    )


def median_columns(values: Sequence[float], form: str) -> Row:
    """The columns of repeated measurements: median, lowest and highest in the format `form`, and
    their number.
    """
    return {
        "value": format(statistics.median(values), form),
        "lowest": format(min(values), form),
        "highest": format(max(values), form),
        "rounds": str(len(values)),
    }


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first one flush left, the others flush right."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def number(value: float) -> str:
    """`value` with four digits, written out."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """A parser with the options of `gpurl bench`; `seconds`: the default time of a case."""
    options = device_parser(description)
    options.add_argument(
        "--seconds", type=float, default=seconds, help=f"time of a case; default {seconds}"
    )
    return options


def device_parser(description: str | None, device: str = "auto") -> argparse.ArgumentParser:
    """A parser with the options --device and --out."""
    options = out_parser(description)
    options.add_argument(
        "--device",
        default=device,
        help=f"auto (cuda if there is one), cpu, cuda, cuda:1, ...; default {device}",
    )
    return options


def out_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option --out."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="folder of the CSV files; default %(default)s",
    )
    return options
