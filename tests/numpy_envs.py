"""Small Gymnasium environments in numpy, single and vectorised, whose every step is known."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from gpurl.envs.gymnasium_cpu import GymnasiumCpu


class Tour(gymnasium.Env):
    """Random episodes: obs is (noise, steps so far), reward depends on both and on the action; ends
    by either flag, or by both.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1.0, 1.0, (1,), np.float64)

    def _obs(self) -> np.ndarray:
        return np.array([self.np_random.normal(), self.steps])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.obs = self._obs()
        return self.obs, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self.obs[0] + 10.0 * self.obs[1] + 0.1 * action[0])
        self.steps += 1
        self.obs = self._obs()
        terminated, truncated = self.np_random.random(2) < 0.2
        return self.obs, reward, bool(terminated), bool(truncated), {"steps": self.steps}


class Batch(gymnasium.vector.VectorEnv):
    """Two environments in numpy that end at their second step; what it gives as final_obs, and its
    mode, are set from outside.
    """

    single_observation_space, single_action_space = Box(-9.0, 9.0, (1,)), Discrete(2)
    num_envs = 2

    def __init__(self, mode: Any, info: Callable[[], dict[str, Any]] = dict) -> None:
        self.metadata = {"autoreset_mode": mode} if mode is not None else {}
        self.observation_space, self.action_space = (
            batch_space(self.single_observation_space, 2),
            batch_space(self.single_action_space, 2),
        )
        self.info, self.was_closed, self.obs = info, False, np.zeros((2, 1), np.float32)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.obs = np.zeros((2, 1), np.float32)
        return self.obs, {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self.obs = self.obs + 1.0
        done = self.obs[:, 0] >= 2
        obs = (
            np.where(done[:, None], 0.0, self.obs)
            if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
            else self.obs
        )
        self.obs = obs
        return obs, np.ones(2), done, np.zeros(2, bool), self.info() if done.any() else {}

    def close_extras(self, **kwargs: Any) -> None:
        self.was_closed = True


def second_step(batch: Batch) -> Any:
    env = GymnasiumCpu(2, env=batch)
    env.reset(seed=0)
    env.step(torch.zeros(2, dtype=torch.int64))
    return env.step(torch.zeros(2, dtype=torch.int64))
