"""The ablation ladder: PPO on Chasing, with one more optimisation switched on at each rung; every
rung runs in fresh processes, in alternating order.

A rung is timed only if its first rollout equals that of the first rung: the random numbers are the
same, so the rewards must be.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import (
    Result,
    cores,
    host_environment,
    print_result,
    run_once,
    take_turns,
)
from benchmarks.results_table import Row, Turns, machine, median_columns, number, table
from benchmarks.timing import median_seconds
from benchmarks.training import common_settings, engine_columns, ready_trainer, warm_up
from gpurl.errors import GpurlError
from gpurl.run.settings import make_settings
from gpurl.run.trainer import Trainer

NUM_ENVS, HORIZON = 4096, 32
COMPARED_ENVS = 64  # environments whose returns in the first rollout are compared
ENGINE = ["precision", "graph", "rollout", "update"]  # columns of `engine_columns`
# of returns, which differ by about 0.1 between environments
TOLERANCES = {"float32": 1e-3, "tf32": 2e-2, "bf16": 2e-2}


@dataclass(frozen=True)
class Rung:
    """Settings of a rung, in addition to those of the rungs before it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # of gpurl.run.settings.TrainConfig
    environment: dict[str, str] = field(
        default_factory=dict
    )  # variables that gpurl reads at import
    only_on: str = ""  # cpu or cuda
    skip_reason: str = ""  # on other devices


def gpu_rung(
    name: str, reason: str, settings: dict[str, Any], environment: dict[str, str] | None = None
) -> Rung:
    """A rung that is skipped on a CPU."""
    return Rung(name, settings, environment or {}, "cuda", reason)


RUNGS = (
    Rung(
        "eager",
        {
            "graph": "off",
            "rollout": "steps",
            "update": "autograd",
            "compile": False,
            "precision": "float32",
        },
        {"GPURL_BACKEND": "torch", "GPURL_CPU_KERNEL": "0"},
    ),
    Rung("+ C kernel", {}, {"GPURL_CPU_KERNEL": "1"}, "cpu", "it computes on the CPU"),
    gpu_rung("+ fused kernels", "Triton compiles for GPUs", {}, {"GPURL_BACKEND": "auto"}),
    gpu_rung("+ graph policy", "CUDA graphs need a GPU", {"graph": "policy"}),
    gpu_rung("+ graph full", "CUDA graphs need a GPU", {"graph": "full"}),
    gpu_rung("+ persistent rollout", "its kernel is in Triton", {"rollout": "persistent"}),
    gpu_rung("+ fused update", "its kernels are in Triton", {"update": "fused"}),
    gpu_rung("+ tf32", "a CPU has no TF32", {"precision": "tf32"}),
    gpu_rung("+ bf16", "slower than float32 on a CPU without matrix units", {"precision": "bf16"}),
)


def rungs_for(device_type: str) -> tuple[dict[str, Rung], dict[str, str]]:
    """(rungs for "cpu" or "cuda", each with the settings of those before it; the reasons why the
    others are skipped).
    """
    rungs, skipped = dict[str, Rung](), dict[str, str]()
    settings, environment = dict[str, Any](), dict[str, str]()
    for rung in RUNGS:
        if rung.only_on not in ("", device_type):
            skipped[rung.name] = rung.skip_reason
            continue
        settings = settings | rung.settings
        environment = environment | rung.environment
        rungs[rung.name] = Rung(rung.name, settings, environment)
    return rungs, skipped


# ---- one rung, in a process of its own ----


def first_rollout(trainer: Trainer) -> list[float]:
    """The returns of COMPARED_ENVS environments in the first rollout. The trainer has made its
    first update afterwards.
    """
    trainer.iterate()
    return trainer.engine.buffer["reward"][:, :COMPARED_ENVS].double().sum(0).tolist()


def check(name: str, got: list[float], expected: list[float], precision: str) -> None:
    """GpurlError unless the returns of a rung equal those of the first rung."""
    difference = max(abs(one - other) for one, other in zip(got, expected, strict=True))
    if not difference <= TOLERANCES[precision]:
        raise GpurlError(
            f"{name}: the returns of the first rollout differ from those of {RUNGS[0].name} by "
            f"{difference:.3g}, so nothing is timed"
        )


