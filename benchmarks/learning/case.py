"""One case of the suite: an algorithm on a task with its settings, the number of seeds, and the
return to reach.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from gpurl.run.presets.find import preset
from gpurl.run.settings import merge

Settings = dict[str, Any]

# names of Gymnasium's tasks where gpurl and the publications say the same in other words
TASKS = {
    "HalfCheetah-v5": "half_cheetah",
    "Hopper-v5": "hopper",
    "LunarLander-v3": "lunar_lander",
    "LunarLanderContinuous-v3": "lunar_lander_continuous",
    "BipedalWalker-v3": "bipedal_walker",
}


def task_of(env: str) -> str:
    """The name of an environment's task in published.py: half_cheetah, lunar_lander."""
    name = env.rpartition(":")[2]
    return TASKS.get(name, name)


@dataclass(frozen=True)
class Case:
    """An algorithm on a task; its results are in NAME.csv."""

    name: str
    """Of the file, unique: ppo-hopper."""
    group: str
    """The section of the report."""
    algorithm: str
    env: str
    steps: int
    """Environment steps of a training, summed over environments."""
    seeds: int = 3
    """Trainings, with the seeds 0, 1, ..."""
    settings: Settings = field(default_factory=dict)
    """What the case sets besides the steps; all else is the preset's and the defaults'. Of sb3:
    the arguments of its algorithm, and num_envs, normalize_obs, linear_schedule. Of rsl_rl: the
    configuration of its runner, and num_envs."""
    published: tuple[str, ...] = ()
    """Columns of published.py to compare with, on the same task."""
    target: float | None = None
    """Mean return to reach, by the median of the seeds."""
    is_lower_end: bool = False
    """The target is to be reached by the lower end of the 95 % interval of the IQM instead."""
    better_than: str = ""
    """A case whose median at the same step must be exceeded."""
    points: int = 20
    """Evaluations on the way, about."""
    curve_episodes: int = 5
    """Episodes of each of them."""
    threads: int = 1
    """Of a training by gpurl; cores that no other one has meanwhile. Others have one."""
    trainer: str = "gpurl"
    """gpurl, sb3 (stable-baselines3) or rsl_rl."""

    @property
    def task(self) -> str:
        """See `task_of`."""
        return task_of(self.env)

    @property
    def device(self) -> str:
        """Where it trains: on a CPU, unless its settings say otherwise."""
        return str(self.settings.get("device", "cpu"))

    @property
    def eval_every(self) -> int:
        """Environment steps between evaluations."""
        return max(self.steps // self.points, 1)

    @property
    def is_resumable(self) -> bool:
        """Whether a stopped training goes on where it was; those of others begin anew."""
        return self.trainer == "gpurl"

    @property
    def is_in_peers(self) -> bool:
        """Whether it runs in the environment of the other trainers. mjlab brings its own rsl_rl."""
        return self.trainer != "gpurl" and self.group != "mjlab"

    def scaled(self, scale: float) -> "Case":
        """The case with `scale` times the steps and the seconds, for a smoke test."""
        settings = dict(self.settings)
        if isinstance(seconds := settings.get("max_seconds"), float):
            settings["max_seconds"] = seconds * scale
        steps = max(int(self.steps * scale), 1)
        return dataclasses.replace(self, steps=steps, settings=settings)

    def resolved_settings(self) -> str:
        """JSON of what decides the training beyond gpurl's defaults: the preset of the task, the
        settings of the case and the steps. Results with other ones are stale.
        """
        values = dict(self.settings)
        if self.trainer == "gpurl":
            num_envs = values.get("num_envs")
            values = merge(preset(self.algorithm, self.env, num_envs, self.device), values)
        return json.dumps(values | {"total_steps": self.steps}, sort_keys=True)
