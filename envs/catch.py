"""Catch: a ball falls through a small picture, and a paddle at its lower edge must be under it.

Source: Mnih et al., "Recurrent models of visual attention" (2014), section 4.2; Osband et al.,
"Behaviour suite for reinforcement learning" (2019), whose rewards and actions these are. The ball
falls one pixel a step; its column and that of the paddle are drawn.
"""

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom

MIN_SIZE = 4  # pixels
WHITE = 255


class Catch(TorchEnv):
    """Observation: a picture (1, size, size), uint8, in which ball and paddle are white. Action: 0
    left, 1 stay, 2 right. Reward at the end: 1 for a caught ball, -1 for a missed one.
    """

    reward_threshold = 0.95
    single_action_space = Discrete(3)

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,
        size: int = 8,  # pixels of a side of the picture
    ) -> None:
        if size < MIN_SIZE:
            raise UsageError(f"catch needs a size of at least {MIN_SIZE} pixels, got {size}")
        self.size = size
        self.max_episode_steps = size - 1
        self.single_observation_space = Box(0, WHITE, (1, size, size), np.uint8)
        super().__init__(num_envs, device, seed, max_episode_steps)
        self._pixels = torch.arange(size, device=self.device)

    def initial_state(self, rng: CounterRandom) -> State:
        columns = rng.integers(0, self.size, (2,))
        return {
            "ball": torch.stack((torch.zeros_like(columns[:, 0]), columns[:, 0]), dim=1),
            "paddle": columns[:, 1].clone(),
        }

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        row, column = state["ball"].unbind(1)
        paddle = (state["paddle"] + action - 1).clamp_(0, self.size - 1)
        row = row + 1
        is_down = row >= self.size - 1
        # 1 where it is caught, -1 where it is missed, 0 before
        reward = torch.where(column == paddle, 1.0, -1.0) * is_down
        return {"ball": torch.stack((row, column), dim=1), "paddle": paddle}, reward, is_down

    def observe(self, state: State) -> Tensor:
        row, column = state["ball"].unbind(1)
        ball = self._lines(row).unsqueeze(2) & self._lines(column).unsqueeze(1)
        lowest = self._lines(torch.full_like(row, self.size - 1))
        paddle = lowest.unsqueeze(2) & self._lines(state["paddle"]).unsqueeze(1)
        return ((ball | paddle).to(torch.uint8) * WHITE).unsqueeze(1)

    def _lines(self, number: Tensor) -> Tensor:
        """[n, size] bool: True at the number [n]."""
        return number.unsqueeze(1) == self._pixels

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        size = self.size
        row, column = state["ball"].tolist()
        paddle = int(state["paddle"])
        canvas.view(-0.5, -0.5, size + 0.5, size + 0.5)
        edge = [(0.0, 0.0), (size, 0.0), (size, size), (0.0, size), (0.0, 0.0)]
        canvas.polygon(edge, "faint")
        canvas.line(edge, "grey", 2.0)
        canvas.polygon(
            [(paddle, 0.0), (paddle + 1.0, 0.0), (paddle + 1.0, 1.0), (paddle, 1.0)], "blue"
        )
        canvas.circle((column + 0.5, size - row - 0.5), 0.45, "orange")
        if action is not None and int(action) != 1:
            middle, way = paddle + 0.5, float(int(action) - 1)
            canvas.arrow([(middle, 0.5), (middle + 1.2 * way, 0.5)], "green", 3.0)
