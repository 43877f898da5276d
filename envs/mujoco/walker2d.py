"""Walker2d-v5 of Gymnasium in MuJoCo: two legs walk along x in the plane and must not fall."""

import torch
from torch import Tensor

from gpurl.envs.mujoco._runner import Runner, inside
from gpurl.envs.mujoco.base import Fields


class Walker2d(Runner):
    """Observation (17,): qpos without x, then qvel, clamped to +-10."""

    model_file = "walker2d_v5.xml"
    njmax = 48
    nconmax = 24
    frame_skip = 4
    max_episode_steps = 1000
    # options, as in Gymnasium
    forward_reward_weight: float = 1.0  # reward for each m/s along x
    ctrl_cost_weight: float = 1e-3  # cost of the squared action
    healthy_reward: float = 1.0  # reward of a step without a fall
    terminate_when_unhealthy: bool = True  # a fall ends the episode
    healthy_z_range: tuple[float, float] = (0.8, 2.0)  # height of the torso without a fall, m
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)  # angle of the torso without a fall, rad
    reset_noise_scale: float = 5e-3  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, int(self.exclude_current_positions_from_observation) :]
        return torch.cat((positions, data.qvel.clamp(-10.0, 10.0)), 1)

    def is_healthy(self, data: Fields) -> Tensor:
        """[N] bool: high and upright enough."""
        return inside(data.qpos[:, 1], self.healthy_z_range) & inside(
            data.qpos[:, 2], self.healthy_angle_range
        )
