"""Learning beside collecting: iterations of PPO on a CPU with and without it, in turn.

    python -m benchmarks.asynchronous

One thread learns, the environments are processes (`workers`) or in this process. `balanced` has as
many epochs as make learning take as long as collecting; `5 epochs` is what most robot tasks have.
The waiting simulator sleeps 2 ms a step, as one on another device would let this one idle.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box

from benchmarks.results_table import Row, machine, median_columns, out_parser, save, table
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer

NETWORK = {"hidden": [256, 128, 64], "activation": "elu"}
# case -> (environment, number of environments, vectorization)
CASES = {
    "waiting simulator, 8 workers": ("gymnasium_cpu:Waiting-v0", 8, "async"),
    "HalfCheetah-v5, 4 workers": ("gymnasium_cpu:HalfCheetah-v5", 4, "async"),
    "Pendulum-v1, 4 workers": ("gymnasium_cpu:Pendulum-v1", 4, "async"),
    "Pendulum-v1, in this process": ("gymnasium_cpu:Pendulum-v1", 4, "sync"),
}
WARM_UP = 2  # iterations


class Waiting(gymnasium.Env):
    """Waits and computes nothing."""

    observation_space = Box(-1.0, 1.0, (17,), np.float32)
    action_space = Box(-1.0, 1.0, (6,), np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(17, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(0.002)
        return np.zeros(17, np.float32), 0.0, False, False, {}


def make(case: str, epochs: int, asynchronous: bool) -> Trainer:
    """A trainer after its first iterations."""
    env, num_envs, vectorization = CASES[case]
    settings = make_settings(
        "ppo",
        env,
        num_envs=num_envs,
        env_options={"vectorization": vectorization},
        horizon=128,
        epochs=epochs,
        minibatches=4,
        network=NETWORK,
        eval_episodes=0,
        device="cpu",
        threads=1,
        asynchronous=asynchronous,
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    for _ in range(WARM_UP):
        trainer.iterate()
    trainer.engine.stopwatch.read()
    return trainer


def phases(case: str, epochs: int) -> tuple[float, float]:
    """Seconds of (collecting, learning) in an iteration, one after the other."""
    trainer = make(case, epochs, asynchronous=False)
    samples = []
    for _ in range(5):
        trainer.iterate()
        samples.append(trainer.engine.stopwatch.read())
    trainer.env.close()
    collect, update = (
        statistics.median(sample[x] for sample in samples) for x in ("collect", "update")
    )
    return collect, update


def ratios(case: str, epochs: int, rounds: int) -> list[float]:
    """How many times as fast each pair of iterations was, one with and one without."""
    trainers = [make(case, epochs, asynchronous) for asynchronous in (False, True)]
    results = []
    for number in range(rounds):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            trainers[which].iterate()
            seconds[which] = time.perf_counter() - began
        results.append(seconds[0] / seconds[1])
    for trainer in trainers:
        trainer.env.close()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases and print them."""
    parser = out_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of iterations; default 40")
    parser.add_argument("--only", choices=CASES, help="one case")
    options = parser.parse_args(arguments)
    gymnasium.register("Waiting-v0", Waiting, max_episode_steps=200)
    torch.set_num_threads(1)
    rows, lines = list[Row](), []
    for case in [options.only] if options.only else CASES:
        collect, update = phases(case, epochs=5)
        for load, epochs in (("balanced", round(5 * collect / update)), ("5 epochs", 5)):
            columns = median_columns(ratios(case, max(epochs, 1), options.rounds), ".2f")
            names = {"case": case, "load": load, "epochs": str(epochs), "unit": "times as fast"}
            rows.append(machine("cpu") | names | columns)
            lines.append([case, load, str(epochs), columns["value"]])
            print(table(["case", "load", "epochs", "times as fast"], lines[-1:]), flush=True)
    print(table(["case", "load", "epochs", "times as fast"], lines))
    print(save("asynchronous", rows, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
