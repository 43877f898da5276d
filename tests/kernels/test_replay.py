"""The replay ring in torch and in C: by hand, whatever the form of what goes in, and what is
refused; laws in test_properties_replay.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpurl.kernels import replay
from gpurl.kernels.replay import (
    BROKEN,
    INVALID,
    TERMINATED,
    TRUNCATED,
    Batch,
    Block,
    Ring,
    new_ring,
    ring_bytes,
)
from tests.replay_world import (
    ENVS,
    FORMS,
    GAMMA,
    OBS,
    Form,
    World,
    block_of,
    filled,
    needs_c,
    streams,
)


@pytest.mark.parametrize("form", FORMS)
def test_the_newest_slots_by_hand(form: Form) -> None:
    """Full ring of 16 rows, n = 3, rewards 20 each: a window ends at the newest row and does not
    run on into the oldest.
    """
    ring = new_ring(16, 1, 1, 1, 4, torch.float32, torch.device("cpu"))
    for step in range(20):
        obs = torch.tensor([[[float(step)]]])
        form[0](
            ring,
            block_of(
                obs, torch.full((1, 1, 1), 20.0), torch.zeros(1, 1, dtype=torch.uint8), obs + 1
            ),
        )
    batch = form[1](
        ring, 3, 0.5, 3, streams(), index=torch.tensor([1, 2, 3])
    )  # steps 17, 18, 19; 19 is the newest
    assert batch.reward.tolist() == [35.0, 30.0, 20.0]
    assert batch.discount.tolist() == [0.125, 0.25, 0.5]
    assert batch.next_obs.flatten().tolist() == [20.0, 20.0, 20.0]


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_end_whose_final_observation_is_gone_is_not_learnt_from(form: Form) -> None:
    ring = new_ring(8, 1, 1, 1, 2, torch.float32, torch.device("cpu"))
    flags = [TRUNCATED, TERMINATED, TERMINATED, TRUNCATED, 0]
    for step, bits in enumerate(flags):
        obs = torch.tensor([[[float(step)]]])
        form[0](
            ring,
            block_of(
                obs, torch.ones(1, 1, 1), torch.full((1, 1), bits, dtype=torch.uint8), obs + 100
            ),
        )
    batch = form[1](ring, 5, 0.5, 1, streams(), index=torch.arange(5))
    assert batch.weight.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert batch.discount.tolist() == [0.5, 0.0, 0.0, 0.5, 0.5]
    assert batch.next_obs.flatten().tolist()[2:] == [102.0, 103.0, 104.0]


@pytest.mark.parametrize("form", FORMS)
def test_more_ends_in_a_block_than_the_table_holds(form: Form) -> None:
    world = World(ends=1.0)
    ring = filled(world, form, 8, (8,), num_final=5)
    batch = form[1](ring, 8 * ENVS, GAMMA, 1, streams(), index=torch.arange(8 * ENVS))
    truncated = torch.tensor(
        [[step["flags"][n] == TRUNCATED for n in range(ENVS)] for step in world.steps]
    ).flatten()
    kept = torch.arange(8 * ENVS) >= 8 * ENVS - 5
    assert torch.equal(batch.weight.bool(), ~truncated | kept)
    for i in torch.nonzero(kept).flatten().tolist():
        np.testing.assert_array_equal(
            batch.next_obs[i].numpy(), world.steps[i // ENVS]["final_obs"][i % ENVS]
        )


@needs_c
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_c_is_the_reference_to_the_bit(kind: torch.dtype) -> None:
    given = torch.uint8 if kind == torch.uint8 else torch.float32
    rings = [new_ring(16, ENVS, OBS, 3, 7, kind, torch.device("cpu")) for _ in range(2)]
    world = World(kind=given)
    for round_number, steps in enumerate((3, 5, 16, 1, 7)):
        block = world.block(steps, invalid=0.1)
        for ring, add in zip(rings, (replay.replay_add_reference, replay.replay_add)):
            add(ring, block)
        for name, ours, theirs in zip(Ring._fields, *rings):
            if name == "owner":  # the last is nobody's
                ours, theirs = ours[:-1], theirs[:-1]
            assert torch.equal(ours, theirs), name
        batches = [
            sample(ring, 100, GAMMA, 3, streams(round_number), 8)
            for ring, sample in zip(rings, (replay.replay_sample_reference, replay.replay_sample))
        ]
        for name, ours, theirs in zip(Batch._fields, *batches):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=1e-6 if name == "reward" else 0,
                atol=1e-6 if name == "reward" else 0,
            )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_valid", [False, True])
@pytest.mark.parametrize("kind", replay.STORED_KINDS)
def test_what_goes_in_may_have_any_dtype_shape_and_strides(
    form: Form, kind: torch.dtype, has_valid: bool
) -> None:
    """And fewer numbers than the ring keeps."""
    rings = [new_ring(8, ENVS, OBS * 2, 4, 3, kind, torch.device("cpu")) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for steps in (3, 8, 1, 5):
        obs, final_obs = (
            torch.randint(0, 256, (2, steps, OBS, ENVS), generator=generator).permute(1, 3, 0, 2)
            for _ in range(2)
        )
        obs, final_obs = (
            x.to(torch.uint8 if kind == torch.uint8 else torch.float32) for x in (obs, final_obs)
        )
        reward = torch.randn(steps, ENVS, generator=generator).double()
        action = torch.randint(-9, 9, (steps, 2, ENVS), generator=generator).transpose(1, 2)
        terminated, truncated, valid = (
            torch.rand(ENVS, steps, generator=generator).t() < chance for chance in (0.3, 0.3, 0.7)
        )
        flags = (
            terminated * TERMINATED + truncated * TRUNCATED + (~valid * INVALID if has_valid else 0)
        )
        numbers = torch.cat((reward.unsqueeze(2), action, torch.zeros(steps, ENVS, 1)), 2).float()
        replay.replay_add_reference(
            rings[0],
            block_of(
                *(x.contiguous() for x in (obs.flatten(2), numbers, flags, final_obs.flatten(2)))
            ),
        )
        form[0](
            rings[1],
            Block(
                obs,
                final_obs,
                terminated,
                truncated,
                valid if has_valid else None,
                [reward, action],
            ),
        )
        for name, ours, theirs in zip(Ring._fields, *rings):
            assert (
                torch.equal(ours[:-1], theirs[:-1])
                if name == "owner"
                else torch.equal(ours, theirs)
            ), name


def test_a_block_of_wrong_sizes_is_refused() -> None:
    ring, flag = (
        new_ring(4, ENVS, OBS, 2, 3, torch.float32, torch.device("cpu")),
        torch.zeros(2, ENVS, dtype=torch.bool),
    )
    block = Block(
        torch.zeros(2, ENVS, OBS),
        torch.zeros(2, ENVS, OBS),
        flag,
        flag,
        None,
        [torch.zeros(2, ENVS)],
    )
    more = [*block.columns, torch.zeros(2, ENVS, 2)]
    for changes, message in (
        (
            {"final_obs": block.obs[:, 1:]},
            rf"\(2, {ENVS - 1}, {OBS}\) is not {OBS} numbers of 2 steps of {ENVS} environments",
        ),
        ({"truncated": flag[:, :2]}, r"\(2, 2\) is not 1 numbers of 2 steps"),
        ({"valid": flag[:1]}, rf"\(1, {ENVS}\) is not 1 numbers of 2 steps"),
        ({"columns": [flag[:1]]}, rf"\(1, {ENVS}\) is not 1 numbers of 2 steps"),
        ({"columns": more}, "a step has 3 numbers, the ring keeps 2"),
        ({"terminated": flag.new_zeros(5, ENVS)}, "a block of 5 steps does not fit a ring of 4"),
        ({"terminated": flag[:0]}, "a block of 0 steps does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            replay.replay_add(ring, block._replace(**changes))
    assert not ring.counts.any()


class Places(TorchDispatchMode):
    """Keeps the indices of every write by index, per tensor written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.index_copy_.default:
            self.written.append((args[0].data_ptr(), args[2]))
        return function(*args, **(kwargs or {}))


