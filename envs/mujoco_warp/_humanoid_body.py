"""What Gymnasium's two tasks of the humanoid share: its body, what is seen of it, and what its
contacts cost.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp.base import MujocoWarpEnv


class HumanoidBody(MujocoWarpEnv):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.
    """

    frame_skip = 5
    max_episode_steps = 1000

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 1e-2,
        exclude_current_positions_from_observation: bool = True,
        include_cinert_in_observation: bool = True,
        include_cvel_in_observation: bool = True,
        include_qfrc_actuator_in_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
        **options: Any,
    ) -> None:
        self.ctrl_cost_weight = ctrl_cost_weight
        self.reset_noise_scale = reset_noise_scale
        self.exclude_current_positions_from_observation = exclude_current_positions_from_observation
        self.include_cinert_in_observation = include_cinert_in_observation
        self.include_cvel_in_observation = include_cvel_in_observation
        self.include_qfrc_actuator_in_observation = include_qfrc_actuator_in_observation
        self.include_cfrc_ext_in_observation = include_cfrc_ext_in_observation
        super().__init__(num_envs, device, seed, **options)

    def observe(self, data: Any) -> Tensor:
        parts = [
            data.qpos[:, 2:] if self.exclude_current_positions_from_observation else data.qpos,
            data.qvel,
        ]
        if self.include_cinert_in_observation:
            parts.append(data.cinert[:, 1:].flatten(1))
        if self.include_cvel_in_observation:
            parts.append(data.cvel[:, 1:].flatten(1))
        if self.include_qfrc_actuator_in_observation:
            parts.append(data.qfrc_actuator[:, 6:])
        if self.include_cfrc_ext_in_observation:
            parts.append(data.cfrc_ext[:, 1:].flatten(1))
        return torch.cat(parts, 1)

    def strain(
        self, data: Any, contact_weight: float, contact_range: tuple[float, float]
    ) -> Tensor:
        """[N] of what the motors do and of what the body runs into."""
        contacts = (contact_weight * data.cfrc_ext.square().sum((1, 2))).clamp(*contact_range)
        return self.ctrl_cost_weight * data.ctrl.square().sum(1) + contacts
