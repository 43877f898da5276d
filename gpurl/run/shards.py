"""The part of a run that each rank has: its environments, its rows of a batch, and its part of a
checkpoint, which rank 0 writes for all; any number of ranks can continue it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from gpurl.buffers.replay import joined_states, state_of_envs
from gpurl.checkpoints.run_parts import Parts
from gpurl.checkpoints.state_files import State
from gpurl.errors import RankError, UsageError
from gpurl.nn.ranks import Alone
from gpurl.run.records import own_modules
from gpurl.run.settings import Settings
from gpurl.run.trackers.tracker import flat

Change = Callable[[Tensor, int], Tensor]  # (a tensor, its axis of environments)
MAX_NAMED = 5  # settings


# ---- settings ----


def settings_of_rank(settings: Settings, ranks: Alone) -> Settings:
    """`settings` with what one rank has of it; UsageError for what does not divide."""
    if ranks.count == 1:
        return settings
    if (population := settings.train.population) > 1:
        raise UsageError(
            f"population {population} is for one process, this run has {ranks.count}: leave out "
            f"one of them"
        )

    def part_of(name: str, number: int) -> int:
        if number < ranks.count:
            raise UsageError(
                f"{name} {number} is less than one for each of {ranks.count} processes: take fewer "
                f"processes, or {name} {ranks.count}"
            )
        if number % ranks.count:
            fewer = number // ranks.count * ranks.count
            raise UsageError(
                f"{name} {number} does not divide into {ranks.count} processes: take {fewer} or "
                f"{fewer + ranks.count}"
            )
        return number // ranks.count

    num_envs = part_of("num_envs", settings.train.num_envs)
    config = settings.algorithm_config
    if isinstance(config, OffPolicyConfig):
        config = dataclasses.replace(
            config,
            batch_size=part_of("batch_size", config.batch_size),
            replay_size=part_of("replay_size", config.replay_size),
        )
    train = dataclasses.replace(settings.train, num_envs=num_envs)
    return dataclasses.replace(settings, train=train, algorithm_config=config)


def check_same_run(settings: Settings, kinds: Iterable[type], ranks: Alone) -> None:
    """RankError if a rank has other settings or other source files than rank 0. kinds: classes of
    the run, whose modules are compared too.
    """
    if ranks.count == 1:
        return
    sources = {"gpurl": digest(Path(__file__).resolve().parents[1].rglob("*.py"))}
    sources |= {name: digest([path]) for name, path in own_modules(kinds).items()}
    mine = {"torch": torch.__version__, **dict(flat(settings.to_dict()))}
    first, *others = ranks.share([mine, sources])
    for rank, other in enumerate(others, start=1):
        if differences := _differences(first[0], other[0]):
            raise RankError(f"rank {rank} has other settings than rank 0: {differences}")
        files = sorted({*first[1], *other[1]})
        if changed := [name for name in files if first[1].get(name) != other[1].get(name)]:
            raise RankError(f"rank {rank} has other source files than rank 0: {', '.join(changed)}")


def digest(paths: Iterable[Path]) -> str:
    """Of the names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _differences(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in first | other if first.get(name) != other.get(name)]
    texts = [f"{name} {other.get(name)}, not {first.get(name)}" for name in names[:MAX_NAMED]]
    return "; ".join(texts)


def check_same_weights(algorithm: Algorithm) -> None:
    """RankError if a rank has other weights or normalisers than rank 0: then the ranks train
    different agents, for example because a method of a subclass depends on one rank's rows.
    """
    ranks = algorithm.ranks
    if ranks.count == 1:
        return
    sums = {name: bit_sum(tensor) for name, tensor in algorithm.state_dict().items()}
    first, *others = ranks.share(sums)
    for rank, other in enumerate(others, start=1):
        if changed := [name for name in first if first[name] != other.get(name)]:
            raise RankError(
                f"rank {rank} has other weights than rank 0: {', '.join(changed[:MAX_NAMED])}; "
                f"{algorithm.label} must change them by what all ranks have in common, such as the "
                f"averaged gradient"
            )


