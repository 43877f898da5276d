"""Converts between Gymnasium spaces and arrays: a batch of observations to one array, actions of a
policy to those of the environment.

The arrays are numpy's; `_torch_spaces.py` encodes tensors with the same functions.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array

from gpurl.envs.observation_groups import GroupedBox
from gpurl.errors import UsageError

Batch = Any  # of a space, as its library has it: an array, or dicts and tuples of arrays
Encode = Callable[[Batch], Any]  # -> an array of numpy or of torch, in new memory


class Encoder(NamedTuple):
    """`encode` turns a batch of the original space into an array [N, *space.shape]."""

    space: Box
    encode: Encode


class Arrays(NamedTuple):
    """The operations of an array library that encoders use."""

    cast: Callable[[Batch, type[np.generic]], Any]  # the same numbers, of this dtype, in new memory
    # (shift [K], D) -> (choices [N, ...] -> [N, D], a 1 at each choice + shift)
    one_hot: Callable[[np.ndarray, int], Encode]
    join: Callable[[list[Any]], Any]  # arrays [N, ...] -> [N, D], flattened and concatenated
    # (space, arrays [N, ...] by group) -> [N, D] rows with images
    join_groups: Callable[[GroupedBox, dict[str, Any]], Any]


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


def _join_groups(space: GroupedBox, parts: dict[str, np.ndarray]) -> np.ndarray:
    return space.join({name: torch.from_numpy(part) for name, part in parts.items()}).numpy()


NUMPY = Arrays(
    np.array,
    _one_hot,
    lambda rows: np.concatenate([row.reshape(len(row), -1) for row in rows], axis=1),
    _join_groups,
)


def make_encoder(
    space: gymnasium.Space,
    name: str = "the observation",
    inside: bool = False,
    arrays: Arrays = NUMPY,
) -> Encoder:
    """The encoder of `space`, which messages call `name`; inside: whether it is in a Dict or Tuple.

    A Box keeps its shape (a single number becomes a row of one) and becomes float32; images (uint8
    with two axes or more) stay uint8; other spaces are flattened as by `gymnasium.spaces.flatten`.
    The parts of a Dict keep their names: its space is a GroupedBox. UsageError for spaces that
    cannot be flattened.
    """
    # spaces of one array
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
    # nested spaces
    if isinstance(space, (Dict, Tuple)):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        has_names = isinstance(space, Dict) and not inside
        encoders = {
            key: make_encoder(
                inner, f"{name}[{key!r}]", not (has_names and isinstance(inner, Box)), arrays
            )
            for key, inner in items
        }
        if not encoders:
            raise UsageError("gpurl needs an observation for the policy, this space is empty")
        if has_names:
            return _group_encoder(encoders, arrays)
        return _concatenating_encoder(encoders, arrays)
    raise UsageError(
        f"gpurl cannot flatten {name}: it is {space}; wrap the environment so that it is a Box"
    )


def _box_encoder(space: Box, name: str, inside: bool, arrays: Arrays) -> Encoder:
    is_image = space.dtype == np.uint8 and len(space.shape) >= 2
    if is_image and inside:
        raise UsageError(
            f"gpurl takes images by themselves, or by name in a Dict that is in no other space: "
            f"{name} is {space}; move it there with a wrapper, or leave it out"
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
    """K choices of sizes [K], numbered from start [K], as concatenated one-hot rows."""
    total = int(sizes.sum())
    # column of each choice: after those of the choices before it
    shift = np.concatenate(([0], sizes.cumsum()[:-1])) - start
    return Encoder(Box(0.0, 1.0, (total,), np.float32), arrays.one_hot(shift, total))


def _concatenating_encoder(encoders: dict[Any, Encoder], arrays: Arrays) -> Encoder:
    """A Dict or Tuple, given by its keys and their encoders, flattened and concatenated; a batch of
    it is a dict or tuple of batches.
    """
    low = np.concatenate([encoder.space.low.flatten() for encoder in encoders.values()])
    high = np.concatenate([encoder.space.high.flatten() for encoder in encoders.values()])
    return Encoder(
        Box(low, high, low.shape, np.float32),
        lambda batch: arrays.join([each.encode(batch[key]) for key, each in encoders.items()]),
    )


def _group_encoder(encoders: dict[Any, Encoder], arrays: Arrays) -> Encoder:
    """A Dict, whose parts become named groups of a row."""
    space = GroupedBox.of({str(key): encoder.space for key, encoder in encoders.items()})
    if not space.has_images:
        return Encoder(space, _concatenating_encoder(encoders, arrays).encode)

    def encode(batch: Batch) -> Any:
        parts = {str(key): encoder.encode(batch[key]) for key, encoder in encoders.items()}
        return arrays.join_groups(space, parts)

    return Encoder(space, encode)


def column_names(space: gymnasium.Space, name: str = "") -> list[str]:
    """A name for each column of the array that `make_encoder` makes of `space`: keys of a Dict,
    places in a Tuple or Box, choices of a Discrete.
    """
    if isinstance(space, (Dict, Tuple)):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        columns = [column_names(inner, f"{name} {key}".strip()) for key, inner in items]
        return list(itertools.chain(*columns))
    if isinstance(space, Discrete):
        first = int(space.start)
        return [f"{name} = {choice}".strip() for choice in range(first, first + int(space.n))]
    if isinstance(space, MultiDiscrete):
        sizes, starts = space.nvec.flatten(), space.start.flatten()
        return [
            f"{name} {place} = {start + choice}".strip()
            for place, (size, start) in enumerate(zip(sizes, starts))
            for choice in range(size)
        ]
    shape = space.shape or ()
    if int(np.prod(shape)) == 1 and name:
        return [name]
    places = [", ".join(map(str, place)) for place in np.ndindex(shape)]
    return [f"{name}[{place}]" if name else place for place in places]


def stack_rows(space: gymnasium.Space, rows: list[Any]) -> Batch:
    """A batch of `space` from single observations."""
    batch: Batch = create_empty_array(space, n=len(rows))
    return concatenate(space, rows, batch)


def make_decoder(space: gymnasium.Space) -> Decoder:
    """The decoder of actions for `space`. A policy numbers choices from 0, in one row, and returns
    float32 for a Box. UsageError for other spaces.
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
    """sizes, start: [*space.shape] number of choices of each component, and the first one."""
    return Decoder(
        MultiDiscrete(sizes.flatten()),
        lambda actions: (actions.reshape(-1, *sizes.shape) + start).astype(space.dtype, copy=False),
    )


def _box_decoder(space: Box) -> Decoder:
    # an environment gets the dtype of its space, numbers within its limits
    is_integer = np.issubdtype(space.dtype, np.integer)
    low = space.low
    high = space.high

    def decode(actions: np.ndarray) -> np.ndarray:
        if is_integer:
            actions = np.rint(actions)
        # scaling in float32 may exceed a limit by rounding
        clipped = np.minimum(np.maximum(actions.reshape(-1, *low.shape), low), high)
        return clipped.astype(space.dtype, copy=False)

    return Decoder(_as_row(space, np.float32), decode)
