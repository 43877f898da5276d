"""EnvPool as a Gymnasium vector environment whose `reset` takes a seed, which EnvPool takes in its
constructor only.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.vec_env import Info, Options
from gpurl.errors import UsageError, did_you_mean, install_extra


class EnvPool(gymnasium.vector.VectorEnv):
    """`num_envs` environments of `task` in EnvPool's threads; options go to `envpool.make`."""

    def __init__(self, task: str, num_envs: int, seed: int, options: dict[str, Any]) -> None:
        try:
            import envpool
        except ImportError as error:
            raise UsageError(
                f"vectorization='envpool' needs EnvPool: {install_extra('envpool')} ({error})"
            ) from error
        known = envpool.list_all_envs()
        if task not in known:
            raise UsageError(
                f"EnvPool has no task {task!r}; {did_you_mean(task, known)}It has {len(known)} "
                f"others"
            )
        # a seed needs a new pool
        self._make = lambda seed: envpool.make(
            task, env_type="gymnasium", num_envs=num_envs, seed=seed % 2**31, **options
        )
        self._pool = self._make(seed)
        self._seed = seed
        self._is_new = True
        # the attributes that Gymnasium expects of a vector environment
        self.num_envs = num_envs
        self.max_episode_steps = self._pool.config["max_episode_steps"]
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Batch, Info]:  # type: ignore[override]
        """A `seed` makes a new pool, unless the pool is new and has this seed. With
        options["reset_mask"] [N] bool it resets, and returns, only those environments.
        """
        if seed is not None and not (self._is_new and seed == self._seed):
            self._pool.close()
            self._pool = self._make(seed)
            self._seed = seed
        self._is_new = False
        mask = (options or {}).get("reset_mask")
        indices = () if mask is None else (np.flatnonzero(mask).astype(np.int32),)
        obs, _ = self._pool.reset(*indices)
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, Info]:
        obs, reward, terminated, truncated, _ = self._pool.step(actions)
        return obs, reward, terminated, truncated, {}

    def close_extras(self, **kwargs: object) -> None:
        self._pool.close()
