"""Pusher-v5 of Gymnasium in MuJoCo: an arm of seven joints pushes a cylinder to a goal."""

import torch
from torch import Tensor

from gpurl.envs.mujoco._pictures import Camera
from gpurl.envs.mujoco.base import Fields, MujocoEnv
from gpurl.kernels.random import CounterRandom

TRIES = 16  # positions drawn for the cylinder


class Pusher(MujocoEnv):
    """Observation (23,): angles and velocities of the arm's joints, positions of hand, cylinder and
    goal.
    """

    model_file = "pusher_v5.xml"
    camera = Camera(distance=2.6, lookat=(0.3, -0.1, -0.2), elevation=-35.0, azimuth=150.0)
    njmax = 32
    nconmax = 16
    frame_skip = 5
    max_episode_steps = 100
    reward_threshold = 0.0
    # options, as in Gymnasium
    reward_near_weight: float = 0.5  # cost of the way from hand to cylinder
    reward_dist_weight: float = 1.0  # cost of the way to the goal
    reward_control_weight: float = 0.1  # cost of the squared action

    def initial_state(self, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        # Gymnasium draws until the cylinder is 17 cm from the goal, as six of ten positions are;
        # all of 16 are nearer once in five million episodes
        positions = torch.stack(
            (rng.uniform(-0.3, 0.0, (TRIES,)), rng.uniform(-0.2, 0.2, (TRIES,))), 2
        )
        first = (positions.norm(dim=2) > 0.17).int().argmax(1)
        cylinder = positions.gather(1, first.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        speed = rng.uniform(-0.005, 0.005, (self.model.nv - 4,))
        arm = self.initial_qpos[:-4].expand(rng.num_envs, -1)
        still = torch.zeros_like(cylinder)
        return torch.cat((arm, cylinder, still), 1), torch.cat((speed, still, still), 1)

    def observe(self, data: Fields) -> Tensor:
        positions = (data.xpos[:, self.body(name)] for name in ("tips_arm", "object", "goal"))
        return torch.cat((data.qpos[:, :7], data.qvel[:, :7], *positions), 1)

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        hand, cylinder, goal = (
            data.xpos[:, self.body(name)] for name in ("tips_arm", "object", "goal")
        )
        near = self.reward_near_weight * (cylinder - hand).norm(dim=1)
        effort = self.reward_control_weight * action.square().sum(1)
        return -self.reward_dist_weight * (cylinder - goal).norm(dim=1) - near - effort
