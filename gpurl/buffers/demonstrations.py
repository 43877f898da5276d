"""Demonstrations: observations and actions from a file or a Minari dataset, checked against the
spaces of the environment, without unpickling anything.
"""

import zipfile
from pathlib import Path
from typing import Literal, get_args

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from safetensors import safe_open

from gpurl.errors import UsageError, install_extra, visible
from gpurl.memory import available_bytes, in_gib

NAMES = ("obs", "action")  # arrays in a file
MINARI = "minari:"  # prefix of a Minari dataset's name
ROUNDING = 1e-5  # an action may exceed its limits by this fraction of their distance
Actions = Box | Discrete | MultiDiscrete


def read_demonstrations(
    source: str, observation_space: Box, action_space: Actions
) -> tuple[np.ndarray, np.ndarray]:
    """(obs [M, *obs] float32, or uint8 if the space is; action [M, *action] float32, or int64 of
    discrete actions) in the environment's units.

    source: FILE.npz or FILE.safetensors with `obs` and `action`, or minari:DATASET_ID. UsageError
    if it cannot be read or does not fit the spaces.
    """
    # read, and check lengths, shapes and dtypes
    if source.startswith(MINARI):
        arrays = _from_minari(source.removeprefix(MINARI))
    else:
        arrays = _from_file(Path(source))
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        got = " and ".join(f"{length} of {name}" for name, length in lengths.items())
        raise UsageError(f"{source} must hold as many obs as action, at least one; it has {got}")
    for name, space in zip(NAMES, (observation_space, action_space)):
        _check_kind(source, name, arrays[name], space)

    # convert; a float64 that overflows becomes infinite
    obs_dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
    action_dtype = np.float32 if isinstance(action_space, Box) else np.int64
    with np.errstate(over="ignore"):
        obs = arrays["obs"].astype(obs_dtype, copy=False)
        action = arrays["action"].astype(action_dtype, copy=False)
    # check values
    for name, array in (("obs", obs), ("action", action)):
        if array.dtype == np.float32 and not np.isfinite(array).all():
            row = int(np.isfinite(array.reshape(len(array), -1)).all(1).argmin())
            raise UsageError(
                f"{source}: {name} must be finite, row {row} holds "
                f"{array[row][~np.isfinite(array[row])][0]}"
            )
    _check_range(source, action, action_space)
    return obs, action


def _from_file(path: Path) -> dict[str, np.ndarray]:
    if path.suffix not in (".npz", ".safetensors"):
        raise UsageError(
            f"a dataset is FILE.npz, FILE.safetensors or {MINARI}DATASET_ID, got {str(path)!r}"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot read the dataset {path}: it is no regular file")
    # read what the file has of `NAMES`; neither reader executes anything
    try:
        if path.suffix == ".npz":
            if zipfile.is_zipfile(path):
                _check_unpacked_size(path)
            with np.load(path, allow_pickle=False) as file:
                names = list(file.keys())
                arrays = {name: file[name] for name in NAMES if name in names}
        else:
            with safe_open(path, framework="numpy") as file:
                names = list(file.keys())
                arrays = {name: file.get_tensor(name) for name in NAMES if name in names}
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # a damaged file raises errors of any type
        reason = f"{type(error).__name__}: {error}"
        if "allow_pickle" in reason:  # numpy would suggest to unpickle the content
            reason = (
                f"it is no {path.suffix} file, or holds Python objects, which are never unpickled"
            )
        raise UsageError(f"cannot read the dataset {path}: {reason}") from error
    # both arrays are needed
    if missing := [name for name in NAMES if name not in arrays]:
        content = ", ".join(map(visible, names)) or "nothing"
        raise UsageError(
            f"{path} must hold {' and '.join(NAMES)}, it lacks {' and '.join(missing)}; there is "
            f"{content}"
        )
    return arrays


def _check_unpacked_size(path: Path) -> None:
    """UsageError for an archive that unpacks to more than the free memory, which a file of a few kB
    can.
    """
    free = available_bytes(torch.device("cpu"))
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if free is not None and size > free:
        raise UsageError(f"{path} unpacks to {in_gib(size)}, where {in_gib(free)} are free")


def _from_minari(dataset_id: str) -> dict[str, np.ndarray]:
    try:
        import minari

        dataset = minari.load_dataset(dataset_id)
    except ImportError as error:
        raise UsageError(
            f"{MINARI}{dataset_id} needs Minari: {install_extra('minari')} ({error})"
        ) from error
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(
            f"cannot read {MINARI}{dataset_id}: {error}; `minari download {dataset_id}` brings a "
            f"public one"
        ) from error
    # spaces of dictionaries or text have no tensor form
    for role, space, kinds in (
        ("observations", dataset.observation_space, Box),
        ("actions", dataset.action_space, Actions | MultiBinary),
    ):
        if not isinstance(space, kinds):
            expected = " or ".join(f"a {kind.__name__}" for kind in get_args(kinds) or (kinds,))
            raise UsageError(f"{MINARI}{dataset_id} must have {role} of {expected}, it has {space}")
    # an episode has one more observation than actions, after the last action
    episodes = list(dataset.iterate_episodes())
    if not episodes:
        return {name: np.empty(0) for name in NAMES}
    obs = np.concatenate([episode.observations[: len(episode.rewards)] for episode in episodes])
    return {"obs": obs, "action": np.concatenate([episode.actions for episode in episodes])}


def _check_kind(source: str, name: str, array: np.ndarray, space: gymnasium.Space) -> None:
    """UsageError unless shape and dtype are those of the space."""
    shape = tuple(space.shape or ())
    # in uint8 larger numbers would wrap
    rule: Literal["safe", "same_kind"] = "safe" if space.dtype == np.uint8 else "same_kind"
    if array.shape[1:] != shape or not np.can_cast(array.dtype, space.dtype or np.int64, rule):
        got = ", ".join(map(str, ("M", *array.shape[1:])))
        expected = ", ".join(map(str, ("M", *shape)))
        raise UsageError(
            f"{source} is of another environment: its {name} is {array.dtype} [{got}], wanted "
            f"{space.dtype} [{expected}] of {space}"
        )


def _check_range(source: str, action: np.ndarray, space: Actions) -> None:
    """UsageError for actions outside the space."""
    # the limits, both inclusive, with room for the rounding of files in float32
    if isinstance(space, Box):
        width = space.high.astype(np.float64) - space.low
        slack = np.where(np.isfinite(width), ROUNDING * width, 0.0)
        low = space.low - slack
        high = space.high + slack
    else:
        low = np.asarray(space.start)
        high = low + (space.n if isinstance(space, Discrete) else space.nvec) - 1
    # [M] bool: rows with a number outside
    outside = ((action < low) | (action > high)).reshape(len(action), -1).any(1)
    if outside.any():
        row = int(outside.argmax())
        raise UsageError(
            f"{source} is of another environment: its action {row} is {action[row].tolist()}, "
            f"wanted one of {space}"
        )
