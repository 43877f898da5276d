"""Environment steps a second: the environment alone, with the policy acting and storing, in full
PPO training, and what is possible.

With --ladder instead: the same training with one thing more switched on at a time (ladder.py).
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import torch

from benchmarks import ladder
from benchmarks.limits import limits
from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.timing import median_seconds
from benchmarks.training import EPOCHS, HIDDEN, how_trained, ready_trainer, shape, warm
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
    """What is measured; every call is num_envs * horizon environment steps, of the trainer or of
    the bare `env`.
    """
    return {
        "chasing env": random_steps(env, horizon),
        "chasing env+policy": collecting(trainer),
        "chasing training": trainer.iterate,
    }


# ---- measuring ----


class Sweep:
    """Measures one case after the other and keeps the rows."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget, self.threads = device, budget, torch.get_num_threads()
        self.rows: list[Row] = []

    def chasing(self, size: int, horizon: int) -> list[str]:
        """The three cases at one size, as a line of the table."""
        torch.set_num_threads(
            self.threads
        )  # of which the trainer takes as many as are quickest at its size
        trainer = ready_trainer(
            make_settings("ppo", "chasing", **shape(size, horizon)), self.device
        )
        warm(trainer)
        functions, how = (
            cases(trainer, make_env("chasing", size, self.device), horizon),
            how_trained(trainer),
        )
        return [
            "chasing",
            str(size),
            str(horizon),
            *(self._measure(case, size, horizon, how, each) for case, each in functions.items()),
        ]

    def alone(self, name: str, horizon: int) -> list[str]:
        """Another environment without a policy, as a line of the table."""
        steps = random_steps(make_env(name, PLAIN_SIZE, self.device), horizon)
        return [
            name,
            str(PLAIN_SIZE),
            str(horizon),
            self._measure(f"{name} env", PLAIN_SIZE, horizon, {}, steps),
            "",
            "",
        ]

    def limits(self) -> str:
        """What the device allows, as a line of text."""
        env = make_env("chasing", 1, self.device)
        obs_size, action_size = (
            env.single_observation_space.shape[0],
            env.single_action_space.shape[0],
        )
        found = limits(self.device, obs_size, action_size, HIDDEN, EPOCHS, self.budget)
        for name, rate in found.items():
            kind, precision = name.split()
            self._keep(f"chasing limit {kind}", "-", "-", {"precision": precision}, rate)
        return "possible at most: " + ", ".join(
            f"{number(rate)} by {name}" for name, rate in found.items()
        )

    def _measure(
        self, case: str, size: int, horizon: int, how: Row, function: Callable[[], object]
    ) -> str:
        seconds = median_seconds({case: function}, self.device, self.budget)[case]
        if not case.endswith("training"):  # collecting by itself runs without graphs
            how = how | {"graph": "off"} if case.endswith("policy") else {}
        self._keep(case, str(size), str(horizon), how, size * horizon / seconds)
        return number(size * horizon / seconds)

    def _keep(self, case: str, size: str, horizon: str, how: Row, rate: float) -> None:
        row = {
            "case": case,
            "num_envs": size,
            "horizon": horizon,
            "precision": "-",
            "graph": "-",
            "rollout": "-",
        } | how
        self.rows.append(
            row | {"value": f"{rate:.0f}", "unit": "env_steps/s"} | machine(str(self.device))
        )


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    options = parser(__doc__, budget=1.0)
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
        help=f"one thing more at a time, at {ladder.NUM_ENVS} environments",
    )
    options.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="ladder: processes a rung, in alternating order; default 3",
    )
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, print and save."""
    options = parse(words)
    device = choose_device(options.device)
    if options.ladder:
        return ladder.run(device, options.rounds, options.seconds, options.out)
    sweep, lines = Sweep(device, options.seconds), []
    for horizon, size in itertools.product(options.horizon, options.num_envs):
        lines.append(sweep.chasing(size, horizon))
        save(
            "throughput", sweep.rows, options.out
        )  # what was measured stays, however long the next size takes
    lines += [sweep.alone(name, options.horizon[0]) for name in PLAIN_ENVS]
    possible = sweep.limits()
    print(
        f"throughput: environment steps a second on {sweep.rows[0]['device']}, {sweep.threads} CPU "
        f"threads at most"
    )
    print(
        table(["task", "environments", "horizon", "environment", "+ policy", "+ training"], lines)
    )
    print(f"{possible}\nwritten to {save('throughput', sweep.rows, options.out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
