"""Environment steps a second on Chasing: of the environment alone, with the policy acting and
storing, in full PPO training, and the limit of the hardware.

With --ladder instead: the same training with one more optimisation at a time (ladder.py).
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ladder
from benchmarks.limits import limits
from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.timing import median_seconds
from benchmarks.training import (
    EPOCHS,
    HIDDEN,
    common_settings,
    engine_columns,
    ready_trainer,
    warm_up,
)
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device
from gpurl.run.trainer import Trainer

SIZES = (64, 512, 4096, 16384, 65536)
HORIZON = 32
PLAIN_ENVS = ("cart_pole", "pendulum")  # measured alone, at PLAIN_SIZE
PLAIN_SIZE = 4096


def random_steps(env: VecEnv, horizon: int) -> Callable[[], None]:
    """A function that takes `horizon` steps with one batch of random actions."""
    env.reset(seed=0)
    env.action_space.seed(0)
    action = torch.as_tensor(env.action_space.sample(), device=env.device)

    def steps() -> None:
        for _ in range(horizon):
            env.step(action)

    return steps


def collecting(trainer: Trainer) -> Callable[[], None]:
    """A function that fills the rollout buffer: act, step, store."""

    def collect() -> None:
        trainer.engine.collect()
        trainer.engine.buffer.clear()

    return collect


def cases(trainer: Trainer, env: VecEnv, horizon: int) -> dict[str, Callable[[], object]]:
    """The functions to measure, by case; every call takes num_envs * horizon environment steps, in
    the trainer or in the bare `env`.
    """
    return {
        "chasing env": random_steps(env, horizon),
        "chasing env+policy": collecting(trainer),
        "chasing training": trainer.iterate,
    }


# ---- measuring ----


class Sweep:
    """Measures the cases one after the other and saves their rows."""

    def __init__(self, device: torch.device, budget: float, folder: Path) -> None:
        self.device = device
        self.budget = budget
        self.folder = folder
        self.threads = torch.get_num_threads()
        self.rows: list[Row] = []

    def chasing(self, size: int, horizon: int) -> list[str]:
        """The three cases at one size, as a line of the table."""
        torch.set_num_threads(self.threads)  # the trainer reduces them for small sizes
        settings = make_settings("ppo", "chasing", **common_settings(size, horizon))
        trainer = ready_trainer(settings, self.device)
        warm_up(trainer)
        engine = engine_columns(trainer)
        functions = cases(trainer, make_env("chasing", size, self.device), horizon)
        rates = [
            self._measure(case, size, horizon, engine, each) for case, each in functions.items()
        ]
        return ["chasing", str(size), str(horizon), *rates]

    def alone(self, name: str, horizon: int) -> list[str]:
        """Another environment without a policy, as a line of the table."""
        steps = random_steps(make_env(name, PLAIN_SIZE, self.device), horizon)
        rate = self._measure(f"{name} env", PLAIN_SIZE, horizon, {}, steps)
        return [name, str(PLAIN_SIZE), str(horizon), rate, "", ""]

    def limits(self) -> str:
        """The limits of the device, as a line of text."""
        env = make_env("chasing", 1, self.device)
        obs_size = env.single_observation_space.shape[0]
        action_size = env.single_action_space.shape[0]
        rates = limits(self.device, obs_size, action_size, HIDDEN, EPOCHS, self.budget)
        for name, rate in rates.items():
            kind, precision = name.split()
            self._add_row(f"chasing limit {kind}", "-", "-", {"precision": precision}, rate)
        words = ", ".join(f"{number(rate)} by {name}" for name, rate in rates.items())
        return f"limits of the hardware: {words}"

    def _measure(
        self, case: str, size: int, horizon: int, engine: Row, function: Callable[[], object]
    ) -> str:
        seconds = median_seconds({case: function}, self.device, self.budget)[case]
        if case.endswith("policy"):  # collecting by itself runs without graphs
            engine = engine | {"graph": "off"}
        elif case.endswith("env"):
            engine = {}
        rate = size * horizon / seconds
        self._add_row(case, str(size), str(horizon), engine, rate)
        return number(rate)

    def _add_row(self, case: str, size: str, horizon: str, engine: Row, rate: float) -> None:
        row = {"case": case, "num_envs": size, "horizon": horizon}
        row |= {"precision": "-", "graph": "-", "rollout": "-", "update": "-"} | engine
        row |= {"value": f"{rate:.0f}", "unit": "env_steps/s"} | machine(str(self.device))
        self.rows.append(row)
        save("throughput", self.rows, self.folder)  # kept if a later case is interrupted


def parse(words: list[str] | None, **changes: Any) -> argparse.Namespace:
    """The options. changes: attributes of the parser and defaults that another caller has."""
    options = parser(__doc__, seconds=1.0)
    options.prog = changes.pop("prog", options.prog)
    options.set_defaults(**changes)
    options.add_argument(
        "--num-envs",
        type=int,
        nargs="+",
        default=SIZES,
        help=f"default {' '.join(map(str, SIZES))}",
    )
    options.add_argument(
        "--horizon",
        type=int,
        nargs="+",
        default=[HORIZON],
        help=f"steps between updates; default {HORIZON}",
    )
    options.add_argument(
        "--ladder",
        action="store_true",
        help=f"one more optimisation at a time, at {ladder.NUM_ENVS} environments",
    )
    options.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="ladder: processes for each rung, in alternating order; default 3",
    )
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, print and save."""
    options = parse(words)
    device = choose_device(options.device)
    if options.ladder:
        return ladder.run(device, options.rounds, options.seconds, options.out)
    sweep = Sweep(device, options.seconds, options.out)
    sizes = itertools.product(options.horizon, options.num_envs)
    lines = [sweep.chasing(size, horizon) for horizon, size in sizes]
    lines += [sweep.alone(name, options.horizon[0]) for name in PLAIN_ENVS]
    limit_text = sweep.limits()
    print(
        f"throughput: environment steps a second on {sweep.rows[0]['device']}, at most "
        f"{sweep.threads} CPU threads"
    )
    header = ["task", "environments", "horizon", "environment", "+ policy", "+ training"]
    print(table(header, lines))
    print(f"{limit_text}\nwritten to {save('throughput', sweep.rows, options.out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
