"""PPO as one central policy of all agents, paid the mean of their rewards: an algorithm for several
agents that needs no new one.
"""

from typing import ClassVar

from torch import Tensor

from gpurl.algorithms.base import Decision
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.envs.vec_env import Timestep


class JointPPO(PPO):
    """Sees the joint observation, takes the joint action."""

    config: PPOConfig
    takes_agents: ClassVar[bool] = True

    def record(
        self, buffer: RolloutBuffer, obs: Tensor, decision: Decision, timestep: Timestep
    ) -> None:
        super().record(buffer, obs, decision, timestep._replace(reward=timestep.reward.mean(1)))
