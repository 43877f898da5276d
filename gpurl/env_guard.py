"""Looks at the outside of what an environment returns, each step: shape, dtype and device, which costs no device anything."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.envs.vec_env import Timestep, VecEnv, check_tensor
from gpurl.errors import EnvError

IMAGE = np.dtype(np.uint8)


def check_reset(env: VecEnv, obs: Tensor) -> None:
    """EnvError unless obs [N, *obs] is what `env.reset` must return."""
    space = env.single_observation_space
    dtype = torch.uint8 if space.dtype == IMAGE else torch.float32
    check_tensor(f"{type(env).__name__}.reset: obs", obs, (env.num_envs, *(space.shape or ())), dtype, env.device)


def check_step(env: VecEnv, timestep: Timestep) -> None:
    """EnvError naming the key, what was wanted and what was got, unless `timestep` has the form that `gpurl.envs.vec_env` sets."""
    name = type(env).__name__
    if not isinstance(timestep, Timestep):
        raise EnvError(f"{name}.step: wanted a gpurl.envs.vec_env.Timestep, got a {type(timestep).__name__}")
    space, device = env.single_observation_space, env.device
    shape, dtype = (env.num_envs, *(space.shape or ())), torch.uint8 if space.dtype == IMAGE else torch.float32
    row = (env.num_envs,)
    info = timestep.info
    wanted = [
        ("obs", timestep.obs, shape, dtype),
        ("reward", timestep.reward, env.reward_shape, torch.float32),
        ("terminated", timestep.terminated, row, torch.bool),
        ("truncated", timestep.truncated, row, torch.bool),
        ("info['final_obs']", info.get("final_obs"), shape, dtype),
    ]
    if "_episode" not in info or not {"r", "l"} <= set(info.get("episode", ())):
        raise EnvError(f"{name}.step: wanted info['episode'] with r and l and info['_episode'], got {sorted(info)}")
    if "valid" in info:
        wanted.append(("info['valid']", info["valid"], row, torch.bool))
    for key, value, value_shape, value_dtype in wanted:
        check_tensor(f"{name}.step: {key}", value, value_shape, value_dtype, device)
    for key in ("state", "final_state"):
        check_state(env, "step", key, info)


def check_state(env: VecEnv, call: str, key: str, info: dict[str, Any]) -> None:
    """EnvError unless info[key] is what only critics see, where `env` says that there is such a thing."""
    if (space := env.single_state_space) is not None:
        shape = (env.num_envs, *(space.shape or ()))
        check_tensor(f"{type(env).__name__}.{call}: info[{key!r}]", info.get(key), shape, torch.float32, env.device)
