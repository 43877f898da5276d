"""InvertedPendulum-v5 of Gymnasium in MuJoCo: balance a pole on a cart, +1 for each step."""

import torch
from torch import Tensor

from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco.base import Fields, MujocoEnv


class InvertedPendulum(MujocoEnv):
    """Observation (4,): position and angle, then their velocities. The pole has fallen at 0.2
    rad.
    """

    model_file = "inverted_pendulum.xml"
    camera = Camera(distance=2.4, lookat=(0.0, 0.0, 0.25), elevation=-10.0)
    njmax = 8
    nconmax = 4
    frame_skip = 2
    max_episode_steps = 1000
    reward_threshold = 950.0
    # options, as in Gymnasium
    reset_noise_scale: float = 0.01  # noise on the first state

    def observe(self, data: Fields) -> Tensor:
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        return (~self.terminated(data)).float()

    def terminated(self, data: Fields) -> Tensor:
        return data.qpos[:, 1].abs() > 0.2
