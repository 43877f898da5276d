"""Walker2d-v5 of Gymnasium on mujoco-warp: two legs walk along x in the plane and must not fall."""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp._runner import Runner


class Walker2d(Runner):
    """Observation (17,): qpos without x, then qvel, cut to 10."""

    model_file = "walker2d_v5.xml"
    njmax, nconmax = 48, 24
    frame_skip = 4
    max_episode_steps = 1000

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 1e-3,
        healthy_reward: float = 1.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (0.8, 2.0),
        healthy_angle_range: tuple[float, float] = (-1.0, 1.0),
        reset_noise_scale: float = 5e-3,
        exclude_current_positions_from_observation: bool = True,
        **options: Any,
    ) -> None:
        self.forward_reward_weight = forward_reward_weight
        self.ctrl_cost_weight = ctrl_cost_weight
        self.healthy_reward = healthy_reward
        self.terminate_when_unhealthy = terminate_when_unhealthy
        self.healthy_z_range = healthy_z_range
        self.healthy_angle_range = healthy_angle_range
        self.reset_noise_scale = reset_noise_scale
        self.exclude_current_positions_from_observation = exclude_current_positions_from_observation
        super().__init__(num_envs, device, seed, **options)

    def observe(self, data: Any) -> Tensor:
        return torch.cat(
            (
                data.qpos[:, int(self.exclude_current_positions_from_observation) :],
                data.qvel.clamp(-10.0, 10.0),
            ),
            1,
        )

    def is_healthy(self, data: Any) -> Tensor:
        """[N] bool: high and upright enough."""
        height, angle = data.qpos[:, 1], data.qpos[:, 2]
        healthy = (height > self.healthy_z_range[0]) & (height < self.healthy_z_range[1])
        return (
            healthy & (angle > self.healthy_angle_range[0]) & (angle < self.healthy_angle_range[1])
        )
