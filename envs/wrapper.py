"""The base of environments around other environments: whatever a subclass does not change is that
of the environment inside.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from gpurl.envs.vec_env import Info, VecEnv

# what a trainer asks of an environment besides its spaces and methods
ATTRIBUTES = (
    "autoreset_mode",
    "single_state_space",
    "num_agents",
    "graph_safe",
    "resets_late",
    "takes_share_seeds",
    "single_instance",
    "control_step",
    "render_fps",
    "max_episode_steps",
    "reward_threshold",
)


class VecEnvWrapper(VecEnv):
    """`env` with observations of another space. A subclass defines `reset` and `step`.

    observation_space: of one environment; the names of observations are not those of `env`.
    """

    def __init__(self, env: VecEnv, observation_space: gymnasium.Space) -> None:
        self.env = env
        self.single_observation_space = observation_space
        self.single_action_space = env.single_action_space
        self.action_names = env.action_names
        for name in ATTRIBUTES:
            setattr(self, name, getattr(env, name))
        self.metadata = env.metadata
        super().__init__(env.num_envs, env.device)
        # the same tensors: a trainer writes the one, a task reads the other
        self.training_progress = env.training_progress
        self.episode_length_buf = env.episode_length_buf

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        return None, self.env.known_names()[1]

    def use_threads(self, count: int) -> None:
        self.env.use_threads(count)

    def robot(self) -> Info:
        return self.env.robot()

    def stagger(self, clocks: Tensor) -> None:
        self.env.stagger(clocks)

    def begin_at(self, first: int) -> None:
        self.env.begin_at(first)

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        return self.env.picture(index, height, action)

    def watch_ends(self, watcher: Callable[[int], None]) -> None:
        self.env.watch_ends(watcher)

    def state_dict(self) -> Info:
        return self.env.state_dict()

    def load_state_dict(self, state: Info) -> None:
        self.env.load_state_dict(state)

    def curriculum_state(self) -> Info:
        return self.env.curriculum_state()

    def load_curriculum_state(self, state: Info) -> None:
        self.env.load_curriculum_state(state)

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()
