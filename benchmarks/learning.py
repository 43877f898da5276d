"""Long learning runs: trains each task with several seeds and compares the median return with its
published score; `make learn`.
"""

import json
import statistics
import tempfile
import time
from typing import Any

import torch
from gymnasium.error import DependencyNotInstalled

from benchmarks.results_table import Row, device_parser, machine, save
from gpurl.api import evaluate_run, train
from gpurl.errors import UsageError
from gpurl.run.setup import choose_device

# sizes that two CPU cores can simulate in minutes; the preset of the task is for a GPU
HALF_CHEETAH = {
    "num_envs": 128,
    "horizon": 32,
    "minibatches": 8,
    "epochs": 8,
    "total_steps": 500_000,
    "network": {"hidden": [64, 64]},
}

# algorithm, environment, settings, mean return to reach
TASKS: list[tuple[str, str, dict[str, Any], float]] = [
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
    target: float,
    seed: int,
    device: torch.device,
) -> tuple[float, Row]:
    """(mean return of the trained policy, acting greedily; the row of the CSV file)."""
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
    row = {
        "algorithm": algorithm,
        "env": env,
        "settings": json.dumps(settings),
        "seed": str(seed),
        "steps": str(run.outcome.steps),
        "seconds": f"{seconds:.1f}",
        "target": f"{target}",
        "value": f"{value:.3f}",
        "unit": "return",
    }
    return value, row | machine(str(device)) | {"threads": str(threads)}


def main() -> None:
    """Run every task with every seed and print which tasks reach their score."""
    parser = device_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each task; default 3")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run the tasks with TEXT in their environment"
    )
    options = parser.parse_args()
    device = choose_device(options.device)
    for algorithm, env, settings, target in TASKS:
        if options.only not in env:
            continue
        returns = []
        for seed in range(options.seeds):
            try:
                value, row = learn(algorithm, env, settings, target, seed, device)
            except UsageError as error:
                # only a missing simulator skips a task; a wrong name or setting is an error
                if not isinstance(error.__cause__, (ImportError, DependencyNotInstalled)):
                    raise
                print(f"{algorithm} {env} is skipped: {error}", flush=True)
                break
            returns.append(value)
            save("learning", [row], options.out)
        if not returns:
            continue
        verdict = "reached" if statistics.median(returns) >= target else "NOT reached"
        values = ", ".join(f"{value:.2f}" for value in returns)
        print(f"{algorithm} {env} {settings}: {values}; target {target}: {verdict}", flush=True)


if __name__ == "__main__":
    main()
