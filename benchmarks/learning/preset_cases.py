"""Off-policy algorithms on Chasing and Pendulum by their presets alone, on few and many
environments.
"""

from benchmarks.learning.case import Case
from gpurl.run.presets.find import preset

PRESET_ALGORITHMS = ("sac", "td3", "fast_sac", "fast_td3", "flash_sac")
PRESET_SIZES = (64, 1024, 4096)  # environments
# task: median return to reach; a script that pursues at full speed gets 10.4
PRESET_TARGETS = {"chasing": 9.0, "pendulum": -200.0}
SEEDS = 2


def preset_case_name(algorithm: str, task: str, num_envs: int) -> str:
    """preset-sac-chasing-64."""
    return f"preset-{algorithm}-{task}-{num_envs}"


PRESET_CASES = [
    Case(
        preset_case_name(algorithm, task, num_envs),
        "presets",
        algorithm,
        task,
        preset(algorithm, task, num_envs)["total_steps"],
        seeds=SEEDS,
        settings={"num_envs": num_envs},
        target=target,
        points=10,
    )
    for task, target in PRESET_TARGETS.items()
    for num_envs in PRESET_SIZES
    for algorithm in PRESET_ALGORITHMS
]
