"""The replay kernel against its reference, which tests/kernels/test_replay.py holds
against episodes that are walked.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import replay
from gpurl.kernels.random import RandomStreams, stream_constants
from gpurl.kernels.replay import STORED_KINDS, Batch, Block, Ring, new_ring
from tests.kernels.triton.conftest import Counted


def streams(step: int) -> RandomStreams:
    return RandomStreams(*stream_constants(5, 1, torch.empty(0).device), torch.tensor(step))


def fill_ring(
    kind: torch.dtype, num_envs: int, obs_size: int, width: int, blocks: tuple[int, ...]
) -> Ring:
    generator = torch.Generator().manual_seed(0)
    ring = new_ring(8, num_envs, obs_size, width, 5, kind, torch.empty(0).device)
    for steps in blocks:
        shape = (steps, num_envs)
        obs, final_obs = (torch.randn(*shape, obs_size, generator=generator) for _ in range(2))
        if kind == torch.uint8:
            obs, final_obs = (x.mul(40).clamp(0, 255).to(torch.uint8) for x in (obs, final_obs))
        ended, is_truncated, valid = (
            torch.rand(shape, generator=generator) < chance for chance in (0.5, 0.5, 0.9)
        )
        numbers = torch.randn(*shape, width, generator=generator)
        steps_in = (obs, final_obs, ended & ~is_truncated, ended & is_truncated, valid, numbers)
        *tensors, numbers = (tensor.to(ring.obs.device) for tensor in steps_in)
        replay.replay_add_reference(ring, Block(*tensors, [numbers]))
    return ring


def in_triton(
    ring: Ring,
    batch_size: int,
    gamma: float,
    steps: int,
    words: RandomStreams,
    offset: int,
    index: Tensor | None = None,
) -> Batch:
    out = replay.batch_memory(ring, batch_size, index)
    replay.replay_sample_triton(ring, out, gamma, steps, words, offset, index is None)
    return out


def assert_same(ours: Batch, theirs: Batch) -> None:
    for name, mine, other in zip(Batch._fields, ours, theirs):
        assert mine.dtype == other.dtype, name
        tolerance = 1e-6 if name == "reward" else 0.0
        torch.testing.assert_close(
            mine,
            other,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("kind", STORED_KINDS)
@pytest.mark.parametrize(
    ("num_envs", "obs_size", "width", "blocks", "num_steps", "batch_size"),
    [
        (3, 5, 2, (2,), 1, 7),
        (3, 5, 3, (4, 4, 3), 3, 40),
        (1, 1, 1, (8, 8, 1), 5, 33),
        (4, 300, 9, (5, 6), 2, 20),
    ],
)
def test_kernel_is_the_reference(
    kind: torch.dtype,
    num_envs: int,
    obs_size: int,
    width: int,
    blocks: tuple[int, ...],
    num_steps: int,
    batch_size: int,
) -> None:
    ring = fill_ring(kind, num_envs, obs_size, width, blocks)
    for step in range(2):
        arguments = (ring, batch_size, 0.9, num_steps, streams(step), 3)
        drawn = in_triton(*arguments)
        assert_same(drawn, replay.replay_sample_reference(*arguments))
    stored = min(sum(blocks), 8) * num_envs
    index = torch.arange(stored)
    again = in_triton(ring, stored, 0.9, num_steps, streams(0), 0, index)
    assert_same(
        again, replay.replay_sample_reference(ring, stored, 0.9, num_steps, streams(0), index=index)
    )


@pytest.mark.parametrize("has_index", [False, True])
def test_members_of_a_stack_sample_in_one_launch(
    has_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as alone, to the bit, though the memory of one member lies between the others'."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    rings = [fill_ring(torch.float32, 3, 5, 2, blocks) for blocks in ((4, 4, 3), (2,), (8, 5))]
    keys = [stream_constants(k, 1, torch.empty(0).device) for k in range(3)]
    words = [RandomStreams(*each, torch.tensor(7 + k)) for k, each in enumerate(keys)]
    index = torch.tensor([[0, 5, 20], [1, 2, 3], [23, 0, 11]])
    # each between numbers that are read only by mistake
    apart = []
    for tensors in zip(*[(*ring, *streams) for ring, streams in zip(rings, words)]):
        one = tensors[0]
        memory = torch.full((3, one.numel() + 9), 77).to(one.dtype)
        view = memory[:, 4 : 4 + one.numel()].unflatten(1, one.shape or (1,))
        apart.append(view if one.dim() else view.squeeze(1))
        apart[-1].copy_(torch.stack(tensors))
    grids = list[Any]()
    monkeypatch.setattr(replay, "replay_sample_kernel", Counted(replay.replay_sample_kernel, grids))

    def sampled(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ring, streams = Ring(*tensors[:7]), RandomStreams(*tensors[7:])
        given = rows if has_index else None
        return tuple(replay.replay_sample(ring, 3, 0.9, 3, streams, 2, given))

    got = torch.func.vmap(sampled)(index, *apart)
    assert [grid[1] for grid in grids] == [3]
    for k, ring in enumerate(rings):
        rows = index[k] if has_index else None
        expected = replay.replay_sample(ring, 3, 0.9, 3, words[k], 2, rows)
        assert_same(Batch(*(each[k] for each in got)), expected)


def test_an_empty_ring_gives_its_first_row() -> None:
    batch = in_triton(fill_ring(torch.float32, 3, 5, 2, ()), 7, 0.9, 2, streams(0), 0)
    assert batch.index.tolist() == [0] * 7
    assert not batch.reward.any()
