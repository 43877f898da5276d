"""Trainers in turn: the same environments and hyper-parameters, a fresh process a run, alternating
order, medians as rows.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.peers.installation import make_environment
from benchmarks.processes import Result, comparison_parser, host_environment, run_once, take_turns
from benchmarks.results_table import ROOT, Row, number, save, table
from gpurl.errors import UsageError

ON_CPU = ("gpurl", "rsl_rl", "skrl", "sb3", "rl_games", "rl_games:eager", "leanrl_style")
ON_GPU = (
    *("gpurl", "gpurl:tf32", "gpurl:bf16", "rsl_rl", "rsl_rl:compile", "skrl", "sb3"),
    *("rl_games", "rl_games:max-autotune", "leanrl_style", "leanrl_style:compile+graphs"),
)
CONTESTANTS = {
    "chasing": {"cpu": ON_CPU, "cuda": ON_GPU},
    "pendulum": {"cpu": ("gpurl", "sb3"), "cuda": ("gpurl", "sb3")},
}
# of each trainer, as its file has them; here too, so that a wrong name is told before anything runs
MODES = {
    "gpurl": ("default", "tf32", "bf16"),
    "rsl_rl": ("default", "compile", "max-autotune"),
    "skrl": ("default",),
    "sb3": ("default",),
    "rl_games": ("default", "eager", "max-autotune", "bf16"),
    "leanrl_style": ("default", "compile", "graphs", "compile+graphs"),
}
NUM_ENVS = {"chasing": 4096, "pendulum": 8}
SCORES = {"chasing": "reward/step", "pendulum": "return"}


def measure(
    options: argparse.Namespace, python: Path
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every contestant, one a round; the last words of those that failed)."""
    common: dict[str, Any] = {
        "case": options.case,
        "num_envs": options.num_envs,
        "activation": options.activation,
        "device": options.device,
    }
    common |= {
        "horizon": options.horizon,
        "iterations": options.iterations,
        "warm_up": options.warm_up,
        "total_steps": options.total_steps,
    }
    environment = host_environment(options.threads, options.waits)

    def run(name: str, round_number: int) -> Result:
        trainer, _, mode = name.partition(":")
        job = common | {"trainer": trainer, "mode": mode or "default", "seed": round_number}
        found = run_once(
            python, "benchmarks.peers.one_run", job, environment, f"{name} on {options.case}"
        )
        said = (
            f"{number(found['steps_per_second'])} env-steps/s, {SCORES[options.case]} "
            f"{found['score']:.3f}, {found['note']}"
        )
        print(f"round {round_number + 1}: {name} {said}", flush=True)
        return found

    return take_turns(options.trainers, options.rounds, run)


def medians(results: list[Result], key: str) -> float:
    """Median over the rounds."""
    return statistics.median(result[key] for result in results)


def report(options: argparse.Namespace, results: dict[str, list[Result]]) -> str:
    """What is printed: medians, spread, and the ratio to the best peer."""
    any_result = next(iter(results.values()))[0]
    length = (
        f"horizon {options.horizon}"
        if options.case == "chasing"
        else f"{options.total_steps} steps"
    )
    title = (
        f"PPO on {options.case}, {options.num_envs} environments, {length}, 64x64 "
        f"{options.activation}, "
    )
    title += (
        f"{any_result['machine']['device']}, {options.threads} threads, OpenMP waits "
        f"{options.waits}, {options.rounds} rounds"
    )
    lines = []
    for name, found in results.items():
        speeds = [result["steps_per_second"] for result in found]
        spread = f"{number(min(speeds))}-{number(max(speeds))}"
        others = [number(medians(found, key)) for key in ("peak_mib", "gpu_mib")]
        speed, score = number(medians(found, "steps_per_second")), f"{medians(found, 'score'):.3f}"
        lines.append([f"{name} {found[0]['version']}", speed, spread, *others, score])
    header = [
        "trainer",
        "env-steps/s",
        "lowest-highest",
        "peak MiB",
        "GPU MiB",
        SCORES[options.case],
    ]
    text = f"{title}\n{table(header, lines)}"
    peers = {
        name: medians(found, "steps_per_second")
        for name, found in results.items()
        if not name.startswith("gpurl")
    }
    if "gpurl" in results and peers:
        best = max(peers, key=lambda name: peers[name])
        text += (
            f"\ngpurl / best peer ({best}): "
            f"{medians(results['gpurl'], 'steps_per_second') / peers[best]:.2f}"
        )
    return text


