"""A stand-in for Atari's package: `ALE/Pong-v5`, as Gymnasium's AtariPreprocessing uses it."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Screen:
    """The emulator, with pictures of noise."""

    random = np.random.default_rng(0)

    def lives(self) -> int:
        return 0

    def getScreenGrayscale(self, out: np.ndarray) -> None:
        out[:] = self.random.integers(0, 256, out.shape)


class Pong(gymnasium.Env):
    """A hundred pictures."""

    observation_space = Box(0, 255, (210, 160, 3), np.uint8)
    action_space = Discrete(6)

    def __init__(self, frameskip: int = 4, render_mode: str | None = None) -> None:
        self._frameskip = frameskip
        self.render_mode = render_mode
        self.ale = Screen()

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.frames = 0
        self.ale.random = self.np_random
        return np.zeros((210, 160, 3), np.uint8), {"lives": 0}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Any]:
        self.frames += 1
        return np.zeros((210, 160, 3), np.uint8), 1.0, self.frames >= 100, False, {"lives": 0}


if "ALE/Pong-v5" not in gymnasium.registry:
    gymnasium.register("ALE/Pong-v5", Pong, max_episode_steps=27_000)
