"""Long learning runs: each task to its published score, over seeds; `make learn`. Writes
results/learning_<device>.csv.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gymnasium.error import DependencyNotInstalled

from benchmarks.results_table import RESULTS, Row, machine, save
from gpurl.api import evaluate_run, train
from gpurl.errors import UsageError
from gpurl.run.setup import choose_device

# what two CPU cores can simulate in minutes; its preset is for a GPU
HALF_CHEETAH = {
    "num_envs": 128,
    "horizon": 32,
    "minibatches": 8,
    "epochs": 8,
    "total_steps": 500_000,
    "network": {"hidden": [64, 64]},
}

TASKS: list[
    tuple[str, str, dict[str, Any], float]
] = [  # algorithm, env, settings, mean return to reach
    ("ppo", "cart_pole", {}, 475.0),
    ("ppo", "pendulum", {}, -200.0),
    ("ppo", "acrobot", {"num_envs": 1024, "horizon": 16, "total_steps": 2_000_000}, -100.0),
    (
        "ppo",
        "mountain_car_continuous",
        {
            "num_envs": 1024,
            "horizon": 32,
            "total_steps": 4_000_000,
            "gamma": 0.999,
            "initial_std": 1.5,
        },
        90.0,
    ),
    ("a2c", "cart_pole", {}, 475.0),
    *(
        (name, "pendulum", {}, -200.0)
        for name in ("ddpg", "td3", "sac", "mod_sac", "redq", "fast_td3", "fast_sac")
    ),
    *(
        ("dqn", "cart_pole", change, 450.0)
        for change in (
            {},
            {"double": False},
            {"network": {"dueling": True}},
            {"atoms": 51, "v_min": 0.0, "v_max": 10.0},
            {"quantiles": 25},
        )
    ),
    *((name, "cart_pole", {}, 450.0) for name in ("rainbow", "pqn")),
    (
        "dqn",
        "gymnasium_cpu:LunarLander-v3",
        {"num_envs": 16, "total_steps": 500_000, "updates": 16},
        200.0,
    ),
    (
        "sac",
        "gymnasium_cpu:LunarLanderContinuous-v3",
        {"num_envs": 16, "total_steps": 500_000, "updates": 16},
        200.0,
    ),
    ("ppo", "inverted_pendulum", {}, 950.0),
    ("ppo", "half_cheetah", HALF_CHEETAH, 1500.0),
    ("ppo", "chasing", {"total_steps": 20_000_000}, 10.0),
    ("ppo", "chasing", {"total_steps": 20_000_000, "env_options": {"bonus": False}}, 1.5),
    ("ppo", "chasing", {"total_steps": 20_000_000, "env_options": {"discrete": True}}, 9.0),
    ("ppo", "chasing", {"total_steps": 40_000_000, "env_options": {"dim": 3}}, 9.0),
]


def learn(
    algorithm: str,
    env: str,
    settings: dict[str, Any],
    wanted: float,
    seed: int,
    device: torch.device,
) -> tuple[float, Row]:
    """(greedy return of one training, its row in the file)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            algorithm,
            env,
            seed=seed,
            device=str(device),
            root=folder,
            eval_episodes=0,
            quiet=True,
            **settings,
        )
        seconds = time.monotonic() - began
        value = evaluate_run(run.folder, 100, str(device), best=False)["eval/mean_reward"]
        threads = json.loads((run.folder / "versions.json").read_text())["threads"]
    case = {
        "algorithm": algorithm,
        "env": env,
        "settings": json.dumps(settings),
        "seed": str(seed),
        "steps": str(run.outcome.steps),
    }
    case |= {
        "seconds": f"{seconds:.1f}",
        "wanted": f"{wanted}",
        "value": f"{value:.3f}",
        "unit": "return",
    }
    return value, case | machine(str(device)) | {"threads": str(threads)}


def main() -> None:
    """Run every task with every seed and tell which reach their score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="run tasks whose environment's name holds this")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where the CSV file goes; default benchmarks/results",
    )
    options = parser.parse_args()
    device = choose_device(options.device)
    for algorithm, env, settings, wanted in TASKS:
        if options.only not in env:
            continue
        returns = []
        for seed in range(options.seeds):
            try:
                value, row = learn(algorithm, env, settings, wanted, seed, device)
            except UsageError as error:
                if not isinstance(error.__cause__, (ImportError, DependencyNotInstalled)):
                    # a setting or a task that is no more: its row must not be missed in silence
                    raise
                print(f"{algorithm} {env} is left out: {error}", flush=True)
                break
            returns.append(value)
            save("learning", [row], options.out)
        if not returns:
            continue
        verdict = "reached" if statistics.median(returns) >= wanted else "NOT reached"
        print(
            f"{algorithm} {env} {settings}: {', '.join(f'{value:.2f}' for value in returns)}; "
            f"wanted {wanted}: {verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
