"""Runs of one task in one picture: returns over steps and over wall clock, the interquartile mean
over seeds as a line and its 95 % interval as a band, over the steps that all of them have, and
both at the end.
"""

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

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
    Series,
    finish_axes,
    new_figure,
    read_metrics,
    save_figure,
)
from gpurl.run.scores import POINTS, Estimate, band, interpolate, iqm
from gpurl.run.settings import TrainConfig
from gpurl.run.trackers.tracker import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#c23b3b", "#4aa3b5", "#8a6d3b", "#d46bb0", INK)
EVALUATION, TRAINING = "eval/mean_reward", "rollout/ep_rew_mean"
MAX_LABEL = 90  # letters in the legend
# settings of a run, not of what it learns
OF_RUNS = {field.name for field in fields(TrainConfig)} - {"num_envs", "precision"}
Curve = list[tuple[float, float]]
Settings = dict[str, Json]


@dataclass(frozen=True)
class RunCurve:
    """What one run contributes. The curves have at least one point each, unless the log has no
    seconds; `last` is of another kind of return than theirs where they are too short to draw.
    """

    folder: Path
    settings: Settings
    by_steps: Curve  # (env steps, return)
    by_seconds: Curve  # (seconds of training, return)
    last: tuple[float, float]  # (env steps, return) at the end


@dataclass(frozen=True)
class Group:
    """Runs that should differ by their seed only; `label` says what they have in common."""

    label: str
    runs: list[RunCurve]
    curves_are_evaluations: bool
    last_is_evaluation: bool

    def differing(self) -> list[str]:
        """The settings of what is learned, besides the seed, in which the runs differ."""
        learned = [
            dict(flat({name: each for name, each in run.settings.items() if name not in OF_RUNS}))
            for run in self.runs
        ]
        # settings that all have: other versions may have others
        names = [name for name in learned[0] if all(name in each for each in learned)]
        return [name for name in names if len({str(each[name]) for each in learned}) > 1]

    def last_returns(self) -> list[float]:
        """[S] of the seeds, at the end."""
        return [run.last[1] for run in self.runs]

    def last_return(self) -> Estimate:
        """The interquartile mean of `last_returns`."""
        return iqm(self.last_returns())


def compare_runs(folders: Sequence[str | Path], by: str = "algorithm") -> list[Group]:
    """The runs in groups of the same value of the setting `by` (network.hidden is one, too).

    Returns at the end are those of the last evaluations, or of the training if one of the runs was
    never evaluated. Curves are of the same kind; where a run has one evaluation only they are of
    the training, if that has more. Members of a population count as runs, unless selection made
    them one. UsageError for runs of different tasks, and for runs without returns.
    """
    # a folder that is named twice counts once
    paths = [*{Path(folder).resolve(): Path(folder) for folder in folders}.values()]
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path} is not a run folder")
    settings = [read_config(path / "config.yaml") for path in paths]
    tasks = {f"{each.get('env')} {each.get('env_options') or ''}".strip() for each in settings}
    if len(tasks) > 1:
        raise UsageError(
            f"returns of different tasks cannot be compared: {', '.join(sorted(tasks))}; draw the "
            f"runs of each task in a picture of its own"
        )
    # evaluations and returns of the training of each run, and which of them are compared
    agents = [agent for path, values in zip(paths, settings) for agent in _agents(path, values)]
    paths, settings, logs = map(list, zip(*agents))
    points = {tag: [_finite(log.get(tag)) for log in logs] for tag in (EVALUATION, TRAINING)}
    fewest = {tag: min(map(len, curves)) for tag, curves in points.items()}
    last_tag = EVALUATION if fewest[EVALUATION] else TRAINING
    if not fewest[last_tag]:
        raise UsageError(_lack_of_returns(paths, points[EVALUATION], points[TRAINING]))
    curve_tag = last_tag
    if fewest[last_tag] < 2 <= fewest[TRAINING]:
        curve_tag = TRAINING
    # the groups
    groups: dict[str, list[RunCurve]] = {}
    for path, values, log, curve, ends in zip(
        paths, settings, logs, points[curve_tag], points[last_tag]
    ):
        seconds = dict(zip(*log.get("time", ([], []))))
        timed = [(seconds[step], value) for step, value in curve if step in seconds]
        run = RunCurve(path, values, curve, timed, ends[-1])
        groups.setdefault(_label(values, by), []).append(run)
    kinds = (curve_tag == EVALUATION, last_tag == EVALUATION)
    return [Group(label, groups[label], *kinds) for label in sorted(groups, key=_in_order)]


