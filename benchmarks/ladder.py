"""The ablation ladder: PPO on Chasing with one thing more switched on at a time, each rung in
processes of its own, in alternating order.

A rung is timed only if its first rollout is that of the first rung: the random numbers are the
same, so the rewards must be.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import Result, cores, host_environment, run_once, take_turns
from benchmarks.results_table import Row, machine, number, save, table
from benchmarks.timing import median_seconds
from benchmarks.training import how_trained, ready_trainer, shape, warm
from gpurl.errors import GpurlError
from gpurl.run.settings import make_settings
from gpurl.run.trainer import Trainer

NUM_ENVS, HORIZON = 4096, 32
SEEN_ENVS = 64  # whose returns in the first rollout are compared
TOLERANCES = {
    "float32": 1e-3,
    "tf32": 2e-2,
    "bf16": 2e-2,
}  # of returns that differ by about 0.1 between environments


@dataclass(frozen=True)
class Rung:
    """What is switched on beside all that the rungs before have."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # of gpurl.run.settings.TrainConfig
    environment: dict[str, str] = field(default_factory=dict)  # variables that are read at import
    only_on: str = ""  # cpu or cuda
    otherwise: str = ""  # why it is left out elsewhere


ON_GPU = {"only_on": "cuda"}
RUNGS = (
    Rung(
        "eager",
        {"graph": "off", "rollout": "steps", "compile": False, "precision": "float32"},
        {"GPURL_BACKEND": "torch", "GPURL_CPU_KERNEL": "0"},
    ),
    Rung("+ C kernel", {}, {"GPURL_CPU_KERNEL": "1"}, "cpu", "it computes on the CPU"),
    Rung(
        "+ fused kernels",
        {},
        {"GPURL_BACKEND": "auto"},
        **ON_GPU,
        otherwise="Triton compiles for GPUs",
    ),
    Rung("+ graph policy", {"graph": "policy"}, **ON_GPU, otherwise="CUDA graphs need a GPU"),
    Rung("+ graph full", {"graph": "full"}, **ON_GPU, otherwise="CUDA graphs need a GPU"),
    Rung(
        "+ persistent rollout",
        {"rollout": "persistent"},
        **ON_GPU,
        otherwise="the kernel that plays a rollout is Triton's",
    ),
    Rung("+ tf32", {"precision": "tf32"}, **ON_GPU, otherwise="a CPU has no TF32"),
    Rung(
        "+ bf16",
        {"precision": "bf16"},
        **ON_GPU,
        otherwise="slower than float32 on a CPU without matrix units",
    ),
)


def climb(kind: str) -> tuple[dict[str, Rung], dict[str, str]]:
    """(rungs for a device of `kind`, each with all that those before it have; the reasons why
    others are left out).
    """
    taken, skipped = dict[str, Rung](), dict[str, str]()
    settings, environment = dict[str, Any](), dict[str, str]()
    for rung in RUNGS:
        if rung.only_on not in ("", kind):
            skipped[rung.name] = rung.otherwise
            continue
        settings, environment = settings | rung.settings, environment | rung.environment
        taken[rung.name] = Rung(rung.name, settings, environment)
    return taken, skipped


# ---- in a process of its own ----


def first_rollout(trainer: Trainer) -> list[float]:
    """Rewards that some environments got in the first rollout, summed; the trainer has updated once
    then.
    """
    trainer.iterate()
    return trainer.engine.buffer["reward"][:, :SEEN_ENVS].double().sum(0).tolist()


def check(name: str, got: list[float], wanted: list[float], precision: str) -> None:
    """GpurlError unless a rung's first rollout is the first rung's."""
    difference = max(abs(one - other) for one, other in zip(got, wanted, strict=True))
    if not difference <= TOLERANCES[precision]:
        raise GpurlError(
            f"{name}: the first rollout's returns are off those of {RUNGS[0].name} by "
            f"{difference:.3g}, so nothing is timed"
        )