def test_no_two_are_written_to_one_entry() -> None:
    """Of two a CPU keeps the last; a GPU keeps any, and may keep another as the owner."""
    ring, world = new_ring(8, ENVS, OBS, 3, 2, torch.float32, torch.device("cpu")), World(ends=0.9)
    nothing = torch.zeros(1, ENVS, dtype=torch.bool)
    with Places() as places:
        replay.replay_add_reference(ring, world.block(7))
        replay.replay_add_reference(
            ring, world.block(1)._replace(terminated=nothing, truncated=nothing)
        )
        replay.replay_mark_episode_break(ring, torch.ones(ENVS, dtype=torch.bool))
    for tensor in (ring.final_obs, ring.owner):
        written = [
            index[index < 2] for place, index in places.written if place == tensor.data_ptr()
        ]
        assert len(written) == 3
        assert all(len(index) == len(index.unique()) for index in written)
        assert len(written[0]) == len(written[2]) == 2


def test_the_order_of_writes_to_one_entry_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several writes of `index_copy_` to one entry any one may stay on a GPU."""
    rings = []
    write = Tensor.index_copy_
    for is_backwards in (False, True):

        def one_by_one(
            x: Tensor, dim: int, index: Tensor, source: Tensor, last_first: bool = is_backwards
        ) -> Tensor:
            numbers = range(len(index))
            for number in reversed(numbers) if last_first else numbers:
                write(x, dim, index[number : number + 1], source.narrow(dim, number, 1))
            return x

        monkeypatch.setattr(Tensor, "index_copy_", one_by_one)
        world = World(ends=0.3)
        ring = new_ring(16, ENVS, OBS, 3, 4, torch.float32, torch.device("cpu"))
        for steps in (7, 5):
            replay.replay_add_reference(ring, world.block(steps))
        rings.append(ring)
    for one, other in zip(*rings):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_final", [1, 2, 20])
def test_a_cut_keeps_as_many_final_observations_as_the_table_holds(num_final: int) -> None:
    """An end that was told stays what it is; of more cuts than entries the last are kept, as of
    ends that go in.
    """
    ring = new_ring(4, 5, 1, 1, num_final, torch.float32, torch.device("cpu"))
    mask = torch.tensor([True, True, True, False, True])
    replay.replay_mark_episode_break(ring, mask)
    assert not ring.counts.any()  # there was nothing to cut
    assert not ring.flags.any()
    flags = torch.tensor([[0, TERMINATED, TRUNCATED, 0, 0]], dtype=torch.uint8)
    for step in range(2):
        obs = torch.arange(5.0).view(1, 5, 1) + 10 * step
        replay.replay_add_reference(ring, block_of(obs, torch.ones(1, 5, 1), flags, obs + 100))
    replay.replay_mark_episode_break(ring, mask)
    assert ring.flags.tolist() == [
        [0, TERMINATED, TRUNCATED, 0, 0],
        [
            TRUNCATED | BROKEN,
            TERMINATED | BROKEN,
            TRUNCATED | BROKEN,
            0,
            TRUNCATED | BROKEN,
        ],
        [0] * 5,
        [0] * 5,
    ]
    fresh = torch.full((1, 5, 1), -1.0)
    replay.replay_add_reference(ring, block_of(fresh, torch.ones(1, 5, 1), 0 * flags, fresh))
    batch = replay.replay_sample_reference(ring, 5, 0.5, 2, streams(), index=torch.arange(5, 10))
    assert batch.discount.tolist() == [0.5, 0.0, 0.5, 0.25, 0.5]
    assert batch.weight.tolist() == [float(num_final > 1), 1.0, float(num_final > 2), 1.0, 1.0]
    expected = torch.tensor([110.0, 111.0, 112.0, -1.0, 114.0])
    may_be_used = (batch.weight > 0) & (batch.discount > 0)
    assert torch.equal(batch.next_obs.flatten()[may_be_used], expected[may_be_used])


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_keeps_infinity_and_nan_apart(form: Form) -> None:
    ring = new_ring(2, 1, 4, 1, 1, torch.bfloat16, torch.device("cpu"))
    obs = torch.tensor(
        [[[float("inf"), float("nan"), 1.00390625, 1.01171875]]]
    )  # the last two lie between two numbers: to the even one
    form[0](ring, block_of(obs, torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.uint8), obs))
    out = form[1](ring, 1, 0.5, 1, streams(), index=torch.tensor([0])).obs[0].tolist()
    assert out[0] == float("inf")
    assert out[1] != out[1]
    assert out[2:] == [1.0, 1.015625]


@pytest.mark.parametrize("form", FORMS)
def test_no_nan_rounds_to_a_number(form: Form) -> None:
    """Those whose upper half is infinity's, and those that would run over into the sign."""
    ring = new_ring(2, 1, 4, 1, 1, torch.bfloat16, torch.device("cpu"))
    obs = (
        torch.tensor([0x7F800001, 0x7FFFFFFF, -0x007FFFFF, -1], dtype=torch.int32)
        .view(torch.float32)
        .view(1, 1, 4)
    )
    assert bool(obs.isnan().all())
    form[0](ring, block_of(obs, torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.uint8), obs))
    assert bool(ring.obs[0].isnan().all())


