"""What every adapter does at the border: tensors as numpy arrays in one copy, rewards of several
agents as one, actions within limits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import VecEnv


def to_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The tensors as arrays of their own memory, which may be written to; from a device they come
    in one copy.
    """
    widest_first = sorted(
        range(len(tensors)), key=lambda at: -tensors[at].element_size()
    )  # so that each is aligned for its dtype
    packed = torch.cat([tensors[at].reshape(-1).view(torch.uint8) for at in widest_first]).numpy(
        force=True
    )
    arrays: dict[int, np.ndarray] = {}
    start = 0
    for at in widest_first:
        tensor = tensors[at]
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        arrays[at] = packed[start : start + tensor.nbytes].view(dtype).reshape(tuple(tensor.shape))
        start += tensor.nbytes
    return [arrays[at] for at in range(len(tensors))]


class StepArrays(NamedTuple):
    """What a step returns, in numpy."""

    obs: np.ndarray  # [N, *obs]
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final_obs: np.ndarray  # [N, *obs]
    episode_return: np.ndarray  # [N]
    episode_length: np.ndarray  # [N]
    is_counted: np.ndarray  # [N] bool: an episode ended here that was seen from its beginning


def step_in_numpy(env: VecEnv, actions: np.ndarray) -> StepArrays:
    """A step of `env`; one copy there, one back. actions: [N, *action]."""
    obs, reward, terminated, truncated, info = env.step(torch.as_tensor(actions).to(env.device))
    episode = info["episode"]
    told = [info["final_obs"], episode["r"], episode["l"], info["_episode"]]
    return StepArrays(*to_arrays([obs, one_reward(reward), terminated, truncated, *told]))


def one_reward(reward: Tensor) -> Tensor:
    """[N], or [N, A] of several agents -> [N], of its own memory: most libraries add to rewards in
    place.
    """
    return reward.clone() if reward.dim() == 1 else reward.mean(1)


def action_limiter(env: VecEnv) -> Callable[[Tensor], Tensor]:
    """A function that clips actions [N, *action] into the Box of `env`, for libraries whose
    Gaussians know no limits.
    """
    space = env.single_action_space
    if not isinstance(space, Box) or not (space.bounded_below | space.bounded_above).any():
        return lambda action: action
    low, high = (
        torch.as_tensor(limit, dtype=torch.float32, device=env.device)
        for limit in (space.low, space.high)
    )
    return lambda action: action.clamp(low, high)