def measure_here(job: dict[str, Any]) -> Result:
    """Compare the first rollout with `job["expected"]`, unless that is None, then time training."""
    device = torch.device(job["device"])
    common = common_settings(job["num_envs"], job["horizon"])
    trainer = ready_trainer(make_settings("ppo", "chasing", **common, **job["settings"]), device)
    returns = first_rollout(trainer)
    if job["expected"] is not None:
        check(job["name"], returns, job["expected"], job["settings"]["precision"])
    warm_up(trainer)
    seconds = median_seconds({"": trainer.iterate}, device, job["seconds"])[""]
    rate = job["num_envs"] * job["horizon"] / seconds
    return {
        "returns": returns,
        "rate": rate,
        "engine": engine_columns(trainer),
        "machine": machine(str(device)),
    }


# ---- the ladder ----


def measure(
    rungs: dict[str, Rung], common: dict[str, Any], rounds: int, turns: Turns
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every rung, one for each round; error messages of the rungs that failed). Rows
    are saved after each turn.
    """
    expected: list[float] | None = None

    def run(name: str, round_number: int) -> Result:
        nonlocal expected
        first = next(iter(rungs))
        rung = rungs[name]
        if expected is None and name != first:
            raise GpurlError(f"{first} failed, and there is nothing else to compare with")
        job = common | {"name": name, "settings": rung.settings, "expected": expected}
        environment = host_environment(cores(), "brief") | rung.environment
        result = run_once(
            Path(sys.executable), "benchmarks.ladder", job, environment, f"rung {name}"
        )
        expected = expected or result["returns"]
        print(f"{name}: {number(result['rate'])} env-steps/s", flush=True)
        return result

    def keep(results: dict[str, list[Result]]) -> None:
        turns.save(rows_of(rungs, results, common))

    return take_turns(list(rungs), rounds, run, keep)


def rows_of(
    rungs: dict[str, Rung], results: dict[str, list[Result]], common: dict[str, Any]
) -> list[Row]:
    """One row for each rung."""
    return [
        {
            "case": "chasing training",
            "rung": name,
            "num_envs": str(common["num_envs"]),
            "horizon": str(common["horizon"]),
            **rung_results[0]["engine"],
            "settings": json.dumps(rungs[name].settings | rungs[name].environment),
            **median_columns([result["rate"] for result in rung_results], ".0f"),
            "unit": "env_steps/s",
            **rung_results[0]["machine"],
        }
        for name, rung_results in results.items()
    ]


def run(
    device: torch.device,
    rounds: int,
    seconds: float,
    folder: Path,
    num_envs: int = NUM_ENVS,
    horizon: int = HORIZON,
) -> int:
    """Measure all rungs, print and save; 1 if a rung failed."""
    # measure
    rungs, skipped = rungs_for(device.type)
    common = {"device": str(device), "num_envs": num_envs, "horizon": horizon, "seconds": seconds}
    turns = Turns("ladder", folder)
    results, failed = measure(rungs, common, rounds, turns)
    rows = rows_of(rungs, results, common)

    # print: the gain over the rung before, and over the first one
    lines = []
    rates = [float(row["value"]) for row in rows]
    for row, rate, before in zip(rows, rates, [None, *rates]):
        gain = [f"{rate / before:.2f}", f"{rate / rates[0]:.2f}"] if before else ["", ""]
        spread = f"{number(float(row['lowest']))}-{number(float(row['highest']))}"
        lines.append([row["rung"], number(rate), spread, *gain, *(row[name] for name in ENGINE)])
    title = (
        f"ladder: PPO on chasing, {num_envs} environments, horizon {horizon}, {rows[0]['device']}, "
        f"{rounds} rounds; all rungs play the same first rollout"
    )
    header = ["rung", "env-steps/s", "lowest-highest", "gain", "total", *ENGINE]
    print(f"\n{title}\n{table(header, lines)}")
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    print(f"written to {turns.save(rows)}\n")
    return 1 if failed else 0


if __name__ == "__main__":  # started by `measure`
    print_result(measure_here(json.loads(sys.argv[1])))
