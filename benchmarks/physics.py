"""MuJoCo tasks: environment steps a second of physics alone, of whole environments and of PPO
training, against MuJoCo's C; and their memory.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Result, resident_mib, run_once, run_script
from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.throughput import random_steps
from benchmarks.timing import median_seconds, now
from benchmarks.training import common_settings, engine_columns, ready_trainer, warm_up
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device

TASKS = ("ant", "humanoid", "half_cheetah")
SIZES = (256,)
HORIZON = 8
PHASES = ("mujoco_c", "physics", "env", "training")
MAX_WORLDS_IN_C = 64  # they are stepped one after the other, so more would not change the rate
MAX_DIFFERENCE = 1e-4  # of qpos after one step from the same state, in MuJoCo's C and here
STATE = ("qpos", "qvel", "qacc_warmstart")


@dataclasses.dataclass
class Job:
    """One task at one size, measured in a fresh process so that its memory can be measured."""

    task: str
    num_envs: int
    horizon: int
    device: str
    seconds: float
    threads: int = 1


def compare(task: str, device: torch.device) -> None:
    """GpurlError if a step differs from MuJoCo's. With elliptic cones: the pyramidal cones of
    mujoco-warp have another orientation.
    """
    import mujoco

    env: Any = make_env(task, 4, device, cone="elliptic", simulator="warp")
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


def steps_in_c(env: Any, horizon: int) -> tuple[Callable[[], None], int]:
    """(a function that takes `horizon` steps in MuJoCo's C on one core, from the present states of
    `env`; the number of its worlds).
    """
    import mujoco

    count = min(env.num_envs, MAX_WORLDS_IN_C)
    states = [
        getattr(env.data, name)[:count].double().cpu().numpy().copy() for name in (*STATE, "ctrl")
    ]
    worlds = [mujoco.MjData(env.model) for _ in range(count)]

    def steps() -> None:
        for data, *state in zip(worlds, *states):
            set_state(data, tuple(state))
            for _ in range(horizon):
                mujoco.mj_step(env.model, data, env.frame_skip)
                mujoco.mj_rnePostConstraint(env.model, data)

    return steps, count


class TimedPhysics:
    """A simulation that adds up the seconds of its steps during training: their time depends on the
    states.
    """

    def __init__(self, simulation: Any, device: torch.device) -> None:
        self.simulation = simulation
        self.device = device
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.simulation, name)

    def step(self) -> None:
        """Step and measure; synchronising with a GPU makes training a little slower."""
        began = now(self.device)
        self.simulation.step()
        self.seconds += now(self.device) - began


def measure(job: Job) -> Result:
    """Environment steps a second of each phase, the peak memory in MiB, and the columns of the
    engine and the machine.
    """
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    compare(job.task, device)
    settings = make_settings(
        "ppo",
        job.task,
        env_options={"simulator": "warp"},
        **common_settings(job.num_envs, job.horizon),
    )
    trainer = ready_trainer(settings, device)
    warm_up(trainer)
    env: Any = trainer.env

    # training, and the physics in it
    env._worlds = timed = TimedPhysics(env._worlds, device)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    began = now(device)
    trainer.iterate()  # to warm up
    while not seconds["training"] or now(device) - began < job.seconds:
        timed.seconds = 0.0
        start = now(device)
        trainer.iterate()
        seconds["training"].append(now(device) - start)
        seconds["physics"].append(timed.seconds)
    env._worlds = timed.simulation
    spent = {phase: statistics.median(samples) for phase, samples in seconds.items() if samples}

    # MuJoCo's C from the states at the end of the training, and the environment alone
    in_c, count = steps_in_c(env, job.horizon)
    spent |= median_seconds(
        {"mujoco_c": in_c, "env": random_steps(env, job.horizon)}, device, job.seconds
    )
    worlds = dict.fromkeys(PHASES, job.num_envs) | {"mujoco_c": count}
    rates = {phase: worlds[phase] * job.horizon / spent[phase] for phase in PHASES}

    # memory; Warp allocates some that torch does not count
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mib = (total - free) / 2**20
    else:
        mib = resident_mib()
    captured = "yes" if env._worlds.is_captured else "no"
    return {
        "rates": rates,
        "mib": mib,
        "columns": engine_columns(trainer) | {"physics": captured} | machine(str(device)),
    }


def rows_of(job: Job, result: Result) -> list[Row]:
    """One row for each phase, and one for the memory."""
    values = [(phase, rate, "env_steps/s") for phase, rate in result["rates"].items()]
    values.append(("memory", result["mib"], "MiB"))
    return [
        {
            "case": f"{job.task} {name}",
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
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure each task at each size, print and save."""
    options = parse(words)
    device = str(choose_device(options.device))
    lines, path = [], Path()
    for task, size in itertools.product(options.tasks, options.num_envs):
        job = Job(task, size, options.horizon, device, options.seconds, torch.get_num_threads())
        result = run_once(
            Path(sys.executable),
            "benchmarks.physics",
            dataclasses.asdict(job),
            dict(os.environ),
            f"{task} {size}",
        )
        path = save("physics", rows_of(job, result), options.out)
        rates = result["rates"]
        overhead = 1.0 - rates["training"] / rates["physics"]
        cells = [*(number(rates[phase]) for phase in PHASES), f"{overhead:.0%}"]
        lines.append([task, str(size), *cells, f"{result['mib']:,.0f}"])
    print(
        f"physics: environment steps a second on {result['columns']['device']}, and peak memory of "
        f"the process (GPU: of the device), MiB"
    )
    header = ["task", "environments", "MuJoCo's C", "physics", "environment", "+ training"]
    print(table([*header, "not physics", "memory"], lines))
    print(f"written to {path}\n")
    return 0


if __name__ == "__main__":
    run_script(main, lambda **job: measure(Job(**job)))
