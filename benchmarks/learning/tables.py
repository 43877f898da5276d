"""The tables of docs/results.md: each takes the outcomes by case name and gives lines of
Markdown.
"""

import json
from collections.abc import Iterable, Sequence

from benchmarks.learning.case import Case
from benchmarks.learning.gpu_cases import GPU_CASES, MJLAB, MJLAB_RUNS
from benchmarks.learning.gymnasium_cases import DISCRETE, DISCRETE_TASKS
from benchmarks.learning.mujoco_cases import PPO_COLUMNS, PPO_MUJOCO
from benchmarks.learning.outcomes import Outcome, published_median, verdicts
from benchmarks.learning.preset_cases import (
    PRESET_ALGORITHMS,
    PRESET_SIZES,
    PRESET_TARGETS,
    preset_case_name,
)
from benchmarks.learning.published import COLUMNS, published
from benchmarks.learning.results import END_EPISODES
from benchmarks.learning.suite import CASES
from gpurl.run.scores import Estimate, stratified_iqm

Outcomes = dict[str, Outcome]
NOT_RUN = "not run"
# groups whose cases are compared with one another
COMPARED = ("peers", "rsl_rl", "mjlab", "wall_clock")


def number(value: float) -> str:
    """Whole from 100 on, else with up to one or two digits: 9,635 and -4.1 and 0.85."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def interval(estimate: Estimate) -> str:
    """The value and its interval; without one if all seeds are equal, or are one."""
    if estimate.low == estimate.high:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def with_seeds(outcome: Outcome) -> str:
    """The interval, and in brackets the number of seeds."""
    return f"{interval(outcome.estimate)} ({len(outcome.seeds)})"


def duration(seconds: float) -> str:
    """12 s, 3.4 min or 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(steps: float) -> str:
    """12 k or 1 M."""
    return f"{steps / 1e6:.3g} M" if steps >= 1e6 else f"{steps / 1e3:.3g} k"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def published_text(column: str, task: str) -> str:
    """A published mean with its standard deviation, empty if there is none."""
    found = published(column, task)
    if found is None:
        return ""
    mean, deviation = found
    return f"{number(mean)} ± {number(deviation)}"


def ppo_table(outcomes: Outcomes) -> list[str]:
    """PPO at a million steps beside three publications, and over all tasks."""
    header = ("task", "IQM [95 %]", "median", "seeds", "time", *PPO_COLUMNS)
    rows = []
    for case in PPO_MUJOCO:
        columns = [published_text(column, case.task) for column in PPO_COLUMNS]
        rows.append((case.task, *own_cells(outcomes.get(case.name)), *columns))
    lines = markdown(header, rows)
    if (text := _over_tasks(outcomes)) is not None:
        lines += ["", text]
    return lines


def _over_tasks(outcomes: Outcomes) -> str | None:
    """Returns as fractions of the published median, over the tasks where it is positive."""
    fractions = {}
    for case in PPO_MUJOCO:
        reference = published_median(case)
        outcome = outcomes.get(case.name)
        if outcome is not None and reference is not None and reference > 0:
            fractions[case.task] = [each / reference for each in outcome.returns]
    if not fractions:
        return None
    return (
        f"Over {', '.join(fractions)}, as fractions of the median of the published means: "
        f"{interval(stratified_iqm(fractions))}."
    )


def own_cells(outcome: Outcome | None) -> tuple[str, str, str, str]:
    """Interval, median, seeds and time."""
    if outcome is None:
        return NOT_RUN, "", "", ""
    seeds = str(len(outcome.seeds))
    return (
        interval(outcome.estimate),
        number(outcome.median),
        seeds,
        duration(outcome.seconds),
    )


def case_table(cases: Sequence[Case], outcomes: Outcomes) -> list[str]:
    """One line a case, with the publications on its task."""
    header = ("case", "steps", "IQM [95 %]", "median", "seeds", "time", "published")
    rows = []
    for case in cases:
        texts = [(column, published_text(column, case.task)) for column in case.published]
        others = ", ".join(
            f"{text} ({column}, {COLUMNS[column].steps.partition(' (')[0]})"
            if case.group == "off_policy"
            else f"{text} ({column})"
            for column, text in texts
            if text
        )
        rows.append((case.name, count(case.steps), *own_cells(outcomes.get(case.name)), others))
    return markdown(header, rows)


def discrete_table(outcomes: Outcomes) -> list[str]:
    """Algorithms by tasks."""
    names = [case.name.removesuffix("-cart_pole") for case in DISCRETE if "cart_pole" in case.name]
    rows = []
    for name in names:
        cells = []
        for task in DISCRETE_TASKS:
            outcome = outcomes.get(f"{name}-{task}")
            steps = count(CASES[f"{name}-{task}"].steps)
            text = NOT_RUN if outcome is None else with_seeds(outcome)
            cells.append(f"{text} at {steps}")
        rows.append((name, *cells))
    for column in ("DQN rl-zoo3", "QR-DQN rl-zoo3"):
        rows.append((column, *(published_text(column, task) for task in DISCRETE_TASKS)))
    return markdown(("", *DISCRETE_TASKS), rows)


def preset_table(outcomes: Outcomes) -> list[str]:
    """Tasks and numbers of environments by algorithms: return, steps and time."""
    rows = []
    for task in PRESET_TARGETS:
        for num_envs in PRESET_SIZES:
            cells = []
            for algorithm in PRESET_ALGORITHMS:
                name = preset_case_name(algorithm, task, num_envs)
                outcome = outcomes.get(name)
                text = NOT_RUN if outcome is None else with_seeds(outcome)
                after = "" if outcome is None else f", {duration(outcome.seconds)}"
                cells.append(f"{text} {count(CASES[name].steps)}{after}")
            rows.append((f"{task}, {num_envs:,}", *cells))
    return markdown(("", *PRESET_ALGORITHMS), rows)


