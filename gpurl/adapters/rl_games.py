"""Our environments as an rl_games IVecEnv, registered under a name: tensors stay on the device."""

import logging
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Tuple
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from gpurl.adapters.transfer import log_of_all, one_reward
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

Info = dict[str, object]


class RlGamesEnv(IVecEnv):
    """Observations are {"obs": [N, *obs]}, with privileged observations as "states", for its
    central value.

    rl_games adds gamma V(s_t) to the reward of a time-out (value_bootstrap), the value of the
    observation before it, and has no place for final_obs. It clips actions itself (clip_actions)
    and scales them to the limits of the Box, which must be finite: a Box without limits becomes
    -1 to 1. Its checkpoints hold the environments' state; after a restore it begins new episodes,
    with any number of environments.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        """Seed the next reset; without it the environments keep their own."""
        self._seed = seed

    def reset(self) -> dict[str, Tensor]:
        obs, info = self.env.reset(seed=self._seed)
        self._seed = None
        return _observations(obs, info.get("state"))

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Info]:
        """(observations, rewards [N], dones [N] uint8, infos)."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        infos: Info = {"time_outs": truncated}
        # a copy: rl_games' observers read means there, and write to it
        if "log" in info:
            infos["episode"] = log_of_all(info["log"])
        observations = _observations(obs, info.get("state"))
        return observations, one_reward(reward), (terminated | truncated).byte(), infos

    def get_env_info(self) -> Info:
        """The spaces of one environment."""
        state_space = self.env.single_state_space
        action_space = self.env.single_action_space
        if isinstance(action_space, MultiDiscrete):
            action_space = Tuple([Discrete(int(count)) for count in action_space.nvec])
        if isinstance(action_space, Box):
            low, high = action_space.low, action_space.high
            low = np.where(np.isinf(low), np.where(high > -1.0, -1.0, high - 2.0), low)
            high = np.where(np.isinf(high), np.where(low < 1.0, 1.0, low + 2.0), high)
            action_space = Box(low.astype(np.float32), high.astype(np.float32))
        return {
            "observation_space": self.env.single_observation_space,
            "action_space": action_space,
            "state_space": state_space,
            "use_global_observations": state_space is not None,
            "agents": 1,
            "value_size": 1,
        }

    @property
    def observation_space(self) -> object:
        """Of one environment; playing asks for it so."""
        return self.get_env_info()["observation_space"]

    @property
    def action_space(self) -> object:
        """Of one environment."""
        return self.get_env_info()["action_space"]

    def close(self) -> None:
        self.env.close()

    def get_env_state(self) -> dict[str, object]:
        """The state that `set_env_state` restores."""
        return {
            "num_envs": self.env.num_envs,
            "state": self.env.state_dict(),
            "curriculum": self.env.curriculum_state(),
        }

    def set_env_state(self, env_state: dict[str, Any] | None) -> None:
        """Continue from `get_env_state()`; of another number of environments only the curriculum is
        taken.
        """
        if not env_state or "num_envs" not in env_state:  # older ones have no number
            return
        if env_state["num_envs"] == self.env.num_envs:
            self.env.load_state_dict(env_state["state"])
        else:
            logging.getLogger("gpurl").warning(
                "the state of %d environments is left out, as there are %d now",
                env_state["num_envs"],
                self.env.num_envs,
            )
        self.env.load_curriculum_state(env_state["curriculum"])


def register(env: VecEnv, name: str) -> RlGamesEnv:
    """The adapter, which rl_games finds by the env_name `name` to train and to play."""
    # its networks have one output for each action, and one agent a row
    space = env.single_action_space
    if (isinstance(space, Box) and len(space.shape) != 1) or env.num_agents > 1:
        raise UsageError(
            f"rl_games takes one agent with actions of one axis, this environment has "
            f"{env.num_agents} and {space}"
        )
    adapter = RlGamesEnv(env)

    def make(config_name: str, num_actors: int, **options: object) -> RlGamesEnv:
        if num_actors != env.num_envs:
            raise UsageError(
                f"num_actors in rl_games' configuration is {num_actors}, but {config_name!r} has "
                f"{env.num_envs} environments"
            )
        return adapter

    # training gets its environments by `make`, playing by env_creator
    vecenv.register(name, make)
    configuration = {"vecenv_type": name, "env_creator": lambda **options: adapter}
    env_configurations.register(name, configuration)
    return adapter


def _observations(obs: Tensor, state: Tensor | None) -> dict[str, Tensor]:
    return {"obs": obs} if state is None else {"obs": obs, "states": state}
