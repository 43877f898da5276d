"""Whether a checkpoint is one that a run can go on from: of the same algorithm, spaces and settings that a run keeps."""

from collections.abc import Iterator
from typing import Any

from gpurl.algorithms.algorithm import Algorithm
from gpurl.config import Settings
from gpurl.errors import CheckpointError
from gpurl.spaces import space_to_dict


def check_fits(meta: dict[str, Any], settings: Settings, algorithm: Algorithm) -> None:
    """CheckpointError that names what differs; meta: of the checkpoint, settings and algorithm: of this run."""
    for name, of_checkpoint, of_run in _kept(meta, settings.to_dict(), algorithm):
        if of_checkpoint != of_run:
            raise CheckpointError(f"the checkpoint has {name} {of_checkpoint}, this run {of_run}; a resumed run keeps it")


def _kept(meta: dict[str, Any], wanted: dict[str, Any], algorithm: Algorithm) -> Iterator[tuple[str, Any, Any]]:
    """What a resume may not change: (name, the checkpoint's value, this run's value)."""
    saved = meta["settings"]
    yield "algorithm", saved["algorithm"], wanted["algorithm"]
    for name in ("observation_space", "action_space"):
        yield name, meta[name], space_to_dict(getattr(algorithm, name))
    for name in ("num_envs", "seed", *algorithm.config.fixed):
        if isinstance(wanted[name], dict):
            yield from ((f"{name}.{inner}", saved[name][inner], value) for inner, value in wanted[name].items())
        elif name in saved:  # a setting that is newer than the checkpoint stands at what was done before
            yield name, saved[name], wanted[name]
    yield "state_space", meta["state_space"], space_to_dict(algorithm.state_space)
