"""Tasks whose rollouts have columns that those of this package lack."""

import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor

from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import Timestep
from tests.tiny_envs import RandomWalk


class LateRestarts(RandomWalk):
    """Says of each step whether it is a real transition."""

    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.info["valid"] = self.episode_length_buf > 0
        return timestep


class Images(RandomWalk):
    """Sees 8 x 8 grey pixels."""

    single_observation_space = Box(0, 255, (8, 8, 1), np.uint8)

    def observe(self, state: State) -> Tensor:
        pixels = state["x"].mean(1).mul(20.0).add(128.0).clamp(0.0, 255.0).to(torch.uint8)
        return pixels.reshape(-1, 1, 1, 1).expand(-1, 8, 8, 1).clone()


class SeveralChoices(RandomWalk):
    """Takes two choices a step."""

    single_action_space = MultiDiscrete([3, 2])


class Privileged(RandomWalk):
    """Shows its critic the noise too."""

    single_state_space = Box(-np.inf, np.inf, (3,), np.float32)

    def observe_state(self, state: State) -> Tensor:
        return state["x"] * 2.0
