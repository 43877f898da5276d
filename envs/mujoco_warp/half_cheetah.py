"""HalfCheetah-v5 of Gymnasium on mujoco-warp: a cheetah in the plane runs along x; it never ends
but by time.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp._runner import Runner


class HalfCheetah(Runner):
    """Observation (17,): qpos without x, then qvel."""

    model_file = "half_cheetah.xml"
    njmax, nconmax = 64, 24
    frame_skip = 5
    max_episode_steps = 1000
    reward_threshold = 4800.0
    normal_velocity_noise = True

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.1,
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
            (data.qpos[:, int(self.exclude_current_positions_from_observation) :], data.qvel), 1
        )
