"""Spaces at the border to a simulator in torch: observation groups become a policy's and a critic's
tensors, actions the simulator's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import Tensor

from gpurl.envs.numpy.spaces import Arrays, Encoder, make_decoder, make_encoder
from gpurl.envs.vec_env import same_device
from gpurl.errors import EnvError, UsageError

CRITIC_GROUPS = ("critic", "privileged")  # of a dict of observations: what only critics may see
POLICY_GROUPS = ("policy", "actor")  # what the policy sees; without one, all that is not a critic's
DTYPES = {
    np.float32: torch.float32,
    np.uint8: torch.uint8,
    np.int64: torch.int64,
    np.bool_: torch.bool,
}


class Groups(NamedTuple):
    """How a batch of observations becomes `obs` and `state`, tensors [N, *space.shape] of their own
    memory.
    """

    policy: Encoder
    critic: Encoder | None  # where there is such a group


def to_gymnasium(space: Any) -> gymnasium.Space:
    """`space`, or Gymnasium's form of one that has the same attributes but another class, as
    mjlab's have.
    """
    if isinstance(space, gymnasium.Space):
        return space
    if hasattr(space, "spaces"):
        return Dict({name: to_gymnasium(part) for name, part in space.spaces.items()})
    if all(hasattr(space, name) for name in ("low", "high", "shape", "dtype")):
        low, high = (
            np.broadcast_to(np.asarray(limit, np.float32), space.shape)
            for limit in (space.low, space.high)
        )
        return Box(
            low.astype(space.dtype), high.astype(space.dtype), dtype=np.dtype(space.dtype).type
        )
    raise UsageError(
        f"gpurl needs a space of Gymnasium's, or one with its attributes, got {space!r}"
    )


def make_groups(space: gymnasium.Space, arrays: Arrays) -> Groups:
    """Of a dict that has a critic's group, or a policy's, only these are used; any other space is
    the policy's, flat where it is nested.
    """
    if not isinstance(space, Dict):
        return Groups(make_encoder(space, arrays=arrays), None)
    critic = next((name for name in CRITIC_GROUPS if name in space.spaces), None)
    policy = next((name for name in POLICY_GROUPS if name in space.spaces), None)
    if policy is not None:
        seen = _of_group(space, policy, arrays)
    else:
        seen = make_encoder(
            Dict({name: part for name, part in space.spaces.items() if name != critic}),
            arrays=arrays,
        )
    return Groups(seen, None if critic is None else _of_group(space, critic, arrays))


def _of_group(space: Dict, name: str, arrays: Arrays) -> Encoder:
    encoder = make_encoder(space[name], f"the observation[{name!r}]", arrays=arrays)
    return Encoder(encoder.space, lambda batch: encoder.encode(batch[name]))


def torch_arrays(device: torch.device, across_devices: bool) -> Arrays:
    """Tensors on `device`; those of another device are EnvErrors, or moved where
    `across_devices`.
    """

    def cast(batch: Any, dtype: Any) -> Tensor:
        if not isinstance(batch, Tensor):
            raise EnvError(
                f"wanted a tensor, got a {type(batch).__name__}; gymnasium_cpu takes environments "
                f"in numpy"
            )
        if not across_devices and not same_device(batch.device, device):
            raise EnvError(
                f"wanted a tensor on {device}, got one on {batch.device}; --env.across-devices "
                f"moves them in every step"
            )
        return batch.to(device, DTYPES[dtype], copy=True)

    def one_hot(shift: np.ndarray, width: int) -> Callable[[Any], Tensor]:
        shifts = torch.tensor(shift, device=device)

        def encode(batch: Any) -> Tensor:
            index = cast(batch, np.int64).reshape(len(batch), len(shift)) + shifts
            return torch.zeros(len(index), width, device=device).scatter_(1, index, 1.0)

        return encode

    return Arrays(cast, one_hot, lambda rows: torch.cat([row.flatten(1) for row in rows], dim=1))


def make_torch_decoder(
    space: gymnasium.Space, device: torch.device, limit: float | None
) -> tuple[gymnasium.Space, Callable[[Tensor], Tensor]]:
    """(the policy's action space, what turns its actions [N, ...] into a batch of `space` on
    `device`, in memory of its own).

    limit: what stands for limits of a Box that are wider or infinite; actions are clipped to it.
    """
    decoded = make_decoder(space).space
    if isinstance(space, Box) and isinstance(decoded, Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise UsageError(
                f"gpurl sends a simulator in torch floating-point actions, this one's space is "
                f"{space}"
            )
        if limit is not None:
            if not limit > 0.0:
                raise UsageError(f"action_limit must be above 0, got {limit}")
            decoded = Box(
                np.maximum(decoded.low, -limit), np.minimum(decoded.high, limit), dtype=np.float32
            )
        least, most = (-float("inf"), float("inf")) if limit is None else (-limit, limit)
        return (
            decoded,
            lambda actions: actions.to(device).reshape(-1, *space.shape).clamp(least, most),
        )
    if limit is not None:
        raise UsageError(f"action_limit is for actions of a Box, these are of {space}")
    start = (
        0
        if isinstance(space, MultiBinary)
        else torch.as_tensor(getattr(space, "start", 0), device=device)
    )
    shape = () if isinstance(space, Discrete) else space.shape or ()
    return decoded, lambda actions: actions.to(device).reshape(-1, *shape) + start