@pytest.mark.parametrize("form", FORMS)
def test_draws_are_uniform_over_what_is_stored(form: Form) -> None:
    ring = filled(World(), form, 100, (40,))
    batch = form[1](ring, 60_000, GAMMA, 1, streams())
    counts = torch.bincount(batch.index, minlength=300).double()
    assert counts[120:].sum() == 0
    chi_square = ((counts[:120] - 500) ** 2 / 500).sum()
    assert 70 < float(chi_square) < 190  # 119 degrees of freedom: mean 119, standard deviation 15
    later = form[1](ring, 60_000, GAMMA, 1, streams(1))
    assert not torch.equal(batch.index, later.index)
    assert torch.equal(batch.index[8:], form[1](ring, 59_992, GAMMA, 1, streams(), 8).index)


def test_rows_that_are_asked_for_may_have_strides() -> None:
    ring = filled(World(), FORMS[0].values[0], 4, (3,))
    spread = torch.arange(9)[::2]
    assert torch.equal(
        replay.replay_sample(ring, 5, GAMMA, 1, streams(), index=spread).reward,
        ring.numbers[..., 0].view(-1)[spread],
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_ring_gives_its_first_row(form: Form) -> None:
    batch = form[1](filled(World(), form, 4, ()), 20, GAMMA, 2, streams())
    assert batch.index.tolist() == [0] * 20
    assert not batch.obs.any()
    assert not batch.reward.any()


def test_every_row_of_a_large_ring_can_be_drawn() -> None:
    """24 bits would give 2**25 rows half of them never; 53 give them all alike."""
    index = replay.uniform_index_reference(streams(), 0, 60_000, torch.tensor(1 << 40))
    assert int(index.unique().numel()) == 60_000
    assert int((index & 0xFFFF).unique().numel()) > 30_000  # the low bits are drawn too
    assert 0 <= int(index.min()) < int(index.max()) < 1 << 40


def test_wrong_sizes_are_named() -> None:
    ring = filled(World(), FORMS[0].values[0], 4, (2,))
    with pytest.raises(ValueError, match="1 to 65536 transitions, not 65537"):
        replay.replay_sample(ring, 65537, GAMMA, 1, streams())
    with pytest.raises(
        ValueError, match="1 to 65496 transitions, not 65497"
    ):  # further words are those of the next step
        replay.replay_sample(ring, 65497, GAMMA, 1, streams(), 40)
    for index in (
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ):
        with pytest.raises(
            ValueError,
            match=r"index must be \[4\] int64 on cpu, got torch.int(32|64) \([45],\) on (cpu|meta)",
        ):
            replay.replay_sample(ring, 4, GAMMA, 1, streams(), index=index)
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"1 to 65536 transitions, not {batch_size}"):
            replay.replay_sample(ring, batch_size, GAMMA, 1, streams())
    with pytest.raises(ValueError, match=r"not torch.float16"):
        new_ring(1, 1, 1, 1, 1, torch.float16, torch.device("cpu"))


