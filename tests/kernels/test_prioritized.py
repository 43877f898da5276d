"""Drawing by priority in torch and C: the very entries of float64, their frequencies, and what must
never be drawn.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpurl.kernels import c_library
from gpurl.kernels import prioritized as module
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.prioritized import (
    prioritized_draw,
    prioritized_draw_c,
    prioritized_draw_reference,
    prioritized_update,
)
from gpurl.kernels.random import RandomStreams, random_words_reference, stream_constants
from tests.aimed_streams import aimed
from tests.fake_graphs import FakeGraphs

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
DRAWS = [prioritized_draw_reference, pytest.param(prioritized_draw_c, marks=needs_c)]
# every statistic below lies within so many standard deviations of its mean, for fixed seeds
SIGMAS = 5.0
BELOW_ONE = 1.0 - 2.0**-53


def stream(step: int = 0, seed: int = 3) -> RandomStreams:
    return RandomStreams(*stream_constants(seed, 1), torch.tensor(step))


def skewed(size: int, seed: int = 0) -> Tensor:
    """[S] priorities over four orders of magnitude, three in ten of them zero, at least one not."""
    generator = torch.Generator().manual_seed(seed)
    priority = 10.0 ** (4.0 * torch.rand(size, generator=generator) - 2.0)
    priority[torch.rand(size, generator=generator) < 0.3] = 0.0
    priority[size // 2] = 1.0
    return priority


def counts(draw: Any, priority: Tensor, batch_size: int, batches: int) -> np.ndarray:
    """[S]: how often each entry is drawn in so many steps."""
    drawn = [draw(priority, stream(step), 0, batch_size)[0] for step in range(batches)]
    return torch.cat(drawn).bincount(minlength=priority.shape[0]).numpy()


# ---- the very entries ----


@pytest.mark.parametrize("size", [1, 5, 63, 64, 1023, 1024, 1025, 5000, 3_000_000])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_those_of_float64(draw: Any, size: int) -> None:
    priority = skewed(size)
    running = np.cumsum(priority.numpy().astype(np.float64))
    for step, offset, batch_size in ((0, 0, 1), (7, 0, 256), (2**33 + 1, 40, 1000)):
        index, probability = draw(priority, stream(step), offset, batch_size)
        assert (index.dtype, probability.dtype) == (torch.int64, torch.float32)
        assert index.shape == probability.shape == (batch_size,)
        words = random_words_reference(*stream(step), offset, batch_size)[0].tolist()
        uniform = np.array([(word % 2**64 >> 11) / 2**53 for word in words])
        number = (np.arange(batch_size) + uniform) * (running[-1] / batch_size)
        expected = np.searchsorted(running, number, side="right")
        close = (
            np.minimum(abs(running[expected] - number), abs(running[expected - 1] - number))
            < 1e-12 * running[-1]
        )
        assert ((index.numpy() == expected) | close).all()
        np.testing.assert_allclose(
            probability.numpy(), priority.numpy()[index] / running[-1], rtol=1e-6
        )


@pytest.mark.parametrize("places", [(1, 3, 4, 5), (1, 100, 101, 290)], ids=["one group", "several"])
@pytest.mark.parametrize("draw", DRAWS)
def test_by_hand(draw: Any, places: tuple[int, ...]) -> None:
    priority = torch.zeros(300)
    priority[list(places)] = torch.tensor([3.0, 1.0, 2.0, 2.0])
    for uniform, number in (
        (0.0, 0),
        (0.374, 0),
        (0.375, 1),
        (0.499, 1),
        (0.5, 2),
        (0.749, 2),
        (0.75, 3),
        (BELOW_ONE, 3),
    ):
        index, probability = draw(priority, aimed(uniform), 0, 1)
        assert index.tolist() == [places[number]]
        assert probability.tolist() == [priority[places[number]] / 8.0]


@pytest.mark.parametrize("draw", DRAWS)
def test_the_first_and_the_last_number(draw: Any) -> None:
    """7 + u of the greatest u is 8 in float64, so of eight draws the last number is the total
    itself, beyond every entry.
    """
    assert 7 + BELOW_ONE == 8.0
    for size, dead in ((9, 3), (200, 3), (200, 100), (3000, 1500)):
        priority = torch.zeros(size)
        priority[5:-dead] = 0.1
        assert draw(priority, aimed(0.0), 0, 8)[0][0] == 5
        assert draw(priority, aimed(BELOW_ONE, number=27), 20, 8)[0][7] == size - dead - 1


@pytest.mark.parametrize("draw", DRAWS)
def test_the_same_stream_draws_the_same(draw: Any) -> None:
    priority = torch.rand(1000)
    first = draw(priority, stream(5), 0, 300)[0]
    assert torch.equal(first, draw(priority, stream(5), 0, 300)[0])
    for other in (
        draw(priority, stream(6), 0, 300),
        draw(priority, stream(5, seed=4), 0, 300),
        draw(priority, stream(5), 300, 300),
    ):
        assert (
            float((other[0] != first).double().mean()) > 0.2
        )  # a range holds three entries, so one in three is the same by chance


# ---- how often ----


@pytest.mark.parametrize("draw", DRAWS)
def test_frequencies_are_the_priorities(draw: Any) -> None:
    """A million draws. An entry inside a range is drawn once a batch at most, so its count varies
    by n P (1 - B P).
    """
    priority = 0.2 + torch.rand(4096, generator=torch.Generator().manual_seed(1))
    batch_size, batches = 256, 3907
    expected = batch_size * batches * (priority.double() / priority.double().sum()).numpy()
    frequencies = counts(draw, priority, batch_size, batches)
    deviation = frequencies - expected
    assert (abs(deviation) < SIGMAS * np.sqrt(expected)).all()
    assert abs(float((deviation**2 / expected).sum()) - (4096 - batch_size)) < SIGMAS * math.sqrt(
        2 * 4096
    )


@pytest.mark.parametrize("draw", DRAWS)
def test_weights_undo_the_priorities(draw: Any) -> None:
    """sum_i P(i) w_i f_i = mean f for w = 1 / (S P): with the probabilities that were told, and as
    the mean over draws.
    """
    generator = torch.Generator().manual_seed(2)
    size = 200
    priority = 0.05 + torch.rand(size, generator=generator)
    f = (
        torch.randn(size, generator=generator).double() + 3.0 * priority
    )  # so that the plain mean is another one
    exact_probability, means, plain = torch.zeros(size, dtype=torch.float64), [], []
    for step in range(500):
        index, probability = draw(priority, stream(step), 0, 256)
        exact_probability[index] = probability.double()
        means.append(float((f[index] / (size * probability.double())).mean()))
        plain.append(float(f[index].mean()))
    exact = (priority.double() / priority.double().sum() * f / (size * exact_probability)).sum()
    assert float(exact) == pytest.approx(float(f.mean()), rel=1e-6)
    tolerance = SIGMAS * np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - float(f.mean())) < tolerance
    assert abs(np.mean(plain) - float(f.mean())) > 5.0 * tolerance


@pytest.mark.parametrize("draw", DRAWS)
def test_what_has_no_priority_is_never_drawn(draw: Any) -> None:
    priority = skewed(7000)
    priority[:1100] = 0.0
    priority[2048:4500] = 0.0  # whole blocks of any size
    priority[-1500:] = 0.0
    frequencies = counts(draw, priority, 20_000, 10)
    assert (frequencies[priority.numpy() == 0.0] == 0).all()
    assert (frequencies[priority.numpy() > 10.0] > 0).all()


@pytest.mark.parametrize("draw", DRAWS)
def test_nothing_to_draw(draw: Any) -> None:
    for priority in (torch.zeros(1), torch.zeros(3000), torch.full((70,), torch.nan)):
        index, probability = draw(priority, stream(), 0, 9)
        assert index.tolist() == [0] * 9
        assert probability.tolist() == [0.0] * 9


# ---- where float32 fails ----


def middles(priority: Tensor, entries: Tensor) -> tuple[list[float], Tensor]:
    """The u of the middle of each entry's share, and how many of these a running sum in float32
    gives to another entry.
    """
    running = priority.double().cumsum(0)
    middle = (running - priority.double() / 2)[entries]
    narrow = torch.from_numpy(np.cumsum(priority.numpy()))
    missed = (
        torch.searchsorted(narrow, (middle / running[-1] * narrow[-1]).float(), right=True)
        != entries
    )
    return (middle / running[-1]).tolist(), missed.sum()


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("tail", ["uniform", "heavy"])
def test_each_of_five_million_can_be_drawn(draw: Any, tail: str) -> None:
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(5_000_000, generator=generator)
    priority = 0.5 + uniform if tail == "uniform" else (1.0 - uniform) ** -0.9
    entries = torch.randint(5_000_000, (200,), generator=generator)
    uniforms, missed = middles(priority, entries)
    assert missed > 0.1 * len(entries)
    few = 8 if draw is prioritized_draw_reference else 200  # a call of it takes a fifth of a second
    assert [int(draw(priority, aimed(middle), 0, 1)[0]) for middle in uniforms[:few]] == entries[
        :few
    ].tolist()


@pytest.mark.parametrize("draw", DRAWS)
def test_one_large_priority_hides_no_other(draw: Any) -> None:
    """Beside 1e6 in the same block an entry has a share of 1e-9, below float32's rounding."""
    priority = torch.full((2000,), 1e-3)
    priority[700] = 1e6
    entries = torch.tensor([0, 300, 699, 700, 701, 705, 767, 768, 1023, 1024, 1999])
    uniforms, missed = middles(priority, entries)
    assert missed > 3
    for uniform, entry in zip(uniforms, entries.tolist()):
        index, probability = draw(priority, aimed(uniform), 0, 1)
        assert index.tolist() == [entry]
        assert float(probability) == pytest.approx(float(priority[entry]) / (1e6 + 1.999), rel=1e-6)


