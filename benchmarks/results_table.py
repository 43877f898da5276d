"""Rows of measurements: the machine they belong to, one CSV file a script and device, and a table
for the eye.
"""

import argparse
import csv
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = (
    "value",
    "lowest",
    "highest",
    "rounds",
    "seconds",
    "date",
)  # columns that two measurements of the same thing may differ in
Row = dict[str, str]


def machine(device: str) -> Row:
    """The columns that tell where this process measures on `device` ("cpu", "cuda:0")."""
    import torch

    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "driver": driver_version() if is_cuda else "-",
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "threads": str(torch.get_num_threads()),
        "waits": os.environ.get(
            "OMP_WAIT_POLICY", f"spin {os.environ.get('GOMP_SPINCOUNT', 'default')}"
        ).lower(),
    }


@functools.cache
def driver_version() -> str:
    """The version of NVIDIA's driver; "unknown" where nvidia-smi does not tell it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            ask, capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _cpu_model() -> str:
    try:
        found = re.search(
            r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def commit() -> str:
    """The commit that is checked out, with a + where files were changed since; outside git what
    GPURL_COMMIT says, else "unknown".
    """
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = [*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"]
        return name + (
            "+"
            if subprocess.run(changes, capture_output=True, text=True, check=True).stdout
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GPURL_COMMIT", "unknown")


def save(script: str, rows: list[Row], folder: Path = RESULTS) -> Path:
    """Add `rows` to the file of `script` and their device. A row that measures the same thing at
    the same commit is replaced.

    Every column that any row has, old or new, is kept; it is empty in rows that lack it.
    """
    rows = [{**row, "commit": commit(), "date": str(datetime.date.today())} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder / f"{script}_{re.sub('[^a-z0-9]+', '_', rows[0]['device'].lower()).strip('_')}.csv"
    )
    replaced = {_same(row) for row in rows}
    kept = [row for row in read_rows(path) if _same(row) not in replaced]
    columns = dict.fromkeys(name for row in (*rows, *kept) for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)
    return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, oldest first; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _same(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((name, value) for name, value in row.items() if value and name not in MEASURED)
    )


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first one flush left, the others flush right."""
    everything = [header, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in everything
    )


def number(value: float) -> str:
    """`value` with four digits, written out."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def parser(description: str | None, budget: float) -> argparse.ArgumentParser:
    """The options that `gpurl bench` takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ...; default cuda where there is one"
    )
    options.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where the CSV files go; default benchmarks/results",
    )
    options.add_argument(
        "--seconds", type=float, default=budget, help=f"time a case; default {budget}"
    )
    return options
