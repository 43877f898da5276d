"""What Gymnasium's tasks that run along x share: pay for speed and health, the price of actions, an
end where health is lost.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco_warp.base import MujocoWarpEnv


class Runner(MujocoWarpEnv):
    """A task sets the weights, and overrides what differs of `speed`, `cost` and `is_healthy`."""

    forward_reward_weight: float
    ctrl_cost_weight: float
    healthy_reward: float = 0.0
    terminate_when_unhealthy: bool = True

    def speed(self, data: Any, before: Any) -> Tensor:
        """[N] along x, m/s."""
        return (data.qpos[:, 0] - before.qpos[:, 0]) / self.dt

    def cost(self, data: Any, action: Tensor) -> Tensor:
        """[N] what the action and what comes of it takes off."""
        return self.ctrl_cost_weight * action.square().sum(1)

    def is_healthy(self, data: Any) -> Tensor:
        """[N] bool: it has not fallen; here nothing can."""
        return torch.ones_like(data.time, dtype=torch.bool)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        reward = self.forward_reward_weight * self.speed(
            data, before
        ) + self.healthy_reward * self.is_healthy(data)
        return reward - self.cost(data, action)

    def terminated(self, data: Any) -> Tensor:
        healthy = self.is_healthy(data)
        return ~healthy if self.terminate_when_unhealthy else torch.zeros_like(healthy)
