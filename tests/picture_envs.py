"""Environments with named observations and images, for tests."""

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom


class Seen(TorchEnv):
    """A picture and two numbers, drawn anew in each step. Action: 0 or 1; the reward is 1 for the
    one that the first number's sign says.
    """

    max_episode_steps = 6
    single_observation_space = Dict(
        {
            "camera": Box(0, 255, (8, 8, 3), np.uint8),
            "speed": Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
    single_action_space = Discrete(2)

    def initial_state(self, rng: CounterRandom) -> State:
        pixels = rng.integers(0, 256, (8, 8, 3)).to(torch.uint8)
        return {"pixels": pixels, "numbers": 3.0 + 2.0 * rng.normal((2,))}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        right = (state["numbers"][:, 0] > 3.0).long()
        return self.initial_state(rng), (action == right).float(), rng.uniform() < 0.1

    def observe(self, state: State) -> dict[str, Tensor]:
        return {"camera": state["pixels"], "speed": state["numbers"]}


class Named(Seen):
    """Numbers only, in two groups whose order is not that of their names."""

    single_observation_space = Dict(
        {
            "speed": Box(-np.inf, np.inf, (2,), np.float32),
            "place": Box(-1.0, 1.0, (3, 1), np.float32),
        }
    )

    def observe(self, state: State) -> dict[str, Tensor]:
        place = state["pixels"][:, 0, 0].float() / 128.0 - 1.0
        return {"speed": state["numbers"], "place": place.unsqueeze(2).clamp(-1.0, 1.0)}


class WithNumber(Seen):
    """A picture and a group of one number without an axis."""

    single_observation_space = Dict(
        {
            "camera": Seen.single_observation_space["camera"],
            "speed": Box(-np.inf, np.inf, (), np.float32),
        }
    )

    def observe(self, state: State) -> dict[str, Tensor]:
        return {"camera": state["pixels"], "speed": state["numbers"][:, 0]}


class Pixels(Seen):
    """The picture alone, channels last."""

    single_observation_space = Box(0, 255, (8, 8, 3), np.uint8)

    def observe(self, state: State) -> Tensor:  # type: ignore[override]
        return state["pixels"]


class GroupTrunk(nn.Module):
    """A trunk of one's own over named observations; notes what it was given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.layer = nn.Linear(shapes["speed"][0] + 3, 8)
        self.given: dict[str, tuple[torch.dtype, tuple[int, ...], float]] = {}

    def forward(self, groups: dict[str, Tensor]) -> Tensor:
        if not torch.compiler.is_exporting():
            self.given = {
                name: (part.dtype, tuple(part.shape[1:]), float(part.detach().abs().max()))
                for name, part in groups.items()
            }
        other = groups["camera"].mean((1, 2)) if "camera" in groups else groups["place"].flatten(1)
        return self.layer(torch.cat((groups["speed"], other), dim=1)).tanh()


class SumOfPixels(nn.Module):
    """An encoder of one's own: the mean of the colours of a picture [B, 8, 8, 3]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2)) * self.scale


class LargeKernel(nn.Module):
    """An encoder, or a trunk, whose kernel needs 12 pixels."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(shape[-1], 4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(-1, 1)).flatten(1)


class Pointing(TorchEnv):
    """A picture with one white column, and a number: the action is to be the column's place in
    [-0.7, 0.7] plus the number. An episode has one step; reward: 1 - |action - place - number|.
    """

    single_observation_space = Dict(
        {
            "camera": Box(0, 255, (1, 8, 8), np.uint8),
            "offset": Box(-0.3, 0.3, (1,), np.float32),
        }
    )
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        offset = 0.3 * (2.0 * rng.uniform() - 1.0)
        return {"column": rng.integers(0, 8), "offset": offset.unsqueeze(1)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        place = 0.2 * state["column"].float() - 0.7 + state["offset"][:, 0]
        reward = 1.0 - (action[:, 0] - place).abs()
        return self.initial_state(rng), reward, torch.ones_like(reward, dtype=torch.bool)

    def observe(self, state: State) -> dict[str, Tensor]:
        columns = torch.arange(8, device=state["column"].device)
        row = (state["column"].unsqueeze(1) == columns).to(torch.uint8) * 255
        camera = row.view(-1, 1, 1, 8).expand(-1, 1, 8, 8).contiguous()
        return {"camera": camera, "offset": state["offset"]}