def rows_of(options: argparse.Namespace, results: dict[str, list[Result]]) -> list[Row]:
    """Medians as rows: speed, memory and score of every contestant."""
    from benchmarks.peers.job import PENDULUM_HORIZON  # brings torch

    rows, horizon = [], PENDULUM_HORIZON if options.case == "pendulum" else options.horizon
    units = {
        "steps_per_second": "env_steps/s",
        "peak_mib": "peak MiB",
        "score": SCORES[options.case],
    }
    units |= {"gpu_mib": "GPU MiB"} if options.device.startswith("cuda") else {}
    for name, found in results.items():
        speeds = [result["steps_per_second"] for result in found]
        for key, unit in units.items():
            label = {
                "case": f"{options.case} {options.activation}",
                "trainer": name.partition(":")[0],
                "version": found[0]["version"],
            }
            label |= {
                "note": found[0]["note"],
                "num_envs": str(options.num_envs),
                "horizon": str(horizon),
            }
            value = {"value": f"{medians(found, key):.4g}", "unit": unit, "rounds": str(len(found))}
            spread = (
                {"lowest": f"{min(speeds):.4g}", "highest": f"{max(speeds):.4g}"}
                if key == "steps_per_second"
                else {}
            )
            rows.append(label | value | spread | found[0]["machine"])
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options, with what depends on the case filled in."""
    parser = comparison_parser(__doc__)
    parser.add_argument("--case", choices=list(CONTESTANTS), default="chasing")
    parser.add_argument(
        "--trainers",
        nargs="+",
        metavar="TRAINER[:MODE]",
        help=f"default those of the case and device; modes: {MODES}",
    )
    parser.add_argument("--activation", choices=("tanh", "elu", "relu"), default="tanh")
    parser.add_argument("--num-envs", type=int, help=f"default {NUM_ENVS}")
    parser.add_argument("--horizon", type=int, default=32, help="chasing: steps between updates")
    parser.add_argument("--iterations", type=int, default=12, help="chasing: timed iterations")
    parser.add_argument(
        "--warm-up", type=int, help="iterations before the timed ones; default 5, 1 for pendulum"
    )
    parser.add_argument(
        "--total-steps", type=int, default=100_000, help="pendulum: steps of a training"
    )
    options = parser.parse_args(words)
    usual = CONTESTANTS[options.case]["cuda" if options.device.startswith("cuda") else "cpu"]
    options.trainers = options.trainers or list(usual)
    options.num_envs = options.num_envs or NUM_ENVS[options.case]
    options.warm_up = (
        (5 if options.case == "chasing" else 1) if options.warm_up is None else options.warm_up
    )
    for name in options.trainers:
        _check(options.case, *name.partition(":")[::2])
    return options


def _check(case: str, trainer: str, mode: str) -> None:
    """UsageError for a trainer that does not have the case, or a mode that it does not have."""
    known = {name.partition(":")[0] for name in CONTESTANTS[case]["cpu"]}
    if trainer not in known:
        raise UsageError(
            f"{case} is not measured with {trainer}, only with {', '.join(sorted(known))}"
        )
    if mode and mode not in MODES[trainer]:
        raise UsageError(f"{trainer} has no mode {mode}; it has {', '.join(MODES[trainer])}")


def main(words: list[str] | None = None) -> int:
    """Measure, print and save; 1 when a contestant failed."""
    options = parse(words)
    python = options.python or make_environment(ROOT / ".venv-peers")
    results, failed = measure(options, python)
    print(f"\n{report(options, results)}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    print(f"written to {save('peers', rows_of(options, results), options.out)}")
    return 1 if failed else 0
