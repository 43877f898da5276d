"""Laws of the kernels' torch and C forms for whatever Hypothesis thinks of, against float64 one
number at a time.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.categorical_projection import categorical_projection_reference
from gpurl.kernels.gae import gae_c, gae_reference
from gpurl.kernels.moments import RunningMoments, update_moments
from gpurl.kernels.newest_episodes import keep_newest
from gpurl.kernels.pack_rows import scaled
from gpurl.kernels.permutation import MAX_WORDS, gather_rows, permutation
from gpurl.kernels.prioritized import (
    prioritized_draw_c,
    prioritized_draw_reference,
    prioritized_update,
)
from gpurl.kernels.random import RandomStreams, random_words_reference, stream_constants
from gpurl.kernels.squash import squashed_likelihood, squashed_sample
from gpurl.kernels.vtrace import vtrace_c, vtrace_reference
from gpurl.losses import rescale, unrescale
from gpurl.nn.normalizer import Normalizer, ValueNormalizer

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
SEEDS = st.integers(0, 2**63 - 1)
SHARES = st.floats(0.0, 1.0)
SIZES = st.integers(1, 200) | st.integers(1, 5000)


def streams(seed: int, step: int = 0) -> RandomStreams:
    return RandomStreams(*stream_constants(seed, 1), torch.tensor(step))


# ---- advantages ----


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Any, ...]:
    """The arguments of `gae`; NaN stands where nothing may be read."""
    steps, envs = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    random, scale = np.random.default_rng(draw(SEEDS)), draw(st.sampled_from([1e-3, 1.0, 1e4]))
    bits = np.frombuffer(
        draw(st.binary(min_size=steps * envs, max_size=steps * envs)), np.uint8
    ).reshape(steps, envs)
    rare = draw(st.booleans())  # ends of episodes
    terminated, truncated = (
        (bits & 7) == 0 if rare else (bits & 1) > 0,
        (bits & 56) == 0 if rare else (bits & 2) > 0,
    )
    valid = (bits & 192) > 0 if draw(st.booleans()) else None
    reward, final = (scale * random.normal(size=(steps, envs)) for _ in range(2))
    final[~truncated] = np.nan
    arrays = reward, scale * random.normal(size=(steps + 1, envs)), final
    flags = [
        None if flag is None else torch.from_numpy(flag) for flag in (terminated, truncated, valid)
    ]
    return (
        *(torch.from_numpy(array).float() for array in arrays),
        *flags[:2],
        draw(SHARES),
        draw(SHARES),
        flags[2],
    )


@pytest.mark.parametrize("function", [gae_reference, pytest.param(gae_c, marks=needs_c)])
@given(arguments=rollouts())
def test_advantages_are_those_of_a_loop(
    function: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...]
) -> None:
    reward, value, final, terminated, truncated = (item.double().numpy() for item in arguments[:5])
    gamma, gae_lambda, mask = arguments[5:]
    valid = np.ones_like(terminated) if mask is None else mask.numpy()
    expected = np.zeros_like(reward)
    for n in range(reward.shape[1]):
        following = 0.0
        for t in reversed(range(len(reward))):
            after = 0.0 if terminated[t, n] else final[t, n] if truncated[t, n] else value[t + 1, n]
            ended = terminated[t, n] or truncated[t, n]
            delta = reward[t, n] + gamma * after - value[t, n]
            following = (
                (delta if ended else delta + gamma * gae_lambda * following) if valid[t, n] else 0.0
            )
            expected[t, n] = following
    advantage, returns, moments = (item.double().numpy() for item in function(*arguments))
    size = 1e-5 * max(np.abs(reward).max(), np.abs(value).max())
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=size)
    np.testing.assert_allclose(returns, expected + value[:-1], rtol=1e-5, atol=size)
    entries = expected[valid > 0] if valid.any() else np.zeros(1)
    np.testing.assert_allclose(
        moments,
        [entries.mean(), entries.var(), valid.sum()],
        rtol=1e-4,
        atol=max(size, size * size),
    )


@needs_c
@given(arguments=rollouts(), seed=SEEDS, limits=st.tuples(SHARES, SHARES))
def test_vtrace_in_c_is_its_reference(
    arguments: tuple[Any, ...], seed: int, limits: tuple[float, float]
) -> None:
    """The reference is compared with a sum in float64 in tests/kernels/triton/test_vtrace.py."""
    *steps, gamma, gae_lambda, mask = arguments
    log_ratio = torch.from_numpy(np.random.default_rng(seed).normal(size=steps[0].shape)).float()
    numbers = log_ratio, gamma, gae_lambda, mask, *limits
    size = 1e-5 * max(float(steps[0].abs().max()), float(steps[1].abs().max()))
    got, expected = vtrace_c(*steps, *numbers), vtrace_reference(*steps, *numbers)
    for name, value, other, scale in zip(
        ("advantage", "returns", "moments"), got, expected, (size, size, max(size, size * size))
    ):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=scale, err_msg=name)


# ---- moments ----


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[Tensor, Tensor | None]]:
    """Rows of three columns and masks, cut into batches anywhere; NaN stands in rows that do not
    count.
    """
    random, size = np.random.default_rng(draw(SEEDS)), draw(st.integers(1, 60))
    rows = random.normal(size=(size, 3)) * 10.0 ** random.uniform(-2, 3, 3) + draw(
        st.sampled_from([0.0, 1.0, -1e4])
    )
    valid_fraction = draw(st.sampled_from([0.0, 0.5, 1.0]))
    valid = random.random(size) < valid_fraction
    x = torch.from_numpy(np.where(valid[:, None], rows, np.nan)).float()
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    spans = [slice(*pair) for pair in zip([0, *cuts], [*cuts, size])]
    return [
        (
            x[span],
            None if valid_fraction == 1.0 and span.start % 2 else torch.from_numpy(valid)[span],
        )
        for span in spans
        if x[span].numel()
    ]


@given(parts=batches(), random=st.randoms(use_true_random=False))
def test_any_split_gives_the_moments_of_all_rows_in_any_order(
    parts: list[tuple[Tensor, Tensor | None]], random: Any
) -> None:
    x, valid = (
        torch.cat(column)
        for column in zip(
            *((x, torch.ones(len(x), dtype=torch.bool) if v is None else v) for x, v in parts)
        )
    )
    pooled = x[valid].double()
    for _ in range(2):
        mean, variance, count = (
            torch.zeros(3, dtype=torch.float64),
            torch.ones(3, dtype=torch.float64),
            torch.zeros(()).double(),
        )
        running = RunningMoments(mean, variance, count, torch.zeros(3), torch.zeros(3))
        normalizer = Normalizer(3, clip=1.5)
        for rows, mask in parts:
            update_moments(running, 1e-8, rows, mask)
            normalizer.update(rows.unsqueeze(1), None if mask is None else mask.unsqueeze(1))
        assert float(count) == len(pooled)
        if len(pooled):
            torch.testing.assert_close(mean, pooled.mean(0), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(variance, pooled.var(0, correction=0), rtol=1e-7, atol=1e-9)
        else:
            assert (mean.tolist(), variance.tolist()) == ([0.0] * 3, [1.0] * 3)
        for kept, own in zip(
            (mean, variance, count), (normalizer.mean, normalizer.variance, normalizer.count)
        ):
            assert torch.equal(kept, own)
        assert torch.equal(normalizer.shift, mean.float())
        torch.testing.assert_close(normalizer.inv_std, (variance + 1e-8).pow(-0.5).float())
        expected = ((x - normalizer.shift) * normalizer.inv_std).clamp(-1.5, 1.5)
        torch.testing.assert_close(normalizer(x), expected, equal_nan=True)
        random.shuffle(parts)


@given(x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30))
def test_returns_come_back_from_the_critics_scale(x: list[float]) -> None:
    normalizer, returns = ValueNormalizer(), torch.tensor(x)
    normalizer.update(returns.unsqueeze(1))
    value = scaled(normalizer.scaled(returns.unsqueeze(0)))[0]
    assert abs(float(value.double().mean())) < 1e-2 or float(
        returns.std(correction=0)
    ) < 1e-4 * float(returns.abs().max())
    size = float(returns.abs().max()) + 1e-3
    torch.testing.assert_close(normalizer.denormalized(value), returns, rtol=1e-5, atol=1e-5 * size)


# ---- priorities ----

DRAWS = [prioritized_draw_reference, pytest.param(prioritized_draw_c, marks=needs_c)]
NO_PRIORITY = [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("draw", DRAWS)
@given(
    data=st.data(),
    seed=SEEDS,
    step=st.integers(0, 2**40),
    offset=st.integers(0, 1000),
    batch_size=st.integers(1, 300),
)
def test_an_entry_is_drawn_where_the_running_sum_says(
    draw: Any, data: Any, seed: int, step: int, offset: int, batch_size: int
) -> None:
    """Priorities are whole sixty-fourths, whose sums are exact in any order, so every draw must be
    numpy's.
    """
    parts = data.draw(
        st.lists(st.integers(1, 2**20) | st.sampled_from(NO_PRIORITY), min_size=1, max_size=300)
    )
    priority = torch.tensor([part / 64.0 for part in parts])
    counted = np.where((priority > 0) & (priority < math.inf), priority.numpy(), 0.0).astype(
        np.float64
    )
    index, probability = (
        item.numpy() for item in draw(priority, streams(seed, step), offset, batch_size)
    )
    if not counted.any():
        assert not index.any()
        assert not probability.any()
        return
    words = random_words_reference(*streams(seed, step), offset, batch_size)[0].tolist()
    uniform = np.array([(word % 2**64 >> 11) / 2**53 for word in words])
    running = np.cumsum(counted)
    number = (np.arange(batch_size) + uniform) * (running[-1] / batch_size)
    inside = number < running[-1]  # by rounding it may be the total
    np.testing.assert_array_equal(
        index[inside], np.searchsorted(running, number, side="right")[inside]
    )
    assert (index[~inside] == counted.nonzero()[0][-1]).all()
    assert (counted[index] > 0.0).all()
    np.testing.assert_allclose(probability, counted[index] / running[-1], rtol=1e-6)


@pytest.mark.parametrize("draw", DRAWS)
@given(priorities=st.lists(st.integers(0, 16), min_size=1, max_size=30).filter(any), seed=SEEDS)
def test_probabilities_of_all_entries_sum_to_one(
    draw: Any, priorities: list[int], seed: int
) -> None:
    """Of 1024 ranges one at least lies within the share of each entry that has one."""
    index, probability = draw(torch.tensor(priorities).float(), streams(seed), 0, 1024)
    of_entry = dict(zip(index.tolist(), probability.tolist()))
    assert set(of_entry) == {entry for entry, priority in enumerate(priorities) if priority}
    assert sum(of_entry.values()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("draw", DRAWS)
def test_single_draws_pass_a_chi_square_test(draw: Any) -> None:
    priority = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 8.0, 2.0, 2.0, 0.25])
    frequencies = (
        torch.cat([draw(priority, streams(17, step), 0, 1)[0] for step in range(3000)])
        .bincount(minlength=9)
        .double()
    )
    expected = 3000.0 * priority.double() / priority.double().sum()
    counts = expected > 0.0
    assert not frequencies[~counts].any()
    statistic = ((frequencies - expected).square() / expected)[counts].sum()
    degrees = torch.tensor(float(counts.sum() - 1), dtype=torch.float64)
    for p in (
        torch.special.gammaincc(degrees / 2, statistic / 2),
        torch.special.gammainc(degrees / 2, statistic / 2),
    ):
        assert float(p) > 1e-4  # neither too uneven nor too even


@given(
    pairs=st.lists(
        st.tuples(
            st.integers(0, 9), st.floats(0.0, 100.0, width=32) | st.sampled_from(NO_PRIORITY)
        ),
        max_size=30,
    )
)
def test_the_greatest_of_equal_entries_is_kept_in_any_order(pairs: list[tuple[int, float]]) -> None:
    expected = torch.full((10,), 7.0)
    for entry in {entry for entry, _ in pairs}:
        expected[entry] = max(
            value if 0.0 < value < math.inf else 0.0 for other, value in pairs if other == entry
        )
    for order in (pairs, pairs[::-1]):
        priority = torch.full((10,), 7.0)
        index, value = (
            torch.tensor([pair[0] for pair in order], dtype=torch.int64),
            torch.tensor([pair[1] for pair in order]),
        )
        prioritized_update(priority, index, value.float())
        assert torch.equal(priority, expected)


# ---- orders, sums, squashing ----


@given(
    size=SIZES,
    seed=SEEDS,
    step=st.integers(0, 2**40),
    offset=st.integers(0, 65_536 - MAX_WORDS),
    data=st.data(),
)
def test_a_permutation_has_each_number_once(
    size: int, seed: int, step: int, offset: int, data: Any
) -> None:
    stream = (*stream_constants(seed, 1), torch.tensor(step), offset)
    order = permutation(*stream, size)
    assert torch.equal(order.sort().values, torch.arange(size))
    packed, start = torch.arange(2.0 * size).view(size, 2), data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - start))
    assert torch.equal(
        gather_rows(packed, *stream, start=start, count=count), packed[order[start : start + count]]
    )


@given(
    steps=st.integers(1, 4).flatmap(
        lambda num_envs: st.lists(
            st.lists(
                st.tuples(st.booleans(), st.floats(width=32), st.integers(0, 1000)),
                min_size=num_envs,
                max_size=num_envs,
            ),
            min_size=1,
            max_size=20,
        )
    )
)
def test_the_newest_episodes_are_those_of_a_loop(
    steps: list[list[tuple[bool, float, int]]],
) -> None:
    num_envs = len(steps[0])
    newest = torch.zeros(3, num_envs)
    expected = [[0.0, 0.0, 0.0] for _ in range(num_envs)]
    for step in steps:
        ended, returns, lengths = (torch.tensor(column) for column in zip(*step))
        keep_newest(newest, ended, returns.float(), lengths)
        for env, (has_ended, episode_return, length) in enumerate(step):
            if has_ended and math.isfinite(episode_return):
                expected[env] = [episode_return, float(length), expected[env][2] + 1.0]
    assert newest.T.tolist() == expected


@given(
    atoms=st.integers(2, 60),
    low=st.floats(-100.0, 99.0),
    width=st.floats(0.1, 200.0),
    seed=SEEDS,
    has_shift=st.booleans(),
)
def test_a_projection_keeps_mass_and_the_mean_of_what_is_held_within_the_limits(
    atoms: int, low: float, width: float, seed: int, has_shift: bool
) -> None:
    random = np.random.default_rng(seed)
    pmf = torch.from_numpy(random.random((5, atoms)) ** 4)
    columns = random.normal(size=5) * width, random.random(5), random.normal(size=5)
    reward, discount, shift = map(torch.from_numpy, columns)
    discount[0], discount[1] = 0.0, 1.0
    got = categorical_projection_reference(
        pmf, reward, discount, low, low + width, shift if has_shift else None
    )
    values = torch.linspace(low, low + width, atoms, dtype=torch.float64)
    moved = (
        reward[:, None] + discount[:, None] * (values + (shift[:, None] if has_shift else 0.0))
    ).clamp(low, low + width)
    assert bool((got >= -1e-12).all())
    torch.testing.assert_close(got.sum(-1), pmf.sum(-1), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(got @ values, (pmf * moved).sum(-1), rtol=1e-9, atol=1e-7)


@given(seed=SEEDS, rows=st.integers(1, 9), width=st.integers(1, 5), spread=st.floats(0.0, 1.5))
def test_the_likelihood_of_a_drawn_action_is_what_the_draw_said(
    seed: int, rows: int, width: int, spread: float
) -> None:
    """tanh there and atanh back."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, noise = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64).clamp(-2, 2)
        for _ in range(3)
    )
    output = torch.cat((spread * mean, 0.3 * log_std), 1)
    action, log_prob = squashed_sample(output, noise)
    torch.testing.assert_close(
        action.atanh(), spread * mean + (0.3 * log_std).exp() * noise, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(squashed_likelihood(output, action), log_prob, rtol=1e-5, atol=1e-5)


@given(
    x=st.floats(-1e12, 1e12, allow_subnormal=False), y=st.floats(-1e12, 1e12, allow_subnormal=False)
)
def test_rescaling_and_its_inverse_are_inverses_and_monotone(x: float, y: float) -> None:
    both = torch.tensor(sorted((x, y)), dtype=torch.float64)
    for there, back in ((rescale, unrescale), (unrescale, rescale)):
        torch.testing.assert_close(back(there(both)), both, rtol=1e-12, atol=0.0)
        assert there(both)[0] <= there(both)[1]
        assert torch.equal(there(-both), -there(both))
