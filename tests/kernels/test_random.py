"""The counter-based random numbers of gpurl.kernels.random: known answers, uniformity and
independence in every direction, bookkeeping.
"""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gpurl.kernels import random as module
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import (
    GOLDEN,
    WORDS_PER_STEP,
    CounterRandom,
    random_fraction_reference,
    random_normal,
    random_normal_reference,
    random_uniform_reference,
    random_words_reference,
    stream_constants,
)

# every statistic below lies within so many standard deviations of its mean, for fixed seeds
SIGMAS = 5.0


def words(
    num_streams: int, num_words: int, step: int = 0, seed: int = 0, offset: int = 0
) -> Tensor:
    """[N, W] int64."""
    return random_words_reference(
        *stream_constants(seed, num_streams), torch.tensor(step), offset, num_words
    )


def uniforms(num_streams: int, count: int, step: int = 0, seed: int = 0) -> Tensor:
    """[N, count] float32."""
    return random_uniform_reference(
        *stream_constants(seed, num_streams), torch.tensor(step), 0, count
    )


def bits(word: Tensor) -> Tensor:
    """[..., 64] bool, lowest bit first."""
    return ((word.unsqueeze(-1) >> torch.arange(64)) & 1).bool()


def assert_uniform(cells: Tensor, num_cells: int) -> None:
    """Chi-square of int64 `cells`, both too uneven and too even."""
    count = torch.bincount(cells.flatten(), minlength=num_cells).double()
    assert len(count) == num_cells
    expected = cells.numel() / num_cells
    chi_square = float(((count - expected) ** 2).sum() / expected)
    assert abs(chi_square - (num_cells - 1)) < SIGMAS * math.sqrt(2 * (num_cells - 1))


def assert_pairs_uniform(first: Tensor, second: Tensor) -> None:
    """Uniform numbers side by side fill the 16 x 16 cells of the square alike."""
    assert_uniform((first * 16).long() * 16 + (second * 16).long(), 256)


def assert_balanced(flags: Tensor) -> None:
    """flags [..., 64] bool: each of the 64 columns is true half of the time."""
    flags = flags.reshape(-1, 64)
    deviation = (flags.double().mean(dim=0) - 0.5).abs().max()
    assert float(deviation) < SIGMAS * 0.5 / math.sqrt(len(flags))


def test_known_answers_of_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    got = random_words_reference(
        torch.tensor([1234567]), torch.tensor([GOLDEN]), torch.tensor(0), 1, 5
    )
    assert [word % 2**64 for word in got[0].tolist()] == published


