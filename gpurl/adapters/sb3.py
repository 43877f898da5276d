"""Our environments as a stable-baselines3 VecEnv: numpy at the border, one copy of all that a step
returns.
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

from gpurl.adapters.transfer import step_in_numpy, to_arrays
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

Indices = int | Iterable[int] | None


class Sb3Env(Sb3VecEnv):
    """`terminal_observation` is final_obs, `TimeLimit.truncated` a time-out: its algorithms
    bootstrap there from the true successor.

    Episodes come with return and length, as from a Monitor. All N environments are one object: an
    attribute of one is that of all.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self._began = time.perf_counter()
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        """The environments draw their numbers from one seed, the first of those that `seed` set."""
        options = self._options[0]
        if any(other != options for other in self._options):
            raise UsageError(
                f"the environments are reset as one and take the same options, got {self._options}"
            )
        obs, _ = self.env.reset(seed=self._seeds[0], options=options or None)
        self._reset_seeds()
        self._reset_options()
        return to_arrays([obs])[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        step = step_in_numpy(self.env, self._actions)
        done = step.terminated | step.truncated
        infos: list[dict[str, Any]] = [
            {} for _ in range(self.num_envs)
        ]  # not one for all: wrappers write into them
        for index in done.nonzero()[0]:
            infos[index] |= {
                "terminal_observation": step.final_obs[index],
                "TimeLimit.truncated": bool(step.truncated[index]),
            }
            if step.is_counted[index]:
                seconds = round(time.perf_counter() - self._began, 6)
                infos[index]["episode"] = {
                    "r": float(step.episode_return[index]),
                    "l": int(step.episode_length[index]),
                    "t": seconds,
                }
        return step.obs, step.reward, done, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        self._all_at_once("set_attr", indices)
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Called once, for all: each has the same result."""
        self._all_at_once("env_method", indices)
        return [getattr(self.env, method_name)(*method_args, **method_kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Of Gymnasium's wrappers none, but what a Monitor adds to infos is there."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def _all_at_once(self, call: str, indices: Indices) -> None:
        if indices is not None and list(self._get_indices(indices)) != list(range(self.num_envs)):
            raise UsageError(
                f"{call}: the {self.num_envs} environments are one object; leave out indices, got "
                f"{indices}"
            )
