"""Hopper-v5 of Gymnasium in MuJoCo: one leg hops along x and must not fall."""

import math

import torch
from torch import Tensor

from gpurl.envs.mujoco._runner import Runner, inside
from gpurl.envs.mujoco.base import Fields


class Hopper(Runner):
    """Observation (11,): qpos without x, then qvel, clamped to +-10."""

    model_file = "hopper.xml"
    njmax = 32
    nconmax = 16
    frame_skip = 4
    max_episode_steps = 1000
    reward_threshold = 3800.0
    # options, as in Gymnasium
    forward_reward_weight: float = 1.0  # reward for each m/s along x
    ctrl_cost_weight: float = 1e-3  # cost of the squared action
    healthy_reward: float = 1.0  # reward of a step without a fall
    terminate_when_unhealthy: bool = True  # a fall ends the episode
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)  # limits of positions and speeds
    healthy_z_range: tuple[float, float] = (0.7, math.inf)  # height of the torso without a fall, m
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)  # angle of the torso without a fall, rad
    reset_noise_scale: float = 5e-3  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, int(self.exclude_current_positions_from_observation) :]
        return torch.cat((positions, data.qvel.clamp(-10.0, 10.0)), 1)

    def is_healthy(self, data: Fields) -> Tensor:
        """[N] bool: high and upright enough, and the state is within its range."""
        state = torch.cat((data.qpos[:, 2:], data.qvel), 1)
        return (
            inside(data.qpos[:, 1], self.healthy_z_range)
            & inside(data.qpos[:, 2], self.healthy_angle_range)
            & inside(state, self.healthy_state_range).all(1)
        )
