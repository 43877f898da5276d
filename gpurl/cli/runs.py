"""The table of runs that `gpurl runs` prints, and the deletion of those that nobody needs."""

import fnmatch
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import GpurlError, UsageError, did_you_mean, visible
from gpurl.run.listing import RunEntry, delete_run, find_runs, obstacle_to_delete

COLUMNS = ("name", "env", "algorithm", "steps", "best", "last", "state", "age", "size")
NUMBERS = ("steps", "best", "last", "age", "size")
# of an entry, where its name is another
FIELDS = {"best": "best_return", "last": "last_return"}
# in a narrow terminal, the least important first
DROPPED = ("size", "last", "age", "algorithm", "env")
GAP = "  "
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def value_of(entry: RunEntry, column: str) -> str | float | None:
    """What a column holds; best: of evaluations, last: of the newest training episodes."""
    return getattr(entry, FIELDS.get(column, column))  # type: ignore[no-any-return]


def choose_runs(root: Path, sort: str, filters: Sequence[str]) -> list[RunEntry]:
    """The runs in `root` that match every filter NAME=PATTERN, sorted by a column: the youngest,
    the largest numbers first, names in their order.

    NAME is a column or a setting such as learning_rate; PATTERN may hold * and ?.
    """
    runs = find_runs(root)
    for text in filters:
        name, separator, pattern = text.partition("=")
        name = name.replace("-", "_")
        if not separator:
            raise UsageError(f"--filter is NAME=PATTERN, got {text!r}")
        known = {*COLUMNS, *(key for run in runs for key in run.settings)}
        if runs and name not in known:
            raise UsageError(
                f"--filter {text}: no run has {name!r}; {did_you_mean(name, known)}it is one of "
                f"{', '.join(COLUMNS)} or a setting"
            )
        runs = [run for run in runs if fnmatch.fnmatchcase(_text(run, name), pattern)]
    descending = sort in NUMBERS and sort != "age"
    worst = float("-inf") if descending else float("inf")

    def key(run: RunEntry) -> tuple[float, str]:
        value = value_of(run, sort)
        if sort in NUMBERS:
            return (worst if value is None else float(value), run.name)
        return (0.0, str(value or "~"))

    return sorted(runs, key=key, reverse=descending)


def _text(run: RunEntry, name: str) -> str:
    value = value_of(run, name) if name in COLUMNS else run.settings.get(name)
    return "" if value is None else str(value)


def run_table(runs: Sequence[RunEntry], width: int | None = None) -> str:
    """The runs as a table. width: letters in a line, None for any number; where it is too narrow,
    the reasons of failures go first, then columns, then the beginning of names.
    """
    columns = list(COLUMNS)
    table = {column: [column, *(_cell(run, column) for run in runs)] for column in columns}
    if width is not None and _width(table) > width:
        table["state"] = [text.partition(" (")[0] for text in table["state"]]
    dropped = []
    for column in _dropping_order(runs):
        if width is None or _width(table) <= width:
            break
        del table[column]
        dropped.append(column)
    if width is not None and (excess := _width(table) - width) > 0:
        longest = max(max(map(len, table["name"])) - excess, len("name"))
        table["name"] = [_ending(text, longest) for text in table["name"]]
    # numbers end, texts begin below each other
    aligned = [
        [cell.rjust(size) if column in NUMBERS else cell.ljust(size) for cell in cells]
        for column, cells in table.items()
        for size in [max(map(len, cells))]
    ]
    lines = [GAP.join(row).rstrip()[:width] for row in zip(*aligned)]
    if dropped and width is not None:
        text = f"not shown: {', '.join(dropped)}; a wider terminal or --json has them"
        lines += textwrap.wrap(text, width)
    return "\n".join(lines)


def _dropping_order(runs: Sequence[RunEntry]) -> list[str]:
    """Columns that the name of every run repeats, as runs/ENV/ALGORITHM/..., then DROPPED."""
    repeated = [
        column
        for column in ("algorithm", "env")
        if all(value_of(run, column) in run.name.split("/") for run in runs)
    ]
    return repeated + [column for column in DROPPED if column not in repeated]


def _width(table: Mapping[str, Sequence[str]]) -> int:
    """Letters in a line."""
    return sum(max(map(len, cells)) for cells in table.values()) + len(GAP) * (len(table) - 1)


def _ending(text: str, length: int) -> str:
    """The last letters of a text that is longer."""
    return text if len(text) <= length else f"…{text[len(text) - length + 1 :]}"


def _cell(run: RunEntry, column: str) -> str:
    value = value_of(run, column)
    if column == "state" and run.reason.startswith("error"):
        return visible(f"failed ({run.reason.removeprefix('error: ')})")
    if value is None:
        return "-"
    if isinstance(value, str):
        return visible(value)
    if column in FIELDS:
        return f"{value:.4g}"
    if column == "steps":
        return f"{value:,}"
    if column == "size":
        return f"{value / 2**20:,.1f} MiB"
    unit, letter = next((each for each in UNITS if value >= each[0]), UNITS[-1])
    return f"{value / unit:.0f} {letter}"


def as_json(run: RunEntry) -> dict[str, Json]:
    """A run for programs; age in seconds, size in bytes."""
    values: dict[str, Json] = {column: value_of(run, column) for column in COLUMNS}
    return {"folder": str(run.folder), **values, "reason": run.reason}


def prune(runs: Sequence[RunEntry], is_sure: bool) -> list[str]:
    """Delete the runs, or only say what would be deleted; a line for each."""
    lines = []
    for run in runs:
        size = _cell(run, "size")
        where = visible(str(run.folder))
        if obstacle := obstacle_to_delete(run):
            lines.append(f"stays: {where}: {visible(obstacle)}")
        elif not is_sure:
            lines.append(f"would delete {where} ({run.state}, {size})")
        else:
            try:
                delete_run(run)
                lines.append(f"deleted {where} ({run.state}, {size})")
            except (GpurlError, OSError) as error:
                lines.append(f"stays: {where}: {error}")
    if not is_sure and any(line.startswith("would") for line in lines):
        lines.append("nothing is deleted yet: add --yes")
    return lines or ["no runs to delete"]
