"""A task's configuration; `overrides` are those that only Isaac Lab 3 knows."""

from typing import Any

import gymnasium
from isaaclab.envs import make_config


def parse_env_cfg(
    task_name: str,
    device: str = "cuda:0",
    num_envs: int | None = None,
    use_fabric: Any = None,
    overrides: Any = (),
) -> Any:
    config = make_config(
        selected=list(overrides), **gymnasium.spec(task_name).kwargs["env_cfg_entry_point"]
    )
    config.sim.device, config.scene.num_envs = device, num_envs
    return config
