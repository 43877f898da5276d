"""A tensor task as `gymnasium.make_vec` gives it: itself, or with several agents behind a wrapper,
since Gymnasium knows one reward [N].
"""

from typing import Any

import torch
from gymnasium.vector import VectorEnv, VectorRewardWrapper
from torch import Tensor

from gpurl.envs.registry import make_env


class MeanReward(VectorRewardWrapper):
    """Gives the mean over agents, as info["episode"]["r"] does."""

    def rewards(self, rewards: Tensor) -> Tensor:
        """[N, A] -> [N]."""
        return rewards.mean(1)


def make_vector(
    name: str, num_envs: int, device: torch.device | str = "cpu", **options: Any
) -> VectorEnv:
    """`num_envs` environments of the task `name`, reward [N]."""
    env = make_env(name, num_envs, device, **options)
    return env if env.num_agents == 1 else MeanReward(env)
