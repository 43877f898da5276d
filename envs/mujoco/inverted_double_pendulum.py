"""InvertedDoublePendulum-v5 of Gymnasium in MuJoCo: balance two poles, one on top of the
other, on a cart.
"""

import torch
from torch import Tensor

from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco.base import Fields, MujocoEnv


class InvertedDoublePendulum(MujocoEnv):
    """Observation (9,): the cart's x, sines and cosines of the two angles, qvel, and the force of
    the cart's end stops.
    """

    model_file = "inverted_double_pendulum.xml"
    camera = Camera(distance=3.4, lookat=(0.0, 0.0, 0.5), elevation=-30.0)
    njmax = 8
    nconmax = 4
    frame_skip = 5
    max_episode_steps = 1000
    reward_threshold = 9100.0
    normal_velocity_noise = True
    # options, as in Gymnasium
    healthy_reward: float = 10.0  # reward of a step without a fall
    reset_noise_scale: float = 0.1  # noise on the first state

    def observe(self, data: Fields) -> Tensor:
        angles = data.qpos[:, 1:]
        columns = (
            data.qpos[:, :1],
            angles.sin(),
            angles.cos(),
            data.qvel.clamp(-10.0, 10.0),
            data.qfrc_constraint[:, :1].clamp(-10.0, 10.0),
        )
        return torch.cat(columns, 1)

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        # the tip, upright at a height of 2 m
        tip = data.site_xpos[:, 0]
        distance = 0.01 * tip[:, 0].square() + (tip[:, 2] - 2.0).square()
        speed = 1e-3 * data.qvel[:, 1].square() + 5e-3 * data.qvel[:, 2].square()
        return self.healthy_reward * ~self.terminated(data) - distance - speed

    def terminated(self, data: Fields) -> Tensor:
        return data.site_xpos[:, 0, 2] <= 1.0
