"""HumanoidStandup-v5 of Gymnasium in MuJoCo: a humanoid that lies on its back gets up; only
the time limit ends an episode.
"""

import math

from torch import Tensor

from gpurl.envs.mujoco._humanoid_body import HumanoidBody
from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco.base import Fields


class HumanoidStandup(HumanoidBody):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.

    The reward is the height divided by the seconds of one step of physics, as in Gymnasium, which
    never uses its uph_cost_weight.
    """

    model_file = "humanoidstandup.xml"
    camera = Camera(body="torso", distance=4.0, elevation=-15.0)
    njmax = 96
    nconmax = 48
    # options, as in Gymnasium
    impact_cost_weight: float = 0.5e-6  # cost of the squared contact forces
    impact_cost_range: tuple[float, float] = (-math.inf, 10.0)  # limits of that cost

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        height = data.qpos[:, 2] / float(self.model.opt.timestep)
        return height - self.effort(data, self.impact_cost_weight, self.impact_cost_range) + 1.0
