"""Our environments as a stable-baselines3 VecEnv: numpy arrays, one copy of all results of a
step.
"""

import time
from collections.abc import Iterable

import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

from gpurl.adapters.transfer import step_in_numpy, to_arrays
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

Indices = int | Iterable[int] | None
Info = dict[str, object]


class Sb3Env(Sb3VecEnv):
    """`terminal_observation` is final_obs, `TimeLimit.truncated` a time-out: its algorithms
    bootstrap there from the true successor.

    Infos hold the return and length of episodes, as from a Monitor. All N environments are one
    object: they share their attributes.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self._start_time = time.perf_counter()
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        """The environments draw random numbers from one seed, the first that `seed` set."""
        # seeds and options hold for one reset, as in its own environments
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

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Info]]:
        step = step_in_numpy(self.env, self._actions)
        done = step.terminated | step.truncated
        # a dict for each environment: wrappers write to them
        infos: list[Info] = [{} for _ in range(self.num_envs)]
        for index in done.nonzero()[0]:
            infos[index]["terminal_observation"] = step.final_obs[index]
            infos[index]["TimeLimit.truncated"] = bool(step.truncated[index])
            if step.is_counted[index]:
                infos[index]["episode"] = {
                    "r": float(step.episode_return[index]),
                    "l": int(step.episode_length[index]),
                    "t": round(time.perf_counter() - self._start_time, 6),
                }
        return step.obs, step.reward, done, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[object]:
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: Indices = None) -> None:
        self._require_all("set_attr", indices)
        setattr(self.env, attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: object,
        indices: Indices = None,
        **method_kwargs: object,
    ) -> list[object]:
        """Called once; each environment has the same result."""
        self._require_all("env_method", indices)
        return [getattr(self.env, method_name)(*method_args, **method_kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """True for Monitor only, whose entries the infos have."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def _require_all(self, call: str, indices: Indices) -> None:
        if indices is not None and list(self._get_indices(indices)) != list(range(self.num_envs)):
            raise UsageError(
                f"{call}: the {self.num_envs} environments are one object; leave out indices, got "
                f"{indices}"
            )
