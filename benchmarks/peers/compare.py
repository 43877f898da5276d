"""Compares PPO trainers on the same environments and hyper-parameters, in fresh processes and in
alternating order.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.peers.installation import make_environment
from benchmarks.processes import Result, comparison_parser, host_environment, run_once, take_turns
from benchmarks.results_table import ROOT, Row, Turns, median_columns, number, table
from gpurl.errors import UsageError

ON_CPU = (
    *("gpurl", "rsl_rl", "rsl_rl:compile", "skrl", "sb3", "rl_games", "rl_games:eager"),
    *("leanrl_style", "leanrl_style:compile"),
)
ON_GPU = (
    *("gpurl", "gpurl:tf32", "gpurl:bf16", "rsl_rl", "rsl_rl:compile", "skrl", "sb3"),
    *("rl_games", "rl_games:max-autotune", "leanrl_style", "leanrl_style:compile+graphs"),
)
CONTESTANTS = {
    "chasing": {"cpu": ON_CPU, "cuda": ON_GPU},
    "pursuit": {"cpu": ON_CPU, "cuda": ON_GPU},
    "pendulum": {"cpu": ("gpurl", "sb3"), "cuda": ("gpurl", "sb3")},
}
# modes of each trainer, as in its file; repeated here to refuse a wrong name before anything runs
MODES = {
    "gpurl": ("default", "tf32", "bf16"),
    "rsl_rl": ("default", "compile", "max-autotune"),
    "skrl": ("default",),
    "sb3": ("default",),
    "rl_games": ("default", "eager", "max-autotune", "bf16"),
    "leanrl_style": ("default", "compile", "graphs", "compile+graphs"),
}
NUM_ENVS = {"chasing": 4096, "pursuit": 4096, "pendulum": 8}
HORIZONS = {"chasing": 32, "pursuit": 24, "pendulum": 1024}
ACTIVATIONS = {"chasing": "tanh", "pursuit": "elu", "pendulum": "tanh"}
SCORES = {"chasing": "reward/step", "pursuit": "reward/step", "pendulum": "return"}


def measure(
    options: argparse.Namespace, python: Path, turns: Turns
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every contestant, one for each round; error messages of those that failed). Rows
    are saved after each turn.
    """
    names = ("case", "num_envs", "activation", "device", "horizon", "iterations", "warm_up")
    common = {name: getattr(options, name) for name in (*names, "total_steps")}
    environment = host_environment(options.threads, options.waits)

    def run(name: str, round_number: int) -> Result:
        trainer, _, mode = name.partition(":")
        job = common | {"trainer": trainer, "mode": mode or "default", "seed": round_number}
        result = run_once(
            python, "benchmarks.peers.one_run", job, environment, f"{name} on {options.case}"
        )
        print(
            f"round {round_number + 1}: {name} {number(result['steps_per_second'])} env-steps/s, "
            f"{SCORES[options.case]} {result['score']:.3f}, {result['note']}",
            flush=True,
        )
        return result

    def keep(results: dict[str, list[Result]]) -> None:
        turns.save(rows_of(options, results))

    return take_turns(options.trainers, options.rounds, run, keep)


def medians(results: list[Result], key: str) -> float:
    """Median over the rounds."""
    return statistics.median(result[key] for result in results)


def report(options: argparse.Namespace, results: dict[str, list[Result]]) -> str:
    """The text to print: medians, spread, and the ratio to the best peer."""
    device = next(iter(results.values()))[0]["machine"]["device"]
    from benchmarks.peers.job import SHAPES  # imports torch

    is_pendulum = options.case == "pendulum"
    length = f"{options.total_steps} steps" if is_pendulum else f"horizon {options.horizon}"
    hidden = "x".join(map(str, SHAPES[options.case][0]))
    title = (
        f"PPO on {options.case}, {options.num_envs} environments, {length}, {hidden} "
        f"{options.activation}, {device}, {options.threads} threads, OpenMP waits "
        f"{options.waits}, {options.rounds} rounds"
    )

    # one line for each contestant
    lines = []
    speeds = {name: medians(runs, "steps_per_second") for name, runs in results.items()}
    for name, runs in results.items():
        rates = [result["steps_per_second"] for result in runs]
        spread = f"{number(min(rates))}-{number(max(rates))}"
        memory = [number(medians(runs, key)) for key in ("peak_mib", "gpu_mib")]
        score = f"{medians(runs, 'score'):.3f}"
        lines.append([f"{name} {runs[0]['version']}", number(speeds[name]), spread, *memory, score])
    header = ["trainer", "env-steps/s", "lowest-highest", "peak MiB", "GPU MiB"]
    text = f"{title}\n{table([*header, SCORES[options.case]], lines)}"

    peers = [name for name in results if not name.startswith("gpurl")]
    if "gpurl" in results and peers:
        best = max(peers, key=lambda name: speeds[name])
        text += f"\ngpurl / best peer ({best}): {speeds['gpurl'] / speeds[best]:.2f}"
    return text


