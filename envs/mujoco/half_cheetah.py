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
    forward_reward_weight: float = 1.0  # reward for each m/s along x
    ctrl_cost_weight: float = 0.1  # cost of the squared action
    reset_noise_scale: float = 0.1  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, int(self.exclude_current_positions_from_observation) :]
        return torch.cat((positions, data.qvel), 1)
