"""One environment of a tensor task as a plain `gymnasium.Env`: numpy arrays, no autoreset. For
debugging and for other tools.
"""

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import Info, Options


class SingleEnv(gymnasium.Env[np.ndarray, Any]):
    """The task `name` with its `options`.

    The task applies its time limit itself, so `gymnasium.make(..., max_episode_steps=...)` can only
    shorten it. With several agents the reward is their mean.
    """

    metadata: Info = {"render_modes": []}  # noqa: RUF012, Gymnasium declares it so

    def __init__(self, name: str, device: torch.device | str = "cpu", **options: Any) -> None:
        self._env = make_env(name, 1, device, **options)
        # copies, because a space holds a random generator
        self.observation_space = copy.deepcopy(self._env.single_observation_space)
        self.action_space = copy.deepcopy(self._env.single_action_space)
        self._seeded = False

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            # as in Gymnasium: without a seed, no two runs are the same
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        obs, _ = self._env.reset(seed=seed)
        return _to_numpy(obs), {}

    def step(self, action: object) -> tuple[np.ndarray, float, bool, bool, Info]:
        # a batch of one; final_obs, as this interface does not reset by itself
        actions = torch.as_tensor(action, device=self._env.device).unsqueeze(0)
        _, reward, terminated, truncated, info = self._env.step(actions)
        obs = _to_numpy(info["final_obs"])
        return obs, float(reward.mean()), bool(terminated), bool(truncated), {}


def _to_numpy(obs: Tensor) -> np.ndarray:
    """The row of obs [1, *obs], copied: a tensor environment may return its state."""
    return obs[0].numpy(force=True).copy()
