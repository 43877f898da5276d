"""Base of Gymnasium's tasks that run along x: rewards for speed and health, a cost of actions, and
termination when the body is unhealthy.
"""

import torch
from torch import Tensor

from gpurl.envs.mujoco.base import Fields, MujocoEnv


class Runner(MujocoEnv):
    """A task sets the weights and may override `speed`, `cost` and `is_healthy`."""

    forward_reward_weight: float
    ctrl_cost_weight: float
    healthy_reward = 0.0
    terminate_when_unhealthy = True

    def speed(self, data: Fields, before: Fields) -> Tensor:
        """[N] speed along x, m/s."""
        return (data.qpos[:, 0] - before.qpos[:, 0]) / self.dt

    def cost(self, data: Fields, action: Tensor) -> Tensor:
        """[N] cost of the action and of its effects."""
        return self.ctrl_cost_weight * action.square().sum(1)

    def is_healthy(self, data: Fields) -> Tensor:
        """[N] bool: the body has not fallen; by default it never does."""
        return torch.ones_like(data.time, dtype=torch.bool)

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        progress = self.forward_reward_weight * self.speed(data, before)
        health = self.healthy_reward * self.is_healthy(data)
        return progress + health - self.cost(data, action)

    def terminated(self, data: Fields) -> Tensor:
        healthy = self.is_healthy(data)
        return ~healthy if self.terminate_when_unhealthy else torch.zeros_like(healthy)


def inside(values: Tensor, limits: tuple[float, float]) -> Tensor:
    """bool: where `values` are between the limits, exclusive."""
    return (values > limits[0]) & (values < limits[1])
