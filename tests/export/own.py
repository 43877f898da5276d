"""Environments, networks and algorithms of one's own, for the tests of exports."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiDiscrete
from torch import Tensor, nn

from gpurl.algorithms.base import Decision, PolicyState
from gpurl.algorithms.dqn import DQN
from gpurl.algorithms.ppo import PPO
from gpurl.algorithms.sac import SAC
from gpurl.algorithms.td3 import TD3
from gpurl.kernels.random import CounterRandom
from gpurl.nn.mlp import BodyConfig, make_network
from tests.tiny_envs import HiddenAlternating, RandomWalk


class ManyChoices(RandomWalk):
    """Three choices a step."""

    single_action_space = MultiDiscrete([2, 3, 4])


class HalfBounded(RandomWalk):
    """Actions of a matrix, some with limits, some without."""

    single_action_space = Box(
        np.array([[-1.0, 0.0], [-np.inf, -2.0]], np.float32),
        np.array([[1.0, 5.0], [np.inf, np.inf]], np.float32),
        dtype=np.float32,
    )


class Wide(RandomWalk):
    """Observations and actions of any size: sums of large terms that nearly cancel."""

    single_observation_space = Box(-1000.0, 1000.0, (30,), np.float32)
    single_action_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, state: dict[str, Tensor]) -> Tensor:
        return state["x"].repeat(1, 10)


class Colliding(RandomWalk):
    """Groups of observations called as an output of the file, and as its other name."""

    names = ("action", "obs_action")
    single_observation_space = Dict({name: Box(-np.inf, np.inf, (3,)) for name in names})

    def observe(self, state: dict[str, Tensor]) -> Any:
        return {name: (k + 1) * state["x"] for k, name in enumerate(self.names)}


class Unnamed(Colliding):
    """A group of observations without a name."""

    names = ("", "speed")
    single_observation_space = Dict({name: Box(-np.inf, np.inf, (3,)) for name in names})


class Hidden(HiddenAlternating):
    """Its critic alone sees something; the policy sees noise."""

    def observe(self, state: dict[str, Tensor]) -> Tensor:
        return torch.zeros(len(state["place"]), 3, device=state["place"].device) + 0.5


class Pictures(RandomWalk):
    """Images of bytes."""

    single_observation_space = Box(0, 255, (2, 6, 6), np.uint8)

    def initial_state(self, rng: CounterRandom) -> dict[str, Tensor]:
        return {"x": rng.integers(0, 256, (2, 6, 6)).to(torch.uint8)}

    def transition(
        self, state: dict[str, Tensor], action: Tensor, rng: CounterRandom
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        new = self.initial_state(rng)
        return new, new["x"].float().mean((1, 2, 3)) / 255.0, rng.uniform() < 0.1


class Conv(nn.Module):
    """A trunk: convolutions of images."""

    def __init__(self, shape: tuple[int, ...], channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], channels, 3)
        self.width = channels * math.prod(size - 2 for size in shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x / 255.0)).flatten(1)


class Mixed(nn.Module):
    """A trunk that is one of gpurl's own networks, which compute in C on a CPU."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = make_network(1, shape[0], 8, BodyConfig(hidden=(8,), activation="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(0)


class Rows(nn.Module):
    """An encoder of numbers."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, torch.sin(self.linear(x))), dim=1)


class Fourier(nn.Module):
    """A trunk with an operation that ONNX lacks."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0(self.linear(x))


class Branches(Fourier):
    """A trunk that decides in Python by the value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = 2.0 * y
        return y


class Chooses(Fourier):
    """The same by a tensor; what it asks of sizes is no obstacle."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] > 0
        y = self.linear(x.view(x.shape[0], -1))
        return torch.where(y.sum() > 0, 2.0 * y, y)


class Outer(nn.Module):
    """A trunk whose inner module decides by the value of a tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 8)
        self.gate = Branches((8,))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.first(x))


class Item(Fourier):
    """A trunk that computes with a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * y.abs().max().item()


class Numpy(Fourier):
    """A trunk that computes with numpy."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.from_numpy(np.tanh(y.detach().numpy())) + y


class ReadsItself(Fourier):
    """A trunk that reads a buffer of its own in Python, which does not depend on observations."""

    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.scale)


class TwoEnds(nn.Module):
    """(outputs, value) of observations."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(num_inputs, 8), nn.SiLU(), nn.Linear(8, num_outputs))
        self.critic = nn.Linear(num_inputs, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs), self.critic(obs).squeeze(1)


class OwnNetworkPPO(PPO):
    """PPO with another network."""

    def make_networks(self) -> None:
        super().make_networks()
        self.network = TwoEnds(self.num_inputs, self.head.num_outputs)  # type: ignore[assignment]


class Scaled(nn.Sequential):
    """A trunk: a chain of layers with a `forward` of its own, and a mask that hides a feature."""

    mask: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(shape[0], 8), nn.Tanh())
        self.register_buffer("mask", torch.tensor([-torch.inf] + [0.0] * 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(super().forward(x / 2.0) + self.mask, 1) * 8.0


class OneMember(nn.Module):
    """[B, D] -> [1, B, out], as stacked networks of one member do."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(num_inputs, 8), nn.Linear(8, num_outputs)

    def forward(self, obs: Tensor, noise: CounterRandom | None = None) -> Tensor:
        return self.last(self.first(obs).sin()).unsqueeze(0)


class OwnActorSAC(SAC):
    """SAC with another actor."""

    def make_actor(self) -> Any:
        return OneMember(self.num_inputs, self.actor_outputs())


class OwnActorTD3(TD3):
    """TD3 with another actor."""

    def make_actor(self) -> Any:
        return OneMember(self.num_inputs, self.actor_outputs())


class OwnNetworkDQN(DQN):
    """DQN with another network."""

    def make_networks(self) -> None:
        super().make_networks()
        for name in ("network", "target"):
            setattr(self, name, OneMember(self.num_inputs, self.num_actions))


class OwnActPPO(PPO):
    """PPO that acts otherwise than its network says."""

    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        decision = super().act(obs, policy_state, explore)
        return decision._replace(action=decision.action + 0.5)


class Unknown(PPO):
    """An algorithm that does not say what acts."""

    def actor_modules(self) -> Any:
        return super(PPO, self).actor_modules()
