"""The parts of a checkpoint, and continuing from them: a checkpoint must have the algorithm, spaces
and settings that a run keeps. The number of environments may change; their episodes then start
anew."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.plain_files import Json
from gpurl.checkpoints.run_parts import Parts
from gpurl.checkpoints.spaces import space_to_dict
from gpurl.checkpoints.state_files import State
from gpurl.engine.eager import Eager
from gpurl.errors import CheckpointError, GpurlError, UsageError
from gpurl.kernels.memory_errors import is_out_of_memory
from gpurl.run.display import counted
from gpurl.run.records import RECORDS, changed_sources
from gpurl.run.settings import Settings, TrainConfig
from gpurl.run.shards import is_ring, of_all_ranks, of_rank
from gpurl.run.trackers.tracker import flat

MISFIT_ERRORS = (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


def checkpoint_parts(
    engine: Eager,
    settings: Mapping[str, Json],
    run: State,
    told: Mapping[str, State],
    env_state: State | None = None,
) -> Parts:
    """What a checkpoint holds, of all ranks on rank 0. run: numbers of the run that the engine does
    not know; told: what the environment tells of itself, by its name in `meta`. env_state: the
    environments' state, by default that of now.
    """
    algorithm = engine.algorithm
    spaces = ("observation_space", "action_space", "state_space")
    parts = {
        "model": _of_members(engine, lambda each: each.state_dict()),
        "training": _of_members(engine, lambda each: each.extra_state()),
        "env": engine.env.state_dict() if env_state is None else env_state,
        "trainer": run | engine.state_dict(),
        "meta": {
            "settings": dict(settings),
            **{name: space_to_dict(getattr(algorithm, name)) for name in spaces},
            **told,
        },
        "replay": _of_members(engine, lambda each: each.replay_state()),
    }
    return of_all_ranks(parts, algorithm)


def _of_members(engine: Eager, state_of: Callable[[Algorithm], State]) -> State:
    """A state of the algorithm, or of a population those of its members by their index."""
    if engine.members == (engine,):
        return state_of(engine.algorithm)
    return {str(k): state_of(member.algorithm) for k, member in enumerate(engine.members)}


def restore_engine(engine: Eager, parts: Parts, settings: Settings) -> State:
    """Continue exactly from `checkpoint_parts`; if the environment cannot restore a state, its
    episodes start anew. Returns the numbers of the run.

    UsageError for settings that the run does not keep, CheckpointError if the parts do not fit or
    are incomplete.
    """
    try:
        parts, notes = validate_for_resume(parts, settings, engine.algorithm)
        _restore(engine, parts, settings.train)
    except GpurlError:
        raise
    except KeyError as error:
        raise CheckpointError(
            f"the checkpoint has no {error}: another version of gpurl wrote it"
        ) from error
    except MISFIT_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"the checkpoint does not fit this run: {type(error).__name__}: {error}"
        ) from error
    engine.notes += notes
    run = {name: parts["trainer"][name] for name in ("elapsed", "best_return", "evaluation")}
    # returns of two tasks do not compare
    before, now = parts["meta"]["settings"], settings.to_dict()
    is_other_task = any(before.get(name) != now[name] for name in ("env", "env_options"))
    if is_other_task:
        engine.notes.append(
            "another task: a new best checkpoint begins with the next evaluation; the best one of "
            "the old task stays only as long as the newest do"
        )
        run |= {"best_return": float("-inf"), "evaluation": {}}
    return run | {"is_other_task": is_other_task}


def _restore(engine: Eager, parts: Parts, config: TrainConfig) -> None:
    members = {str(k): member for k, member in enumerate(engine.members)}
    names = ("model", "training", "replay")
    # of one agent, or of each member
    states = {name: parts[name] for name in names}
    if engine.members == (engine,):
        states = {name: {"0": state} for name, state in states.items()}
    # weights, optimisers and random streams
    for key, member in members.items():
        member.algorithm.load_state_dict(states["model"][key])
        member.algorithm.load_extra_state(states["training"][key])
    # the loop and its episodes; new episodes get another seed than the first ones had
    engine.load_state_dict(parts["trainer"])
    engine.env.training_progress.fill_(min(engine.steps / config.total_steps, 1.0))
    if parts["env"]:
        engine.load_episodes(parts["env"], parts["trainer"], config.seed)
    else:
        engine.begin(config.seed + engine.iteration, config.stagger)
    # the replay buffer, whose newest episodes end if the environments start new ones
    engine.stored = 0
    for key, member in members.items():
        stored = member.algorithm.load_replay_state(states["replay"][key])
        # of a member that was lost early it is less
        engine.stored = max(engine.stored, stored * engine.ranks.count)
        if not parts["env"]:
            member.algorithm.mark_episode_break()


def validate_for_resume(
    parts: Parts, settings: Settings, algorithm: Algorithm
) -> tuple[Parts, list[str]]:
    """(the checkpoint's parts adapted to this run, notes for the user); UsageError names what
    differs.
    """
    # what a resume may not change
    env = parts["meta"]["settings"].get("env")
    is_same = env == settings.env
    tasks = "" if is_same else f"the checkpoint is of {env}, this run of {settings.env}: "
    for name, old, new in _kept_values(parts["meta"], settings.to_dict(), algorithm):
        if old != new:
            raise UsageError(
                f"{tasks}the checkpoint has {name} {old}, this run {new}; a resumed run keeps it"
            )
    # the keys of streams follow from the seed and the rank, whichever ranks the saved ones were of
    if settings.train.population == 1:
        random = streams_at_step(parts["training"]["random"], algorithm)
        parts = parts | {"training": parts["training"] | {"random": random}}
    # the number of environments may change
    old_count = parts["meta"]["settings"]["num_envs"]
    new_count = settings.train.num_envs
    if old_count == new_count:
        return of_rank(parts, algorithm), []
    if settings.train.population > 1:
        raise UsageError(
            f"the checkpoint has num_envs {old_count}, this run {new_count}; a population keeps it"
        )
    # a replay buffer is laid out for its number of environments, a data set is not
    trainer, training = parts["trainer"], parts["training"]
    ended = algorithm.of_episodes - {"random"}
    loses_replay = is_ring(parts["replay"])
    changed = {
        "env": {},
        "training": {name: state for name, state in training.items() if name not in ended},
        "trainer": trainer | {"statistics": trainer["statistics"] | {"newest": torch.zeros(3, 0)}},
        "replay": {} if loses_replay else parts["replay"],
    }
    note = (
        f"{counted(new_count, 'environment')} instead of {old_count}: their episodes start anew; "
        f"weights, optimiser and normalisation continue"
    )
    parts = of_rank(parts | changed, algorithm)
    return parts, [note + "; the saved replay buffer is dropped" * loses_replay]


def resume_call(folder: Path, needs_env: bool, change: str) -> str:
    """What to type in Python to continue a run that no command can; change: of a setting."""
    env = ", env=..." if needs_env else ""
    return f"gpurl.resume({str(folder)!r}{env}, {change})"


def resume_notes(
    before: Mapping[str, Json], settings: Settings, steps: int, record: Path | None
) -> list[str]:
    """What a resumed run says: the step at which it continues, and what makes its environment or
    algorithm another than before. before: the checkpoint's settings. record: of this start.
    """
    total = settings.train.total_steps
    notes = [f"continues at step {steps:,} of {total:,}"] if steps < total else []
    # the modules, and the environment's name and options
    changes = [] if record is None else changed_sources(record)
    old, new = (
        dict(flat({name: values[name] for name in ("env", "env_options") if name in values}))
        for values in (before, settings.to_dict())
    )
    changes += [
        f"{name} {old.get(name, 'default')} -> {new.get(name, 'default')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if changes:
        place = "" if record is None else f" ({RECORDS}/{record.name} keeps it)"
        notes.append(f"changed since the last start: {', '.join(changes)}{place}")
    return notes


def streams_at_step(saved: State, algorithm: Algorithm) -> State:
    """The algorithm's random streams, at the step that the saved ones had reached."""
    streams = algorithm.random_streams.items()
    return {name: each.state_dict() | {"step": saved[name]["step"]} for name, each in streams}


def _kept_values(
    meta: State, settings: Mapping[str, Json], algorithm: Algorithm
) -> Iterator[tuple[str, object, object]]:
    """What a resume may not change: (name, the checkpoint's value, this run's value)."""
    saved = meta["settings"]
    yield "algorithm", saved["algorithm"], settings["algorithm"]
    yield "population", saved.get("population", 1), settings["population"]
    for name in ("observation_space", "action_space"):
        yield name, meta[name], space_to_dict(getattr(algorithm, name))
    for name in ("seed", "preset", *algorithm.config.fixed):
        value = settings[name]
        if name not in saved:  # a checkpoint may be older than the setting
            continue
        if isinstance(value, dict):
            for inner in filter(saved[name].__contains__, value):
                yield f"{name}.{inner}", saved[name][inner], value[inner]
        else:
            yield name, saved[name], value
    # after the settings that decide whether the critic reads it
    yield "state_space", meta["state_space"], space_to_dict(algorithm.state_space)
