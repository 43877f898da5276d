"""Reacher-v5 of Gymnasium in MuJoCo: an arm of two links brings its tip to a target."""

import math

import torch
from torch import Tensor

from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco.base import Fields, MujocoEnv
from gpurl.kernels.random import CounterRandom


class Reacher(MujocoEnv):
    """Observation (10,): cosines and sines of the joints, position of the target, velocities of the
    joints, tip minus target in the plane.
    """

    model_file = "reacher.xml"
    camera = Camera(distance=0.7, lookat=(0.0, 0.0, 0.0), elevation=-89.0)
    njmax = 8
    nconmax = 8
    frame_skip = 2
    max_episode_steps = 50
    reward_threshold = -3.75
    observation_names = (
        *("cos(joint0)", "cos(joint1)", "sin(joint0)", "sin(joint1)", "target_x", "target_y"),
        *("joint0 velocity", "joint1 velocity", "tip - target x", "tip - target y"),
    )
    # options, as in Gymnasium
    reward_dist_weight: float = 1.0  # cost of the way to the goal
    reward_control_weight: float = 1.0  # cost of the squared action

    def initial_state(self, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        joints = rng.uniform(-0.1, 0.1, (2,)) + self.initial_qpos[:2]
        # Gymnasium draws until the target is inside a circle; a radius that is the root of a
        # uniform number has the same distribution
        distance = 0.2 * rng.uniform().sqrt()
        angle = rng.uniform(0.0, 2.0 * math.pi)
        target = torch.stack((distance * angle.cos(), distance * angle.sin()), 1)
        speed = rng.uniform(-0.005, 0.005, (2,))
        return torch.cat((joints, target), 1), torch.cat((speed, torch.zeros_like(target)), 1)

    def observe(self, data: Fields) -> Tensor:
        joints = data.qpos[:, :2]
        target = data.qpos[:, 2:]
        offset = self.to_target(data)[:, :2]
        return torch.cat((joints.cos(), joints.sin(), target, data.qvel[:, :2], offset), 1)

    def to_target(self, data: Fields) -> Tensor:
        """[N, 3] from the target to the tip, m."""
        return data.xpos[:, self.body("fingertip")] - data.xpos[:, self.body("target")]

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        distance = self.to_target(data).norm(dim=1)
        effort = action.square().sum(1)
        return -self.reward_dist_weight * distance - self.reward_control_weight * effort
