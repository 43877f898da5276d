"""Our environments as a gymnasium.vector.VectorEnv of numpy arrays: as Gymnasium's SyncVectorEnv,
from one batch of tensors.
"""

import time

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from gpurl.adapters.transfer import StepArrays, step_in_numpy, to_arrays
from gpurl.envs.vec_env import VecEnv

Info = dict[str, object]


class GymnasiumNumpy(gymnasium.vector.VectorEnv):
    """Autoreset is that of `env`, as its metadata say. Arrays are copies, in one transfer a step.

    Where episodes ended, SAME_STEP returns "final_obs", an object array with None elsewhere, and
    "final_info" with their "episode", as environments under Gymnasium's RecordEpisodeStatistics do.
    It does not set info["episode"], which the vector wrapper of that name needs free. NEXT_STEP
    returns no info: `obs` is the last of the episode, and the next step only resets: it ignores the
    action and returns reward 0.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.autoreset_mode = env.autoreset_mode
        self.metadata = dict(env.metadata)
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._start_times = np.full(env.num_envs, time.perf_counter())  # seconds, of each episode

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[np.ndarray, Info]:
        obs, _ = self.env.reset(seed=seed, options=options)
        # the clocks of the environments that are reset
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self._start_times[np.asarray(mask)] = time.perf_counter()
        return to_arrays([obs])[0], {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:
        """(obs [N, *obs], reward [N] float32, terminated [N], truncated [N], info)."""
        step = step_in_numpy(self.env, actions)
        done = step.terminated | step.truncated
        has_ends = self.autoreset_mode == AutoresetMode.SAME_STEP and done.any()
        return *step[:4], self._final_info(step, done) if has_ends else {}

    def _final_info(self, step: StepArrays, done: np.ndarray) -> Info:
        """The info about the episodes that ended, done [N] bool."""
        # seconds since each episode began, as RecordEpisodeStatistics measures them
        now = time.perf_counter()
        seconds = np.round(now - self._start_times, 6)
        self._start_times[done] = now
        counted = step.is_counted
        episode: Info = {}
        for key, value in (
            ("r", step.episode_return.astype(np.float64)),
            ("l", step.episode_length),
            ("t", seconds),
        ):
            episode[key] = np.where(counted, value, 0)
            episode[f"_{key}"] = counted.copy()
        # rows of objects: an observation where an episode ended, else None
        final_obs = np.full(self.num_envs, None, dtype=object)
        for index in done.nonzero()[0]:
            final_obs[index] = step.final_obs[index]
        return {
            "final_obs": final_obs,
            "_final_obs": done.copy(),
            "final_info": {"episode": episode, "_episode": counted.copy()} if counted.any() else {},
            "_final_info": done.copy(),
        }

    def close_extras(self, **kwargs: object) -> None:
        self.env.close()
