"""An EnvPool as a Gymnasium vector environment whose seed can be set at a reset, which EnvPool
itself takes only when it is made.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from gpurl.errors import UsageError, did_you_mean


class EnvPool(gymnasium.vector.VectorEnv):
    """`num_envs` environments of `task` in EnvPool's threads; options go to `envpool.make`."""

    def __init__(self, task: str, num_envs: int, seed: int, options: dict[str, Any]) -> None:
        try:
            import envpool
        except ImportError as error:
            raise UsageError(
                f"vectorization='envpool' needs EnvPool: pip install 'gpurl[envpool]' ({error})"
            ) from error
        if task not in (known := envpool.list_all_envs()):
            raise UsageError(
                f"EnvPool has no task {task!r}; {did_you_mean(task, known)}It has {len(known)} "
                f"others"
            )
        self._make = lambda seed: envpool.make(
            task, env_type="gymnasium", num_envs=num_envs, seed=seed % 2**31, **options
        )
        self._pool, self._made_with, self._is_fresh = self._make(seed), seed, True
        self.num_envs, self.max_episode_steps = num_envs, self._pool.config["max_episode_steps"]
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = (
            self._pool.observation_space,
            self._pool.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        """With a `seed` the pool is made anew, unless it was just made with it.
        options["reset_mask"] [N] bool: those only.
        """
        if seed is not None and not (self._is_fresh and seed == self._made_with):
            self._pool.close()
            self._pool, self._made_with = self._make(seed), seed
        self._is_fresh = False
        mask = (options or {}).get("reset_mask")
        obs, _ = (
            self._pool.reset()
            if mask is None
            else self._pool.reset(np.flatnonzero(mask).astype(np.int32))
        )
        return obs, {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self._pool.step(actions)
        return obs, reward, terminated, truncated, {}

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()
