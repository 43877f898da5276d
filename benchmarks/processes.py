"""Measurements in fresh processes: same threads and wait mode for all, a job as JSON, a result as JSON; and who runs after whom."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_table import ROOT
from gpurl.errors import GpurlError
from gpurl.host_settings import SPIN_COUNT

WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # all that change how a thread waits
SPINS = {"default": "300000", "brief": SPIN_COUNT}  # libgomp's own, and what gpurl sets
WAITS = (*SPINS, "passive", "active")
Result = dict[str, Any]


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_environment(threads: int, waits: str) -> dict[str, str]:
    """The environment variables of a process with that many OpenMP threads, which wait as `waits` says."""
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment | ({"GOMP_SPINCOUNT": SPINS[waits]} if waits in SPINS else {"OMP_WAIT_POLICY": waits.upper()})


def run_once(python: Path, module: str, job: dict[str, Any], environment: dict[str, str], name: str) -> Result:
    """What one process of `module` prints behind RESULT; GpurlError with its last words when it fails."""
    command = [str(python), "-m", module, json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise GpurlError(f"{name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def orders(names: list[str], rounds: int) -> list[list[str]]:
    """Who runs after whom, round by round: a b c, c b a, a b c, ..."""
    return [list(reversed(names)) if number % 2 else list(names) for number in range(rounds)]


def take_turns(names: list[str], rounds: int, run: Callable[[str, int], Result]) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every name, one a round; what GpurlErrors said of those that failed, which run no more and of which nothing is kept).

    run: gets a name and the number of the round. Ctrl-C ends the turns, and what was measured by then counts. GpurlError when there is
    nothing.
    """
    results, failed = dict[str, list[Result]](), dict[str, str]()
    turns = [(name, round_number) for round_number, order in enumerate(orders(names, rounds)) for name in order]
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