@needs_c
def test_a_batch_is_written_over_another_of_its_size() -> None:
    ring, index = filled(World(), FORMS[0].values[0], 4, (3,)), torch.arange(4)
    out = replay.replay_sample(ring, 4, GAMMA, 1, streams())
    expected = replay.replay_sample(ring, 4, GAMMA, 1, streams(), index=index)
    got = replay.replay_sample(ring, 4, GAMMA, 1, streams(), index=index, out=out)
    assert got.obs.data_ptr() == out.obs.data_ptr()
    assert all(torch.equal(mine, other) for mine, other in zip(got, expected))
    assert torch.equal(got.index, index)
    with pytest.raises(ValueError, match="out has 4 transitions, not 3"):
        replay.replay_sample(ring, 3, GAMMA, 1, streams(), out=out)


def test_where_nothing_could_be_built_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = filled(World(), FORMS[0].values[0], 4, (3,))
    monkeypatch.setattr(replay, "use_c", lambda tensor: False)
    got, expected = (
        sample(ring, 7, GAMMA, 2, streams(), 3)
        for sample in (replay.replay_sample, replay.replay_sample_reference)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(got, expected))


def test_a_batch_lies_where_its_ring_does() -> None:
    ring = new_ring(4, 2, 3, 2, 1, torch.uint8, torch.device("meta"))
    assert {tensor.device.type for tensor in replay.batch_memory(ring, 5, None)} == {"meta"}


def test_the_very_first_step_can_be_cut() -> None:
    world = World(ends=0.0)
    ring = new_ring(4, world.envs, OBS, world.width, 8, world.kind, torch.device("cpu"))
    replay.replay_mark_episode_break(ring, torch.ones(world.envs, dtype=torch.bool))
    assert not ring.flags.any()  # there is none yet
    FORMS[0].values[0][0](ring, world.block(1))
    replay.replay_mark_episode_break(ring, torch.tensor([True, False, True]))
    cut = TRUNCATED | BROKEN
    assert ring.flags[0].tolist() == [cut, 0, cut]


@pytest.mark.parametrize(
    ("kind", "of_an_observation"), [*zip(replay.STORED_KINDS, (28, 14, 7))], ids=str
)
def test_the_estimate_is_what_is_taken(kind: torch.dtype, of_an_observation: int) -> None:
    ring: Any = new_ring(10, 3, 7, 4, 11, kind, torch.device("cpu"))
    expected = (
        30 * (of_an_observation + 4 * 4 + 1 + 4) + (11 + 3) * of_an_observation + 12 * 8 + 3 * 8
    )
    assert sum(tensor.nbytes for tensor in ring) == ring_bytes(10, 3, 7, 4, 11, kind) == expected
