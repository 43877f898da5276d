"""Compares off-policy libraries: their results first, then their times, in fresh processes and in
alternating order.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.off_policy.job import SKIPPED
from benchmarks.peers.installation import make_environment
from benchmarks.processes import Result, comparison_parser, host_environment, run_once, take_turns
from benchmarks.results_table import ROOT, Row, Turns, median_columns, number, table
from gpurl.errors import UsageError

CONTESTANTS = {
    "replay": ("gpurl", "sb3", "torchrl", "gpurl:prioritized", "torchrl:prioritized"),
    "sac": ("gpurl", "sb3"),
    "redq": ("gpurl", "torch_loop"),
}
# compared in one process with both libraries; a replay is compared in each process with its input
COMPARED_FIRST = ("sac", "redq")
RATES = ("updates/s",)  # units of which more is better
Key = tuple[str, str, str]  # case, environments, unit


def measure(
    options: argparse.Namespace, case: str, python: Path, turns: Turns
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every contestant of a case, one for each round; error messages of those that
    failed). Rows are saved after each turn.
    """
    environment = host_environment(options.threads, options.waits)
    common: dict[str, Any] = {
        "case": case,
        "device": options.device,
        "seconds": options.seconds,
    } | options.sizes
    module = "benchmarks.off_policy.one_run"
    if case in COMPARED_FIRST:
        job = common | {"trainer": "both", "only_compare": True}
        comparison = run_once(python, module, job, environment, f"comparing {case}")
        print(f"{case}: {comparison['message']}", flush=True)

    def run(name: str, round_number: int) -> Result:
        trainer, _, mode = name.partition(":")
        job = common | {"trainer": trainer, "mode": mode or "default", "seed": round_number}
        result = run_once(python, module, job, environment, f"{name} on {case}")
        print(f"round {round_number + 1}: {name} on {case}", flush=True)
        return result

    def keep(results: dict[str, list[Result]]) -> None:
        turns.save(rows_of(results))

    return take_turns(names_of(case, options.trainers), options.rounds, run, keep)


def names_of(case: str, trainers: list[str]) -> list[str]:
    """The contestants of a case that are among `trainers`."""
    return [name for name in CONTESTANTS[case] if name.partition(":")[0] in trainers]


def values_of(results: list[Result]) -> dict[Key, list[float]]:
    """The values of each measurement, one for each round."""
    values: dict[Key, list[float]] = {}
    for result in results:
        for case, num_envs, value, unit in result["measurements"]:
            values.setdefault((case, num_envs, unit), []).append(value)
    return values


def report(options: argparse.Namespace, case: str, results: dict[str, list[Result]]) -> str:
    """A table of the medians, and of the ratio between gpurl's and each other library's."""
    # medians of each trainer
    medians: dict[Key, dict[str, float]] = {}
    for name, trainer_results in results.items():
        for key, values in values_of(trainer_results).items():
            medians.setdefault(key, {})[name.partition(":")[0]] = statistics.median(values)
    trainers = dict.fromkeys(name.partition(":")[0] for name in results)
    peers = [name for name in trainers if name != "gpurl"]

    # one line for each measurement
    lines = []
    for (name, num_envs, unit), by_trainer in medians.items():
        own = by_trainer.get("gpurl", float("nan"))
        line = [name, num_envs, unit, number(own)]
        for peer in peers:
            value = by_trainer.get(peer)
            if value is None:
                line += ["", ""]
            else:
                ratio = own / value if unit in RATES else value / own
                line += [number(value), f"{ratio:.2f}"]
        lines.append(line)

    machine = next(iter(results.values()))[0]["machine"]
    title = (
        f"{case} on {machine['device']}, {machine['threads']} CPU threads, OpenMP waits "
        f"{options.waits}, {options.rounds} rounds"
    )
    peer_headers = itertools.chain(*((peer, "gpurl is better by") for peer in peers))
    return f"{title}\n{table(['', 'environments', 'unit', 'gpurl', *peer_headers], lines)}"


def rows_of(results: dict[str, list[Result]]) -> list[Row]:
    """Medians as rows."""
    rows = []
    for name, trainer_results in results.items():
        trainer, _, mode = name.partition(":")
        for (case, num_envs, unit), values in values_of(trainer_results).items():
            row = {
                "case": case,
                "trainer": trainer,
                "version": trainer_results[0]["version"],
                "note": mode or "default",
                "num_envs": num_envs,
                "unit": unit,
            }
            rows.append(row | median_columns(values, ".4g") | trainer_results[0]["machine"])
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    everyone = sorted({name.partition(":")[0] for names in CONTESTANTS.values() for name in names})
    parser = comparison_parser(__doc__)
    parser.add_argument(
        "--case",
        nargs="+",
        choices=list(CONTESTANTS),
        default=list(CONTESTANTS),
        help="default all",
    )
    parser.add_argument(
        "--trainers", nargs="+", choices=everyone, default=everyone, help="default all"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time of a measurement; default 1"
    )
    parser.add_argument(
        "--sizes",
        type=json.loads,
        default={},
        metavar="JSON",
        help='fields of Job in job.py, for example {"size": 5000000}',
    )
    options = parser.parse_args(words)
    for case in options.case:
        if not names_of(case, options.trainers):
            raise UsageError(
                f"{case} is not measured with {', '.join(options.trainers)}, only with "
                f"{', '.join(CONTESTANTS[case])}"
            )
    return options


def main(words: list[str] | None = None) -> int:
    """Compare, measure, print and save; 1 if a contestant failed, 0 if it cannot be measured
    here.
    """
    options = parse(words)
    python = options.python or make_environment(ROOT / ".venv-peers")
    code = 0
    for case in options.case:
        turns = Turns("off_policy", options.out)
        results, failed = measure(options, case, python, turns)
        print(f"\n{report(options, case, results)}")
        for name, reason in failed.items():
            _, is_skipped, why = reason.partition(SKIPPED)
            print(f"skipped: {name}: {why.strip()}" if is_skipped else f"failed: {name}: {reason}")
            code = code if is_skipped else 1
        print(f"written to {turns.save(rows_of(results))}\n", flush=True)
    return code
