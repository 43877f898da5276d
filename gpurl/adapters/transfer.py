"""The border to other trainers: tensors as numpy arrays in one copy, rewards of several agents as
one, actions within limits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import Info, VecEnv


class StepArrays(NamedTuple):
    """The results of a step in numpy."""

    obs: np.ndarray  # [N, *obs]
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final_obs: np.ndarray  # [N, *obs]
    episode_return: np.ndarray  # [N]
    episode_length: np.ndarray  # [N]
    is_counted: np.ndarray  # [N] bool: an episode ended here that was seen from its beginning


def to_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The tensors as writable arrays with memory of their own; from a device in one copy."""
    # one buffer of bytes; the widest dtypes first, so that each array is aligned
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    pieces = [tensors[index].reshape(-1).view(torch.uint8) for index in order]
    packed = torch.cat(pieces).numpy(force=True)
    arrays: dict[int, np.ndarray] = {}
    start = 0
    for index in order:
        tensor = tensors[index]
        stop = start + tensor.nbytes
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        arrays[index] = packed[start:stop].view(dtype).reshape(tuple(tensor.shape))
        start = stop
    return [arrays[index] for index in range(len(tensors))]


def step_in_numpy(env: VecEnv, actions: np.ndarray) -> StepArrays:
    """A step of `env`, with one copy to its device and one back. actions: [N, *action]."""
    timestep = env.step(torch.as_tensor(actions).to(env.device))
    episode = timestep.info["episode"]
    tensors = [
        timestep.obs,
        one_reward(timestep.reward),
        timestep.terminated,
        timestep.truncated,
        timestep.info["final_obs"],
        episode["r"],
        episode["l"],
        timestep.info["_episode"],
    ]
    return StepArrays(*to_arrays(tensors))


def one_reward(reward: Tensor) -> Tensor:
    """[N], or [N, A] of several agents -> [N], a copy: most libraries add to rewards in place."""
    return reward.clone() if reward.dim() == 1 else reward.mean(1)


def log_of_all(log: Info) -> Info:
    """info["log"] for libraries that average what they are given: the means of what holds for every
    environment; entries of some environments, which a mask names, are left out.
    """
    return {
        name: value.float().mean() if isinstance(value, Tensor) and value.dim() else value
        for name, value in log.items()
        if f"_{name}" not in log and not (name[:1] == "_" and name[1:] in log)
    }


def action_limiter(env: VecEnv) -> Callable[[Tensor], Tensor]:
    """A function that clips actions [N, *action] to the Box of `env`, for libraries whose Gaussians
    have no limits.
    """
    space = env.single_action_space
    if not isinstance(space, Box) or not (space.bounded_below | space.bounded_above).any():
        return lambda action: action
    low = torch.as_tensor(space.low, dtype=torch.float32, device=env.device)
    high = torch.as_tensor(space.high, dtype=torch.float32, device=env.device)
    return lambda action: action.clamp(low, high)
