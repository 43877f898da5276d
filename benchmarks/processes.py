"""Measurements in fresh processes: the same threads and wait mode for all, a job as JSON, a result
as JSON, in alternating order.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gpurl
from benchmarks.results_table import ROOT, device_parser
from gpurl.engine.threads import SPIN_COUNT
from gpurl.errors import GpurlError

# all variables that change how a thread waits
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
SPINS = {"default": "300000", "brief": SPIN_COUNT}  # libgomp's own, and what gpurl sets
WAITS = (*SPINS, "passive", "active")
DISTRIBUTIONS = {  # packages of the other trainers
    "rsl_rl": "rsl-rl-lib",
    "skrl": "skrl",
    "sb3": "stable-baselines3",
    "rl_games": "rl-games",
    "torchrl": "torchrl",
    "leanrl_style": "torch",
    "torch_loop": "torch",
}
RESULT = "RESULT "  # the line of a process's output with its result
Result = dict[str, Any]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_environment(threads: int, waits: str) -> dict[str, str]:
    """The environment variables of a process with `threads` OpenMP threads; `waits`, one of WAITS,
    is how they wait.
    """
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment | (
        {"GOMP_SPINCOUNT": SPINS[waits]} if waits in SPINS else {"OMP_WAIT_POLICY": waits.upper()}
    )


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every comparison of libraries."""
    parser = device_parser(description, device="cpu")
    parser.add_argument(
        "--python",
        type=Path,
        help="the Python with the other libraries; default that of .venv-peers, made if missing",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each contestant, in alternating order"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), help=f"OpenMP threads of all; default {cores()}"
    )
    parser.add_argument(
        "--waits",
        choices=WAITS,
        default="brief",
        help="wait mode of all threads; brief is what gpurl sets",
    )
    return parser


def version_of(trainer: str) -> str:
    """The version of the library of `trainer`."""
    if trainer == "gpurl":
        return gpurl.__version__
    return importlib.metadata.version(DISTRIBUTIONS[trainer])


def resident_mib() -> float:
    """The highest resident memory of this process."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak[1]) / 1024 if peak else float("nan")


def run_once(
    python: Path,
    module: str | Path,
    job: dict[str, Any],
    environment: dict[str, str],
    name: str,
    folder: Path = ROOT,
) -> Result:
    """Run a module, or a file, with `job` as JSON in a process in `folder`; returns the result that
    it prints by `print_result`. GpurlError with the end of its stderr if it fails.
    """
    script = ["-m", module] if isinstance(module, str) else [str(module)]
    done = subprocess.run(
        [str(python), *script, json.dumps(job)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        raise GpurlError(f"{name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix(RESULT))


def print_result(result: Result) -> None:
    """Print the result of a process for `run_once`."""
    print(RESULT + json.dumps(result))


def run_script(main: Callable[[], int], measure: Callable[..., Result]) -> NoReturn:
    """End this process with `main()`, or with `measure(**job)` if `run_once` started it."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print_result(measure(**json.loads(sys.argv[1])))
        sys.exit()
    sys.exit(main())


def orders(names: list[str], rounds: int) -> list[list[str]]:
    """The order of the runs in each round: a b c, c b a, a b c, ..."""
    return [list(reversed(names)) if number % 2 else list(names) for number in range(rounds)]


def take_turns(
    names: list[str],
    rounds: int,
    run: Callable[[str, int], Result],
    keep: Callable[[dict[str, list[Result]]], object],
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every name, one for each round; the error messages of those that failed). One
    that fails runs no more, and none of its results is kept.

    run: takes a name and the number of the round; keep: takes all results so far, after each
    turn. Ctrl-C ends the turns, and the results so far count. GpurlError if there is none.
    """
    results, failed = dict[str, list[Result]](), dict[str, str]()
    turns = [
        (name, round_number)
        for round_number, order in enumerate(orders(names, rounds))
        for name in order
    ]
    for name, round_number in turns:
        if name in failed:
            continue
        try:
            result = run(name, round_number)
        except GpurlError as error:
            failed[name] = str(error)
            if results.pop(name, None) is not None:
                keep(results)
        except KeyboardInterrupt:
            failed["the rest"] = f"interrupted in round {round_number + 1}, when {name} ran"
            break
        else:
            results.setdefault(name, []).append(result)
            keep(results)
    if not results:
        raise GpurlError("; ".join(failed.values()))
    return {name: results[name] for name in names if name in results}, failed
