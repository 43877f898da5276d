"""Tensor tasks for `gymnasium.make_vec`: tasks with several agents get a wrapper that returns one
reward [N], as Gymnasium expects.
"""

from typing import Any

import torch
from gymnasium.vector import VectorEnv, VectorRewardWrapper
from torch import Tensor

from gpurl.envs.registry import make_env


class MeanReward(VectorRewardWrapper):
    """Returns the mean reward of the agents, which info["episode"]["r"] sums too."""

    def rewards(self, rewards: Tensor) -> Tensor:
        """[N, A] -> [N]."""
        return rewards.mean(1)


def make_vector(
    name: str, num_envs: int, device: torch.device | str = "cpu", **options: Any
) -> VectorEnv:
    """`num_envs` environments of the task `name`, with reward [N]."""
    env = make_env(name, num_envs, device, **options)
    return env if env.num_agents == 1 else MeanReward(env)
