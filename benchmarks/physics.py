"""MuJoCo tasks: environment steps a second of physics alone, beside MuJoCo's C, of whole steps, and
in PPO training, and the memory.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import resident_mib, run_once
from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.throughput import random_steps
from benchmarks.timing import median_seconds, now
from benchmarks.training import how_trained, ready_trainer, shape, warm
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device

TASKS, SIZES, HORIZON = ("ant", "humanoid", "half_cheetah"), (256,), 8
PHASES = ("mujoco_c", "physics", "env", "training")
# worlds at most that MuJoCo's C steps, one after the other: how many there are changes nothing
IN_C = 64
LARGEST_DIFFERENCE = 1e-4  # of qpos after one step from the same state, in MuJoCo's C and here


@dataclasses.dataclass
class Job:
    """One task at one size, measured in a process of its own, so that the memory is its own too."""

    task: str
    num_envs: int
    horizon: int
    device: str
    seconds: float
    threads: int = 1


def compare(task: str, device: torch.device) -> None:
    """GpurlError where a step is not MuJoCo's own. With elliptic cones: the pyramidal ones of
    mujoco-warp stand in another direction.
    """
    import mujoco

    env: Any = make_env(task, 4, device, cone="elliptic")
    env.reset(seed=0)
    env.action_space.seed(0)
    for step in range(5):
        before = [
            getattr(env.data, name).double().cpu().numpy()
            for name in ("qpos", "qvel", "qacc_warmstart")
        ]
        action = torch.as_tensor(env.action_space.sample(), device=device)
        timestep = env.step(action)
        for row, (qpos, qvel, warmstart) in enumerate(zip(*before)):
            if timestep.terminated[row] or timestep.truncated[row]:
                continue
            data = mujoco.MjData(env.model)
            data.qpos[:], data.qvel[:], data.qacc_warmstart[:], data.ctrl[:] = (
                qpos,
                qvel,
                warmstart,
                action[row].cpu().numpy(),
            )
            mujoco.mj_step(env.model, data, env.frame_skip)
            difference = abs(env.data.qpos[row].double().cpu().numpy() - data.qpos).max()
            if not difference <= LARGEST_DIFFERENCE:
                raise GpurlError(
                    f"{task}: step {step} of world {row} is not MuJoCo's: qpos differs by "
                    f"{difference:.3g}; nothing is timed"
                )
    env.close()


def steps_in_c(env: Any, horizon: int) -> tuple[Callable[[], None], int]:
    """(a function that takes `horizon` steps in MuJoCo's C, on one core, from the states that `env`
    is in, of how many worlds).
    """
    import mujoco

    count = min(env.num_envs, IN_C)
    states = [
        getattr(env.data, name)[:count].double().cpu().numpy().copy()
        for name in ("qpos", "qvel", "qacc_warmstart", "ctrl")
    ]
    worlds = [mujoco.MjData(env.model) for _ in range(count)]

    def steps() -> None:
        for data, qpos, qvel, warmstart, ctrl in zip(worlds, *states):
            data.qpos[:], data.qvel[:], data.qacc_warmstart[:], data.ctrl[:] = (
                qpos,
                qvel,
                warmstart,
                ctrl,
            )
            for _ in range(horizon):
                mujoco.mj_step(env.model, data, env.frame_skip)
                mujoco.mj_rnePostConstraint(env.model, data)

    return steps, count


class TimedPhysics:
    """A simulation that adds up the seconds of its steps, in the states that a training comes to:
    how long one takes depends on them.
    """

    def __init__(self, simulation: Any, device: torch.device) -> None:
        self.simulation, self.device, self.seconds = simulation, device, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.simulation, name)

    def step(self) -> None:
        """A GPU is waited for before and after, which costs its training a little."""
        began = now(self.device)
        self.simulation.step()
        self.seconds += now(self.device) - began


def measure(job: Job) -> dict[str, Any]:
    """Environment steps a second of each phase, the peak memory in MiB, and how the training was
    run.
    """
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    compare(job.task, device)
    trainer = ready_trainer(
        make_settings("ppo", job.task, **shape(job.num_envs, job.horizon)), device
    )
    warm(trainer)
    env: Any = trainer.env

    env._simulation = timed = TimedPhysics(env._simulation, device)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    began = now(device)
    trainer.iterate()  # to warm up
    while not seconds["training"] or now(device) - began < job.seconds:
        timed.seconds, start = 0.0, now(device)
        trainer.iterate()
        seconds["training"].append(now(device) - start)
        seconds["physics"].append(timed.seconds)
    env._simulation = timed.simulation
    spent = {phase: statistics.median(samples) for phase, samples in seconds.items() if samples}
    in_c, count = steps_in_c(env, job.horizon)  # in the states that the training came to
    spent |= median_seconds(
        {"mujoco_c": in_c, "env": random_steps(env, job.horizon)}, device, job.seconds
    )
    worlds = dict.fromkeys(PHASES, job.num_envs) | {"mujoco_c": count}
    rates = {phase: worlds[phase] * job.horizon / spent[phase] for phase in PHASES}
    if device.type == "cuda":  # Warp has memory of its own, which torch does not count
        free, total = torch.cuda.mem_get_info(device)
        mib = (total - free) / 2**20
    else:
        mib = resident_mib()
    captured = "yes" if env._simulation.is_captured else "no"
    return {
        "rates": rates,
        "mib": mib,
        "how": how_trained(trainer) | {"physics": captured} | machine(str(device)),
    }


def rows_of(job: Job, result: dict[str, Any]) -> list[Row]:
    """A row a phase, and the memory."""
    case = {"num_envs": str(job.num_envs), "horizon": str(job.horizon)}
    rows = [
        {
            "case": f"{job.task} {phase}",
            **case,
            "value": f"{rate:.0f}",
            "unit": "env_steps/s",
            **result["how"],
        }
        for phase, rate in result["rates"].items()
    ]
    return [
        *rows,
        {
            "case": f"{job.task} memory",
            **case,
            "value": f"{result['mib']:.0f}",
            "unit": "MiB",
            **result["how"],
        },
    ]


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    options = parser(__doc__, budget=5.0)
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
    chosen = parse(words)
    device = str(choose_device(chosen.device))
    lines, path = [], Path()
    for task in chosen.tasks:
        for size in chosen.num_envs:
            job = Job(task, size, chosen.horizon, device, chosen.seconds, torch.get_num_threads())
            result = run_once(
                Path(sys.executable),
                "benchmarks.physics",
                dataclasses.asdict(job),
                dict(os.environ),
                f"{task} {size}",
            )
            path = save("physics", rows_of(job, result), chosen.out)
            rates = result["rates"]
            overhead = 1.0 - rates["training"] / rates["physics"]
            lines.append(
                [
                    task,
                    str(size),
                    *(number(rates[phase]) for phase in PHASES),
                    f"{overhead:.0%}",
                    f"{result['mib']:,.0f}",
                ]
            )
    print(
        f"physics: environment steps a second on {result['how']['device']}, and peak memory of the "
        f"process (GPU: of the device), MiB"
    )
    print(
        table(
            [
                "task",
                "environments",
                "MuJoCo's C",
                "physics",
                "environment",
                "+ training",
                "not physics",
                "memory",
            ],
            lines,
        )
    )
    print(f"written to {path}\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        print("RESULT " + json.dumps(measure(Job(**json.loads(sys.argv[1])))))
    else:
        sys.exit(main())
