"""What the results of a case say: its returns with their interval, its time, and whether it reaches
its targets.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.learning import results
from benchmarks.learning.case import Case
from benchmarks.learning.published import published
from benchmarks.learning.results import Seed
from benchmarks.learning.suite import CASES
from gpurl.run.scores import Estimate, iqm


@dataclass(frozen=True)
class Outcome:
    """The trainings of one case with the same settings; at least one."""

    case: Case
    seeds: tuple[Seed, ...]

    @property
    def returns(self) -> list[float]:
        """The final return of each seed."""
        return [seed.end.mean_return for seed in self.seeds]

    @property
    def estimate(self) -> Estimate:
        """The interquartile mean over seeds, with its interval."""
        return iqm(self.returns)

    @property
    def median(self) -> float:
        """Over seeds."""
        return statistics.median(self.returns)

    @property
    def seconds(self) -> float:
        """Wall clock of a training, the median over seeds."""
        return statistics.median(seed.end.seconds for seed in self.seeds)

    @property
    def steps(self) -> float:
        """Environment steps of a training, the median over seeds."""
        return statistics.median(seed.end.steps for seed in self.seeds)

    def median_at(self, step: float) -> float:
        """The median over seeds of their learning curves at an environment step."""
        values = []
        for seed in self.seeds:
            steps = [point.steps for point in seed.curve]
            values.append(np.interp(step, steps, [point.mean_return for point in seed.curve]))
        return float(statistics.median(values))


@dataclass(frozen=True)
class Verdict:
    """One target: what is measured, what is wanted, what was got (None: not run)."""

    case: Case
    measure: str
    wanted: float
    got: float | None

    @property
    def is_reached(self) -> bool:
        """Whether it was run and reached."""
        return self.got is not None and self.got >= self.wanted

    @property
    def word(self) -> str:
        """For the table."""
        if self.got is None:
            return "not run"
        return "reached" if self.is_reached else "**not reached**"


def read_outcomes(folder: Path = results.FOLDER) -> dict[str, Outcome]:
    """The outcome of every case that has results of its number of steps, by name. Seeds with other
    settings than the first one are left out: they are of before a change, and the next command
    trains them again.
    """
    found = {}
    for case in CASES.values():
        seeds = [each for each in results.read(case, folder) if _steps_wanted(each) == case.steps]
        same = tuple(each for each in seeds if each.last["settings"] == seeds[0].last["settings"])
        if same:
            found[case.name] = Outcome(case, same)
    return found


def _steps_wanted(seed: Seed) -> int:
    """The steps that the training was given."""
    return int(json.loads(seed.last["settings"])["total_steps"])


def published_median(case: Case) -> float | None:
    """The median of the published means of the case's task, None if there is none."""
    found = [published(column, case.task) for column in case.published]
    means = [each[0] for each in found if each is not None]
    return statistics.median(means) if means else None


def verdicts(outcomes: dict[str, Outcome]) -> list[Verdict]:
    """All targets of all cases, in the order of the suite."""
    found = []
    for case in CASES.values():
        outcome = outcomes.get(case.name)
        if case.target is not None:
            found.append(_target(case, case.target, outcome))
        if case.group == "ppo" and (median := published_median(case)) is not None:
            got = None if outcome is None else outcome.median
            found.append(Verdict(case, "median, that of published PPO", median, got))
        other = outcomes.get(case.better_than)
        if other is not None:
            got = None if outcome is None else outcome.median
            wanted = other.median_at(case.steps)
            found.append(Verdict(case, f"median, that of {other.case.name}", wanted, got))
    return found


def _target(case: Case, target: float, outcome: Outcome | None) -> Verdict:
    if outcome is None:
        return Verdict(case, "", target, None)
    seeds = len(outcome.seeds)
    measure = "one seed" if seeds == 1 else f"median of {seeds} seeds"
    if case.is_lower_end:
        measure = "lower end of the interval"
    got = outcome.estimate.low if case.is_lower_end else outcome.median
    return Verdict(case, measure, target, got)
