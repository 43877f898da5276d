"""Humanoid-v5 of Gymnasium on mujoco-warp: a humanoid walks along x and must not fall."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp._humanoid_body import HumanoidBody
from gpurl.envs.mujoco_warp._runner import Runner


class Humanoid(Runner, HumanoidBody):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.

    The speed is that of the centre of mass.
    """

    model_file = "humanoid.xml"
    njmax, nconmax = 64, 48

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        forward_reward_weight: float = 1.25,
        contact_cost_weight: float = 5e-7,
        contact_cost_range: tuple[float, float] = (-math.inf, 10.0),
        healthy_reward: float = 5.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (1.0, 2.0),
        **options: Any,
    ) -> None:
        self.forward_reward_weight = forward_reward_weight
        self.contact_cost_weight = contact_cost_weight
        self.contact_cost_range = contact_cost_range
        self.healthy_reward = healthy_reward
        self.terminate_when_unhealthy = terminate_when_unhealthy
        self.healthy_z_range = healthy_z_range
        super().__init__(num_envs, device, seed, **options)

    @functools.cached_property
    def share_of_mass(self) -> Tensor:
        """[bodies] of the whole."""
        return self.constant(self.model.body_mass / self.model.body_mass.sum())

    def speed(self, data: Any, before: Any) -> Tensor:
        return (data.xipos[:, :, 0] - before.xipos[:, :, 0]) @ self.share_of_mass / self.dt

    def cost(self, data: Any, action: Tensor) -> Tensor:
        return self.strain(data, self.contact_cost_weight, self.contact_cost_range)

    def is_healthy(self, data: Any) -> Tensor:
        """[N] bool: neither fallen nor flown."""
        return (data.qpos[:, 2] > self.healthy_z_range[0]) & (
            data.qpos[:, 2] < self.healthy_z_range[1]
        )