def _agents(path: Path, settings: Settings) -> list[tuple[Path, Settings, Series]]:
    """(folder, settings, log) of a run of one agent, or of each member of a population; a member
    that the last evaluation left out was lost and is left out, too. Without any, it counts as one.
    """
    log = read_metrics(path)
    size, own_values = settings.get("population", 1), settings.get("member", {})
    # the log says which members there are: the settings may be a stranger's
    tags = (re.fullmatch(r"members/([0-9]{1,9})/(eval_reward|ep_rew_mean)", tag) for tag in log)
    members = sorted({int(match[1]) for match in tags if match})
    if size == 1 or settings.get("pbt"):
        return [(path, settings, log)]
    nothing: tuple[list[float], list[float]] = ([], [])
    last_evaluation = log.get(EVALUATION, nothing)[0][-1:]
    agents = list[tuple[Path, Settings, Series]]()
    for k in members:
        evaluations = log.get(f"members/{k}/eval_reward", nothing)
        training = log.get(f"members/{k}/ep_rew_mean", nothing)
        if evaluations[0][-1:] != last_evaluation:
            continue
        own = {
            name: values[k]
            for name, values in (own_values.items() if isinstance(own_values, dict) else ())
            if isinstance(values, list) and len(values) > k
        }
        if isinstance(seed := settings.get("seed"), int):
            own["seed"] = seed + k
        agents.append((path, settings | own, log | {EVALUATION: evaluations, TRAINING: training}))
    return agents or [(path, settings, log)]


def _lack_of_returns(
    paths: Sequence[Path], evaluations: Sequence[Curve], training: Sequence[Curve]
) -> str:
    """Which runs have no returns that could be compared."""
    not_evaluated = [path for path, curve in zip(paths, evaluations) if not curve]
    not_ended = [path for path, curve in zip(paths, training) if not curve]
    if without := [path for path in not_evaluated if path in not_ended]:
        return f"{without[0]} has no return: it was not evaluated, and logged none of its training"
    return (
        f"{not_evaluated[0]} was not evaluated and {not_ended[0]} logged no return of its "
        f"training: they cannot be compared"
    )


def _finite(points: tuple[list[float], list[float]] | None) -> Curve:
    return [pair for pair in zip(*(points or ([], []))) if math.isfinite(pair[1])]


def _label(settings: Settings, by: str) -> str:
    """The value of the setting, nested ones with a point."""
    value: Json = settings
    for name in by.replace("-", "_").split("."):
        if not isinstance(value, dict) or name not in value:
            known = value if isinstance(value, dict) else settings
            near = did_you_mean(name, known, cutoff=0.7) or f"there are {', '.join(sorted(known))}"
            raise UsageError(f"there is no setting {by!r} to group by; {near.strip()}")
        value = value[name]
    return str(value) if by == "algorithm" else f"{by} {value}"


def _in_order(label: str) -> list[tuple[float, str]]:
    """Sorts labels by their numbers: gamma 9 before gamma 10, learning_rate 1e-05 before 0.001."""
    words = re.split(r"([0-9][0-9.]*(?:e[+-]?[0-9]+)?)", label)
    return [
        (float(word), "") if index % 2 and word.count(".") < 2 else (-1.0, word)
        for index, word in enumerate(words)
    ]


def comparison_table(groups: Sequence[Group]) -> str:
    """A line for each group: its label, seeds, and the return at the end; and what it is of."""
    rows = []
    for group in groups:
        ends = [run.last[0] for run in group.runs]
        # runs that are not finished count with what they have
        steps = f"{min(ends):,.0f} to " if min(ends) < 0.99 * max(ends) else ""
        kind = "run" if group.differing() else "seed"
        row = f"{group.label}: {counted(len(group.runs), kind)}, {steps}{max(ends):,.0f} steps, "
        returns = group.last_returns()
        if len(returns) == 1:  # it has no interval
            rows.append(f"{row}return {returns[0]:.2f}")
            continue
        last = group.last_return()
        rows.append(
            f"{row}mean {statistics.fmean(returns):.2f}, "
            f"IQM {last.value:.2f} [{last.low:.2f}, {last.high:.2f}]"
        )
    kind = "the last evaluation" if groups[0].last_is_evaluation else "training, at the end"
    rows.append(f"returns of {kind}; IQM: interquartile mean over seeds [95 % interval]")
    rows += [
        f"{group.label}: these are no seeds of one training, they differ in {', '.join(names)}: "
        f"--by {names[0]} groups them"
        for group in groups
        if (names := group.differing())
    ]
    return "\n".join(rows)


