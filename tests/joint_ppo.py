"""PPO as one central policy of all agents, paid the mean of their rewards: an algorithm for several
agents that needs no new one.
"""

from typing import ClassVar

from torch import Tensor

from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.envs.vec_env import Timestep


class JointPPO(PPO):
    """Sees the joint observation, takes the joint action."""

    config: PPOConfig
    takes_agents: ClassVar[bool] = True

    def reward_of(self, timestep: Timestep) -> Tensor:
        return timestep.reward.mean(1) if timestep.reward.dim() > 1 else timestep.reward
