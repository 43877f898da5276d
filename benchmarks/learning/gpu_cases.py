"""What a GPU has to reach: PPO on the eleven MuJoCo tasks with mjlab's hyper-parameters for each of
them and the sizes of its published trainings, beside its returns and minutes.
"""

import math
from typing import NamedTuple

from benchmarks.learning.case import Case, Settings

MJLAB = (
    "mjlab, src/mjlab/tasks/gym_mujoco/BENCHMARK.md (commit 9d41856): its own versions of the v5 "
    "tasks in mujoco-warp, one training, 1,000 greedy episodes; the GPU is not named. Humanoid's "
    "policy was trained in several stages, the last of which has these sizes (5,414 iterations "
    "before it), Pusher's too (1,200 before it, with 4 minibatches)"
)
SEEDS = 3


class Published(NamedTuple):
    """A training of mjlab."""

    mean: float  # return
    deviation: float  # over episodes
    num_envs: int
    horizon: int
    epochs: int
    minibatches: int
    iterations: int  # of all stages
    minutes: float  # of them, without evaluations


MJLAB_RUNS = {
    "ant": Published(6294.429, 754.161, 4096, 24, 5, 4, 1501, 13.52),
    "half_cheetah": Published(6489.964, 43.753, 4096, 24, 5, 4, 1701, 6.19),
    "hopper": Published(3100.010, 13.029, 4096, 24, 5, 4, 1501, 7.73),
    "humanoid": Published(12049.012, 1821.074, 2048, 128, 10, 32, 5529, 82.36),
    "humanoid_standup": Published(395345.155, 15591.305, 4096, 24, 5, 4, 2501, 28.04),
    "inverted_double_pendulum": Published(9295.498, 374.034, 4096, 24, 5, 4, 501, 2.72),
    "inverted_pendulum": Published(1000.0, 0.0, 4096, 24, 5, 4, 301, 1.02),
    "pusher": Published(-28.9, 4.1, 4096, 32, 5, 16, 1600, 11.28),
    "reacher": Published(-3.468, 1.367, 4096, 128, 5, 4, 176, 2.70),
    "swimmer": Published(341.757, 2.754, 4096, 128, 5, 4, 276, 5.16),
    "walker2d": Published(7045.781, 337.195, 4096, 24, 5, 4, 1301, 7.80),
}
# new transitions in millions, where stages had other sizes than the last one
MILLIONS = {"humanoid": 627.9}


def steps_of(task: str) -> int:
    """Environment steps of mjlab's training of `task`, over all stages."""
    run = MJLAB_RUNS[task]
    if task in MILLIONS:
        return int(MILLIONS[task] * 1e6)
    return run.iterations * run.num_envs * run.horizon


# mjlab, src/mjlab/tasks/gym_mujoco/config/rl_cfg.py (commit d954e90): what all tasks share
SHARED: Settings = {
    "learning_rate": 3e-4,
    "schedule": "constant",
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_value": None,
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "normalize_obs": True,
    "normalize_value": False,
    "normalize_advantage": "minibatch",
    "initial_std": 1.0,
}
SMALL: Settings = {"hidden": [64, 64], "activation": "tanh", "init": "uniform"}
LARGE: Settings = {"hidden": [256, 256], "activation": "relu", "init": "uniform"}
CAUTIOUS: Settings = {"network": LARGE, "initial_std": math.exp(-2.0)}
ADAPTIVE: Settings = {"schedule": "kl_minibatch", "target_kl": 0.01}
# and what each task has of its own
OF_TASKS: dict[str, Settings] = {
    "ant": {},
    "half_cheetah": CAUTIOUS
    | dict(learning_rate=2.0633e-5, gamma=0.98, gae_lambda=0.92, entropy_coef=0.000401762)
    | dict(clip_range=0.1, max_grad_norm=0.8, value_coef=0.58096),
    "hopper": CAUTIOUS
    | ADAPTIVE
    | dict(learning_rate=9.80828e-5, gamma=0.999, gae_lambda=0.99, entropy_coef=0.00229519)
    | dict(max_grad_norm=0.7, value_coef=0.835671),
    "humanoid": CAUTIOUS
    | ADAPTIVE
    | dict(learning_rate=3.56987e-5, gamma=0.98, gae_lambda=0.9, entropy_coef=0.00238306)
    | dict(clip_range=0.3, max_grad_norm=2.0, value_coef=0.431892),
    "humanoid_standup": CAUTIOUS
    | dict(learning_rate=2.55673e-5, gae_lambda=0.9, entropy_coef=3.62109e-6)
    | dict(clip_range=0.3, max_grad_norm=0.7, value_coef=0.430793),
    "inverted_double_pendulum": ADAPTIVE
    | dict(learning_rate=0.000155454, gamma=0.98, gae_lambda=0.8, entropy_coef=1.05057e-6)
    | dict(clip_range=0.4, value_coef=0.695929),
    "inverted_pendulum": dict(learning_rate=0.000222425, gamma=0.999, gae_lambda=0.9)
    | dict(entropy_coef=1.37976e-7, clip_range=0.4, max_grad_norm=0.3, value_coef=0.19816),
    "pusher": ADAPTIVE | dict(network=LARGE, gamma=0.98, gae_lambda=1.0, entropy_coef=0.01),
    "reacher": ADAPTIVE
    | dict(learning_rate=0.000104019, gamma=0.98, gae_lambda=1.0, entropy_coef=0.001)
    | dict(clip_range=0.3, max_grad_norm=0.9, value_coef=0.950368),
    "swimmer": ADAPTIVE
    | dict(learning_rate=6e-4, gamma=0.9999, gae_lambda=0.98, entropy_coef=0.01),
    "walker2d": ADAPTIVE
    | dict(learning_rate=5.05041e-5, entropy_coef=0.000585045)
    | dict(clip_range=0.1, max_grad_norm=1.0, value_coef=0.871923),
}
GPU_CASES = [
    Case(
        f"gpu-ppo-{task}",
        "gpu",
        "ppo",
        task,
        steps_of(task),
        seeds=SEEDS,
        settings=SHARED
        | {"network": SMALL}
        | OF_TASKS[task]
        | {
            "device": "cuda",
            "num_envs": run.num_envs,
            "horizon": run.horizon,
            "epochs": run.epochs,
            "minibatches": run.minibatches,
        },
        target=run.mean,
        points=10,
        curve_episodes=64,
    )
    for task, run in MJLAB_RUNS.items()
]
