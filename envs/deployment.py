"""What a controller outside of the simulator needs beside a policy: the time between two actions,
the names of observations and actions, and the robot's joints.
"""

from typing import Any

import numpy as np

from gpurl.envs.names import name_problems, names_of
from gpurl.envs.vec_env import VecEnv


def deployment(env: VecEnv) -> dict[str, Any]:
    """Plain values, null or empty where the environment does not know them:

    - "control_step": seconds between two actions
    - "observation_names" [D], "action_names" [A], of one agent; pixels have none
    - "robot": `VecEnv.robot`, such as joint_names, action_scale and action_offset
    """
    names = None if any(name_problems(env)) else names_of(env)
    is_image = env.single_observation_space.dtype == np.uint8
    return {
        "control_step": None if env.control_step is None else float(env.control_step),
        "observation_names": names.observation if names and not is_image else [],
        "action_names": (names.choices or names.action) if names else [],
        "robot": env.robot(),
    }
