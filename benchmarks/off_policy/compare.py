"""Libraries in turn: what they compute is compared, then each is timed in fresh processes, in
alternating order, medians as rows.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.off_policy.job import SKIPPED
from benchmarks.peers.installation import make_environment
from benchmarks.processes import Result, comparison_parser, host_environment, run_once, take_turns
from benchmarks.results_table import ROOT, Row, number, save, table
from gpurl.errors import UsageError

CONTESTANTS = {
    "replay": ("gpurl", "sb3", "torchrl", "gpurl:prioritized", "torchrl:prioritized"),
    "sac": ("gpurl", "sb3"),
    "redq": ("gpurl", "torch_loop"),
}
COMPARED_FIRST = (
    "sac",
    "redq",
)  # in a process that has both; a replay is compared in each process, with what went in
FASTER = ("updates/s",)  # units of which more is better
Key = tuple[str, str, str]  # what was measured, environments, unit


def measure(
    options: argparse.Namespace, case: str, python: Path
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every contestant of a case, one a round; the last words of those that failed)."""
    environment = host_environment(options.threads, options.waits)
    common: dict[str, Any] = {
        "case": case,
        "device": options.device,
        "seconds": options.seconds,
    } | options.sizes
    module = "benchmarks.off_policy.one_run"
    if case in COMPARED_FIRST:
        told = run_once(
            python,
            module,
            common | {"trainer": "both", "only_compare": True},
            environment,
            f"comparing {case}",
        )["told"]
        print(f"{case}: {told}", flush=True)

    def run(name: str, round_number: int) -> Result:
        trainer, _, mode = name.partition(":")
        job = common | {"trainer": trainer, "mode": mode or "default", "seed": round_number}
        found = run_once(python, module, job, environment, f"{name} on {case}")
        print(f"round {round_number + 1}: {name} on {case}", flush=True)
        return found

    return take_turns(names_of(case, options.trainers), options.rounds, run)


def names_of(case: str, trainers: list[str]) -> list[str]:
    """The contestants of a case that are among `trainers`."""
    return [name for name in CONTESTANTS[case] if name.partition(":")[0] in trainers]


def values_of(found: list[Result]) -> dict[Key, list[float]]:
    """What was measured -> a value a round."""
    values: dict[Key, list[float]] = {}
    for result in found:
        for case, num_envs, value, unit in result["measurements"]:
            values.setdefault((case, num_envs, unit), []).append(value)
    return values


def report(options: argparse.Namespace, case: str, results: dict[str, list[Result]]) -> str:
    """A table: medians of all, and how many times better gpurl's are than each other's."""
    medians: dict[Key, dict[str, float]] = {}
    for name, found in results.items():
        for key, values in values_of(found).items():
            medians.setdefault(key, {})[name.partition(":")[0]] = statistics.median(values)
    peers = [
        name
        for name in dict.fromkeys(name.partition(":")[0] for name in results)
        if name != "gpurl"
    ]
    lines = []
    for (what, num_envs, unit), by_name in medians.items():
        own = by_name.get("gpurl", float("nan"))
        ratios = {
            name: own / value if unit in FASTER else value / own for name, value in by_name.items()
        }
        cells = [
            [number(by_name[name]), f"{ratios[name]:.2f}"] if name in by_name else ["", ""]
            for name in peers
        ]
        lines.append(
            [what, num_envs, unit, number(own), *(cell for pair in cells for cell in pair)]
        )
    found = next(iter(results.values()))[0]["machine"]
    title = (
        f"{case} on {found['device']}, {found['threads']} CPU threads, OpenMP waits "
        f"{options.waits}, {options.rounds} rounds"
    )
    header = [
        "",
        "environments",
        "unit",
        "gpurl",
        *(word for name in peers for word in (name, "gpurl is better by")),
    ]
    return f"{title}\n{table(header, lines)}"


def rows_of(results: dict[str, list[Result]]) -> list[Row]:
    """Medians as rows."""
    rows = []
    for name, found in results.items():
        trainer, _, mode = name.partition(":")
        for (case, num_envs, unit), values in values_of(found).items():
            row = {
                "case": case,
                "trainer": trainer,
                "version": found[0]["version"],
                "note": mode or "default",
                "num_envs": num_envs,
            }
            spread = {
                "lowest": f"{min(values):.4g}",
                "highest": f"{max(values):.4g}",
                "rounds": str(len(values)),
            }
            rows.append(
                row
                | {"value": f"{statistics.median(values):.4g}", "unit": unit}
                | spread
                | found[0]["machine"]
            )
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
    parser.add_argument("--seconds", type=float, default=1.0, help="time a measurement; default 1")
    parser.add_argument(
        "--sizes",
        type=json.loads,
        default={},
        metavar="JSON",
        help='fields of job.py\'s Job, as {"size": 5000000}',
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
    """Compare, measure, print and save; 1 when a contestant failed, not when it cannot be measured
    here.
    """
    options = parse(words)
    python = options.python or make_environment(ROOT / ".venv-peers")
    code = 0
    for case in options.case:
        results, failed = measure(options, case, python)
        print(f"\n{report(options, case, results)}")
        for name, reason in failed.items():
            _, is_skipped, why = reason.partition(SKIPPED)
            print(f"left out: {name}: {why.strip()}" if is_skipped else f"failed: {name}: {reason}")
            code = code if is_skipped else 1
        print(f"written to {save('off_policy', rows_of(results), options.out)}\n", flush=True)
    return code
