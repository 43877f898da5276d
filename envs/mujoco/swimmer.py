"""Swimmer-v5 of Gymnasium in MuJoCo: three links in a viscous fluid swim along x."""

import torch
from torch import Tensor

from gpurl.envs.mujoco._runner import Runner
from gpurl.envs.mujoco.base import Fields


class Swimmer(Runner):
    """Observation (8,): qpos without x and y, then qvel."""

    model_file = "swimmer.xml"
    njmax = 16
    nconmax = 8
    frame_skip = 4
    max_episode_steps = 1000
    reward_threshold = 360.0
    # options, as in Gymnasium
    forward_reward_weight: float = 1.0  # reward for each m/s along x
    ctrl_cost_weight: float = 1e-4  # cost of the squared action
    reset_noise_scale: float = 0.1  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, 2 * int(self.exclude_current_positions_from_observation) :]
        return torch.cat((positions, data.qvel), 1)
