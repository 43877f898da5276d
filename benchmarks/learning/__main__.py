"""`python -m benchmarks.learning`: runs the trainings of a suite that have no results yet."""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.learning import results
from benchmarks.learning.case import Case
from benchmarks.learning.results import Seed
from benchmarks.learning.schedule import Places, Stop, in_order, run_all
from benchmarks.learning.suite import SUITES, select
from benchmarks.peers.installation import make_environment
from benchmarks.processes import cores
from benchmarks.results_table import ROOT, table
from gpurl.errors import GpurlError, UsageError


def options_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), default="short")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="PATTERN",
        help="of names of cases or groups, in place of a suite: 'ppo-*', off_policy",
    )
    parser.add_argument("--seeds", type=int, help="trainings of each case; default: the case's")
    parser.add_argument("--hours", type=float, help="stop after this time; unfinished ones resume")
    parser.add_argument(
        "--cores", type=int, default=cores(), help="one for each thread of a training; default all"
    )
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the CSV files")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/learning"),
        help="folder of unfinished trainings; default runs/learning",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="times the steps of each case, for a smoke test into another --out",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the cases only: how many of their seeds are finished, and which ones are "
        "stale, made with other settings, and run again",
    )
    return parser


def seeds_of(case: Case, seeds: int | None) -> range:
    """The seeds that are wanted."""
    return range(case.seeds if seeds is None else seeds)


def stale(case: Case, seeds: int | None, out: Path) -> list[Seed]:
    """The results of wanted seeds that were made with other settings."""
    wanted = seeds_of(case, seeds)
    found = results.read(case, out)
    return [each for each in found if each.seed in wanted and results.is_stale(each, case)]


def overview(cases: list[Case], seeds: int | None, out: Path) -> str:
    """A table of the cases, how many of their seeds are finished, and which ones are stale."""
    header = ("case", "group", "trainer", "env", "steps", "seeds", "finished", "stale", "target")
    lines = []
    for case in cases:
        wanted = seeds_of(case, seeds)
        done = len(results.finished(case, out).intersection(wanted))
        target = "" if case.target is None else f"{case.target:,.0f}"
        old = ",".join(str(each.seed) for each in stale(case, seeds, out))
        numbers = (f"{case.steps:,}", str(len(wanted)), str(done), old, target)
        lines.append((case.name, case.group, case.trainer, case.env, *numbers))
    return table(header, lines)


def missing(cases: list[Case], seeds: int | None, out: Path) -> dict[str, list[int]]:
    """The seeds of each case that need a training; prints which results are stale."""
    wanted = {}
    for case in cases:
        for found in stale(case, seeds, out):
            print(
                f"{case.name} seed {found.seed} had other settings and runs again: "
                f"{results.changes_since(found, case)}",
                flush=True,
            )
        done = results.finished(case, out)
        wanted[case.name] = [seed for seed in seeds_of(case, seeds) if seed not in done]
    return wanted


def places_of(cases: list[Case], options: argparse.Namespace) -> Places:
    """The folders, and the Pythons; that of the other trainers is made if a case needs it."""
    python = peers = Path(sys.executable)
    if any(case.is_in_peers for case in cases):
        peers = make_environment(ROOT / ".venv-peers")
    return Places(options.out.resolve(), options.work.resolve(), python, peers, options.scale)


def say_what_makes_the_page(out: Path) -> None:
    """Print the command for docs/results.md, which is made from the published results only."""
    if out.resolve() == results.FOLDER:
        print("python -m benchmarks.learning.report makes docs/results.md from these CSV files")


def main() -> int:
    """Run what is missing; exit code 1 if a training failed."""
    options = options_parser().parse_args()
    try:
        if options.scale != 1.0 and options.out == results.FOLDER:
            raise UsageError("--scale needs an --out of its own: these are no published results")
        cases = [case.scaled(options.scale) for case in select(options.suite, options.only)]
        if options.list:
            print(overview(cases, options.seeds, options.out))
            return 0
        wanted = missing(cases, options.seeds, options.out)
        cases = [case for case in cases if wanted[case.name]]
        jobs = in_order(cases, lambda case: wanted[case.name])
        if not jobs:
            print(
                f"nothing to do: all seeds asked for are in {os.path.relpath(options.out)} "
                f"already; --out FOLDER repeats them elsewhere"
            )
            say_what_makes_the_page(options.out)
            return 0
        print(f"{len(jobs)} trainings of {len(cases)} cases", flush=True)
        places = places_of(cases, options)
        seconds = None if options.hours is None else options.hours * 3600
        with Stop(seconds) as stop:
            failed = run_all(
                jobs, places, options.cores, stop, lambda text: print(text, flush=True)
            )
    except GpurlError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    say_what_makes_the_page(options.out)
    if failed:
        print(f"failed: {', '.join(job.name for job in failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
