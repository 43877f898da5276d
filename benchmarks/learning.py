"""Long learning runs: each task to its published score, over seeds; `make learn`. Writes results/learning_<device>.csv."""

import argparse
import csv
import statistics
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gpurl.api import choose_device, evaluate_run, train

RESULTS = Path(__file__).resolve().parent / "results"
TASKS: list[tuple[str, str, dict[str, Any], float]] = [  # algorithm, env, settings, mean return to reach
    ("ppo", "cart_pole", {}, 475.0),
    ("ppo", "pendulum", {}, -200.0),
    ("ppo", "acrobot", {"num_envs": 1024, "horizon": 16, "total_steps": 2_000_000}, -100.0),
    (
        "ppo",
        "mountain_car_continuous",
        {"num_envs": 1024, "horizon": 32, "total_steps": 4_000_000, "gamma": 0.999, "initial_std": 1.5},
        90.0,
    ),
    ("a2c", "cart_pole", {}, 475.0),
    ("ppo", "chasing", {"total_steps": 20_000_000}, 10.0),
    ("ppo", "chasing", {"total_steps": 20_000_000, "env_options": {"bonus": False}}, 1.5),
    ("ppo", "chasing", {"total_steps": 20_000_000, "env_options": {"discrete": True}}, 9.0),
    ("ppo", "chasing", {"total_steps": 40_000_000, "env_options": {"dim": 3}}, 9.0),
]


def main() -> None:
    """Run every task with every seed and tell which reach their score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="run tasks whose environment's name holds this")
    options = parser.parse_args()
    device = choose_device(options.device)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS, check=False
    ).stdout.strip()
    output = RESULTS / f"learning_{device.type}.csv"
    is_new = not output.exists()
    with output.open("a", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(
                ["algorithm", "env", "settings", "seed", "steps", "seconds", "return", "wanted", "device", "torch", "commit", "date"]
            )
        for algorithm, env, settings, wanted in TASKS:
            if options.only not in env:
                continue
            returns = []
            for seed in range(options.seeds):
                began = time.monotonic()
                run = train(algorithm, env, seed=seed, device=str(device), root=folder, eval_episodes=0, quiet=True, **settings)
                seconds = time.monotonic() - began
                value = evaluate_run(run.folder, 100, str(device), best=False)["eval/mean_reward"]
                returns.append(value)
                name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
                writer.writerow(
                    [
                        algorithm,
                        env,
                        settings,
                        seed,
                        run.outcome.steps,
                        f"{seconds:.1f}",
                        f"{value:.3f}",
                        wanted,
                        name,
                        torch.__version__,
                        commit,
                        date.today(),
                    ]
                )
                file.flush()
            median = statistics.median(returns)
            verdict = "reached" if median >= wanted else "NOT reached"
            print(
                f"{algorithm} {env} {settings}: returns {', '.join(f'{value:.2f}' for value in returns)}; wanted {wanted}: {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
