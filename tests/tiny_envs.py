"""Small environments whose right answers are known."""

import os

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import Timestep
from gpurl.kernels.random import CounterRandom


class AlternatingEnv(TorchEnv):
    """A -> B -> A ..., reward 0 in A, 1 in B, cut off after 3 steps, restart in A. With gamma 0.9:
    V(A) = 0.9 / 0.19, V(B) = 1 / 0.19.
    """

    single_observation_space = Box(0.0, 1.0, (2,), np.float32)
    single_action_space = Discrete(2)
    max_episode_steps = 3

    def initial_state(self, rng: CounterRandom) -> State:
        return {"place": torch.zeros(rng.num_envs, dtype=torch.int64, device=rng.device)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        place = state["place"]
        return {"place": 1 - place}, place.float(), torch.zeros_like(place, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return torch.stack((1 - state["place"], state["place"]), dim=1).float()


class ContinuousAlternating(AlternatingEnv):
    """The same with an action that does nothing of another kind."""

    single_action_space = Box(-1.0, 1.0, (1,), np.float32)


class HiddenAlternating(ContinuousAlternating):
    """The same, where the policy sees nothing and only critics see the place."""

    single_observation_space = Box(-1.0, 1.0, (3,), np.float32)
    single_state_space = Box(0.0, 1.0, (2,), np.float32)

    def observe(self, state: State) -> Tensor:
        return torch.zeros(len(state["place"]), 3, device=state["place"].device)

    def observe_state(self, state: State) -> Tensor:
        return super().observe(state)


class RandomWalk(TorchEnv):
    """Noise to look at, episodes that end at random or after 7 steps; action spaces of every kind
    by class attribute.
    """

    single_observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    single_action_space = Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 7

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": rng.normal((3,))}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x = state["x"] + 0.3 * rng.normal((3,))
        return {"x": x}, -x.square().sum(1), rng.uniform() < 0.1

    def observe(self, state: State) -> Tensor:
        return state["x"]


class Endless(RandomWalk):
    """Never ends."""

    max_episode_steps = None

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return {"x": 0.5 * next_state["x"]}, reward, torch.zeros_like(terminated)

    def scripted_action(self, obs: Tensor) -> Tensor:
        return torch.zeros(obs.shape[0], 2)


class Lingering(Endless):
    """Ends at random in the first half of the training, never in the second."""

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, _ = super().transition(state, action, rng)
        return next_state, reward, (rng.uniform() < 0.5) & (self.training_progress <= 0.5)


class Walkers(TorchEnv):
    """Three agents on a line, each paid for being near the origin; the episode ends for all when
    one is too far, or after 7 steps.
    """

    num_agents = 3
    single_observation_space = Box(-np.inf, np.inf, (3, 2), np.float32)
    single_action_space = Box(-1.0, 1.0, (3, 1), np.float32)
    max_episode_steps = 7

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": rng.normal((3,))}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x = state["x"] + 0.3 * action.clamp(-1.0, 1.0).squeeze(2)
        return {"x": x}, -x.abs(), x.abs().amax(1) > 2.5

    def observe(self, state: State) -> Tensor:
        x = state["x"]
        return torch.stack((x, x.mean(1, keepdim=True).expand_as(x)), dim=2)


class Wanderer(RandomWalk):
    """Changes the working directory in its first step of a process."""

    def step(self, actions: Tensor) -> Timestep:
        if os.path.basename(os.getcwd()) != "elsewhere":
            os.makedirs("elsewhere", exist_ok=True)
            os.chdir("elsewhere")
        return super().step(actions)
