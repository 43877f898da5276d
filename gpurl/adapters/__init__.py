"""Our environments for other trainers: one function a library, which imports it when called.

Each takes an environment from `gpurl.envs.registry.make_env` and owns it: step it through the
adapter only. Several agents appear as one, with joint observations and actions and the mean of
their rewards.
"""

import importlib
import logging
from types import ModuleType
from typing import TYPE_CHECKING

from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError, install_extra

if TYPE_CHECKING:
    from gpurl.adapters.gymnasium_numpy import GymnasiumNumpy
    from gpurl.adapters.rl_games import RlGamesEnv
    from gpurl.adapters.rsl_rl import RslRlEnv
    from gpurl.adapters.sb3 import Sb3Env
    from gpurl.adapters.skrl import SkrlEnv
    from gpurl.adapters.torchrl import TorchRlEnv

LIBRARIES = {  # adapter's file: (the library, the extra that installs it)
    "sb3": ("stable-baselines3", "sb3"),
    "rsl_rl": ("rsl-rl-lib", "rsl-rl"),
    "skrl": ("skrl", "skrl"),
    "torchrl": ("torchrl", "torchrl"),
    "rl_games": ("rl-games", "rl-games"),
}


def to_sb3(env: VecEnv) -> "Sb3Env":
    """A stable-baselines3 VecEnv for `PPO("MlpPolicy", to_sb3(env))` and its other algorithms; see
    `gpurl.adapters.sb3`.
    """
    _check(env, "stable-baselines3")
    return _module("sb3").Sb3Env(env)


def to_rsl_rl(env: VecEnv) -> "RslRlEnv":
    """An rsl_rl VecEnv for `OnPolicyRunner(to_rsl_rl(env), settings)`; see
    `gpurl.adapters.rsl_rl`.
    """
    _check(env, "rsl_rl")
    return _module("rsl_rl").RslRlEnv(env)


def to_skrl(env: VecEnv) -> "SkrlEnv":
    """A skrl Wrapper for its trainers, as from its `wrap_env`; for agents that need the true
    successor see `gpurl.adapters.skrl.with_final_obs`.
    """
    _check(env, "skrl")
    return _module("skrl").SkrlEnv(env)


def to_torchrl(env: VecEnv) -> "TorchRlEnv":
    """A TorchRL EnvBase of batch size [N]; see `gpurl.adapters.torchrl`."""
    # the adapter resets environments itself, so only late resets leave steps that are no transition
    _check(env, "TorchRL" if env.resets_late else None)
    return _module("torchrl").TorchRlEnv(env)


def to_rl_games(env: VecEnv, name: str = "gpurl") -> "RlGamesEnv":
    """An IVecEnv, registered as `name`, the env_name in a configuration of rl_games; see
    `gpurl.adapters.rl_games`.
    """
    _check(env, "rl_games")
    return _module("rl_games").register(env, name)


def to_gymnasium_numpy(env: VecEnv) -> "GymnasiumNumpy":
    """A gymnasium.vector.VectorEnv of numpy arrays, for Gymnasium's wrappers and CleanRL's scripts;
    see `gpurl.adapters.gymnasium_numpy`.
    """
    _check(env, None)
    return _module("gymnasium_numpy").GymnasiumNumpy(env)


def _module(name: str) -> ModuleType:
    """The adapter's file; UsageError where its library is missing."""
    try:
        return importlib.import_module(f"gpurl.adapters.{name}")
    except ImportError as error:
        library, extra = LIBRARIES.get(name, (name, name))
        raise UsageError(f"to_{name} needs {library}: {install_extra(extra)} ({error})") from error


def _check(env: VecEnv, trains_on_reset_steps: str | None) -> None:
    """UsageError for what no adapter takes; a warning where the library `trains_on_reset_steps`
    would learn from the steps in which environments only reset.
    """
    if not isinstance(env, VecEnv):
        raise UsageError(
            f"wanted an environment, as make_env(name, num_envs) makes it, got a "
            f"{type(env).__name__}: {env!r}"
        )
    # gymnasium_cpu only
    if restarts := getattr(env, "restart_workers", 0):
        raise UsageError(
            f"{type(env).__name__}: wanted restart_workers 0, got {restarts}: the step in which "
            f"workers are started again is no transition, and other trainers would learn from it"
        )
    rows = env.single_observation_space
    if isinstance(rows, GroupedBox) and rows.has_images:
        raise UsageError(
            f"other trainers would read the bytes of {rows} as numbers, floats among them: wanted "
            f"one image, or numbers only"
        )
    space = env.single_action_space
    if isinstance(space, Discrete) and space.start != 0:
        raise UsageError(
            f"other trainers number their actions from 0, the environment's are {space}"
        )
    if trains_on_reset_steps and env.autoreset_mode == AutoresetMode.NEXT_STEP:
        logging.getLogger("gpurl").warning(
            "%s resets one step after the end of an episode, which %s does not know: it also "
            "learns from these steps, with reward 0, from the last observation of an episode to "
            "the first of the next; an environment with autoreset SAME_STEP has no such steps",
            type(env).__name__,
            trains_on_reset_steps,
        )
