"""Converts between the spaces of a simulator in torch and those of gpurl: observation groups to the
tensors of policy and critic, actions to the simulator's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor

from gpurl.envs.numpy.spaces import Arrays, Batch, Encode, Encoder, make_decoder, make_encoder
from gpurl.envs.vec_env import describe, same_device
from gpurl.errors import EnvError, UsageError, did_you_mean

# names of groups in a dict of observations: for the critic only, and for the policy; without a
# group of the policy, it gets all groups but the critic's
CRITIC_GROUPS = ("critic", "privileged")
POLICY_GROUPS = ("policy", "actor")
DTYPES = {
    np.float32: torch.float32,
    np.uint8: torch.uint8,
    np.int64: torch.int64,
    np.bool_: torch.bool,
}


class Groups(NamedTuple):
    """Encoders of a batch of observations to `obs` and `state`, [N, *space.shape] in new memory."""

    policy: Encoder
    critic: Encoder | None  # None without a critic's group
    unread: tuple[str, ...] = ()  # groups that go to neither


def to_gymnasium(space: Any) -> gymnasium.Space:
    """`space` as a Gymnasium space; it may be another class with the same attributes, as in
    mjlab.
    """
    if isinstance(space, gymnasium.Space):
        return space
    # a dict of spaces
    if hasattr(space, "spaces"):
        return Dict({name: to_gymnasium(part) for name, part in space.spaces.items()})
    if all(hasattr(space, name) for name in ("low", "high", "shape", "dtype")):
        dtype = np.dtype(space.dtype)
        low = np.broadcast_to(np.asarray(space.low, np.float32), space.shape).astype(dtype)
        high = np.broadcast_to(np.asarray(space.high, np.float32), space.shape).astype(dtype)
        return Box(low, high, dtype=dtype.type)
    raise UsageError(
        f"gpurl needs a Gymnasium space, or one with the same attributes, got {space!r}"
    )


def make_groups(
    space: gymnasium.Space, arrays: Arrays, policy: Sequence[str] = (), critic: Sequence[str] = ()
) -> Groups:
    """Encoders of `space`. A dict is divided into the groups of policy and critic: those named by
    `policy` and `critic`, else those whose names say so. Any other space is the policy's, flattened
    if it is nested. Names in a dict of the policy stay known.
    """
    if not isinstance(space, Dict):
        if policy or critic:
            raise UsageError(
                f"the observation has no groups to choose {', '.join((*policy, *critic))} from, it "
                f"is {space}: leave out obs_groups and state_groups"
            )
        return Groups(make_encoder(space, arrays=arrays), None)
    known = list(space.spaces)
    for name in (*policy, *critic):
        if name not in known:
            raise UsageError(
                f"the observation has no group {name!r}: {did_you_mean(name, known)}it has "
                f"{', '.join(known)}"
            )
    # the groups that are there
    critic = critic or [name for name in CRITIC_GROUPS if name in known][:1]
    policy = policy or [name for name in POLICY_GROUPS if name in known][:1]
    if policy:
        encoder = _encode_groups(space, policy, arrays)
    else:
        policy = [name for name in known if name not in critic]
        encoder = make_encoder(Dict({name: space[name] for name in policy}), arrays=arrays)
    unread = tuple(name for name in known if name not in (*policy, *critic))
    return Groups(encoder, _encode_groups(space, critic, arrays) if critic else None, unread)


def _encode_groups(space: Dict, names: Sequence[str], arrays: Arrays) -> Encoder:
    """Of one group its own observation, of several a row of all."""
    if len(names) > 1:
        return make_encoder(Dict({name: space[name] for name in names}), arrays=arrays)
    (name,) = names
    encoder = make_encoder(space[name], f"the observation[{name!r}]", arrays=arrays)
    return Encoder(encoder.space, lambda batch: encoder.encode(batch[name]))


def torch_arrays(device: torch.device, across_devices: bool) -> Arrays:
    """Operations on tensors on `device`. Tensors on another device raise EnvError, or are moved if
    `across_devices`.
    """

    def cast(batch: Batch, dtype: type[np.generic]) -> Tensor:
        if not isinstance(batch, Tensor):
            raise EnvError(
                f"wanted a tensor, got {describe(batch)}; gymnasium_cpu takes environments in numpy"
            )
        if not across_devices and not same_device(batch.device, device):
            raise EnvError(
                f"wanted a tensor on {device}, got one on {batch.device}; --env.across-devices "
                f"moves them in every step"
            )
        return batch.to(device, DTYPES[dtype], copy=True)

    def one_hot(shift: np.ndarray, width: int) -> Encode:
        shifts = torch.tensor(shift, device=device)

        def encode(batch: Batch) -> Tensor:
            index = cast(batch, np.int64).reshape(len(batch), len(shift)) + shifts
            return torch.zeros(len(index), width, device=device).scatter_(1, index, 1.0)

        return encode

    def join(rows: list[Tensor]) -> Tensor:
        return torch.cat([row.flatten(1) for row in rows], dim=1)

    return Arrays(cast, one_hot, join, lambda space, parts: space.join(parts))


def make_torch_decoder(
    space: gymnasium.Space, device: torch.device, limit: float | None
) -> tuple[gymnasium.Space, Callable[[Tensor], Tensor]]:
    """(the policy's action space, a function from its actions [N, ...] to a batch of `space` on
    `device`, in new memory).

    limit: replaces wider or infinite limits of a Box; actions are clipped to it.
    """
    decoded = make_decoder(space).space
    # continuous actions, within the limits of the simulator and of `limit`
    if isinstance(space, Box) and isinstance(decoded, Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise UsageError(
                f"a simulator in torch needs floating-point actions in a Box, this space is {space}"
            )
        if limit is not None:
            if not limit > 0.0:
                raise UsageError(f"action_limit must be above 0, got {limit}")
            low = np.maximum(decoded.low, -limit)
            high = np.minimum(decoded.high, limit)
            decoded = Box(low, high, dtype=np.float32)
        bound = float("inf") if limit is None else limit

        def decode_box(actions: Tensor) -> Tensor:
            return actions.to(device).reshape(-1, *space.shape).clamp(-bound, bound)

        return decoded, decode_box
    if limit is not None:
        raise UsageError(f"action_limit is for actions of a Box, these are of {space}")
    # choices, numbered from `start`, which MultiBinary does not have
    start = torch.as_tensor(getattr(space, "start", 0), device=device)
    shape = () if isinstance(space, Discrete) else space.shape or ()
    return decoded, lambda actions: actions.to(device).reshape(-1, *shape) + start
