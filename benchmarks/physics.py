"""MuJoCo tasks: environment steps a second of physics alone, of whole environments and of PPO
training, by each way to step them; and their memory.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Result, orders, resident_mib, run_once, run_script
from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.throughput import random_steps
from benchmarks.timing import median_seconds, now
from benchmarks.training import common_settings, engine_columns, ready_trainer, warm_up
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import choose_device

TASKS = ("ant", "humanoid", "half_cheetah")
SIZES = (256,)
HORIZON = 8
PHASES = ("physics", "env", "training")
# simulators of our tasks, and vectorizations of Gymnasium's
SIMULATORS = ("mujoco", "warp")
VECTORIZATIONS = {"sync": "sync", "workers": "async", "envpool": "envpool"}
WAYS = (*SIMULATORS, *VECTORIZATIONS)
MAX_DIFFERENCE = 1e-4  # of qpos after one step from the same state, in MuJoCo's C and here
STATE = ("qpos", "qvel", "qacc_warmstart")


@dataclasses.dataclass
class Job:
    """One task at one size in one way, measured in a fresh process so that its memory can be
    measured.
    """

    task: str
    way: str
    num_envs: int
    horizon: int
    device: str
    seconds: float
    threads: int = 1


def settings_of(job: Job) -> Settings:
    """Those of the training; the environment is ours, or Gymnasium's with its name there."""
    common = common_settings(job.num_envs, job.horizon)
    if job.way in SIMULATORS:
        return make_settings("ppo", job.task, env_options={"simulator": job.way}, **common)
    gymnasiums = "".join(word.title() for word in job.task.split("_"))
    options = {"vectorization": VECTORIZATIONS[job.way]}
    return make_settings("ppo", f"gymnasium_cpu:{gymnasiums}-v5", env_options=options, **common)


def compare(task: str, simulator: str, device: torch.device) -> None:
    """GpurlError if a step differs from MuJoCo's. With elliptic cones: the pyramidal cones of
    mujoco-warp have another orientation.
    """
    import mujoco

    env: Any = make_env(task, 4, device, cone="elliptic", simulator=simulator)
    env.reset(seed=0)
    env.action_space.seed(0)
    for step in range(5):
        before = [getattr(env.data, name).double().cpu().numpy() for name in STATE]
        action = torch.as_tensor(env.action_space.sample(), device=device)
        timestep = env.step(action)
        for row, state in enumerate(zip(*before)):
            if timestep.terminated[row] or timestep.truncated[row]:
                continue
            data = mujoco.MjData(env.model)
            set_state(data, (*state, action[row].cpu().numpy()))
            mujoco.mj_step(env.model, data, env.frame_skip)
            difference = abs(env.data.qpos[row].double().cpu().numpy() - data.qpos).max()
            if not difference <= MAX_DIFFERENCE:
                raise GpurlError(
                    f"{task}: step {step} of world {row} is not MuJoCo's: qpos differs by "
                    f"{difference:.3g}; nothing is timed"
                )
    env.close()


def set_state(data: Any, state: tuple[np.ndarray, ...]) -> None:
    """Write the arrays of STATE and ctrl into MuJoCo's `data`."""
    for name, values in zip((*STATE, "ctrl"), state, strict=True):
        getattr(data, name)[:] = values


class TimedPhysics:
    """Worlds that add up the seconds of their steps during training: their time depends on the
    states.
    """

    def __init__(self, worlds: Any, device: torch.device) -> None:
        self.worlds = worlds
        self.device = device
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worlds, name)

    def step(self) -> None:
        """Step and measure; synchronising with a GPU makes training a little slower."""
        began = now(self.device)
        self.worlds.step()
        self.seconds += now(self.device) - began


