"""HumanoidStandup-v5 of Gymnasium on mujoco-warp: a humanoid that lies on its back gets up; it
never ends but by time.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp._humanoid_body import HumanoidBody


class HumanoidStandup(HumanoidBody):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.

    The reward is the height over the seconds of one step of physics, as Gymnasium has it, which
    never uses its uph_cost_weight.
    """

    model_file = "humanoidstandup.xml"
    njmax, nconmax = 96, 48

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        impact_cost_weight: float = 0.5e-6,
        impact_cost_range: tuple[float, float] = (-math.inf, 10.0),
        **options: Any,
    ) -> None:
        self.impact_cost_weight = impact_cost_weight
        self.impact_cost_range = impact_cost_range
        super().__init__(num_envs, device, seed, **options)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        height = data.qpos[:, 2] / float(self.model.opt.timestep)
        return height - self.strain(data, self.impact_cost_weight, self.impact_cost_range) + 1.0
