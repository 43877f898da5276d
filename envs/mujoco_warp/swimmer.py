"""Swimmer-v5 of Gymnasium on mujoco-warp: three links in a viscous fluid swim along x."""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp._runner import Runner


class Swimmer(Runner):
    """Observation (8,): qpos without x and y, then qvel."""

    model_file = "swimmer.xml"
    njmax, nconmax = 16, 8
    frame_skip = 4
    max_episode_steps = 1000
    reward_threshold = 360.0

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 1e-4,
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        **options: Any,
    ) -> None:
        self.forward_reward_weight = forward_reward_weight
        self.ctrl_cost_weight = ctrl_cost_weight
        self.reset_noise_scale = reset_noise_scale
        self.exclude_current_positions_from_observation = exclude_current_positions_from_observation
        super().__init__(num_envs, device, seed, **options)

    def observe(self, data: Any) -> Tensor:
        return torch.cat(
            (data.qpos[:, 2 * int(self.exclude_current_positions_from_observation) :], data.qvel), 1
        )
