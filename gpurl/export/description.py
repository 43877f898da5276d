"""What the file beside an exported policy says: its inputs and outputs, and where it comes from."""

import json
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from gpurl import __version__
from gpurl.checkpoints.plain_files import Json
from gpurl.checkpoints.spaces import space_to_dict
from gpurl.checkpoints.state_files import State
from gpurl.envs.observation_groups import GroupedBox
from gpurl.nn.acting import PolicyModule
from gpurl.nn.action_scaler import ActionScaler
from gpurl.policy import Policy
from gpurl.run.records import last_commit
from gpurl.run.run_folder import run_of

OTHER_NAMES = ("action", "memory", "memory_out")
FORMAT_VERSION = 2  # raised when a key of the description changes its meaning
RESET = (
    "Give zeros to memory in the first step of an episode, then the memory_out of the step before; "
    "set a row to zeros again whenever the episode of that row has ended."
)


def obs_dtype(space: gymnasium.Space) -> np.dtype:
    """Of the exported input: as the environment gives observations, float32 for all floats."""
    dtype = np.dtype(space.dtype)
    return np.dtype(np.float32) if np.issubdtype(dtype, np.floating) else dtype


def describe(
    policy: Policy, module: PolicyModule, path: Path, file: str, export_format: str
) -> dict[str, Json]:
    """The description of `file`, exported from the run or checkpoint `path`."""
    algorithm, settings = policy.algorithm, policy.settings
    space, action_space = algorithm.observation_space, algorithm.action_space
    # inputs and outputs, "batch" is any number of rows
    action_dtype = "float32" if isinstance(action_space, Box) else "int64"
    inputs = _observations(space)
    outputs: list[Json] = [_tensor("action", action_space.shape or (), action_dtype)]
    memory: Json = None
    if module.memory_size:
        inputs.append(_tensor("memory", (module.memory_size,), "float32"))
        outputs.append(_tensor("memory_out", (module.memory_size,), "float32"))
        memory = {"initial_value": 0.0, "size": module.memory_size, "reset": RESET}
    return {
        "format_version": FORMAT_VERSION,
        "file": file,
        "format": export_format,
        "inputs": inputs,
        "outputs": outputs,
        "memory": memory,
        # a row of named observations is how gpurl stores them: the inputs say what they are
        "observation_space": (
            None if isinstance(space, GroupedBox) else _finite(space_to_dict(space))
        ),
        "action_space": _finite(space_to_dict(action_space)),
        "observations_normalized_inside": module.normalizer is not None,
        "actions_scaled_inside": _action_scale(module.choice),
        **_deployment(policy.deployment),
        "algorithm": settings["algorithm"],
        "env": settings["env"],
        "env_options": dict(settings["env_options"]),
        "steps": policy.step,
        "gpurl": __version__,
        "torch": torch.__version__,
        "git_commit": last_commit(run_of(path)),
    }


def _deployment(told: State) -> dict[str, Json]:
    """What the environment told of the time between actions, names and the robot."""
    return {
        "control_step": told.get("control_step"),
        "observation_names": told.get("observation_names", []),
        "action_names": told.get("action_names", []),
        "robot": told.get("robot", {}),
    }


def _observations(space: gymnasium.Space) -> list[Json]:
    """The inputs before the memory: one for each group, where the observation has names."""
    if not isinstance(space, GroupedBox):
        return [_tensor("obs", space.shape or (), str(obs_dtype(space)))]
    names = _input_names([group.name for group in space.groups])
    return [
        _tensor(name, group.shape, "uint8" if group.is_image else "float32")
        for name, group in zip(names, space.groups)
    ]


def _input_names(groups: Sequence[str]) -> list[str]:
    """The names of groups, each with obs_ in front until it is that of no other input or output."""
    names = []
    for group in groups:
        name = group
        while name in OTHER_NAMES or (name != group and name in groups):
            name = f"obs_{name}"
        names.append(name)
    return names


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Json]:
    return {"name": name, "shape": ["batch", *map(int, shape)], "dtype": dtype}


def _finite(value: Json) -> Json:
    """`value` with infinite numbers as text, which JSON does not have as numbers."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return value


def _action_scale(choice: nn.Module) -> Json:
    """How the file computes an action of a Box from the policy's own: clip, then half_width * x +
    center; None for choices.
    """
    scalers = [each for each in choice.modules() if isinstance(each, ActionScaler)]
    if not scalers:
        return None
    low, high, half_width, center = scalers[0].units.cpu().double().tolist()
    scale: Json = {
        "clip_low": low,
        "clip_high": high,
        "half_width": half_width,
        "center": center,
    }
    return _finite(scale)


def as_json(description: dict[str, Json]) -> bytes:
    """The content of the file beside the policy."""
    return f"{json.dumps(description, indent=1, allow_nan=False)}\n".encode()
