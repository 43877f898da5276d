"""Tunings whose trials take a fraction of a second."""

from pathlib import Path
from typing import Any

from gpurl.run.settings import Settings, make_settings
from gpurl.tuning.space import Dimension, Space
from gpurl.tuning.tuner import Plan
from tests.small_runs import ITERATION, SMALL

SHORT = {"max_episode_steps": 8}  # as evaluations take the most time
RATES = (1e-4, 1e-3, 1e-2)
RATE: Space = {"learning_rate": Dimension("learning_rate", choices=RATES)}
WIDE: Space = {
    "learning_rate": Dimension("learning_rate", 1e-4, 1e-2, log=True),
    "gamma": Dimension("gamma", 0.9, 0.99),
}


def small_settings(
    root: Path, iterations: int = 2, env: str = "pendulum", **changes: Any
) -> Settings:
    values = {"total_steps": iterations * ITERATION, "threads": 1, "root": str(root)}
    values |= {"env_options": SHORT}
    return make_settings(*("ppo", env), **(SMALL | values | {"eval_every": ITERATION} | changes))


def small_plan(
    folder: Path, trials: int = 3, space: Space = WIDE, name: str = "own.journal", **changes: Any
) -> Plan:
    """changes: of the plan, and of its settings."""
    own = {key: changes.pop(key) for key in ("jobs", "prune", "sampler") if key in changes}
    return Plan(small_settings(folder, **changes), space, folder / name, trials, **own)