@pytest.mark.parametrize("draw", DRAWS)
def test_small_priorities_beside_a_large_one_keep_their_share(draw: Any) -> None:
    priority = torch.full((3_000_000,), 1e-3)
    priority[1_234_567] = 1e6
    drawn = torch.cat([draw(priority, stream(step), 0, 65_536)[0] for step in range(10)])
    others = drawn[drawn != 1_234_567]
    share = 3000.0 / 1_003_000.0
    assert abs(len(others) - share * len(drawn)) < SIGMAS * math.sqrt(share * len(drawn))
    tenths = (others // 300_000).bincount(minlength=10).numpy()
    assert (abs(tenths - len(others) / 10) < SIGMAS * math.sqrt(len(others) / 10)).all()


# ---- NaN, infinity ----


@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_no_priority_counts_as_zero(draw: Any, wrong: float) -> None:
    priority = skewed(3000)
    places = torch.arange(0, 3000, 7)
    as_zero, with_wrong = priority.index_fill(0, places, 0.0), priority.index_fill(0, places, wrong)
    for expected, got in zip(draw(as_zero, stream(), 0, 2000), draw(with_wrong, stream(), 0, 2000)):
        assert torch.equal(got, expected)


@needs_c
def test_the_largest_and_the_smallest_float_are_priorities() -> None:
    for value in (torch.finfo(torch.float32).max, 1e-45):
        priority = torch.tensor([0.0, value, math.inf, value])
        for draw in (prioritized_draw_reference, prioritized_draw_c):
            index, probability = draw(priority, stream(), 0, 100)
            assert index.tolist() == [1] * 50 + [3] * 50
            assert probability.tolist() == [0.5] * 100


# ---- update ----


def test_the_largest_value_of_an_index_stays() -> None:
    generator = torch.Generator().manual_seed(4)
    before = torch.rand(50, generator=generator) + 5.0
    index, value = (
        torch.randint(40, (300,), generator=generator),
        torch.rand(300, generator=generator),
    )
    expected = before.numpy().copy()
    expected[np.unique(index)] = 0.0
    np.maximum.at(expected, index.numpy(), value.numpy())
    for order in (
        torch.arange(300),
        torch.arange(299, -1, -1),
        torch.randperm(300, generator=generator),
    ):
        priority = before.clone()
        prioritized_update(priority, index[order], value[order])
        assert (priority.numpy() == expected).all()
    assert (expected[40:] > 5.0).all()


def test_what_is_no_priority_is_written_as_zero() -> None:
    priority = torch.full((8,), 9.0)
    index = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 7])
    value = torch.tensor([math.nan, -math.nan, math.inf, -1.0, 2.0, math.nan, -math.inf, 3.0, 0.0])
    prioritized_update(priority, index, value)
    assert priority.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0, 3.0, 9.0, 0.0]


