"""InvertedPendulum-v5 of Gymnasium on mujoco-warp: a pole on a cart stays up, 1 for every step that
it does.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp.base import MujocoWarpEnv


class InvertedPendulum(MujocoWarpEnv):
    """Observation (4,): position and angle, then their velocities. The pole has fallen at 0.2
    rad.
    """

    model_file = "inverted_pendulum.xml"
    njmax, nconmax = 8, 4
    frame_skip = 2
    max_episode_steps = 1000
    reward_threshold = 950.0

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        reset_noise_scale: float = 0.01,
        **options: Any,
    ) -> None:
        self.reset_noise_scale = reset_noise_scale
        super().__init__(num_envs, device, seed, **options)

    def observe(self, data: Any) -> Tensor:
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return (~self.terminated(data)).float()

    def terminated(self, data: Any) -> Tensor:
        return data.qpos[:, 1].abs() > 0.2