def rows_of(options: argparse.Namespace, results: dict[str, list[Result]]) -> list[Row]:
    """Medians as rows: speed, memory and score of every contestant."""
    rows = []
    per_iteration = options.num_envs * options.horizon
    steps = options.total_steps
    if options.case != "pendulum":
        steps = options.iterations * per_iteration
    units = {
        "steps_per_second": "env_steps/s",
        "peak_mib": "peak MiB",
        "score": SCORES[options.case],
    }
    units |= {"gpu_mib": "GPU MiB"} if options.device.startswith("cuda") else {}
    for name, runs in results.items():
        for key, unit in units.items():
            row = {
                "case": f"{options.case} {options.activation}",
                "trainer": name.partition(":")[0],
                "version": runs[0]["version"],
                "note": runs[0]["note"],
                "num_envs": str(options.num_envs),
                "horizon": str(options.horizon),
                "steps": str(steps),
                "warm_up": str(options.warm_up),
                "unit": unit,
                **median_columns([result[key] for result in runs], ".4g"),
            }
            if key != "steps_per_second":
                row |= {"lowest": "", "highest": ""}
            rows.append(row | runs[0]["machine"])
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options, with defaults that depend on the case."""
    parser = comparison_parser(__doc__)
    parser.add_argument("--case", choices=list(CONTESTANTS), default="chasing")
    parser.add_argument(
        "--trainers",
        nargs="+",
        metavar="TRAINER[:MODE]",
        help=f"default all of the case and device; modes: {MODES}",
    )
    parser.add_argument(
        "--activation", choices=("tanh", "elu", "relu"), help=f"default {ACTIVATIONS}"
    )
    parser.add_argument("--num-envs", type=int, help=f"default {NUM_ENVS}")
    parser.add_argument(
        "--horizon", type=int, help=f"steps between updates; default {HORIZONS}, fixed for pendulum"
    )
    parser.add_argument("--iterations", type=int, default=12, help="timed iterations; not pendulum")
    parser.add_argument(
        "--warm-up", type=int, help="iterations before the timed ones; default 5, 1 for pendulum"
    )
    parser.add_argument(
        "--total-steps", type=int, default=100_000, help="pendulum: steps of a training"
    )
    options = parser.parse_args(words)
    device = "cuda" if options.device.startswith("cuda") else "cpu"
    options.trainers = options.trainers or list(CONTESTANTS[options.case][device])
    options.num_envs = options.num_envs or NUM_ENVS[options.case]
    options.activation = options.activation or ACTIVATIONS[options.case]
    if options.case == "pendulum" or not options.horizon:
        options.horizon = HORIZONS[options.case]
    if options.warm_up is None:
        options.warm_up = 1 if options.case == "pendulum" else 5
    for name in options.trainers:
        _check(options.case, *name.partition(":")[::2])
    return options


def _check(case: str, trainer: str, mode: str) -> None:
    """UsageError for a trainer without the case, or for an unknown mode of it."""
    known = {name.partition(":")[0] for name in CONTESTANTS[case]["cpu"]}
    if trainer not in known:
        raise UsageError(
            f"{case} is not measured with {trainer}, only with {', '.join(sorted(known))}"
        )
    if mode and mode not in MODES[trainer]:
        raise UsageError(f"{trainer} has no mode {mode}; it has {', '.join(MODES[trainer])}")


def main(words: list[str] | None = None) -> int:
    """Measure, print and save; 1 if a contestant failed."""
    options = parse(words)
    python = options.python or make_environment(ROOT / ".venv-peers")
    turns = Turns("peers", options.out)
    results, failed = measure(options, python, turns)
    print(f"\n{report(options, results)}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    print(f"written to {turns.save(rows_of(options, results))}")
    return 1 if failed else 0