def test_an_update_counts_in_the_next_draw() -> None:
    priority = torch.rand(3000)
    prioritized_update(priority, torch.arange(3000), torch.zeros(3000))
    prioritized_update(priority, torch.tensor([2047, 11]), torch.tensor([3.0, 1.0]))
    index, probability = prioritized_draw(priority, stream(), 0, 400)
    assert index.tolist() == [11] * 100 + [2047] * 300
    assert probability.tolist() == [0.25] * 100 + [0.75] * 300


# ---- dispatch ----


@needs_c
def test_c_serves_where_the_host_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        module,
        "prioritized_draw_c",
        lambda *arguments: called.append(1) or prioritized_draw_c(*arguments),
    )
    with no_host_syncs():
        expected = prioritized_draw(torch.ones(100), stream(), 0, 50)
    assert not called
    assert torch.equal(prioritized_draw(torch.ones(100), stream(), 0, 50)[0], expected[0])
    assert called


def test_nothing_is_looked_at() -> None:
    with FakeTensorMode(), no_host_syncs():
        priority = torch.rand(5000)
        index, probability = prioritized_draw(priority, stream(), 0, 256)
        prioritized_update(priority, index, probability)
        assert index.shape == probability.shape == (256,)


def test_a_replayed_graph_draws_on() -> None:
    priority, streams = torch.rand(5000), stream()

    def draw_and_update() -> Tensor:
        index, probability = prioritized_draw(priority, streams, 0, 256)
        prioritized_update(priority, index, 1.0 - probability)
        streams.step.add_(1)
        return index

    with no_host_syncs():
        before = priority.clone()
        expected = [draw_and_update().clone() for _ in range(3)]
        priority.copy_(before)
        streams.step.zero_()
        replay, index = FakeGraphs().capture(draw_and_update)
        for step in range(3):
            replay()
            assert torch.equal(index, expected[step])


def test_wrong_arguments_are_named() -> None:
    priority = torch.ones(10)
    index, value = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    for wrong in (priority.double(), priority.view(2, 5), priority[::2], priority[:0]):
        with pytest.raises(ValueError, match="priority must be"):
            prioritized_draw(wrong, stream(), 0, 1)
        with pytest.raises(ValueError, match="priority must be"):
            prioritized_update(wrong, index, value)
    for offset, batch_size in ((0, 0), (-1, 2), (0, 65_537), (65_536, 1)):
        with pytest.raises(ValueError, match="words 0 to 65535"):
            prioritized_draw(priority, stream(), offset, batch_size)
    for offset, batch_size in ((0, 1), (0, 65_536), (65_535, 1)):  # the limits themselves
        assert prioritized_draw(priority, stream(), offset, batch_size)[0].shape == (batch_size,)
    for bad_index, bad_value in (
        (index.int(), value),
        (index, value.double()),
        (index, value[:2]),
        (index.view(3, 1), value.view(3, 1)),
    ):
        with pytest.raises(ValueError, match="index and value must be"):
            prioritized_update(priority, bad_index, bad_value)
