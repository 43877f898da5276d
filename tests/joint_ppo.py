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

    def record_step(
        self,
        buffer: RolloutBuffer,
        obs: Tensor,
        decision: Decision,
        timestep: Timestep,
        final_value: Tensor | None = None,
    ) -> None:
        timestep = timestep._replace(reward=timestep.reward.mean(1))
        super().record_step(buffer, obs, decision, timestep, final_value)
