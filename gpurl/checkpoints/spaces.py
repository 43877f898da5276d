"""Observation and action spaces as plain values, so that a checkpoint can be used without its
environment.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpurl.errors import CheckpointError


def space_to_dict(space: gymnasium.Space | None) -> dict[str, Any] | None:
    """JSON-able description, None of none; Box limits that are all equal are kept as one number."""
    if space is None:
        return None
    if isinstance(space, Box):
        limits = {name: _short(getattr(space, name)) for name in ("low", "high")}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **limits}
    if isinstance(space, Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist()}
    raise TypeError(f"cannot describe the space {space}")


def _short(limits: np.ndarray) -> Any:
    return (
        float(limits.flat[0])
        if limits.size and (limits == limits.flat[0]).all()
        else limits.tolist()
    )


def space_from_dict(values: Any) -> gymnasium.Space:
    """The space that `space_to_dict` described; CheckpointError for anything else."""
    try:
        if values["kind"] == "Box":
            shape, dtype = tuple(values["shape"]), np.dtype(values["dtype"])
            low, high = (
                np.broadcast_to(np.asarray(values[name], dtype), shape) for name in ("low", "high")
            )
            return Box(low, high, shape, dtype.type)
        if values["kind"] == "Discrete":
            return Discrete(values["n"], start=values["start"])
        if values["kind"] == "MultiDiscrete":
            return MultiDiscrete(np.asarray(values["nvec"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AssertionError) as error:
        raise CheckpointError(
            f"a space in the checkpoint cannot be read: {values!r} ({error})"
        ) from None
    raise CheckpointError(f"the checkpoint has a space of unknown kind {values['kind']!r}")
