"""gpurl against rsl_rl, skrl and stable-baselines3: same environments and hyper-parameters, a fresh process a run, alternating order.

The peers live in an environment of their own, .venv-peers, which the first run makes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results_table import RESULTS, ROOT, Row, number, save, table
from gpurl.errors import GpurlError, UsageError
from gpurl.host_settings import SPIN_COUNT

TORCH = "torch==2.13.0"
PEERS = ("rsl-rl-lib==5.5.1", "skrl==2.1.1", "stable-baselines3==2.9.2", "tensorboard")
TRAINERS = {"chasing": ("gpurl", "rsl_rl", "skrl", "sb3"), "pendulum": ("gpurl", "sb3")}
NUM_ENVS = {"chasing": 4096, "pendulum": 8}
SCORES = {"chasing": "reward/step", "pendulum": "return"}
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # all that change how a thread waits
SPINS = {"default": "300000", "brief": SPIN_COUNT}  # libgomp's own, and what gpurl sets
Result = dict[str, Any]


def make_environment(folder: Path) -> Path:
    """The Python of the peers' environment in `folder`, made where it is missing or holds other versions."""
    python, marker, wanted = folder / "bin" / "python", folder / ".installed", "\n".join((TORCH, *PEERS))
    if marker.is_file() and marker.read_text() == wanted:
        return python
    print(f"making {folder}: {', '.join((TORCH, *PEERS))}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    for requirements in ([TORCH], [*PEERS], ["--editable", str(ROOT)]):  # torch first: what comes after must not choose another
        subprocess.run([*pip, *requirements], check=True)
    marker.write_text(wanted)
    return python


def run_once(python: Path, job: dict[str, Any], threads: int, waits: str) -> Result:
    """One process of peer_loops.py; GpurlError with its last words when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment |= {"GOMP_SPINCOUNT": SPINS[waits]} if waits in SPINS else {"OMP_WAIT_POLICY": waits.upper()}
    command = [str(python), "-m", "benchmarks.peer_loops", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise GpurlError(f"{job['trainer']} on {job['case']} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def orders(trainers: list[str], rounds: int) -> list[list[str]]:
    """Who runs after whom, round by round: a b c, c b a, a b c, ..."""
    return [list(reversed(trainers)) if number % 2 else list(trainers) for number in range(rounds)]


def measure(options: argparse.Namespace, python: Path) -> dict[str, list[Result]]:
    """The results of every trainer, one a round."""
    results: dict[str, list[Result]] = {name: [] for name in options.trainers}
    job: dict[str, Any] = {"case": options.case, "num_envs": options.num_envs, "activation": options.activation, "device": options.device}
    job |= {"horizon": options.horizon, "iterations": options.iterations, "warm_up": options.warm_up, "total_steps": options.total_steps}
    for round_number, order in enumerate(orders(options.trainers, options.rounds)):
        for name in order:
            found = run_once(python, job | {"trainer": name, "seed": round_number}, options.threads, options.waits)
            results[name].append(found)
            said = f"{number(found['steps_per_second'])} env-steps/s, {SCORES[options.case]} {found['score']:.3f} {found['note']}"
            print(f"round {round_number + 1}: {name} {said}".rstrip(), flush=True)
    return results


def medians(results: list[Result], key: str) -> float:
    """Median over the rounds."""
    return statistics.median(result[key] for result in results)


def report(options: argparse.Namespace, results: dict[str, list[Result]]) -> str:
    """What is printed: medians, spread, and the ratio to the best peer."""
    any_result = next(iter(results.values()))[0]
    length = f"horizon {options.horizon}" if options.case == "chasing" else f"{options.total_steps} steps"
    title = f"PPO on {options.case}, {options.num_envs} environments, {length}, 64x64 {options.activation}, "
    title += f"{any_result['machine']['device']}, {options.threads} threads, OpenMP waits {options.waits}, {options.rounds} rounds"
    lines = []
    for name, found in results.items():
        speeds = [result["steps_per_second"] for result in found]
        spread = f"{number(min(speeds))}-{number(max(speeds))}"
        others = [number(medians(found, key)) for key in ("peak_mib", "gpu_mib")]
        speed, score = number(medians(found, "steps_per_second")), f"{medians(found, 'score'):.3f}"
        lines.append([f"{name} {found[0]['version']}", speed, spread, *others, score])
    header = ["trainer", "env-steps/s", "lowest-highest", "peak MiB", "GPU MiB", SCORES[options.case]]
    text = f"{title}\n{table(header, lines)}"
    peers = {name: medians(found, "steps_per_second") for name, found in results.items() if name != "gpurl"}
    if "gpurl" in results and peers:
        best = max(peers, key=lambda name: peers[name])
        text += f"\ngpurl / best peer ({best}): {medians(results['gpurl'], 'steps_per_second') / peers[best]:.2f}"
    return text


def rows_of(options: argparse.Namespace, results: dict[str, list[Result]]) -> list[Row]:
    """Medians as rows: speed, memory and score of every trainer."""
    rows = []
    units = {"steps_per_second": "env_steps/s", "peak_mib": "peak MiB", "score": SCORES[options.case]}
    units |= {"gpu_mib": "GPU MiB"} if options.device.startswith("cuda") else {}
    for name, found in results.items():
        for key, unit in units.items():
            label = {"case": f"{options.case} {options.activation}", "trainer": name, "version": found[0]["version"]}
            value = {"num_envs": str(options.num_envs), "value": f"{medians(found, key):.4g}", "unit": unit, "rounds": str(options.rounds)}
            rows.append(label | value | found[0]["machine"])
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options, with what depends on the case filled in."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(TRAINERS), default="chasing")
    parser.add_argument("--trainers", nargs="+", help=f"default all of the case: {TRAINERS}")
    parser.add_argument("--python", type=Path, help="Python that has the peers; default .venv-peers, which is made")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every trainer, in alternating order")
    parser.add_argument("--threads", type=int, default=cores, help=f"OMP_NUM_THREADS of all; default {cores}")
    parser.add_argument(
        "--waits",
        choices=(*SPINS, "passive", "active"),
        default="brief",
        help="how threads of all wait; brief is gpurl's own choice",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--activation", choices=("tanh", "elu", "relu"), default="tanh")
    parser.add_argument("--num-envs", type=int, help=f"default {NUM_ENVS}")
    parser.add_argument("--horizon", type=int, default=32, help="chasing: steps between updates")
    parser.add_argument("--iterations", type=int, default=12, help="chasing: timed iterations")
    parser.add_argument("--warm-up", type=int, help="iterations before the timed ones; default 3, 1 for pendulum")
    parser.add_argument("--total-steps", type=int, default=100_000, help="pendulum: steps of a training")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV file goes")
    options = parser.parse_args(words)
    options.trainers = options.trainers or list(TRAINERS[options.case])
    options.num_envs = options.num_envs or NUM_ENVS[options.case]
    options.warm_up = (3 if options.case == "chasing" else 1) if options.warm_up is None else options.warm_up
    if unknown := set(options.trainers) - set(TRAINERS[options.case]):
        raise UsageError(f"{options.case} is not measured with {', '.join(sorted(unknown))}, only with {', '.join(TRAINERS[options.case])}")
    return options


def main(words: list[str] | None = None) -> int:
    """Measure, print and save."""
    options = parse(words)
    python = options.python or make_environment(ROOT / ".venv-peers")
    results = measure(options, python)
    print(f"\n{report(options, results)}")
    print(f"written to {save('peers', rows_of(options, results), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
