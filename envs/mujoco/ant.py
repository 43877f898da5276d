"""Ant-v5 of Gymnasium in MuJoCo: four legs run along x.

MuJoCo's C steps it as Gymnasium does. mujoco-warp turns the model's pyramidal friction cones where
a leg stands steeper than 60 degrees, so a step differs there; with `cone="elliptic"`, which is
another task, it agrees.
"""

import torch
from torch import Tensor

from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco._runner import Runner
from gpurl.envs.mujoco.base import Fields


class Ant(Runner):
    """Observation (105,): qpos without x and y, qvel, contact forces on each body, clamped to
    `contact_force_range`.
    """

    model_file = "ant.xml"
    camera = Camera(body="torso", distance=4.0, elevation=-20.0)
    njmax = 48
    nconmax = 24
    frame_skip = 5
    max_episode_steps = 1000
    reward_threshold = 6000.0
    normal_velocity_noise = True
    # options, as in Gymnasium
    forward_reward_weight: float = 1.0  # reward for each m/s along x
    ctrl_cost_weight: float = 0.5  # cost of the squared action
    contact_cost_weight: float = 5e-4  # cost of the squared contact forces
    healthy_reward: float = 1.0  # reward of a step without a fall
    main_body: int = 1  # number of the body whose speed counts; Gymnasium takes its name too
    terminate_when_unhealthy: bool = True  # a fall ends the episode
    healthy_z_range: tuple[float, float] = (0.2, 1.0)  # height of the torso without a fall, m
    contact_force_range: tuple[float, float] = (-1.0, 1.0)  # limits of observed contact forces
    reset_noise_scale: float = 0.1  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)
    include_cfrc_ext_in_observation: bool = True  # observe contact forces

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, 2 * int(self.exclude_current_positions_from_observation) :]
        # the world is body 0
        columns = [positions, data.qvel]
        if self.include_cfrc_ext_in_observation:
            columns.append(data.cfrc_ext[:, 1:].clamp(*self.contact_force_range).flatten(1))
        return torch.cat(columns, 1)

    def speed(self, data: Fields, before: Fields) -> Tensor:
        return (data.xpos[:, self.main_body, 0] - before.xpos[:, self.main_body, 0]) / self.dt

    def cost(self, data: Fields, action: Tensor) -> Tensor:
        contacts = data.cfrc_ext.clamp(*self.contact_force_range).square().sum((1, 2))
        return super().cost(data, action) + self.contact_cost_weight * contacts

    def is_healthy(self, data: Fields) -> Tensor:
        """[N] bool: the torso is neither too low nor too high."""
        low, high = self.healthy_z_range
        return (data.qpos[:, 2] >= low) & (data.qpos[:, 2] <= high)
