"""Algorithms on the same task for the same wall clock, one core each."""

from benchmarks.learning.case import Case, Settings

# task: seconds of each training
CLOCK_SECONDS = {"chasing": 120.0, "pendulum": 60.0, "half_cheetah": 600.0}
# about as many steps as fit into the time, or more, with so many points that 10 to 50 of them are
# reached; on Chasing those of the presets, whose rates fall with the steps
CLOCK_STEPS = {
    "ppo": {"chasing": 50_000_000, "pendulum": 10_000_000, "half_cheetah": 10_000_000},
    "": {"chasing": 2_000_000, "pendulum": 200_000, "half_cheetah": 500_000},
}
POINTS = 100
CLOCK_ALGORITHMS = ("ppo", "sac", "fast_sac", "flash_sac", "td3", "fast_td3")


def _clock(algorithm: str, task: str, num_envs: int | None = None) -> Case:
    settings: Settings = {"max_seconds": CLOCK_SECONDS[task]}
    if task == "chasing":
        settings |= {"num_envs": num_envs}
    if algorithm == "ppo" and task == "half_cheetah":
        settings |= {"schedule": "constant"}  # the number of steps, and so an end, is not known
    return Case(
        "-".join(("clock", algorithm, task, *([str(num_envs)] if num_envs else []))),
        "wall_clock",
        algorithm,
        task,
        CLOCK_STEPS.get(algorithm, CLOCK_STEPS[""])[task],
        settings=settings,
        points=POINTS,
    )


WALL_CLOCK = [
    *(_clock(name, "chasing", size) for size in (64, 1024) for name in CLOCK_ALGORITHMS),
    *(_clock(name, task) for task in ("pendulum", "half_cheetah") for name in CLOCK_ALGORITHMS),
]
