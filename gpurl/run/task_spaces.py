"""What a Gymnasium environment gives and takes, kept in the checkpoint: observations as it gives
them become those of the policy, and the policy's actions those that it takes.
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple, flatdim

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.spaces import space_from_dict, space_to_dict
from gpurl.checkpoints.state_files import State
from gpurl.envs.numpy.spaces import Batch, make_decoder, make_encoder
from gpurl.envs.observation_groups import bytes_of, tensor_of
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

KEY = "task_spaces"  # in a checkpoint's meta


def describe_task(env: VecEnv) -> State:
    """The entry of a checkpoint's meta; {} for an environment that is not Gymnasium's."""
    if env.gymnasium_spaces is None:
        return {}
    observation, action = env.gymnasium_spaces
    try:
        spaces = {"observation": space_to_dict(observation), "action": space_to_dict(action)}
    except TypeError:  # a Dict whose keys are no text
        return {}
    return {KEY: spaces}


class TaskSpaces:
    """Encodes observations and decodes actions as the training did."""

    def __init__(self, observation: gymnasium.Space, action: gymnasium.Space) -> None:
        self.observation = observation
        self.encoder = make_encoder(observation)
        self.decoder = make_decoder(action)

    def encode(self, obs: object) -> tuple[np.ndarray, bool]:
        """(observations [N, *obs] of the policy, whether `obs` is a single one); UsageError for
        what the environment does not give.
        """
        counts = set[int | None]()
        batch = _as_batch(self.observation, obs, "observations", counts)
        if len(counts) != 1:
            raise UsageError(
                f"the policy takes one observation, or N of every part; got parts of "
                f"{', '.join('one' if count is None else str(count) for count in counts)}"
            )
        return self.encoder.encode(batch), None in counts


def read_task(meta: State, algorithm: Algorithm) -> TaskSpaces | None:
    """The spaces that `describe_task` noted; None if they are not there, or are not those that the
    algorithm was trained on. CheckpointError for what is no space.
    """
    if KEY not in meta:
        return None
    spaces = [space_from_dict(meta[KEY][name]) for name in ("observation", "action")]
    # a file may claim any size: the policy's is known
    if flatdim(spaces[0]) > math.prod(algorithm.observation_space.shape):
        return None
    task = TaskSpaces(*spaces)
    trained_on = (algorithm.observation_space, algorithm.action_space)
    return task if (task.encoder.space, task.decoder.space) == trained_on else None


def _as_batch(space: gymnasium.Space, value: Any, name: str, counts: set[int | None]) -> Batch:
    """`value` as a batch of `space`, which messages call `name`; adds to `counts` how many each
    part has, None for a single one.
    """
    # nested spaces
    if isinstance(space, Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            got = sorted(map(str, value)) if isinstance(value, Mapping) else _kind(value)
            raise UsageError(f"the policy takes {name}, a dict of {', '.join(space)}; got {got}")
        return {
            key: _as_batch(part, value[key], f"{name}[{key!r}]", counts)
            for key, part in space.items()
        }
    if isinstance(space, Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space):
            got = f"{len(value)}" if isinstance(value, (tuple, list)) else _kind(value)
            raise UsageError(f"the policy takes {name}, a tuple of {len(space)} parts; got {got}")
        return tuple(
            _as_batch(part, value[place], f"{name}[{place}]", counts)
            for place, part in enumerate(space)
        )
    # one array
    shape = space.shape or ()
    array = _numbers(value, name)
    is_single = array.shape == shape
    if not is_single and (array.shape[1:] != shape or array.ndim == len(shape) or not len(array)):
        wanted = ", ".join(map(str, ("N", *shape))) + "," * (not shape)
        raise UsageError(
            f"the policy takes {name} of shape {shape} or ({wanted}), got {array.shape}"
        )
    counts.add(None if is_single else len(array))
    return _checked(space, array[np.newaxis] if is_single else array, name)


def _numbers(value: object, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise UsageError(f"the policy takes {name} as numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"the policy takes {name} as numbers, got {_kind(value)}")
    return array


def _checked(space: gymnasium.Space, batch: np.ndarray, name: str) -> np.ndarray:
    """`batch` [N, *space.shape]; UsageError for choices that there are not, and for images that are
    no bytes.
    """
    if isinstance(space, (Discrete, MultiDiscrete)):
        size = space.n if isinstance(space, Discrete) else space.nvec
        is_known = (batch >= space.start) & (batch < space.start + size)
        if batch.dtype.kind not in "iu" or not is_known.all():
            raise UsageError(
                f"the policy takes {name} as {space} has them, got {batch.dtype} from "
                f"{batch.min()} to {batch.max()}"
            )
        return batch.astype(np.int64)
    if isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) >= 2:
        return bytes_of(tensor_of(batch), name).numpy()
    return batch


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