def bit_sum(tensor: Tensor) -> int:
    """The sum of the bits of `tensor` as integers."""
    kinds = {4: torch.int32, 8: torch.int64}
    kind = kinds.get(tensor.element_size(), torch.uint8)
    return int(tensor.detach().contiguous().view(-1).view(kind).sum(dtype=torch.int64))


# ---- checkpoints ----


def of_all_ranks(parts: Parts, algorithm: Algorithm) -> Parts:
    """On rank 0 the parts of a checkpoint with the environments of all ranks; elsewhere they mean
    nothing.
    """
    ranks, num_envs = algorithm.ranks, algorithm.num_envs
    if ranks.count == 1:
        return parts

    def gather(tensor: Tensor, axis: int) -> Tensor:
        all_ = ranks.gather(tensor)
        return torch.cat(all_, axis) if all_ else tensor

    parts = _with_envs(parts, algorithm, num_envs, gather)
    # a replay buffer
    if not is_ring(parts["replay"]):
        return parts
    assert isinstance(algorithm, OffPolicy)
    gathered = {
        name: ranks.gather(value) if isinstance(value, Tensor) else [value] * ranks.count
        for name, value in parts["replay"].items()
    }
    if ranks.index:
        return parts
    states = [dict(zip(gathered, values)) for values in zip(*gathered.values())]
    num_final = algorithm.replay.num_final(num_envs * ranks.count)
    return parts | {"replay": joined_states(states, num_final)}


def is_ring(replay: State) -> bool:
    """Whether a saved replay buffer is laid out for its environments, as a data set is not."""
    return "flags" in replay


def of_rank(parts: Parts, algorithm: Algorithm) -> Parts:
    """The parts of a checkpoint of as many environments as all ranks have, with those of this
    rank.
    """
    ranks = algorithm.ranks
    if ranks.count == 1:
        return parts
    num_envs = algorithm.num_envs * ranks.count
    if is_ring(replay := parts["replay"]):
        assert isinstance(algorithm, OffPolicy)
        first = ranks.index * algorithm.num_envs
        num_final = algorithm.replay.num_final(algorithm.num_envs)
        replay = state_of_envs(replay, first, algorithm.num_envs, num_final)
    if "random" in replay:  # of a data set too; each rank draws by a stream of its own
        assert isinstance(algorithm, OffPolicy)
        random = algorithm.replay.random.state_dict() | {"step": replay["random"]["step"]}
        parts = parts | {"replay": replay | {"random": random}}

    def own(tensor: Tensor, axis: int) -> Tensor:
        return tensor.chunk(ranks.count, axis)[ranks.index]

    parts = _with_envs(parts, algorithm, num_envs, own)
    if ranks.index == 0:
        return parts
    # sums over all environments are rank 0's
    statistics = parts["trainer"]["statistics"] | {"terms": {}, "host_terms": {}}
    return parts | {"trainer": parts["trainer"] | {"statistics": statistics}}


def _with_envs(parts: Parts, algorithm: Algorithm, num_envs: int, change: Change) -> Parts:
    """`parts` with `change` of each tensor that has an axis of `num_envs` environments."""
    training = dict(parts["training"])
    for name in sorted(algorithm.of_episodes - {"random"}):
        if name in training:
            training[name] = _changed(training[name], 0, num_envs, change)
    trainer = dict(parts["trainer"])
    for name in ("obs", "policy_state"):
        trainer[name] = _changed(trainer[name], 0, num_envs, change)
    statistics = trainer["statistics"]
    newest = _changed(statistics["newest"], 1, num_envs, change)
    trainer["statistics"] = statistics | {"newest": newest}
    env = _changed(parts["env"], 0, num_envs, change)
    return parts | {"training": training, "trainer": trainer, "env": env}


def _changed(state: Any, axis: int, num_envs: int, change: Change) -> Any:
    """A nested state; tensors without that axis stay, they belong to all environments."""
    if isinstance(state, dict):
        return {name: _changed(each, axis, num_envs, change) for name, each in state.items()}
    if isinstance(state, list | tuple):
        return [_changed(each, axis, num_envs, change) for each in state]
    if isinstance(state, Tensor) and state.dim() > axis and state.shape[axis] == num_envs:
        return change(state, axis)
    return state
