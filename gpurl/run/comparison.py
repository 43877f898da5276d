"""Runs of one task in one picture: returns over steps and over wall clock, the interquartile mean
over seeds as a line and its 95 % interval as a band, over the steps that all of them have.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.config_file import read_config
from gpurl.run.display import counted
from gpurl.run.plot import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    STYLE,
    finish_axes,
    new_figure,
    read_metrics,
    save_figure,
)
from gpurl.run.scores import Estimate, band, interpolate, iqm

COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#c23b3b", "#4aa3b5", "#8a6d3b", "#d46bb0", INK)
EVALUATION, TRAINING = "eval/mean_reward", "rollout/ep_rew_mean"
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class RunCurve:
    """What one run contributes."""

    folder: Path
    settings: dict[str, Json]
    by_steps: Curve  # (env steps, return)
    by_seconds: Curve  # (seconds of training, return)


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed; `label` says what they have in common."""

    label: str
    runs: list[RunCurve]

    def last_return(self) -> Estimate:
        """Of the last points of the curves, over seeds."""
        return iqm([run.by_steps[-1][1] for run in self.runs])


def compare_runs(folders: Sequence[str | Path], by: str = "algorithm") -> list[Group]:
    """The runs in groups of the same value of the setting `by` (network.hidden is one, too).

    Returns are those of evaluations, or of the training if one of the runs has fewer than two
    evaluations. UsageError for runs of different tasks, and for runs without returns.
    """
    paths = [Path(folder) for folder in folders]
    settings = [read_config(path / "config.yaml") for path in paths]
    tasks = {f"{each.get('env')} {each.get('env_options') or ''}".strip() for each in settings}
    if len(tasks) > 1:
        raise UsageError(
            f"returns of different tasks cannot be compared: {', '.join(sorted(tasks))}; draw the "
            f"runs of each task in a picture of its own"
        )
    logs = [read_metrics(path) for path in paths]
    has_evaluations = all(len(_finite(log.get(EVALUATION))) > 1 for log in logs)
    tag = EVALUATION if has_evaluations else TRAINING
    groups: dict[str, list[RunCurve]] = {}
    for path, values, log in zip(paths, settings, logs):
        points = _finite(log.get(tag))
        if len(points) < 2:
            raise UsageError(f"{path} has fewer than two returns: it cannot be drawn")
        seconds = dict(zip(*log.get("time", ([], []))))
        timed = [(seconds[step], value) for step, value in points if step in seconds]
        label = _label(values, by)
        groups.setdefault(label, []).append(RunCurve(path, values, points, timed))
    return [Group(label, groups[label]) for label in sorted(groups)]


def _finite(points: tuple[list[float], list[float]] | None) -> Curve:
    return [pair for pair in zip(*(points or ([], []))) if math.isfinite(pair[1])]


def _label(settings: dict[str, Json], by: str) -> str:
    """The value of the setting, nested ones with a point."""
    value: Json = settings
    for name in by.replace("-", "_").split("."):
        if not isinstance(value, dict) or name not in value:
            known = value if isinstance(value, dict) else settings
            raise UsageError(f"there is no setting {by!r} to group by; {did_you_mean(name, known)}")
        value = value[name]
    return str(value) if by == "algorithm" else f"{by} {value}"


def comparison_table(groups: Sequence[Group]) -> str:
    """A line for each group: its label, seeds, and the return at the end."""
    rows = []
    for group in groups:
        last = group.last_return()
        ends = [run.by_steps[-1][0] for run in group.runs]
        # runs that are not finished count with what they have
        steps = f"{min(ends):,.0f} to " if min(ends) < 0.99 * max(ends) else ""
        rows.append(
            f"{group.label}: {counted(len(group.runs), 'seed')}, {steps}{max(ends):,.0f} steps, "
            f"IQM {last.value:.2f} [{last.low:.2f}, {last.high:.2f}]"
        )
    return "\n".join(rows)


def plot_comparison(groups: Sequence[Group], path: Path) -> Path:
    """Draw the groups over env steps and over wall clock."""
    import matplotlib as mpl

    env = str(groups[0].runs[0].settings.get("env"))
    with mpl.rc_context(STYLE):
        figure = new_figure(4.6, env)
        by_steps, by_time = figure.subplots(1, 2, sharey=True)
        for group, color in zip(groups, itertools.cycle(COLORS)):
            label = f"{group.label} ({len(group.runs)})"
            for axes, curves in (
                (by_steps, [run.by_steps for run in group.runs]),
                (by_time, [_in_minutes(run.by_seconds) for run in group.runs]),
            ):
                # runs whose ranges do not overlap have no mean
                if min(map(len, curves)) < 2 or max(c[0][0] for c in curves) >= min(
                    c[-1][0] for c in curves
                ):
                    continue
                x, values = interpolate(curves)
                middle, low, high = band(values)
                axes.plot(x, middle, color=color, linewidth=1.8, label=label)
                axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        by_steps.set_ylabel("episode return")
        finish_axes(by_steps, "env steps")
        finish_axes(by_time, "minutes of training")
        by_steps.legend(frameon=True, framealpha=0.85, edgecolor="none", loc="best")
        return save_figure(figure, path)


def _in_minutes(curve: Curve) -> Curve:
    return [(seconds / 60, value) for seconds, value in curve]
