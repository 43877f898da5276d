"""What a memory costs: the update of PPO with each of them beside that without one, in turn.

    python -m benchmarks.memories

`MLP` is an update without memory by the same autograd, `MLP in C` that of the engine which policies
without memory have on a CPU. Seconds are those of the processor, in one process with one thread.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.results_table import Row, machine, median_columns, out_parser, save, table
from gpurl.engine.eager import Eager
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer

SIZES = ((256, 32), (64, 128))  # environments, steps of a rollout
WARM_UP = 2  # iterations
BASELINE = "MLP"
# case -> its memory
CASES = {BASELINE: "none", "MLP in C": "none"} | {name: name for name in MEMORIES}


def make(case: str, num_envs: int, horizon: int) -> Eager:
    """The engine of a training after its first iterations."""
    settings = make_settings(
        "ppo",
        "chasing",
        num_envs=num_envs,
        horizon=horizon,
        epochs=4,
        minibatches=4,
        network={"memory": CASES[case]},
        eval_episodes=0,
        device="cpu",
        threads=1,
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    if case == BASELINE:
        engine = trainer.engine
        trainer.engine = Eager(engine.algorithm, engine.env, engine.guards)
    trainer.start()
    for _ in range(WARM_UP):
        trainer.iterate()
    return trainer.engine


def update_seconds(engine: Eager) -> float:
    """Of an update; the rollout before it is not timed."""
    engine.collect()
    data, _ = engine.prepare()
    began = time.process_time()
    engine.learn(data)
    seconds = time.process_time() - began
    engine.buffer.clear()
    return seconds


def measure(num_envs: int, horizon: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the updates of each case, every second round in the opposite order."""
    engines = {case: make(case, num_envs, horizon) for case in CASES}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case in list(CASES) if number % 2 else reversed(CASES):
            seconds[case].append(update_seconds(engines[case]))
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases and print them."""
    parser = out_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="updates of each case; default 20")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, lines = list[Row](), []
    for num_envs, horizon in SIZES:
        seconds = measure(num_envs, horizon, options.rounds)
        for case, of_case in seconds.items():
            ratios = [each / other for each, other in zip(of_case, seconds[BASELINE])]
            columns = median_columns(ratios, ".2f")
            size = f"{num_envs} environments, {horizon} steps"
            names = {"case": case, "size": size, "unit": f"times the update of {BASELINE}"}
            rows.append(machine("cpu") | names | columns)
            milliseconds = format(1000 * statistics.median(of_case), ".1f")
            lines.append([case, size, milliseconds, columns["value"]])
    print(table(["case", "size", "ms", "times MLP"], lines))
    print(save("memories", rows, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
