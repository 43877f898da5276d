"""What a tracker is, and which there are: the name of a file of this folder is the name of the
tracker."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import UsageError, did_you_mean, install_extra

# the package that each needs; its extra has the tracker's name
PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@dataclass(frozen=True)
class RunCard:
    """What a tracker is told of a run at its start."""

    project: str
    name: str  # unique among the runs of one machine, as good as
    root: str  # folder for files of the tracker itself, absolute
    config: dict[str, Json]  # `Settings.to_dict()`
    id: str | None = None  # of the tracker's own run, if this one continues it


class Tracker(Protocol):
    """Writes one run to a service or a data base. Its methods may raise anything, and may hang:
    they run in a process of their own (`gpurl.run.trackers.worker`).

    note: after `begin`, what the user should know though the tracker goes on; "" if nothing.
    rescue: after `begin`, the command that sends what did not arrive; "" if there is none.
    """

    note: str
    rescue: str

    def begin(self, card: RunCard) -> str:
        """Begin a run, or continue that of `card.id`; returns its id."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers by their names in metrics.jsonl, at an env step."""

    def finish(self, summary: Mapping[str, Json], failed: bool) -> None:
        """Write the summary and wait until everything has arrived."""


def make_tracker(name: str) -> Tracker:
    """The tracker called `name`, whose package is imported when it begins."""
    tracker: Tracker = importlib.import_module(f"gpurl.run.trackers.{name}").make()
    return tracker


def check_trackers(names: tuple[str, ...]) -> None:
    """UsageError for a name that is unknown or given twice."""
    for name in names:
        if name not in PACKAGES:
            raise UsageError(
                f"no tracker is called {name!r}; {did_you_mean(name, PACKAGES)}Known: "
                f"{', '.join(PACKAGES)}"
            )
    if len(set(names)) < len(names):
        raise UsageError(f"track names a tracker twice: {' '.join(names)}")


def check_installed(names: tuple[str, ...]) -> None:
    """UsageError naming the extra of a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UsageError(
                f"track {name} needs the package {PACKAGES[name]}: {install_extra(name)}"
            )


def flat(config: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """`{"a": {"b": 1}}` as ("a.b", 1)."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