def peer_table(cases: Sequence[Case], peer: str, outcomes: Outcomes) -> list[str]:
    """gpurl beside `peer`: returns, wall clock, and the ratio of the times; cases: in pairs."""
    header = ("training", "steps", "gpurl", peer, "time", "its time", "ratio")
    rows = []
    for own, other in zip(cases[::2], cases[1::2]):
        pair = (outcomes.get(own.name), outcomes.get(other.name))
        texts = [NOT_RUN if each is None else with_seeds(each) for each in pair]
        times = ["" if each is None else duration(each.seconds) for each in pair]
        ratio = "" if None in pair else f"{pair[1].seconds / pair[0].seconds:.1f}"  # type: ignore[union-attr]
        name = own.name.partition("-")[2]
        rows.append((name, count(own.steps), *texts, *times, ratio))
    return markdown(header, rows)


def gpu_table(outcomes: Outcomes) -> list[str]:
    """mjlab's trainings of Gymnasium's tasks, and ours with the same sizes and steps."""
    header = ("task", "sizes", "steps", "mjlab", "its time", "gpurl: IQM [95 %]", "time")
    rows = []
    for case in GPU_CASES:
        run = MJLAB_RUNS[case.task]
        sizes = f"{run.num_envs} × {run.horizon} × {run.epochs} × {run.minibatches}"
        other = f"{number(run.mean)} ± {number(run.deviation)}"
        own = outcomes.get(case.name)
        texts = (NOT_RUN, "") if own is None else (with_seeds(own), duration(own.seconds))
        times = (duration(60 * run.minutes), *texts)
        rows.append((case.task, sizes, count(case.steps), other, *times))
    return markdown(header, rows)


def clock_table(outcomes: Outcomes) -> list[str]:
    """Algorithms for the same wall clock."""
    header = ("training", "time", "environment steps", "IQM [95 %]", "seeds")
    rows = []
    for case in CASES.values():
        if case.group != "wall_clock":
            continue
        outcome = outcomes.get(case.name)
        name = case.name.removeprefix("clock-")
        limit = duration(case.settings["max_seconds"])
        if outcome is None:
            rows.append((name, limit, "", NOT_RUN, ""))
            continue
        estimate = interval(outcome.estimate)
        seeds = str(len(outcome.seeds))
        rows.append((name, duration(outcome.seconds), count(outcome.steps), estimate, seeds))
    return markdown(header, rows)


def target_table(outcomes: Outcomes) -> list[str]:
    """Every target, reached or not."""
    header = ("case", "measure", "wanted", "got", "")
    rows = []
    all_targets = verdicts(outcomes)
    was_run = [each for each in all_targets if each.got is not None]
    reached = sum(each.is_reached for each in was_run)
    for each in all_targets:
        got = "" if each.got is None else number(each.got)
        rows.append((each.case.name, each.measure, number(each.wanted), got, each.word))
    summary = (
        f"{reached} of {len(was_run)} targets are reached; {len(all_targets) - len(was_run)} more "
        f"are not run."
    )
    with_target = {each.case.name for each in all_targets}
    others = [
        name
        for name, case in CASES.items()
        if name not in with_target and case.group not in COMPARED
    ]
    without = f"Without a target: {', '.join(others)}."
    return [summary, "", without, "", *markdown(header, rows)]


def few_episodes(outcomes: Outcomes) -> str:
    """How many trainings had fewer episodes in their last evaluation than they would have now."""
    seeds = [seed for outcome in outcomes.values() for seed in outcome.seeds]
    few = sum(int(seed.last["episodes"]) < END_EPISODES for seed in seeds)
    return f"{few} of {len(seeds)}"


def settings_table(outcomes: Outcomes) -> list[str]:
    """What each case was trained with, where that differs from the defaults; the commits."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, outcome in outcomes.items():
        values = json.loads(outcome.seeds[0].last["settings"])
        text = ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items())
        commits = sorted({seed.last["commit"] for seed in outcome.seeds})
        names.setdefault((text, ", ".join(commits)), []).append(name)
    rows = [(", ".join(same), f"`{text}`", commits) for (text, commits), same in names.items()]
    return markdown(("cases", "settings", "commits"), rows)


def source_list() -> list[str]:
    """The publications, each with its columns and the steps of their trainings."""
    steps: dict[str, list[str]] = {}
    for column in COLUMNS.values():
        steps.setdefault(column.source, []).append(f"{column.name} {column.steps}")
    lines = [f"- {source}. Steps: {'; '.join(columns)}." for source, columns in steps.items()]
    return [*lines, f"- {MJLAB}."]


def machine_lines(outcomes: Outcomes) -> list[str]:
    """The machines and versions of all trainings."""
    columns = ("cpu", "threads", "gpurl", "torch", "gymnasium", "mujoco")
    found = {
        tuple(seed.last[column] for column in columns)
        for outcome in outcomes.values()
        for seed in outcome.seeds
    }
    return [
        f"- {cpu}, threads: {threads}; gpurl {own}, torch {torch}, gymnasium {gymnasium}, "
        f"mujoco {mujoco}"
        for cpu, threads, own, torch, gymnasium, mujoco in sorted(found)
    ]
