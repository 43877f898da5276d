"""Compares the speed of this tree with that of another commit: the same trainings in fresh
processes, and the ratio of their times with its 95 % interval.

A change is slower if the whole interval is above the limit: 3 % on a GPU, 10 % on a shared CPU.
Pairs of processes run in alternating order, and the interval is a bootstrap over pairs. Every
process runs this file with the `gpurl` of its tree.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo chasing": ("ppo", "chasing", {"num_envs": 1024, "horizon": 32, "minibatches": 4}),
    "sac pendulum": ("sac", "pendulum", {"learning_starts": 640, "total_steps": 10**6}),
    "dqn cart_pole": ("dqn", "cart_pole", {"learning_starts": 640, "total_steps": 10**6}),
    "ppo gymnasium": ("ppo", "gymnasium_cpu:Pendulum-v1", {"horizon": 64, "minibatches": 4}),
}
# measured on demand: the first run compiles the physics for a minute
SLOW_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo ant": ("ppo", "ant", {"num_envs": 64, "horizon": 8, "minibatches": 4}),
}
LIMITS = {"cpu": 1.10, "cuda": 1.03}
RESAMPLES, MIN_PAIRS = 10_000, 5


def measure(device_name: str, threads: int, seconds: float, cases: list[str]) -> dict[str, Any]:
    """Median seconds of an iteration of each case, with the `gpurl` that this process imports."""
    import torch

    import gpurl

    try:
        from gpurl.run.settings import make_settings
        from gpurl.run.setup import choose_device, make_trainer
    except ImportError:  # a commit before these packages
        from gpurl.config import make_settings  # type: ignore[import-not-found, no-redef]

        from gpurl.api import choose_device, make_trainer  # type: ignore[attr-defined, no-redef]

    device = choose_device(device_name)
    medians = dict[str, float]()
    for name in cases:
        algorithm, env, changes = (CASES | SLOW_CASES)[name]
        settings = make_settings(
            algorithm,
            env,
            **{"threads": threads, "eval_episodes": 0, "device": device_name, **changes},
        )
        trainer = make_trainer(settings, device)
        trainer.start()

        # warm up: on a GPU the graphs are captured in the fourth iteration
        for _ in range(5):
            trainer.iterate()
        while trainer.steps < 2 * trainer.algorithm.learning_starts:
            trainer.iterate()

        # measure
        times = list[float]()
        began = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - began < seconds:
            before = time.perf_counter()
            trainer.iterate()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - before)
        trainer.env.close()
        medians[name] = float(np.median(times))
    return {"gpurl": str(Path(gpurl.__file__).resolve().parent), "seconds": medians}


def interval(ratios: list[float], seed: int = 0) -> tuple[float, float, float]:
    """(geometric mean, lower and upper end of its 95 % bootstrap interval) of the ratios of all
    pairs.
    """
    logs = np.log(ratios)
    draws = np.random.default_rng(seed).choice(logs, (RESAMPLES, len(logs))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


@contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """A folder with `commit` of the repository at `root`, deleted after the block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run_in(tree: Path, job: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """`measure` in a fresh process that imports `gpurl` from `tree`; ends the comparison if it
    fails.
    """
    from benchmarks.processes import run_once
    from gpurl.errors import GpurlError

    environment = environment | {"PYTHONPATH": str(tree)}
    script = Path(__file__).resolve()
    try:
        result = run_once(Path(sys.executable), script, job, environment, str(tree), tree)
    except GpurlError as error:
        sys.exit(str(error))
    if Path(result["gpurl"]) != (tree / "gpurl").resolve():
        sys.exit(f"wanted gpurl of {tree}, got {result['gpurl']}")
    return result["seconds"]


def main() -> int:
    """Compare; 1 if a case is slower than the limit."""
    from benchmarks.processes import cores, host_environment
    from benchmarks.results_table import ROOT, table
    from gpurl.run.setup import choose_device

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the commit to compare with: HEAD~1, a tag, a branch")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of processes; default 15")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time of a case in a process; default 1"
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N; default cpu")
    parser.add_argument(
        "--threads", type=int, default=cores(), help=f"OpenMP threads; default {cores()}"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[*CASES, *SLOW_CASES],
        default=list(CASES),
        metavar="CASE",
        help=f"default {', '.join(CASES)}; also {', '.join(SLOW_CASES)}",
    )
    options = parser.parse_args()
    if options.pairs < MIN_PAIRS:
        parser.error(f"{options.pairs} pairs are too few: at least {MIN_PAIRS}, better 15")

    # measure in alternating order
    device = choose_device(options.device)
    job = {
        "device_name": str(device),
        "threads": options.threads,
        "seconds": options.seconds,
        "cases": options.cases,
    }
    environment, limit = host_environment(options.threads, "brief"), LIMITS[device.type]
    times: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    with checked_out(ROOT, options.commit) as other:
        trees = {"this": ROOT, "other": other}
        for pair in range(options.pairs):
            for name in sorted(trees, reverse=pair % 2 == 0):
                times[name].append(run_in(trees[name], job, environment))
            print(f"pair {pair + 1} of {options.pairs}", file=sys.stderr, flush=True)

    # judge
    lines, slower = [], False
    for case in options.cases:
        ratios = [this[case] / other[case] for this, other in zip(times["this"], times["other"])]
        mean, low, high = interval(ratios)
        slower |= low > limit
        if low > limit:
            word = "slower"
        elif high < 1.0:
            word = "faster"
        elif low <= 1.0:
            word = "no difference shown"
        else:
            word = "within the limit"
        lines.append([case, f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}", word])
    print(table([f"time of this tree / {options.commit}", "ratio", "low", "high", ""], lines))
    return int(slower)


if __name__ == "__main__":  # a process of another commit may lack the helpers of benchmarks
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print("RESULT " + json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
