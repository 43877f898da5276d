"""`gpurl tune`: trains the trials, then prints them as a table and draws them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpurl.cli.settings import TuneOptions
from gpurl.errors import visible
from gpurl.run.display import counted
from gpurl.run.run_folder import safe_name
from gpurl.run.settings import Settings
from gpurl.run.terminal import say
from gpurl.tuning.picture import PICTURE, plot_tuning
from gpurl.tuning.space import default_space, read_space
from gpurl.tuning.study import TrialRow, Tuning, load_tuning
from gpurl.tuning.tuner import BEST_FILE, Plan, tune

MAX_ROWS = 20  # of the table after a tuning; --show has all


def run_tuning(settings: Settings, options: TuneOptions, words: Sequence[str]) -> int:
    """Tune, print the table; returns the exit code."""
    train = settings.train
    default = Path(train.root) / safe_name(settings.env) / safe_name(settings.algorithm)
    plan = Plan(
        settings,
        read_space(options.space, settings) if options.space else default_space(settings),
        options.storage or default / "tuning.journal",
        options.trials,
        options.jobs,
        options.prune,
        options.sampler,
        ("gpurl", "tune", *words),
    )
    tuning, signal_number = tune(plan, (lambda text: None) if train.quiet else say)
    report(tuning, f"{settings.env} · {settings.algorithm}", train.quiet, MAX_ROWS)
    if signal_number is not None:
        say("stopped; the same command goes on", is_error=True)
        return 128 + signal_number
    return 0


def show(storage: Path) -> int:
    """Print the table of a storage and draw it again."""
    tuning = load_tuning(storage)
    about = tuning.study.user_attrs.get("about")
    named = about if isinstance(about, dict) else {}
    report(tuning, visible(f"{named.get('env', '?')} · {named.get('algorithm', '?')}"))
    return 0


def report(tuning: Tuning, task: str, quiet: bool = False, most: int | None = None) -> None:
    """The table, the importances and where the files are. most: rows of the table."""
    rows = tuning.rows()
    importances = tuning.importances()
    tuning.folder.mkdir(parents=True, exist_ok=True)
    picture = plot_tuning(
        rows, importances, f"{task} · {counted(len(rows), 'trial')}", tuning.folder / PICTURE
    )
    if quiet:
        return
    say(trial_table(rows, most))
    if importances:
        text = ", ".join(f"{name} {value:.2f}" for name, value in importances.items())
        say(f"importances: {text}")
    best = tuning.folder / BEST_FILE
    if best.exists():
        say(f"the best settings: gpurl train --config {best}")
    say(f"trials {tuning.folder}: gpurl runs {tuning.folder}; picture {picture}")


def trial_table(rows: Sequence[TrialRow], most: int | None = None) -> str:
    """A line for each trial, the best first; most: so many, and the number of the others."""
    names = list(dict.fromkeys(name for row in rows for name in row.params))
    heads = ["trial", "state", "return", "best", "seconds", *names]
    lines = [heads, *(_cells(row, names) for row in rows[:most])]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    text = [
        "  ".join(
            cell.ljust(width) if head == "state" else cell.rjust(width)
            for cell, width, head in zip(line, widths, heads)
        ).rstrip()
        for line in lines
    ]
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    left_out = f"; {most} are shown, --show has all" if most and len(rows) > most else ""
    text.append(f"{counted(len(rows), 'trial')}: {counts or 'none'}{left_out}")
    text.append("return: of the last evaluation; best: of all evaluations")
    for reason, count in Counter(row.reason for row in rows[:most] if row.reason).items():
        text.append(f"{counted(count, 'trial')}: {visible(reason)}")
    return "\n".join(text)


def _cells(row: TrialRow, names: Sequence[str]) -> list[str]:
    values = [row.value, row.best, row.seconds]
    numbers = ["-" if value is None else f"{value:.4g}" for value in values]
    return [str(row.number), row.state, *numbers, *(_param(row.params, name) for name in names)]


def _param(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name, "-")
    return f"{value:.3g}" if isinstance(value, float) else visible(str(value))
