"""The parts of a checkpoint, and going on from them: a checkpoint must be of the same algorithm,
spaces and settings that a run keeps; it may be of fewer or more environments, whose episodes then
begin anew."""

from collections.abc import Iterator
from typing import Any

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.spaces import space_to_dict
from gpurl.engine.eager import Eager
from gpurl.errors import CheckpointError, GpurlError
from gpurl.kernels.memory_errors import is_out_of_memory
from gpurl.run.settings import Settings

Parts = dict[str, dict[str, Any]]
UNFIT = (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


def checkpoint_parts(engine: Eager, settings: Settings, run: dict[str, Any]) -> Parts:
    """What a checkpoint holds; run: numbers of the run that the engine does not know."""
    algorithm = engine.algorithm
    spaces = ("observation_space", "action_space", "state_space")
    return {
        "model": algorithm.state_dict(),
        "training": algorithm.extra_state(),
        "env": engine.env.state_dict(),
        "trainer": run | engine.state_dict(),
        "meta": {
            "settings": settings.to_dict(),
            **{name: space_to_dict(getattr(algorithm, name)) for name in spaces},
        },
        "replay": algorithm.replay_state(),
    }


def restore_engine(engine: Eager, parts: Parts, settings: Settings) -> dict[str, Any]:
    """Continue exactly from `checkpoint_parts`; where the environment cannot restore a state, its
    episodes begin anew. Returns the numbers of the run.

    CheckpointError when the parts are of something else or lack something.
    """
    try:
        parts, notes = validate_for_resume(parts, settings, engine.algorithm)
        _restore(engine, parts, settings)
    except GpurlError:
        raise
    except KeyError as error:
        raise CheckpointError(
            f"the checkpoint has no {error}: it was written by another version of gpurl"
        ) from error
    except UNFIT as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"the checkpoint does not fit this run: {type(error).__name__}: {error}"
        ) from error
    engine.notes += notes
    run = parts["trainer"]
    return {name: run[name] for name in ("elapsed", "best_return", "evaluation")}


def _restore(engine: Eager, parts: Parts, settings: Settings) -> None:
    algorithm, config = engine.algorithm, settings.train
    # what learns
    algorithm.load_state_dict(parts["model"])
    algorithm.load_extra_state(parts["training"])
    # the loop and its episodes
    engine.load_state_dict(parts["trainer"])
    if parts["env"]:
        engine.load_episodes(parts["env"], parts["trainer"], config.seed)
    else:  # other episodes than the first ones again
        engine.begin(config.seed + engine.iteration, config.stagger)
    # what was stored of earlier episodes
    engine.stored = algorithm.load_replay_state(parts["replay"])
    if engine.stored and not parts["env"]:
        algorithm.mark_episode_break()


def validate_for_resume(
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
