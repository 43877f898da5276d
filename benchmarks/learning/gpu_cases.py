"""What a GPU has to reach: PPO on the eleven MuJoCo tasks with 4096 environments and the settings
that mjlab trains its versions of them with, beside mjlab's returns and minutes.
"""

from typing import NamedTuple

from benchmarks.learning.case import Case
from gpurl.run.presets import NAMED

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


PUBLISHED = {
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
    run = PUBLISHED[task]
    if task in MILLIONS:
        return int(MILLIONS[task] * 1e6)
    return run.iterations * run.num_envs * run.horizon


GPU_CASES = [
    Case(
        f"gpu-ppo-{task}",
        "gpu",
        "ppo",
        task,
        steps_of(task),
        seeds=SEEDS,
        settings={
            **{name: value for name, value in NAMED["mjlab"].items() if name != "total_steps"},
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
    for task, run in PUBLISHED.items()
]