def plot_comparison(groups: Sequence[Group], path: Path) -> Path:
    """Draw the groups over env steps and over wall clock: the mean where all seeds of a group have
    returns, each seed faintly, and the mean at the end where the curve does not show it.
    """
    import matplotlib as mpl

    env = str(groups[0].runs[0].settings.get("env"))
    with mpl.rc_context(STYLE):
        # the legend has a row of its own, above both axes
        columns = _columns(groups)
        legend_height = 0.22 * math.ceil(len(groups) / columns)
        figure = new_figure(4.4 + legend_height, env)
        grid = figure.add_gridspec(2, 2, height_ratios=[legend_height, 4.0])
        legend = figure.add_subplot(grid[0, :])
        legend.axis("off")
        by_steps = figure.add_subplot(grid[1, 0])
        by_time = figure.add_subplot(grid[1, 1], sharey=by_steps)
        by_time.tick_params(labelleft=False)
        has_bands = has_ends = False
        for group, (dashes, color) in zip(groups, itertools.product(("-", "--", ":"), COLORS)):
            label = f"{_shortened(group.label)} ({len(group.runs)})"
            of_steps = [run.by_steps for run in group.runs]
            of_time = [_in_minutes(run.by_seconds) for run in group.runs]
            has_band = _draw_group(by_steps, of_steps, color, dashes, label)
            _draw_group(by_time, of_time, color, dashes, "_nolegend_")
            if not has_band or group.curves_are_evaluations != group.last_is_evaluation:
                _draw_end(by_steps, group, color, "_nolegend_" if has_band else label)
                has_ends = True
            has_bands |= has_band
        by_steps.set_ylabel("episode return")
        finish_axes(by_steps, "env steps", ticks=6)
        finish_axes(by_time, "minutes of training", ticks=6)
        for axes in (by_steps, by_time):
            axes.set_xlim(0, 1.03 * max(axes.dataLim.x1, 1e-9))
        handles = by_steps.get_legend_handles_labels()
        legend.legend(*handles, loc="center", borderaxespad=0, frameon=False, ncols=columns)
        figure.supxlabel(_caption(groups, has_bands, has_ends), fontsize=8, alpha=0.7)
        return save_figure(figure, path)


def _draw_group(axes: "Axes", curves: list[Curve], color: str, dashes: str, label: str) -> bool:
    """Each curve faintly, a dot if it is a point; returns whether there is a range that all of them
    have, over which the mean is drawn.
    """
    for curve in curves:
        if len(curves) > 1 or len(curve) < 2:
            marker = "o" if len(curve) < 2 else None
            axes.plot(*zip(*curve), color=color, linewidth=0.7, alpha=0.4, marker=marker)
    if min(map(len, curves)) < 2 or max(curve[0][0] for curve in curves) >= min(
        curve[-1][0] for curve in curves
    ):
        return False
    x, values = interpolate(curves)
    middle, low, high = band(values)
    axes.plot(x, middle, color=color, linestyle=dashes, linewidth=1.8, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    return True


def _draw_end(axes: "Axes", group: Group, color: str, label: str) -> None:
    """The interquartile mean at the end, and its interval."""
    last = group.last_return()
    axes.errorbar(
        [max(run.last[0] for run in group.runs)],
        [last.value],
        yerr=[[last.value - last.low], [last.high - last.value]],
        color=color,
        marker="D",
        markersize=6,
        capsize=4,
        label=label,
    )


def _shortened(label: str) -> str:
    """At most MAX_LABEL letters: a longer one is wider than the picture."""
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def _columns(groups: Sequence[Group]) -> int:
    """Columns of the legend: as many as fit side by side."""
    longest = max(len(_shortened(group.label)) for group in groups)
    return max(1, min(len(groups), 120 // (longest + 10)))


def _caption(groups: Sequence[Group], has_bands: bool, has_ends: bool) -> str:
    """What lines, bands and diamonds are."""
    first = groups[0]
    curves = "evaluations" if first.curves_are_evaluations else "the training"
    last = "evaluation" if first.last_is_evaluation else "returns of the training"
    statistic = "interquartile mean over seeds and its 95 % interval"
    parts = []
    if has_bands:
        parts.append(
            f"line and band: {statistic}, of {curves}, interpolated at {POINTS} common places; "
            f"faint: single seeds"
        )
    if has_ends:
        what = "the same" if has_bands else statistic
        parts.append(
            f"diamond: {what}, of the last {last}, where curves of seeds do not overlap or are of "
            f"the training"
        )
    return "\n".join(parts)


def _in_minutes(curve: Curve) -> Curve:
    return [(seconds / 60, value) for seconds, value in curve]
