"""Humanoid-v5 of Gymnasium in MuJoCo: a humanoid walks along x and must not fall."""

import functools
import math

from torch import Tensor

from gpurl.envs.mujoco._humanoid_body import HumanoidBody
from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco._runner import Runner, inside
from gpurl.envs.mujoco.base import Fields


class Humanoid(Runner, HumanoidBody):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.

    The speed is that of the centre of mass.
    """

    model_file = "humanoid.xml"
    camera = Camera(body="torso", distance=4.0, elevation=-12.0)
    njmax = 64
    nconmax = 48
    # options, as in Gymnasium
    forward_reward_weight: float = 1.25  # reward for each m/s along x
    contact_cost_weight: float = 5e-7  # cost of the squared contact forces
    contact_cost_range: tuple[float, float] = (-math.inf, 10.0)  # limits of that cost
    healthy_reward: float = 5.0  # reward of a step without a fall
    terminate_when_unhealthy: bool = True  # a fall ends the episode
    healthy_z_range: tuple[float, float] = (1.0, 2.0)  # height of the torso without a fall, m

    @functools.cached_property
    def mass_fraction(self) -> Tensor:
        """[bodies] mass of each body as a fraction of the total."""
        return self.constant(self.model.body_mass / self.model.body_mass.sum())

    def speed(self, data: Fields, before: Fields) -> Tensor:
        return (data.xipos[:, :, 0] - before.xipos[:, :, 0]) @ self.mass_fraction / self.dt

    def cost(self, data: Fields, action: Tensor) -> Tensor:
        return self.effort(data, self.contact_cost_weight, self.contact_cost_range)

    def is_healthy(self, data: Fields) -> Tensor:
        """[N] bool: the torso is neither too low nor too high."""
        return inside(data.qpos[:, 2], self.healthy_z_range)
