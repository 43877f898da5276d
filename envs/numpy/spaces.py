"""Gymnasium spaces at the border to an environment: batches of observations become one array, a
policy's actions become the environment's.

The arrays are of numpy; `_torch_spaces.py` encodes tensors by the same walk through a space.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array

from gpurl.errors import UsageError

Batch = Any  # of a space, as its library has it: an array, or dicts and tuples of arrays


Encode = Callable[[Batch], Any]  # -> an array of numpy or of torch, in new memory


class Encoder(NamedTuple):
    """`encode` turns a batch of the original space into an array [N, *space.shape]."""

    space: Box
    encode: Encode


class Arrays(NamedTuple):
    """What an encoder needs of an array library."""

    cast: Callable[[Batch, type[np.generic]], Any]  # the same numbers, of this dtype, in new memory
    # (shift [K], D) -> (choices [N, ...] -> [N, D], a 1 at each choice + shift)
    one_hot: Callable[[np.ndarray, int], Encode]
    join: Callable[[list[Any]], Any]  # arrays [N, ...] -> [N, D], one behind the other


class Decoder(NamedTuple):
    """`decode` turns an array [N, ...] of the policy's actions in `space` into a batch of the
    original space.
    """

    space: gymnasium.Space
    decode: Callable[[np.ndarray], np.ndarray]


def _one_hot(shift: np.ndarray, width: int) -> Encode:
    def encode(batch: Batch) -> np.ndarray:
        index = np.asarray(batch).reshape(len(batch), len(shift)) + shift
        rows = np.zeros((len(index), width), np.float32)
        np.put_along_axis(rows, index, 1.0, axis=1)
        return rows

    return encode


NUMPY = Arrays(
    np.array,
    _one_hot,
    lambda rows: np.concatenate([row.reshape(len(row), -1) for row in rows], axis=1),
)


def make_encoder(
    space: gymnasium.Space,
    name: str = "the observation",
    inside: bool = False,
    arrays: Arrays = NUMPY,
) -> Encoder:
    """A Box keeps its shape (a single number becomes a row of one) and becomes float32; images
    (uint8 with two axes or more) stay uint8; all else is flattened as by
    `gymnasium.spaces.flatten`. `inside`: part of a Dict or Tuple. UsageError names what cannot be.
    """
    if isinstance(space, Box):
        return _box_encoder(space, name, inside, arrays)
    if isinstance(space, Discrete):
        return _one_hot_encoder(np.array([space.n]), np.array([space.start]), arrays)
    if isinstance(space, MultiDiscrete):
        return _one_hot_encoder(space.nvec.flatten(), space.start.flatten(), arrays)
    if isinstance(space, MultiBinary):
        size = int(np.prod(space.shape))
        return Encoder(
            Box(0.0, 1.0, (size,), np.float32),
            lambda batch: arrays.cast(batch, np.float32).reshape(len(batch), size),
        )
    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        return _concatenating_encoder(
            [(key, make_encoder(part, f"{name}[{key!r}]", True, arrays)) for key, part in parts],
            arrays,
        )
    raise UsageError(
        f"gpurl cannot flatten {name}: it is {space}; wrap the environment so that it is a Box"
    )


def _box_encoder(space: Box, name: str, inside: bool, arrays: Arrays) -> Encoder:
    is_image = space.dtype == np.uint8 and len(space.shape) >= 2
    if is_image and inside:
        raise UsageError(
            f"gpurl does not mix images with other observations: {name} is {space}; leave it out "
            f"with a wrapper"
        )
    dtype: type[np.generic] = np.uint8 if is_image else np.float32
    box = _as_row(space, dtype)
    if space.shape == ():
        return Encoder(box, lambda batch: arrays.cast(batch, dtype).reshape(-1, 1))
    return Encoder(box, lambda batch: arrays.cast(batch, dtype))


def _as_row(space: Box, dtype: type[np.generic]) -> Box:
    """`space` with another dtype; a single number becomes a row of one."""
    with np.errstate(over="ignore"):  # float64 limits beyond float32 become infinite
        low = np.atleast_1d(space.low).astype(dtype)
        high = np.atleast_1d(space.high).astype(dtype)
    return Box(low, high, dtype=dtype)  # type: ignore[arg-type]


def _one_hot_encoder(sizes: np.ndarray, start: np.ndarray, arrays: Arrays) -> Encoder:
    """sizes, start: [K] of K choices; their one-hot rows stand one behind the other."""
    total = int(sizes.sum())
    shift = np.concatenate(([0], sizes.cumsum()[:-1])) - start
    return Encoder(Box(0.0, 1.0, (total,), np.float32), arrays.one_hot(shift, total))


def _concatenating_encoder(parts: list[tuple[str | int, Encoder]], arrays: Arrays) -> Encoder:
    """The parts of a Dict or Tuple, flat, one behind the other; a batch of it is a dict or tuple of
    batches.
    """
    if not parts:
        raise UsageError("gpurl needs an observation to show the policy, this space is empty")
    low = np.concatenate([part.space.low.flatten() for _, part in parts])
    high = np.concatenate([part.space.high.flatten() for _, part in parts])
    return Encoder(
        Box(low, high, low.shape, np.float32),
        lambda batch: arrays.join([part.encode(batch[key]) for key, part in parts]),
    )


def stack_rows(space: gymnasium.Space, rows: list[Any]) -> Batch:
    """A batch of `space` from single observations."""
    batch: Batch = create_empty_array(space, n=len(rows))
    return concatenate(space, rows, batch)


def make_decoder(space: gymnasium.Space) -> Decoder:
    """The policy counts choices from 0, in one row, and sends float32 for a Box; UsageError for a
    space it has no actions for.
    """
    if isinstance(space, Box) and space.low.size:
        return _box_decoder(space)
    if isinstance(space, Discrete):
        return Decoder(
            Discrete(int(space.n)),
            lambda actions: (actions + space.start).astype(space.dtype, copy=False),
        )
    if isinstance(space, MultiDiscrete) and space.nvec.size:
        return _choices_decoder(space, space.nvec, space.start)
    if isinstance(space, MultiBinary):
        return _choices_decoder(space, np.full(space.shape, 2), np.zeros(space.shape, np.int64))
    raise UsageError(
        f"gpurl needs a Box of at least one number, a Discrete, MultiDiscrete or MultiBinary "
        f"action space, this one is {space}"
    )


def _choices_decoder(space: gymnasium.Space, sizes: np.ndarray, start: np.ndarray) -> Decoder:
    """sizes, start: [*space.shape] choices of each part, and the number of the first."""
    return Decoder(
        MultiDiscrete(sizes.flatten()),
        lambda actions: (actions.reshape(-1, *sizes.shape) + start).astype(space.dtype, copy=False),
    )


def _box_decoder(space: Box) -> Decoder:
    is_integer = np.issubdtype(space.dtype, np.integer)
    low = space.low
    high = space.high

    def decode(actions: np.ndarray) -> np.ndarray:
        if is_integer:
            actions = np.rint(actions)
        # a policy scales by center and half width in float32: a rounding can pass a limit
        clipped = np.minimum(np.maximum(actions.reshape(-1, *low.shape), low), high)
        return clipped.astype(space.dtype, copy=False)

    return Decoder(_as_row(space, np.float32), decode)
