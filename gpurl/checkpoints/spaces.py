"""Observation and action spaces as plain values, so that a checkpoint can be used without its
environment.
"""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from gpurl.checkpoints.plain_files import Json
from gpurl.checkpoints.state_files import State
from gpurl.envs.observation_groups import Group, GroupedBox
from gpurl.errors import CheckpointError


def space_to_dict(space: gymnasium.Space | None) -> dict[str, Json] | None:
    """A description in JSON values, None for None. Limits of a Box that are all equal become one
    number. What a Discrete or MultiDiscrete says besides its sizes is left out where it is
    Gymnasium's default. TypeError for other kinds of spaces, and for a Dict whose keys are no text.
    """
    if space is None:
        return None
    if isinstance(space, Box):
        values: dict[str, Json] = {
            "kind": "Box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": _shorten(space.low),
            "high": _shorten(space.high),
        }
        if isinstance(space, GroupedBox):
            values["groups"] = [
                [name, list(shape), is_image, start]
                for name, shape, is_image, start in space.groups
            ]
        return values
    if isinstance(space, Discrete):
        return {
            "kind": "Discrete",
            "n": int(space.n),
            "start": int(space.start),
            **_other_dtype(space),
        }
    if isinstance(space, MultiDiscrete):
        start: dict[str, Json] = {"start": space.start.tolist()} if space.start.any() else {}
        return {
            "kind": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            **start,
            **_other_dtype(space),
        }
    if isinstance(space, MultiBinary):
        n: Json = space.n if isinstance(space.n, int) else list(space.shape)
        return {"kind": "MultiBinary", "n": n}
    # spaces of spaces
    if isinstance(space, Dict) and all(isinstance(key, str) for key in space.spaces):
        parts: list[Json] = [[key, space_to_dict(part)] for key, part in space.spaces.items()]
        return {"kind": "Dict", "spaces": parts}
    if isinstance(space, Tuple):
        return {"kind": "Tuple", "spaces": [space_to_dict(part) for part in space.spaces]}
    raise TypeError(f"cannot describe the space {space}")


def _other_dtype(space: gymnasium.Space) -> dict[str, Json]:
    return {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}


def _shorten(limits: np.ndarray) -> Json:
    if limits.size and (limits == limits.flat[0]).all():
        return limits.flat[0].item()
    return limits.tolist()


def space_from_dict(values: State) -> gymnasium.Space:
    """The space that `space_to_dict` described; CheckpointError for anything else."""
    try:
        # a file may hold anything here: every failure of a constructor is caught
        kind = values["kind"]
        if kind == "Box":
            shape = tuple(values["shape"])
            dtype = np.dtype(values["dtype"])
            low = np.broadcast_to(np.asarray(values["low"], dtype), shape)
            high = np.broadcast_to(np.asarray(values["high"], dtype), shape)
            if "groups" in values:
                groups = [
                    Group(str(name), tuple(map(int, sizes)), bool(is_image), int(start))
                    for name, sizes, is_image, start in values["groups"]
                ]
                return GroupedBox(low.copy(), high.copy(), groups)
            return Box(low, high, shape, dtype.type)
        if kind == "Discrete":
            dtype = np.dtype(values.get("dtype", np.int64))
            return Discrete(values["n"], start=values["start"], dtype=dtype.type)
        if kind == "MultiDiscrete":
            nvec, dtype = np.asarray(values["nvec"]), np.dtype(values.get("dtype", np.int64))
            start = np.broadcast_to(values.get("start", 0), nvec.shape)
            return MultiDiscrete(nvec, dtype.type, start=start)
        if kind == "MultiBinary":
            return MultiBinary(values["n"])
        if kind == "Dict":
            return Dict([(str(key), space_from_dict(part)) for key, part in values["spaces"]])
        if kind == "Tuple":
            return Tuple([space_from_dict(part) for part in values["spaces"]])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AssertionError) as error:
        raise CheckpointError(
            f"cannot read a space in the checkpoint: {values!r} ({error})"
        ) from None
    raise CheckpointError(f"the checkpoint has a space of unknown kind {kind!r}")
