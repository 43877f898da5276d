"""One environment of a tensor task as a plain `gymnasium.Env`: numpy in, numpy out, no autoreset.
For debugging and for other tools.
"""

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from gpurl.envs.registry import make_env


class SingleEnv(gymnasium.Env[np.ndarray, Any]):
    """The task `name` with its own `options`.

    Its time limit holds inside, so `gymnasium.make(..., max_episode_steps=...)` can only shorten
    it. Of several agents' rewards it gives the mean.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, Gymnasium declares it so

    def __init__(self, name: str, device: torch.device | str = "cpu", **options: Any) -> None:
        self._env = make_env(name, 1, device, **options)
        self.observation_space = copy.deepcopy(
            self._env.single_observation_space
        )  # a space owns a random generator
        self.action_space = copy.deepcopy(self._env.single_action_space)
        self._seeded = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            seed = int(
                self.np_random.integers(2**31)
            )  # as in Gymnasium: without a seed, no two runs are alike
        self._seeded = True
        obs, _ = self._env.reset(seed=seed)
        return _to_numpy(obs), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        actions = torch.as_tensor(action, device=self._env.device).unsqueeze(0)
        _, reward, terminated, truncated, info = self._env.step(actions)
        return (
            _to_numpy(info["final_obs"]),
            float(reward.mean()),
            bool(terminated),
            bool(truncated),
            {},
        )


def _to_numpy(obs: Tensor) -> np.ndarray:
    """The one row of obs [1, *obs], as a copy: what a tensor environment returns may be its
    state.
    """
    return obs[0].numpy(force=True).copy()
