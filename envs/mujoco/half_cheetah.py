"""HalfCheetah-v5 of Gymnasium in MuJoCo: a cheetah in the plane runs along x; only the time
limit ends an episode.
"""

import torch
from torch import Tensor

from gpurl.envs.mujoco._runner import Runner
from gpurl.envs.mujoco.base import Fields


class HalfCheetah(Runner):
    """Observation (17,): qpos without x, then qvel."""

    model_file = "half_cheetah.xml"
    njmax = 64
    nconmax = 24
    frame_skip = 5
    max_episode_steps = 1000
    reward_threshold = 4800.0
    normal_velocity_noise = True
    # options, as in Gymnasium
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, int(self.exclude_current_positions_from_observation) :]
        return torch.cat((positions, data.qvel), 1)