def measure_here(job: dict[str, Any]) -> Result:
    """Compare with `job["wanted"]`, where it is known, then time."""
    device = torch.device(job["device"])
    settings = make_settings(
        "ppo", "chasing", **shape(job["num_envs"], job["horizon"]), **job["settings"]
    )
    trainer = ready_trainer(settings, device)
    returns = first_rollout(trainer)
    if job["wanted"] is not None:
        check(job["name"], returns, job["wanted"], job["settings"]["precision"])
    warm(trainer)
    seconds = median_seconds({"": trainer.iterate}, device, job["seconds"])[""]
    rate = job["num_envs"] * job["horizon"] / seconds
    return {
        "returns": returns,
        "rate": rate,
        "how": how_trained(trainer),
        "machine": machine(str(device)),
    }


# ---- the ladder ----


def measure(
    rungs: dict[str, Rung], common: dict[str, Any], rounds: int
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(results of every rung, one a round; what is wrong with those that failed, of which nothing
    is kept).
    """
    wanted: list[float] | None = None

    def run(name: str, round_number: int) -> Result:
        nonlocal wanted
        first, rung = next(iter(rungs)), rungs[name]
        if wanted is None and name != first:
            raise GpurlError(f"{first} failed, and there is nothing else to compare with")
        job = common | {"name": name, "settings": rung.settings, "wanted": wanted}
        environment = host_environment(cores(), "brief") | rung.environment
        found = run_once(
            Path(sys.executable), "benchmarks.ladder", job, environment, f"rung {name}"
        )
        wanted = wanted or found["returns"]
        print(f"{name}: {number(found['rate'])} env-steps/s", flush=True)
        return found

    return take_turns(list(rungs), rounds, run)


def rows_of(
    rungs: dict[str, Rung], results: dict[str, list[Result]], common: dict[str, Any]
) -> list[Row]:
    """A row a rung."""
    rows = []
    for name, found in results.items():
        rates = [result["rate"] for result in found]
        row = {
            "case": "chasing training",
            "rung": name,
            "num_envs": str(common["num_envs"]),
            "horizon": str(common["horizon"]),
        }
        row |= found[0]["how"] | {
            "settings": json.dumps(rungs[name].settings | rungs[name].environment),
            "rounds": str(len(rates)),
        }
        spread = {"lowest": f"{min(rates):.0f}", "highest": f"{max(rates):.0f}"}
        rows.append(
            row
            | {"value": f"{statistics.median(rates):.0f}", **spread, "unit": "env_steps/s"}
            | found[0]["machine"]
        )
    return rows


def run(
    device: torch.device,
    rounds: int,
    seconds: float,
    folder: Path,
    num_envs: int = NUM_ENVS,
    horizon: int = HORIZON,
) -> int:
    """Measure all rungs, print and save; 1 when a rung failed."""
    rungs, skipped = climb(device.type)
    common = {"device": str(device), "num_envs": num_envs, "horizon": horizon, "seconds": seconds}
    results, failed = measure(rungs, common, rounds)
    lines, before = [], float("nan")
    for row in rows_of(rungs, results, common):
        rate = float(row["value"])
        gain = (
            [f"{rate / before:.2f}", f"{rate / float(lines[0][1].replace(',', '')):.2f}"]
            if lines
            else ["", ""]
        )
        spread = f"{number(float(row['lowest']))}-{number(float(row['highest']))}"
        lines.append(
            [
                row["rung"],
                number(rate),
                spread,
                *gain,
                row["precision"],
                row["graph"],
                row["rollout"],
            ]
        )
        before = rate
    title = (
        f"ladder: PPO on chasing, {num_envs} environments, horizon {horizon}, "
        f"{next(iter(results.values()))[0]['machine']['device']}"
    )
    print(f"\n{title}, {rounds} rounds; all rungs play the same first rollout")
    header = [
        "rung",
        "env-steps/s",
        "lowest-highest",
        "gain",
        "in all",
        "precision",
        "graph",
        "rollout",
    ]
    print(table(header, lines))
    for name, reason in skipped.items():
        print(f"left out: {name}: {reason}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    print(f"written to {save('ladder', rows_of(rungs, results, common), folder)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    words = argparse.ArgumentParser(
        description="One rung, for `python -m benchmarks.throughput --ladder`."
    )
    words.add_argument("job", type=json.loads)
    print("RESULT " + json.dumps(measure_here(words.parse_args().job)))
