"""Replay buffers of several ranks, joined, and parts of one buffer: every transition that is still
known comes out as from the buffer that stored it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.buffers.prioritized import PrioritizedReplay
from gpurl.buffers.replay import Replay, joined_states, state_of_envs

ENVS, HALF, ROWS = 6, 3, 8
COLUMNS: dict[str, tuple[int, ...]] = {"reward": (), "action": (2,)}


def buffer(num_envs: int, fraction: float) -> Replay:
    return Replay(
        ROWS * num_envs,
        num_envs,
        (3,),
        COLUMNS,
        torch.device("cpu"),
        final_obs_fraction=fraction,
    )


def steps(count: int, seed: int) -> dict[str, Tensor]:
    """Two episodes of three end in each step; every number is another."""
    generator = torch.Generator().manual_seed(seed)
    shape = count, ENVS
    columns = {name: torch.randn(*shape, 3, generator=generator) for name in ("obs", "final_obs")}
    columns |= {
        name: torch.randn(*shape, *more, generator=generator) for name, more in COLUMNS.items()
    }
    terminated = torch.rand(shape, generator=generator) < 0.3
    truncated = ~terminated & (torch.rand(shape, generator=generator) < 0.5)
    return columns | {"terminated": terminated, "truncated": truncated}


def filled(written: int, fraction: float) -> tuple[Replay, list[Replay]]:
    """(the buffer of all environments, those of two ranks)."""
    whole = buffer(ENVS, fraction)
    parts = [buffer(HALF, fraction), buffer(HALF, fraction)]
    for seed in range(written):
        columns = steps(1, seed)
        whole.add(columns)
        for rank, part in enumerate(parts):
            part.add({name: each.chunk(2, 1)[rank].clone() for name, each in columns.items()})
    return whole, parts


def content(replay: Replay, envs: range) -> dict[str, Tensor]:
    """Every transition of these environments, [rows, environments, ...]."""
    stored = min(int(replay.ring.counts[0]), ROWS)
    index = torch.arange(stored).unsqueeze(1) * replay.num_envs + torch.tensor(list(envs))
    batch = replay._sample(index.numel(), 0.9, 2, False, index.flatten())
    batch.pop("index")
    return {name: each.unflatten(0, (stored, len(envs))) for name, each in batch.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Where both know what followed, and so does each where the other does."""
    assert one.keys() == other.keys()
    assert torch.equal(one["weight"], other["weight"])
    known = one["weight"] > 0
    assert int(known.sum()) > 5
    for name in one:
        assert torch.equal(one[name][known], other[name][known]), name


def loaded(num_envs: int, fraction: float, state: dict[str, Any]) -> Replay:
    replay = buffer(num_envs, fraction)
    replay.load_state_dict(state)
    return replay


@pytest.mark.parametrize("written", [5, 8, 13])
def test_joined_buffers_are_the_buffer_of_all_environments(written: int) -> None:
    whole, parts = filled(written, 1.0)
    states = [part.state_dict() for part in parts]
    joined = loaded(ENVS, 1.0, joined_states(states, whole.num_final(ENVS)))
    assert_same(content(joined, range(ENVS)), content(whole, range(ENVS)))
    # and it goes on as that does
    for seed in range(100, 103):
        for replay in (whole, joined):
            replay.add(steps(1, seed))
    assert_same(content(joined, range(ENVS)), content(whole, range(ENVS)))


@pytest.mark.parametrize("written", [5, 8, 13])
def test_a_part_of_a_buffer_is_that_of_its_rank(written: int) -> None:
    whole, parts = filled(written, 1.0)
    state = whole.state_dict()
    for rank, part in enumerate(parts):
        mine = state_of_envs(state, rank * HALF, HALF, part.num_final(HALF))
        one = content(loaded(HALF, 1.0, mine), range(HALF))
        assert_same(one, content(part, range(HALF)))


def test_of_more_ends_than_a_buffer_stores_the_newest_are_kept() -> None:
    whole, parts = filled(13, 1.0)
    count = 7
    state = joined_states([part.state_dict() for part in parts], count)
    replay = loaded(ENVS, count / (ROWS * ENVS), state)
    got, expected = content(replay, range(ENVS)), content(whole, range(ENVS))
    # from the oldest row: those that lost their final observation come first
    order = (torch.arange(ROWS) + 13) % ROWS
    ends = (replay.ring.flags[order] != 0) & (replay.ring.flags[order] != 1)
    assert int(ends.sum()) > count
    lost = (got["weight"] < expected["weight"])[order]
    rows = lost.any(1).nonzero().squeeze(1)
    assert len(rows)
    assert int((replay.ring.owner >= 0).sum()) == count
    newest_lost = int(rows.max())
    assert not bool((got["weight"][order][newest_lost + 2 :] == 0).any())


def test_priorities_follow_their_environments() -> None:
    def prioritized(num_envs: int) -> PrioritizedReplay:
        device = torch.device("cpu")
        return PrioritizedReplay(ROWS * num_envs, num_envs, (3,), COLUMNS, device)

    parts = [prioritized(HALF), prioritized(HALF)]
    for seed in range(5):
        for rank, part in enumerate(parts):
            columns = steps(1, seed).items()
            part.add({name: each.chunk(2, 1)[rank].clone() for name, each in columns})
    for rank, part in enumerate(parts):
        part.priority[:5] = torch.rand(5, HALF, generator=torch.Generator().manual_seed(rank))
    whole = prioritized(ENVS)
    states = [part.state_dict() for part in parts]
    whole.load_state_dict(joined_states(states, whole.num_final(ENVS)))
    assert torch.equal(whole.priority, torch.cat([part.priority for part in parts], 1))
    for rank, part in enumerate(parts):
        mine = prioritized(HALF)
        mine.load_state_dict(
            state_of_envs(whole.state_dict(), rank * HALF, HALF, mine.num_final(HALF))
        )
        assert torch.equal(mine.priority, part.priority)
