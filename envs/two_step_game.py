"""TwoStepGame: agent 1 chooses one of two matrix games, then two agents play it together.

The better of the two requires coordination.

Source: Rashid et al., "QMIX: monotonic value function factorisation for deep multi-agent
reinforcement learning" (2018), "Two-step game".
A sum of the agents' values cannot represent the values of 2B: VDN learns to get the 7 of 2A, the
best joint policy gets 8.
"""

import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

PAYOFFS = [  # [place, action of agent 1, action of agent 2], for each agent
    [[0.0, 0.0], [0.0, 0.0]],  # the first step
    [[7.0, 7.0], [7.0, 7.0]],  # 2A
    [[0.0, 1.0], [1.0, 8.0]],  # 2B
]


class TwoStepGame(TorchEnv):
    """Observation of each agent: one-hot place (first step, 2A, 2B), one-hot number of the agent.
    Action: 0 or 1.

    Agent 1's first action leads to 2A or 2B, agent 2's does nothing. The second step ends the
    episode.
    """

    num_agents = 2
    observation_names = ("first step", "2A", "2B", "is agent 1", "is agent 2")
    single_observation_space = Box(0.0, 1.0, (2, 5), np.float32)
    single_action_space = MultiDiscrete([2, 2])

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,
    ) -> None:
        super().__init__(num_envs, device, seed, max_episode_steps)
        self._payoffs = torch.tensor(PAYOFFS, device=self.device)
        # every observation there is: a step only looks it up
        place = torch.eye(3, device=self.device).unsqueeze(1).expand(3, 2, 3)
        agent = torch.eye(2, device=self.device).expand(3, 2, 2)
        self._observations = torch.cat((place, agent), dim=2)  # [place, agent, D]

    def initial_state(self, rng: CounterRandom) -> State:
        return {"place": torch.zeros(rng.num_envs, dtype=torch.int64, device=rng.device)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        place = state["place"]
        first, second = action.unbind(1)
        # the payoff counts in the second step; the first one pays 0
        ended = place > 0
        payoff = self._payoffs[place, first, second]
        next_state = {"place": torch.where(ended, place, first + 1)}
        return next_state, torch.stack((payoff, payoff), dim=1), ended

    def observe(self, state: State) -> Tensor:
        return self._observations[state["place"]]

    def scripted_action(self, obs: Tensor) -> Tensor:
        """The best joint policy: to 2B, where both play 1. obs [N, 2, 5] -> action [N, 2]."""
        return torch.ones_like(obs[:, :, 0], dtype=torch.int64)
