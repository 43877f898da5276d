"""Whether a checkpoint is one that a run can go on from: of the same algorithm, spaces and settings
that a run keeps; of fewer or more environments too, whose episodes then begin anew."""

from collections.abc import Iterator
from typing import Any

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.spaces import space_to_dict
from gpurl.errors import CheckpointError
from gpurl.run.settings import Settings


def fitting(
    parts: dict[str, Any], settings: Settings, algorithm: Algorithm
) -> tuple[dict[str, Any], list[str]]:
    """(the checkpoint's parts as this run takes them, what there is to tell); CheckpointError that
    names what differs.
    """
    for name, of_checkpoint, of_run in _kept(parts["meta"], settings.to_dict(), algorithm):
        if of_checkpoint != of_run:
            raise CheckpointError(
                f"the checkpoint has {name} {of_checkpoint}, this run {of_run}; a resumed run "
                f"keeps it"
            )
    before, now = parts["meta"]["settings"]["num_envs"], settings.train.num_envs
    if before == now:
        return parts, []
    lost = "flags" in parts["replay"]  # of steps of so many environments; a dataset is of none
    fresh = {
        "env": {},
        "training": _for_streams(parts["training"], algorithm.extra_state()),
        "replay": {} if lost else parts["replay"],
    }
    told = (
        f"{now} environments instead of {before}: their episodes begin anew, weights, optimiser "
        f"and normalisation go on"
    )
    return parts | fresh, [told + "; the saved replay is left out" * lost]


def _for_streams(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`saved` with random streams for as many environments as `own` has, at the step that the saved
    ones had come to.
    """
    result = dict(saved)
    for name, value in own.items():
        if (
            isinstance(value, dict)
            and "gamma" in value
            and value["key"].shape != saved[name]["key"].shape
        ):
            result[name] = value | {"step": saved[name]["step"]}
    return result


def _kept(
    meta: dict[str, Any], wanted: dict[str, Any], algorithm: Algorithm
) -> Iterator[tuple[str, Any, Any]]:
    """What a resume may not change: (name, the checkpoint's value, this run's value)."""
    saved = meta["settings"]
    yield "algorithm", saved["algorithm"], wanted["algorithm"]
    for name in ("observation_space", "action_space"):
        yield name, meta[name], space_to_dict(getattr(algorithm, name))
    for name in ("seed", *algorithm.config.fixed):
        if isinstance(wanted[name], dict):
            yield from (
                (f"{name}.{inner}", saved[name][inner], value)
                for inner, value in wanted[name].items()
            )
        elif (
            name in saved
        ):  # a setting that is newer than the checkpoint stands at what was done before
            yield name, saved[name], wanted[name]
    yield "state_space", meta["state_space"], space_to_dict(algorithm.state_space)