def measure(job: Job) -> Result:
    """Environment steps a second of each phase, the peak memory in MiB, and the columns of the
    engine and the machine.
    """
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    is_ours = job.way in SIMULATORS
    if is_ours:
        compare(job.task, job.way, device)
    trainer = ready_trainer(settings_of(job), device)
    warm_up(trainer)
    env: Any = trainer.env

    # training, and the physics in it
    timed = TimedPhysics(env._worlds, device) if is_ours else None
    if timed:
        env._worlds = timed
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    began = now(device)
    trainer.iterate()  # to warm up
    while not seconds["training"] or now(device) - began < job.seconds:
        start = now(device)
        if timed:
            timed.seconds = 0.0
        trainer.iterate()
        seconds["training"].append(now(device) - start)
        if timed:
            seconds["physics"].append(timed.seconds)
    if timed:
        env._worlds = timed.worlds
    spent = {phase: statistics.median(samples) for phase, samples in seconds.items() if samples}

    # the environment alone
    spent |= median_seconds({"env": random_steps(env, job.horizon)}, device, job.seconds)
    steps = job.num_envs * job.horizon
    rates = {phase: steps / spent[phase] for phase in PHASES if phase in spent}

    # memory; Warp allocates some that torch does not count, and workers are other processes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mib = (total - free) / 2**20
    else:
        mib = resident_mib()
    # those of the physics; the networks have the number that is fastest for them
    columns = engine_columns(trainer) | machine(str(device)) | {"threads": str(job.threads)}
    env.close()
    return {"rates": rates, "mib": mib, "columns": columns}


def rows_of(job: Job, result: Result) -> list[Row]:
    """One row for each phase, and one for the memory."""
    values = [(phase, rate, "env_steps/s") for phase, rate in result["rates"].items()]
    values.append(("memory", result["mib"], "MiB"))
    return [
        {
            "case": f"{job.task} {name}",
            "way": job.way,
            "num_envs": str(job.num_envs),
            "horizon": str(job.horizon),
            "value": f"{value:.0f}",
            "unit": unit,
            **result["columns"],
        }
        for name, value, unit in values
    ]


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    options = parser(__doc__, seconds=5.0)
    options.add_argument("--tasks", nargs="+", default=TASKS, help=f"default {' '.join(TASKS)}")
    options.add_argument(
        "--num-envs",
        type=int,
        nargs="+",
        default=SIZES,
        help=f"default {' '.join(map(str, SIZES))}",
    )
    options.add_argument(
        "--horizon", type=int, default=HORIZON, help=f"steps between updates; default {HORIZON}"
    )
    options.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        help="our tasks in MuJoCo's C or in mujoco-warp; Gymnasium's in one process, in a process "
        "each, or in EnvPool. Default mujoco and warp on a CPU, warp on a GPU",
    )
    options.add_argument("--rounds", type=int, default=1, help="runs of each way, in turns")
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure each task at each size in each way, print and save the medians."""
    options = parse(words)
    device = str(choose_device(options.device))
    ways = options.ways or (SIMULATORS if device == "cpu" else ("warp",))
    lines, path = [], Path()
    for task, size in itertools.product(options.tasks, options.num_envs):
        results: dict[str, list[Result]] = {way: [] for way in ways}
        jobs = {
            way: Job(
                task, way, size, options.horizon, device, options.seconds, torch.get_num_threads()
            )
            for way in ways
        }
        for way in itertools.chain(*orders(list(ways), options.rounds)):
            results[way].append(
                run_once(
                    Path(sys.executable),
                    "benchmarks.physics",
                    dataclasses.asdict(jobs[way]),
                    dict(os.environ),
                    f"{task} {size} {way}",
                )
            )
        for way, all_rounds in results.items():
            result = median_of(all_rounds)
            path = save("physics", rows_of(jobs[way], result), options.out)
            rates = result["rates"]
            cells = [number(rates[phase]) if phase in rates else "-" for phase in PHASES]
            lines.append([task, str(size), way, *cells, f"{result['mib']:,.0f}"])
    print(f"physics: environment steps a second on {device}, and peak memory of the process, MiB")
    header = ["task", "environments", "way", "physics", "environment", "+ training", "memory"]
    print(table(header, lines))
    print(f"written to {path}\n")
    return 0


def median_of(results: list[Result]) -> Result:
    """The medians of rates and memory."""
    rates = {
        phase: statistics.median(result["rates"][phase] for result in results)
        for phase in results[0]["rates"]
    }
    mib = statistics.median(result["mib"] for result in results)
    return {"rates": rates, "mib": mib, "columns": results[0]["columns"]}


if __name__ == "__main__":
    run_script(main, lambda **job: measure(Job(**job)))
