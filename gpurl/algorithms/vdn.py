"""Value decomposition networks (Sunehag et al. 2018): DQN for a team, whose value is the sum of its
agents' values.
"""

from gymnasium.spaces import MultiDiscrete
from torch import Tensor

from gpurl.algorithms.dqn import DQN, DQNConfig
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.nn.acting import Actor, BestOfAgents, Shaped, chain
from gpurl.nn.q_networks import who_takes


class VDN(DQN):
    """Agents share one network and the mean of their rewards: observations [N, A, D], actions
    [N, A].
    """

    config: DQNConfig
    takes_agents = True

    def read_space(self) -> int:
        space = self.action_space
        if (
            not isinstance(space, MultiDiscrete)
            or space.nvec.ndim != 1
            or len({*space.nvec}) != 1
            or space.start.any()
        ):
            raise UsageError(
                f"VDN needs a MultiDiscrete action space, the same number for each agent, this one "
                f"is {space}{who_takes(space)}"
            )
        self.num_agents = len(space.nvec)
        obs_shape = self.observation_space.shape or ()
        if len(obs_shape) < 2 or obs_shape[0] != self.num_agents:
            raise UsageError(
                f"VDN needs an observation of each of its {self.num_agents} agents, this space is "
                f"{self.observation_space}"
            )
        if self.config.atoms or self.config.quantiles:
            raise UsageError("VDN sums values, not distributions: leave out atoms and quantiles")
        if self.config.network.noisy:
            raise UsageError(
                "VDN explores by random actions of each agent: leave out network.noisy"
            )
        if self.config.network.encoder not in ("auto", "none") or self.config.network.encoders:
            raise UsageError(
                "VDN has no encoder of observations: leave out network.encoder and encoders"
            )
        return int(space.nvec[0])

    def encoder_config(self) -> None:
        return None  # a row is of one agent

    def actor_modules(self) -> Actor:
        values = super().actor_modules().network
        rows = Shaped((self.num_inputs // self.num_agents,))  # agents share the network
        return Actor(chain(rows, values), BestOfAgents(self.num_agents))

    def action_shape(self) -> tuple[int, ...]:
        return (self.num_agents,)

    def reward_of(self, timestep: Timestep) -> Tensor:
        return timestep.reward.mean(1) if timestep.reward.dim() > 1 else timestep.reward

    def mix(self, values: Tensor) -> Tensor:
        return values.sum(-1)