def mix13(z: int) -> int:
    """Variant 13 of Stafford's mixers in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 5, -3, 2**62 + 1])
def test_streams_and_fractions_by_their_formulas_in_integers(seed: int) -> None:
    key, gamma = stream_constants(seed, 6)
    root = mix13((seed + GOLDEN) % 2**64)
    numbers = [mix13((root + index * GOLDEN) % 2**64) for index in range(1, 13)]
    assert [number % 2**64 for number in key.tolist()] == numbers[0::2]
    assert [number % 2**64 for number in gamma.tolist()] == [number | 1 for number in numbers[1::2]]
    got = random_fraction_reference(key, gamma, torch.tensor(3), 7, 5)
    assert got.dtype == torch.float64
    for stream, row in enumerate(got.tolist()):
        counters = [3 * 65536 + 7 + number for number in range(5)]
        words = [
            mix13((numbers[2 * stream] + counter * (numbers[2 * stream + 1] | 1)) % 2**64)
            for counter in counters
        ]
        assert row == [(word >> 11) / 2**53 for word in words]


def test_a_step_is_two_to_the_sixteen_words() -> None:
    assert torch.equal(words(5, 3, step=7, offset=2), words(5, 3, step=0, offset=7 * 65536 + 2))


def test_uniform_takes_24_bits_of_each_half_low_half_first() -> None:
    got = uniforms(50, 6)
    for stream, row in enumerate(words(50, 3).tolist()):
        halves = itertools.chain.from_iterable((word % 2**32, (word % 2**64) >> 32) for word in row)
        assert got[stream].tolist() == [(half >> 8) / 2**24 for half in halves]


def test_uniform_moments() -> None:
    sample = uniforms(4096, 256).double()
    n = sample.numel()
    assert float(sample.min()) >= 0.0
    assert float(sample.max()) < 1.0
    assert float(sample.mean()) == pytest.approx(1 / 2, abs=SIGMAS * math.sqrt(1 / 12 / n))
    assert float(sample.var()) == pytest.approx(1 / 12, abs=SIGMAS * math.sqrt(1 / 180 / n))
    assert float((sample - 0.5).pow(4).mean()) == pytest.approx(
        1 / 80, abs=SIGMAS * math.sqrt(1 / 2304 / n)
    )


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -3])
def test_values_fill_256_cells_alike(seed: int) -> None:
    assert_uniform((uniforms(2048, 128, seed=seed) * 256).long(), 256)
    assert_uniform(
        (uniforms(2048, 128, seed=seed) * 2**24).long() % 256, 256
    )  # the lowest bits too
    assert_uniform(
        (torch.cat([uniforms(2048, 1, step, seed) for step in range(128)]) * 256).long(), 256
    )


def test_pairs_across_steps() -> None:
    run = torch.stack([uniforms(1024, 1, step)[:, 0] for step in range(257)])
    assert_pairs_uniform(run[:-1], run[1:])
    for row in (0, 511):  # along one stream
        long = torch.cat([uniforms(row + 1, 1, step)[row] for step in range(4097)])
        assert_pairs_uniform(long[:-1], long[1:])


def test_pairs_across_neighbouring_streams() -> None:
    sample = uniforms(4097, 64)
    assert_pairs_uniform(sample[:-1], sample[1:])


def test_pairs_across_words_and_within_one() -> None:
    sample = uniforms(2048, 130)
    assert_pairs_uniform(sample[:, 0:-2], sample[:, 2:])
    assert_pairs_uniform(sample[:, 0::2], sample[:, 1::2])


def test_pairs_across_neighbouring_seeds() -> None:
    assert_pairs_uniform(uniforms(2048, 128, seed=10), uniforms(2048, 128, seed=11))


def test_every_bit_is_balanced() -> None:
    assert_balanced(bits(words(1024, 64)))
    assert_balanced(bits(torch.cat([words(256, 1, step) for step in range(256)])))


def test_neighbours_differ_in_half_of_the_bits() -> None:
    sample = words(1025, 64)
    assert_balanced(bits(sample[:-1] ^ sample[1:]))  # streams
    assert_balanced(bits(sample[:, :-1] ^ sample[:, 1:]))  # words
    assert_balanced(bits(sample ^ words(1025, 64, step=1)))  # steps
    assert_balanced(bits(sample ^ words(1025, 64, seed=1)))  # seeds
    key, gamma = stream_constants(0, 4096)
    assert_balanced(bits(key[:-1] ^ key[1:]))
    assert_balanced(
        bits(gamma[:-1] ^ gamma[1:])
        | (torch.arange(64) == 0) & (torch.arange(4095)[:, None] % 2 == 0)
    )  # bit 0 is always 1


def test_pairs_of_bits_are_independent() -> None:
    flags = bits(words(1024, 64)).reshape(-1, 64).double() * 2 - 1
    correlation = flags.T @ flags / len(flags)
    assert float(correlation.fill_diagonal_(0.0).abs().max()) < 5.5 / math.sqrt(
        len(flags)
    )  # 2016 pairs


def test_gamma_is_odd_and_no_two_streams_are_equal() -> None:
    key, gamma = stream_constants(3, 100_000)
    assert bool((gamma & 1).all())
    assert len(key.unique()) == 100_000
    assert len(gamma.unique()) == 100_000


def test_a_stream_does_not_depend_on_how_many_there_are() -> None:
    for few, many in zip(stream_constants(9, 7), stream_constants(9, 1000)):
        assert torch.equal(few, many[:7])


def test_a_subset_draws_the_rows_of_the_full_batch() -> None:
    index = torch.tensor([3, 17, 99, 4])
    full, source = CounterRandom(6, 100), CounterRandom(6, 100)
    for _ in range(3):
        source.uniform()
        part = source.subset(index)
        assert part.num_envs == 4
        full.uniform()
        assert torch.equal(part.uniform(-1.0, 2.0, (3,)), full.uniform(-1.0, 2.0, (3,))[index])
        assert torch.equal(part.normal((2, 3)), full.normal((2, 3))[index])
        assert torch.equal(part.integers(-5, 60), full.integers(-5, 60)[index])
        part.load_state_dict(part.state_dict())
        first = random_uniform_reference(full.key, full.gamma, full.step, 0, 1)[:, 0]
        assert torch.equal(part.uniform(), first[index])
        full.advance()
        source.advance()


def test_one_stream_draws_what_it_draws_among_many() -> None:
    for count in (1, 2, 7):
        assert torch.equal(
            CounterRandom(6, 1).normal((count,))[0], CounterRandom(6, 33).normal((count,))[0]
        )


def test_normal_moments() -> None:
    sample = random_normal_reference(*stream_constants(1, 4096), torch.tensor(3), 0, 256).double()
    n = sample.numel()
    assert float(sample.mean()) == pytest.approx(0.0, abs=SIGMAS * math.sqrt(1 / n))
    assert float(sample.var()) == pytest.approx(1.0, abs=SIGMAS * math.sqrt(2 / n))
    assert float(sample.pow(3).mean()) == pytest.approx(0.0, abs=SIGMAS * math.sqrt(15 / n))
    assert float(sample.pow(4).mean()) == pytest.approx(3.0, abs=SIGMAS * math.sqrt(96 / n))
    assert float((sample[:, 0::2] * sample[:, 1::2]).mean()) == pytest.approx(
        0.0, abs=SIGMAS * math.sqrt(2 / n)
    )  # the two of one pair
    assert float((sample[:, 0::2].square() * sample[:, 1::2].square()).mean()) == pytest.approx(
        1.0, abs=SIGMAS * math.sqrt(16 / n)
    )
    assert_uniform((torch.special.ndtr(sample) * 256).long(), 256)


def test_normal_is_finite_where_the_uniform_is_zero() -> None:
    key = torch.zeros(1, dtype=torch.int64)  # word 0 of key 0 is 0: both uniforms are 0
    got = random_normal_reference(key, torch.ones(1, dtype=torch.int64), torch.tensor(0), 0, 2)[
        0
    ].tolist()
    assert got == pytest.approx([math.sqrt(48 * math.log(2)), 0.0])


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (0, 256), (1000, 1001), (0, 1 << 24)])
def test_integers_fill_their_range_alike(low: int, high: int) -> None:
    sample = CounterRandom(2, 4096).integers(low, high, (64,))
    assert sample.dtype == torch.int64
    assert int(sample.min()) >= low
    assert int(sample.max()) < high
    if high - low > 1:
        cells = min(high - low, 256)
        assert_uniform((sample - low) * cells // (high - low), cells)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (3, 2), (0, (1 << 24) + 1)])
def test_integers_refuse_an_empty_or_a_too_wide_range(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=r"rng.integers\(.*\): wanted 1 to 2\*\*24 numbers"):
        CounterRandom(0, 2).integers(low, high)


def test_two_draws_of_a_step_do_not_overlap() -> None:
    rng = CounterRandom(5, 11)
    key, gamma = stream_constants(5, 11)
    for step in range(3):
        all_uniforms = random_uniform_reference(key, gamma, torch.tensor(step), 0, 12)
        assert torch.equal(rng.uniform(shape=(3,)), all_uniforms[:, 0:3])
        assert torch.equal(
            rng.uniform(), all_uniforms[:, 4]
        )  # the odd half-word is left, never given twice
        assert torch.equal(rng.uniform(shape=(2, 2)), all_uniforms[:, 6:10].reshape(11, 2, 2))
        rng.normal()
        assert torch.equal(
            rng.uniform(), random_uniform_reference(key, gamma, torch.tensor(step), 6, 1)[:, 0]
        )
        rng.advance()


def test_uniform_bounds_may_be_numbers_or_tensors() -> None:
    unit = CounterRandom(5, 64).uniform(shape=(3,))
    torch.testing.assert_close(CounterRandom(5, 64).uniform(-2.0, 6.0, (3,)), unit * 8.0 - 2.0)
    low, high = torch.tensor([0.0, -1.0, 5.0]), torch.tensor([1.0, 1.0, 5.5])
    torch.testing.assert_close(
        CounterRandom(5, 64).uniform(low, high, (3,)), unit * (high - low) + low
    )
    torch.testing.assert_close(CounterRandom(5, 64).uniform(1.0, 3.0, (3,)), unit * 2.0 + 1.0)
    torch.testing.assert_close(
        CounterRandom(5, 64).uniform(-1.0, high, (3,)), unit * (high + 1.0) - 1.0
    )
    torch.testing.assert_close(
        CounterRandom(5, 64).uniform(low, 7.0, (3,)), unit * (7.0 - low) + low
    )


def test_a_restored_generator_continues() -> None:
    rng, other = CounterRandom(5, 8), CounterRandom(77, 8)
    rng.uniform()
    rng.advance()
    other.normal((9,))  # leaves an offset, which a restored generator must not keep
    other.load_state_dict(rng.state_dict())
    assert torch.equal(rng.uniform(), other.uniform())
    rng.advance()
    other.advance()
    assert torch.equal(rng.normal((3,)), other.normal((3,)))
    with pytest.raises(ValueError, match="8 streams, this one 9"):
        CounterRandom(5, 9).load_state_dict(rng.state_dict())


def test_steps_drawn_ahead_have_the_numbers_of_their_step() -> None:
    """Few numbers are drawn for many steps at once; callers may overwrite theirs, and a resume may
    begin anywhere.
    """
    rng, saved = CounterRandom(5, 3), {}
    constants = stream_constants(5, 3)
    for step in range(70):
        if step == 40:
            saved = {name: value.clone() for name, value in rng.state_dict().items()}
        first, second = rng.uniform(shape=(2,)), rng.normal((1,))
        assert torch.equal(first, random_uniform_reference(*constants, torch.tensor(step), 0, 2))
        assert torch.equal(second, random_normal(*constants, torch.tensor(step), 1, 1))
        first.fill_(9.0)
        rng.advance()
    stranger = CounterRandom(6, 3)  # at the same step, with numbers of its own drawn
    stranger.load_state_dict(stranger.state_dict() | {"step": torch.tensor(40)})
    stranger.uniform(shape=(2,))
    for other in (stranger, rng):
        other.load_state_dict(saved)
        assert torch.equal(
            other.uniform(shape=(2,)), random_uniform_reference(*constants, torch.tensor(40), 0, 2)
        )
        other.advance()
        assert torch.equal(
            other.uniform(shape=(2,)), random_uniform_reference(*constants, torch.tensor(41), 0, 2)
        )


def test_an_advance_that_does_not_happen_leaves_the_step_to_be_drawn_again() -> None:
    rng = CounterRandom(5, 3)
    expected = rng.uniform(shape=(2,)).clone()
    rng.uniform(shape=(2,)).zero_()
    rng.advance(torch.tensor(False))
    got = rng.uniform(shape=(2,))
    assert torch.equal(got, expected)
    got.zero_()  # a caller may overwrite its numbers
    rng.advance(torch.tensor(False))
    assert torch.equal(rng.uniform(shape=(2,)), expected)
    rng.advance(torch.tensor(True))
    assert torch.equal(
        rng.uniform(shape=(2,)),
        random_uniform_reference(*stream_constants(5, 3), torch.tensor(1), 0, 2),
    )


@pytest.mark.parametrize(
    ("envs", "shape", "calls"),
    [(1, (), 3), (512, (2,), 3), (205, (5,), 70), (3, (0,), 70)],
    ids=["one", "few", "many", "none"],
)
def test_few_numbers_are_drawn_for_32_steps_in_one_call(
    envs: int, shape: tuple[int, ...], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(
        module,
        "random_uniform",
        lambda *arguments: called.append(1) or random_uniform_reference(*arguments),
    )
    rng, constants = CounterRandom(5, envs), stream_constants(5, envs)
    for step in range(70):
        expected = random_uniform_reference(*constants, torch.tensor(step), 0, math.prod(shape))
        assert torch.equal(rng.uniform(shape=shape), expected.view(envs, *shape))
        rng.advance()
    assert len(called) == calls


def test_where_nobody_looks_the_device_counts() -> None:
    """What a graph of the first step holds must read the counter when it is replayed."""
    constants = stream_constants(5, 3)
    for rng in (CounterRandom(5, 3), None):
        with no_host_syncs():
            rng = rng or CounterRandom(5, 3)  # made on the host, or here
            for step in range(4):
                assert torch.equal(
                    rng.uniform(shape=(2,)),
                    random_uniform_reference(*constants, torch.tensor(step), 0, 2),
                )
                assert not rng._ahead
                if step < 2:
                    rng.advance()
                else:
                    rng.advance(torch.tensor(True))
                    assert rng._host_step is None
            counter = rng.step
            rng.advance(by=3)
            assert counter is rng.step
            assert int(counter) == 7
    rng = CounterRandom(5, 3)
    rng.advance(torch.tensor(True))
    assert rng._host_step == 1


def test_reserved_words_are_drawn_by_nobody_else() -> None:
    """A kernel that draws by itself gets a counter; the next draw starts after its words."""
    for rng in (CounterRandom(5, 3), None):
        with nullcontext() if rng else no_host_syncs():
            rng = rng or CounterRandom(5, 3)
            rng.advance(by=7)
            rng.uniform(shape=(4,))
            assert rng.take_words(5) == 7 * WORDS_PER_STEP + 2
            assert rng.take_words(2) == 7 * WORDS_PER_STEP + 5
            expected = random_uniform_reference(rng.key, rng.gamma, torch.tensor(7), 6, 2)
            assert torch.equal(rng.uniform(shape=(2,)), expected)


def test_drawing_stays_out_of_what_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(
        torch.compiler, "disable", lambda function: kept.append(function) or function
    )  # the real one takes seconds
    rng = CounterRandom(5, 3)
    rng.disable_compile()
    assert kept == [rng._draw]
