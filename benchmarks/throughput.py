"""Environment steps a second: the environment alone, with the policy acting and storing, and in full PPO training."""

import sys
from collections.abc import Callable

import torch

from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.timing import median_seconds
from gpurl.api import choose_device, make_trainer
from gpurl.config import Settings, make_settings
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.trainer import Trainer

SIZES = (64, 512, 4096, 16384, 65536)
HORIZON = 32
PLAIN_ENVS = ("cart_pole", "pendulum")  # measured alone, at PLAIN_SIZE
PLAIN_SIZE = 4096


def ready_trainer(settings: Settings, device: torch.device, env: VecEnv | None = None) -> Trainer:
    """The product's trainer by `settings`, set up as gpurl.api.run does and ready for `iterate`; without evaluation, files and screen."""
    trainer = make_trainer(settings, device, env=env)
    trainer.start()
    return trainer


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
        trainer.collect()
        trainer.buffer.clear()

    return collect


def cases(size: int, horizon: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is measured on `size` Chasing environments; every call is size * horizon environment steps."""
    shape = {"num_envs": size, "horizon": horizon, "epochs": 4, "minibatches": 4, "network": {"hidden": [64, 64]}}
    trainer = ready_trainer(make_settings("ppo", "chasing", **shape), device)
    alone = random_steps(make_env("chasing", size, device), horizon)
    return {"chasing env": alone, "chasing env+policy": collecting(trainer), "chasing training": trainer.iterate}


def main(words: list[str] | None = None) -> int:
    """Measure, print and save."""
    options_parser = parser(__doc__, budget=1.0)
    options_parser.add_argument("--num-envs", type=int, nargs="+", default=SIZES, help=f"default {' '.join(map(str, SIZES))}")
    options_parser.add_argument("--horizon", type=int, default=HORIZON, help=f"steps between updates; default {HORIZON}")
    options = options_parser.parse_args(words)
    device = choose_device(options.device)
    rows: list[Row] = []

    def measure(case: str, size: int, function: Callable[[], object]) -> str:
        seconds = median_seconds({case: function}, device, options.seconds)[case]
        rate = size * options.horizon / seconds
        rows.append({"case": case, "num_envs": str(size), "value": f"{rate:.0f}", "unit": "env_steps/s", **machine(str(device))})
        return number(rate)

    lines = []
    for size in options.num_envs:
        functions = cases(size, options.horizon, device)
        lines.append(["chasing", str(size), *(measure(case, size, function) for case, function in functions.items())])
    for name in PLAIN_ENVS:
        alone = random_steps(make_env(name, PLAIN_SIZE, device), options.horizon)
        lines.append([name, str(PLAIN_SIZE), measure(f"{name} env", PLAIN_SIZE, alone), "", ""])
    print(f"throughput: environment steps a second on {rows[0]['device']}, {rows[0]['threads']} CPU threads, horizon {options.horizon}")
    print(table(["task", "environments", "environment", "+ policy", "+ training"], lines))
    print(f"written to {save('throughput', rows, options.out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
