"""Reacher-v5 of Gymnasium on mujoco-warp: an arm of two links brings its tip to a target."""

import math
from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp.base import MujocoWarpEnv
from gpurl.kernels.random import CounterRandom


class Reacher(MujocoWarpEnv):
    """Observation (10,): cosines and sines of the joints, the target's place, the joints'
    velocities, tip minus target in the plane.
    """

    model_file = "reacher.xml"
    njmax, nconmax = 8, 8
    frame_skip = 2
    max_episode_steps = 50
    reward_threshold = -3.75

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        reward_dist_weight: float = 1.0,
        reward_control_weight: float = 1.0,
        **options: Any,
    ) -> None:
        self.reward_dist_weight = reward_dist_weight
        self.reward_control_weight = reward_control_weight
        super().__init__(num_envs, device, seed, **options)

    def initial_state(self, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        joints = rng.uniform(-0.1, 0.1, (2,)) + self.initial_qpos[:2]
        # Gymnasium draws until the target is inside a circle; the root of a uniform number is as
        # far from its middle
        distance, angle = 0.2 * rng.uniform().sqrt(), rng.uniform(0.0, 2.0 * math.pi)
        target = torch.stack((distance * angle.cos(), distance * angle.sin()), 1)
        speed = rng.uniform(-0.005, 0.005, (2,))
        return torch.cat((joints, target), 1), torch.cat((speed, torch.zeros_like(target)), 1)

    def observe(self, data: Any) -> Tensor:
        joints = data.qpos[:, :2]
        return torch.cat(
            (
                joints.cos(),
                joints.sin(),
                data.qpos[:, 2:],
                data.qvel[:, :2],
                self.to_target(data)[:, :2],
            ),
            1,
        )

    def to_target(self, data: Any) -> Tensor:
        """[N, 3] from the target to the tip, m."""
        return data.xpos[:, self.body("fingertip")] - data.xpos[:, self.body("target")]

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return -self.reward_dist_weight * self.to_target(data).norm(
            dim=1
        ) - self.reward_control_weight * action.square().sum(1)
