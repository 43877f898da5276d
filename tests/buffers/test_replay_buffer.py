"""Replay buffers: what goes in comes out under its names, and prioritised draws and weights are
those of their formulas.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.buffers.prioritized import MIN_ERROR, PrioritizedReplay
from gpurl.buffers.replay import Replay
from gpurl.errors import UsageError
from gpurl.kernels import c_library
from gpurl.kernels.prioritized import prioritized_draw
from gpurl.kernels.random import CounterRandom, RandomStreams
from gpurl.kernels.replay import BROKEN, TRUNCATED, replay_sample
from gpurl.nn.ranks import ALONE, Alone
from tests.thread_ranks import ThreadRank, together

ENVS = 4
COLUMNS: dict[str, tuple[int, ...]] = {"reward": (), "action": (2,), "extra": ()}


def steps(count: int, seed: int = 0, ends: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, ENVS)
    columns = {name: torch.randn(*shape, 3, generator=generator) for name in ("obs", "final_obs")}
    columns |= {
        name: torch.randn(*shape, *more, generator=generator) for name, more in COLUMNS.items()
    }
    terminated = torch.rand(shape, generator=generator) < ends
    return columns | {
        "terminated": terminated,
        "truncated": ~terminated & (torch.rand(shape, generator=generator) < ends),
    }


def uniform(size: int = 40, **options: object) -> Replay:
    return Replay(size, ENVS, (3,), COLUMNS, torch.device("cpu"), **options)  # type: ignore[arg-type]


def prioritized(
    size: int = 40,
    alpha: float = 0.6,
    beta: float = 0.4,
    decay: float = 1.0,
    ranks: Alone = ALONE,
) -> PrioritizedReplay:
    arguments = size, ENVS, (3,), COLUMNS, torch.device("cpu")
    replay = PrioritizedReplay(*arguments, alpha=alpha, beta=beta, decay=decay, ranks=ranks)
    replay.random.begin_at(ranks.index)
    return replay


def saved(replay: Replay) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in replay.state_dict().items()
    }


def test_columns_come_out_under_their_names() -> None:
    replay, columns = uniform(), steps(10, ends=0.3)
    replay.add(columns)
    batch = replay.sample(500, 0.9)
    for name, value in columns.items():
        if name in batch:
            torch.testing.assert_close(batch[name], value.flatten(0, 1)[batch["index"]], msg=name)
    assert {name: tuple(batch[name].shape) for name in ("reward", "action", "extra", "weight")} == {
        "reward": (500,),
        "action": (500, 2),
        "extra": (500,),
        "weight": (500,),
    }


@pytest.mark.parametrize("make", [uniform, prioritized])
def test_a_batch_in_used_memory_is_the_one_that_new_memory_would_hold(make: Any) -> None:
    twins = make(), make()
    for replay in twins:
        replay.add(steps(10, ends=0.3))
    first = twins[0].sample(50, 0.9, 2, reuse=True)
    place = first["obs"].data_ptr()
    twins[1].sample(50, 0.9, 2)
    for size in (50, 7, 50):
        again, expected = twins[0].sample(size, 0.9, 2, reuse=True), twins[1].sample(size, 0.9, 2)
        for name, value in expected.items():
            torch.testing.assert_close(again[name], value, rtol=0.0, atol=0.0, msg=name)
    if c_library.load().functions is not None:
        assert again["obs"].data_ptr() == place
    kept = twins[0].sample(50, 0.9, 2)["obs"]
    before = kept.clone()
    twins[0].sample(50, 0.9, 2)
    twins[0].sample(50, 0.9, 2, reuse=True)
    assert torch.equal(kept, before)  # without being asked nothing is overwritten


def test_images_stay_bytes_and_keep_no_shape() -> None:
    replay = Replay(
        8,
        ENVS,
        (2, 3),
        {"reward": ()},
        torch.device("cpu"),
        obs_dtype=torch.uint8,
        storage="bfloat16",
    )
    columns = steps(2) | {
        name: torch.randint(0, 256, (2, ENVS, 2, 3), dtype=torch.uint8)
        for name in ("obs", "final_obs")
    }
    replay.add(columns)
    batch = replay.sample(50, 0.9)
    assert batch["obs"].dtype == torch.uint8
    assert torch.equal(batch["obs"].view(50, 2, 3), columns["obs"].flatten(0, 1)[batch["index"]])


def test_sizes_are_rounded_up_to_whole_steps_and_the_oldest_goes() -> None:
    replay = uniform(size=10)
    assert replay.num_rows == 3
    for seed in range(5):
        replay.add(steps(1, seed))
    kept = torch.cat([steps(1, seed)["extra"] for seed in (2, 3, 4)]).flatten().sort().values
    drawn = replay.sample(500, 0.9)["extra"].unique()
    torch.testing.assert_close(drawn, kept)


@pytest.mark.parametrize("make", [uniform, prioritized])
@pytest.mark.parametrize("count", [7, 13])
def test_a_replay_that_was_cleared_is_as_good_as_a_new_one(make: Any, count: int) -> None:
    """Also where its ring of 10 rows was full; in the memory that CUDA graphs hold."""
    replay = make()
    memory = [tensor.data_ptr() for tensor in replay.ring]
    for _ in range(count):
        replay.add(steps(1, ends=0.3))
    replay.clear()
    new = steps(3, seed=1)
    for step in range(3):
        replay.add({name: column[step : step + 1] for name, column in new.items()})
        batch = replay.sample(200, 0.9, num_steps=2)
        assert bool((batch["weight"] == 1.0).all())
        torch.testing.assert_close(batch["obs"], new["obs"].flatten(0, 1)[batch["index"]])
    assert {*batch["index"].tolist()} == {*range(3 * ENVS)}
    assert memory == [tensor.data_ptr() for tensor in replay.ring]


def test_no_draw_comes_twice() -> None:
    replay = uniform()
    replay.add(steps(10))
    first, second = replay.sample(64, 0.9)["index"], replay.sample(64, 0.9)["index"]
    assert not torch.equal(first, second)


def test_draws_are_those_of_the_seeds_stream() -> None:
    for replay in (uniform(), prioritized(), uniform(seed=0)):
        replay.add(steps(10, ends=0.3))
        random, index = CounterRandom(0, 1, torch.device("cpu")), None
        if isinstance(replay, PrioritizedReplay):
            replay.update_priorities(torch.arange(40), torch.linspace(0.1, 5.0, 40))
            index = prioritized_draw(
                replay.priority.view(-1),
                RandomStreams(random.key, random.gamma, random.step),
                0,
                64,
            )[0]
        random.advance()
        streams = RandomStreams(random.key, random.gamma, random.step)
        expected, batch = (
            replay_sample(replay.ring, 64, 0.9, 1, streams, index=index),
            replay.sample(64, 0.9),
        )
        for name in ("index", "obs", "next_obs", "reward", "discount"):
            assert torch.equal(batch[name], getattr(expected, name)), name
        assert batch["obs"].data_ptr() != replay.sample(64, 0.9)["obs"].data_ptr()


def test_what_is_not_said_is_as_the_papers_have_it() -> None:
    replay = PrioritizedReplay(640, ENVS, (3,), COLUMNS, torch.device("cpu"))
    assert (replay.alpha, replay.initial_beta, replay.decay) == (0.5, 0.4, 0.999)
    assert len(replay.ring.owner) == 640 // 16 + 1  # one for what is overwritten at once
    assert len(uniform(final_obs_fraction=0.0).ring.owner) == 1 + 1


@pytest.mark.parametrize(
    "options", [{}, {"storage": "bfloat16"}, {"obs_dtype": torch.uint8}, {"alpha": 0.6}], ids=str
)
def test_a_replay_knows_what_it_takes(options: dict[str, Any]) -> None:
    kind = PrioritizedReplay if "alpha" in options else Replay
    replay = kind(4000, ENVS, (3,), COLUMNS, torch.device("cpu"), **options)
    priorities = [replay.priority] if isinstance(replay, PrioritizedReplay) else []
    assert replay.bytes == sum(tensor.nbytes for tensor in (*replay.ring, *priorities))


def test_a_cut_ends_the_newest_step() -> None:
    replay = uniform()
    replay.add(steps(2))
    replay.mark_episode_break(torch.tensor([True, False, True, False]))
    cut = TRUNCATED | BROKEN
    assert replay.ring.flags[:2].tolist() == [[0] * 4, [cut, 0, cut, 0]]


def test_weights_take_back_the_bias_of_the_draws() -> None:
    """With beta 1 the weighted mean over draws is the plain mean over all that is stored, up to one
    constant factor.
    """
    replay, columns = prioritized(beta=1.0), steps(10)
    replay.add(columns)
    errors = torch.linspace(0.1, 5.0, 40)
    replay.update_priorities(torch.arange(40), errors)
    drawn = replay.sample(40_000, 0.9)
    priority = (errors + MIN_ERROR) ** 0.6
    expected = priority.double() / priority.double().sum()
    shares = torch.bincount(drawn["index"], minlength=40).double() / 40_000
    torch.testing.assert_close(shares, expected, rtol=0.1, atol=1e-3)
    estimate = (drawn["weight"].double() * drawn["extra"].double()).sum() / drawn[
        "weight"
    ].double().sum()
    assert float(estimate) == pytest.approx(float(columns["extra"].double().mean()), abs=0.02)
    torch.testing.assert_close(
        drawn["weight"].double(),
        (expected[drawn["index"]].min() / expected[drawn["index"]]),
        rtol=1e-5,
        atol=0,
    )


def test_the_weights_of_ranks_take_back_the_bias_of_all_draws() -> None:
    """Each rank draws the same number, whatever the sum of its priorities: a transition of the rank
    with the lower sum is more probable, and weighs less.
    """

    def of_rank(rank: ThreadRank) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        replay, columns = prioritized(beta=1.0, ranks=rank), steps(10, seed=rank.index)
        columns["extra"] += 10.0 * rank.index
        replay.add(columns)
        errors = torch.linspace(0.1, 5.0, 40) ** (1 + rank.index)
        replay.update_priorities(torch.arange(40), errors)
        drawn = replay.sample(20_000, 0.9)
        priority = ((errors + MIN_ERROR) ** 0.6).double()
        probability = priority / priority.sum() / rank.count
        return probability[drawn["index"]], drawn["weight"], drawn["extra"], columns["extra"]

    probability, weight, extra, stored = (
        torch.cat([each.double().flatten() for each in of_ranks])
        for of_ranks in zip(*together(2, of_rank))
    )
    torch.testing.assert_close(weight, probability.min() / probability, rtol=1e-5, atol=0)
    estimate = (weight * extra).sum() / weight.sum()
    assert float(estimate) == pytest.approx(float(stored.mean()), abs=0.1)


def test_new_transitions_of_all_ranks_have_the_largest_priority_of_all() -> None:
    def of_rank(rank: ThreadRank) -> Tensor:
        replay = prioritized(decay=0.5, ranks=rank)
        replay.add(steps(1))
        replay.update_priorities(torch.arange(4), torch.full((4,), 3.0 + 4.0 * rank.index))
        replay.add(steps(1))
        return replay.priority[1]

    for new in together(2, of_rank):
        assert new.tolist() == pytest.approx([(7.0 + MIN_ERROR) ** 0.6] * 4)


def test_what_is_not_learnt_from_weighs_nothing_and_lowers_no_other_weight() -> None:
    """Rows 0 to 3 are truncated, and their final observations were overwritten; their priority is
    the least, as their error was 0.
    """
    replay = PrioritizedReplay(
        40,
        ENVS,
        (3,),
        COLUMNS,
        torch.device("cpu"),
        alpha=1.0,
        beta=1.0,
        final_obs_fraction=0.1,
    )
    for seed in range(2):
        columns = steps(1, seed)
        columns["truncated"][:] = True
        replay.add(columns)
    replay.update_priorities(torch.arange(8), torch.tensor([0.01] * 4 + [1.0, 1.0, 1.0, 4.0]))
    batch = replay.sample(2000, 0.9)
    lost = batch["index"] < 4
    assert 0 < int(lost.sum()) < 100
    assert batch["weight"][lost].unique().tolist() == [0.0]
    assert sorted(batch["weight"][~lost].unique().tolist()) == pytest.approx([0.25, 1.0])
    replay.update_priorities(torch.arange(4, 8), torch.full((4,), 1e-30))
    replay.priority[1] = 0.0
    assert replay.sample(50, 0.9)["weight"].unique().tolist() == [0.0]


def test_beta_goes_to_one_and_without_it_nothing_is_weighed() -> None:
    replay = prioritized(beta=0.4)
    replay.add(steps(10))
    replay.update_priorities(torch.arange(40), torch.linspace(0.1, 5.0, 40))
    replay.beta.fill_(0.0)
    assert replay.sample(100, 0.9)["weight"].unique().tolist() == [1.0]
    for progress, expected in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0), (2.0, 1.0)):
        replay.set_progress(progress)
        assert float(replay.beta) == pytest.approx(expected)


def test_an_alpha_of_zero_is_uniform() -> None:
    replay = prioritized(alpha=0.0)
    replay.add(steps(10))
    replay.update_priorities(torch.arange(40), torch.linspace(0.0, 50.0, 40))
    assert replay.priority.unique().tolist() == [1.0]


def test_new_transitions_have_the_maximum_priority_which_decays() -> None:
    replay = prioritized(decay=0.25)
    replay.add(steps(3))
    assert replay.priority[:3].unique().tolist() == [1.0]
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([9.0, 0.5]))
    highest = (9.0 + MIN_ERROR) ** 0.6
    replay.add(steps(1))
    torch.testing.assert_close(replay.priority[3], torch.full((ENVS,), highest))
    replay.update_priorities(torch.tensor([2]), torch.tensor([0.1]))
    replay.add(steps(1))
    torch.testing.assert_close(
        replay.priority[4], torch.full((ENVS,), highest / 4 + MIN_ERROR**0.6 * 3 / 4)
    )


def test_of_a_transition_that_comes_twice_the_greater_error_counts() -> None:
    replay = prioritized()
    replay.add(steps(3))
    replay.update_priorities(torch.tensor([5, 5, 5]), torch.tensor([1.0, 7.0, 2.0]))
    assert float(replay.priority.view(-1)[5]) == pytest.approx((7.0 + MIN_ERROR) ** 0.6)


def test_errors_that_are_no_numbers_change_no_priority() -> None:
    replay = prioritized()
    replay.add(steps(3))
    before = replay.priority.clone()
    replay.update_priorities(torch.arange(4), torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0]))
    before[0, 3] = (7.0 + MIN_ERROR) ** 0.6
    torch.testing.assert_close(replay.priority, before)
    torch.testing.assert_close(replay.max_priority, before[0, 3])


def test_a_replay_of_other_observations_or_types_is_not_loaded() -> None:
    """bfloat16 would be copied into float32 without a word."""
    others = [
        uniform(storage="bfloat16"),
        uniform(size=80),
        Replay(40, ENVS, (4,), COLUMNS, torch.device("cpu")),
    ]
    for other in others:
        other.ring.counts[0] = other.num_rows
        with pytest.raises(
            UsageError,
            match=r"the saved replay is of another environment or size: its (obs|flags|numbers) is",
        ):
            uniform().load_state_dict(saved(other))


def test_a_larger_replay_goes_on_with_what_a_smaller_one_saved() -> None:
    """Its table of final observations is longer, and those of the newest row stand behind it."""
    one, larger = (uniform(size=size, final_obs_fraction=0.5) for size in (400, 4000))
    one.add(steps(30, ends=0.3))
    larger.load_state_dict(saved(one))
    for add_more in (False, True):
        for replay in (one, larger) if add_more else ():
            replay.mark_episode_break(torch.tensor([True, False, True, False]))
            replay.add(steps(1, seed=7))
        index = torch.arange((30 + add_more) * ENVS)
        mine, theirs = (
            replay._sample(len(index), 0.9, 3, False, index) for replay in (one, larger)
        )
        assert all(
            torch.equal(mine[name], theirs[name])
            for name in ("obs", "next_obs", "reward", "discount", "weight")
        )


@pytest.mark.parametrize(
    "count", [14, 30], ids=["not yet as many steps as the other holds", "more"]
)
def test_a_full_replay_goes_on_only_in_one_of_its_size(count: int) -> None:
    """Rows behind its own were never written, but the count of steps says so."""
    full = uniform(size=40)
    for seed in range(count):
        full.add(steps(1, seed))
    uniform(size=40).load_state_dict(saved(full))
    with pytest.raises(
        UsageError,
        match="the saved replay has 10 rows and is full, this one has 20: keep replay_size",
    ):
        uniform(size=80).load_state_dict(saved(full))


def test_a_saved_prioritised_replay_continues_also_in_a_larger_one() -> None:
    replay = prioritized()
    replay.add(steps(3))
    replay.update_priorities(torch.arange(4), torch.tensor([5.0, 1.0, 2.0, 3.0]))
    state = saved(replay)
    assert state["priority"].shape == (3, ENVS)
    for size in (40, 80):
        other = prioritized(size)
        other.load_state_dict(state)
        assert torch.equal(other.priority[:3], replay.priority[:3])
        assert not other.priority[3:].any()
        assert torch.equal(other.max_priority, replay.max_priority)
        assert torch.equal(other.ring.obs[:3], replay.ring.obs[:3])
        assert torch.equal(other.ring.counts, replay.ring.counts)


def test_transitions_that_are_not_valid_have_and_keep_priority_zero() -> None:
    replay = prioritized()
    valid = torch.ones(3, ENVS, dtype=torch.bool)
    valid[1, 2] = False
    replay.add(steps(3) | {"valid": valid})
    assert torch.equal(replay.priority[:3] > 0.0, valid)
    replay.update_priorities(torch.arange(3 * ENVS), torch.full((3 * ENVS,), 2.0))
    assert torch.equal(replay.priority[:3] > 0.0, valid)
    assert (replay.sample(64, 0.9)["index"] != ENVS + 2).all()


def test_a_prioritised_replay_loads_no_state_of_another_kind() -> None:
    replay = prioritized()
    replay.add(steps(3, ends=0.3))
    kept = saved(replay)
    with pytest.raises(UsageError, match="the saved replay has no priorities"):
        replay.load_state_dict({name: value for name, value in kept.items() if name != "priority"})
