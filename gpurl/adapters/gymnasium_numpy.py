"""Our environments as a gymnasium.vector.VectorEnv of numpy arrays: what Gymnasium's SyncVectorEnv
gives, from one batch of tensors.
"""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from gpurl.adapters.transfer import StepArrays, step_in_numpy, to_arrays
from gpurl.envs.vec_env import VecEnv


class GymnasiumNumpy(gymnasium.vector.VectorEnv):
    """Autoreset is that of `env`, as its metadata say. Arrays are copies, in one transfer a step.

    Where episodes ended, SAME_STEP gives "final_obs", an object array with None elsewhere, and
    "final_info" with their "episode", as environments under Gymnasium's RecordEpisodeStatistics do;
    info["episode"] itself is left to the vector wrapper of that name, which wants it free.
    NEXT_STEP gives no info: `obs` is the last one, and the step after it is none (its action is
    ignored, its reward 0).
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs, self.autoreset_mode = env.num_envs, env.autoreset_mode
        self.metadata = dict(env.metadata)
        self.single_observation_space, self.single_action_space = (
            env.single_observation_space,
            env.single_action_space,
        )
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._began = np.full(env.num_envs, time.perf_counter())  # seconds, of each episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        obs, _ = self.env.reset(seed=seed, options=options)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self._began[np.asarray(mask)] = time.perf_counter()
        return to_arrays([obs])[0], {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """(obs [N, *obs], reward [N] float32, terminated [N], truncated [N], info)."""
        step = step_in_numpy(self.env, actions)
        done = step.terminated | step.truncated
        has_ends = self.autoreset_mode == AutoresetMode.SAME_STEP and done.any()
        return *step[:4], self._final(step, done) if has_ends else {}

    def _final(self, step: StepArrays, done: np.ndarray) -> dict[str, Any]:
        """What info says of the episodes that ended, done [N] bool."""
        now, counted = time.perf_counter(), step.is_counted
        values = {
            "r": step.episode_return.astype(np.float64),
            "l": step.episode_length,
            "t": np.round(now - self._began, 6),
        }
        self._began[done] = now
        episode: dict[str, Any] = {}
        for key, value in values.items():
            episode |= {key: np.where(counted, value, 0), f"_{key}": counted.copy()}
        last = np.full(self.num_envs, None, dtype=object)
        for index in done.nonzero()[0]:
            last[index] = step.final_obs[index]
        final_info = {"episode": episode, "_episode": counted.copy()} if counted.any() else {}
        return {
            "final_obs": last,
            "_final_obs": done.copy(),
            "final_info": final_info,
            "_final_info": done.copy(),
        }

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()
