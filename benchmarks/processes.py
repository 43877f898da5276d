"""Measurements in fresh processes: same threads and wait mode for all, a job as JSON, a result as
JSON; and who runs after whom.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpurl
from benchmarks.results_table import RESULTS, ROOT
from gpurl.engine.threads import SPIN_COUNT
from gpurl.errors import GpurlError

WAIT_SETTINGS = (
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "KMP_LIBRARY",
)  # all that change how a thread waits
SPINS = {"default": "300000", "brief": SPIN_COUNT}  # libgomp's own, and what gpurl sets
WAITS = (*SPINS, "passive", "active")
DISTRIBUTIONS = {  # of trainers that are not gpurl
    **{
        "rsl_rl": "rsl-rl-lib",
        "skrl": "skrl",
        "sb3": "stable-baselines3",
        "rl_games": "rl-games",
        "torchrl": "torchrl",
    },
    **{"leanrl_style": "torch", "torch_loop": "torch"},
}
Result = dict[str, Any]


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_environment(threads: int, waits: str) -> dict[str, str]:
    """The environment variables of a process with that many OpenMP threads, which wait as `waits`
    says.
    """
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment | (
        {"GOMP_SPINCOUNT": SPINS[waits]} if waits in SPINS else {"OMP_WAIT_POLICY": waits.upper()}
    )


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every comparison of libraries."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--python", type=Path, help="Python that has the peers; default .venv-peers, which is made"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of every contestant, in alternating order"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), help=f"OMP_NUM_THREADS of all; default {cores()}"
    )
    parser.add_argument(
        "--waits",
        choices=WAITS,
        default="brief",
        help="how threads of all wait; brief is gpurl's own choice",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV file goes"
    )
    return parser


def version_of(trainer: str) -> str:
    """Of the library that `trainer` is of."""
    return (
        gpurl.__version__
        if trainer == "gpurl"
        else importlib.metadata.version(DISTRIBUTIONS[trainer])
    )


def resident_mib() -> float:
    """The highest resident memory of this process."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def run_once(
    python: Path, module: str, job: dict[str, Any], environment: dict[str, str], name: str
) -> Result:
    """What one process of `module` prints behind RESULT; GpurlError with its last words when it
    fails.
    """
    command = [str(python), "-m", module, json.dumps(job)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise GpurlError(f"{name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def orders(names: list[str], rounds: int) -> list[list[str]]:
    """Who runs after whom, round by round: a b c, c b a, a b c, ..."""
    return [list(reversed(names)) if number % 2 else list(names) for number in range(rounds)]


def take_turns(
    names: list[str], rounds: int, run: Callable[[str, int], Result]
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every name, one a round; what GpurlErrors said of those that failed, which run no
    more and of which nothing is kept).

    run: gets a name and the number of the round. Ctrl-C ends the turns, and what was measured by
    then counts. GpurlError when there is nothing.
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
            found = run(name, round_number)
        except GpurlError as error:
            failed[name] = str(error)
            results.pop(name, None)
        except KeyboardInterrupt:
            failed["the rest"] = f"interrupted in round {round_number + 1}, when {name} ran"
            break
        else:
            results.setdefault(name, []).append(found)
    if not results:
        raise GpurlError("; ".join(failed.values()))
    return {name: results[name] for name in names if name in results}, failed
