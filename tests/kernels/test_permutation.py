"""The permutations of gpurl.kernels.permutation as numpy and torch make them: bijections by the
formula, and random in every way tried.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.permutation import MAX_WORDS, gather_rows, permutation, permutation_network
from gpurl.kernels.random import random_words_reference, stream_constants

SIZES = [1, 2, 3, 5, 17, 64, 1000, 4096, 65_536, 131_072, 100_003]
LARGE = [65_536, 131_072, 100_003]
# every statistic below lies within so many standard deviations of its mean, for fixed seeds
SIGMAS = 5.0


def order_of(size: int, step: int = 0, seed: int = 0, offset: int = 0) -> Tensor:
    """[size] int64."""
    return permutation(*stream_constants(seed, 1), torch.tensor(step), offset, size)


@functools.cache
def many_orders(size: int, count: int = 2000) -> np.ndarray:
    """[count, size] int64, of as many steps."""
    key, gamma = stream_constants(7, 1)
    return np.stack(
        [permutation(key, gamma, torch.tensor(step), 0, size).numpy() for step in range(count)]
    )


def assert_chi_square(statistic: float, degrees: int) -> None:
    """Neither too uneven nor too even."""
    assert abs(statistic - degrees) < SIGMAS * math.sqrt(2 * degrees)


def assert_uniform(cells: np.ndarray, num_cells: int) -> None:
    """Chi-square of integer `cells` in 0 .. num_cells-1."""
    count = np.bincount(cells.reshape(-1), minlength=num_cells)
    assert len(count) == num_cells
    assert_chi_square(
        float(((count - cells.size / num_cells) ** 2).sum() / (cells.size / num_cells)),
        num_cells - 1,
    )


# ---- what is computed ----


def finalizer(x: int) -> int:
    """MurmurHash3's fmix32 in Python's integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 64, 1000, 100_003])
def test_the_formula_in_integers(size: int) -> None:
    assert finalizer(1) == 0x514E28B7  # published
    a, b, rounds = permutation_network(size)
    words = random_words_reference(
        *stream_constants(5, 1), torch.tensor(2**33 + 1), 40, (rounds + 1) // 2
    )[0].tolist()
    round_keys = [half for word in words for half in (word % 2**32, (word >> 32) % 2**32)]
    expected, positions = [], range(0, size, max(size // 1000, 1))
    for position in positions:
        number, count = position, len(expected)
        while len(expected) == count:
            left, right = divmod(number, b)
            for turn in range(rounds):
                if turn % 2 == 0:
                    left = (left + (finalizer((right + round_keys[turn]) % 2**32) * a >> 32)) % a
                else:
                    right = (right + (finalizer((left + round_keys[turn]) % 2**32) * b >> 32)) % b
            number = left * b + right
            if number < size:
                expected.append(number)
    assert order_of(size, step=2**33 + 1, seed=5, offset=40)[list(positions)].tolist() == expected


@pytest.mark.parametrize("size", SIZES)
def test_every_row_once(size: int) -> None:
    for seed, step, offset in itertools.product((0, 1, 2**40 + 7), (0, 1, 2**35), (0, MAX_WORDS)):
        order = order_of(size, step, seed, offset)
        assert order.dtype == torch.int64
        assert torch.equal(order.sort().values, torch.arange(size))
    with no_host_syncs():
        assert torch.equal(order_of(size, step, seed, offset), order)


def test_most_rows_may_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.kernels.permutation.permutation_network", lambda size: (13, 17, 5))
    for size in (1, 2, 11, 220, 221):
        order = order_of(size)
        assert torch.equal(order.sort().values, torch.arange(size))
        with no_host_syncs():
            assert torch.equal(order_of(size), order)


def test_rows_that_are_not_there_are_not_gathered() -> None:
    packed, stream = torch.randn(30, 6), (*stream_constants(5, 1), torch.tensor(3), 0)
    order = permutation(*stream, 30)
    for start, count in ((0, 30), (30, 0), (0, 0), (29, 1)):
        assert torch.equal(
            gather_rows(packed, *stream, start=start, count=count),
            packed[order[start : start + count]],
        )
    for start, count in ((-1, 2), (0, -1), (0, 31), (30, 1)):
        with pytest.raises(
            ValueError, match=f"positions {start} to {start + count} are not within 30 rows"
        ):
            gather_rows(packed, *stream, start=start, count=count)
    for wrong in (packed.double(), packed.flatten(), packed.t()):
        with pytest.raises(ValueError, match=r"packed must be \[S, W\] float32 contiguous"):
            gather_rows(wrong, *stream, start=0, count=1)


def test_nothing_is_looked_at() -> None:
    with FakeTensorMode(), no_host_syncs():
        for size in SIZES:
            assert order_of(size).shape == (size,)


def test_networks() -> None:
    for size in [*range(1, 3000), *SIZES, 2**30]:
        a, b, rounds = permutation_network(size)
        assert 0 <= a * b - size <= max(math.isqrt(size), 1)  # few walk
        assert a <= b <= 4 * a
        assert rounds % 2 == 1
        assert rounds >= 5
        assert (rounds + 1) // 2 <= MAX_WORDS
        assert size < 3 or (a > 1 and a ** (rounds // 2) >= 2**16)
    assert permutation_network(131_072) == (256, 512, 5)


@pytest.mark.parametrize("size", [1000, 131_072, 100_003])
def test_step_stream_and_offset_each_give_another(size: int) -> None:
    orders = [
        order_of(size),
        order_of(size, step=1),
        order_of(size, seed=1),
        order_of(size, offset=MAX_WORDS),
        order_of(size, offset=1),
    ]
    for first, second in itertools.combinations(orders, 2):
        same = int((first == second).sum())
        assert same < 10  # one on average


# ---- how random it is: small sizes, many orders ----


@pytest.mark.parametrize("size", [3, 5])
def test_every_order_is_equally_likely(size: int) -> None:
    weights = size ** np.arange(size)
    names = {
        int(np.dot(order, weights)): number
        for number, order in enumerate(itertools.permutations(range(size)))
    }
    numbers = np.array([names[int(name)] for name in many_orders(size, 3000) @ weights])
    assert_uniform(numbers, math.factorial(size))


@pytest.mark.parametrize("size", [8, 17, 64])
def test_every_row_is_everywhere_equally_often(size: int) -> None:
    orders = many_orders(size)
    count = np.bincount((orders + size * np.arange(size)).reshape(-1), minlength=size * size)
    expected = len(orders) / size
    statistic = float(((count - expected) ** 2).sum() / expected)
    assert_chi_square(
        statistic * (size - 1) / size, (size - 1) ** 2
    )  # rows and columns of the table have fixed sums


@pytest.mark.parametrize("size", [16, 64, 210])
def test_pairs_of_positions_have_independent_rows(size: int) -> None:
    a, b, _ = permutation_network(size)
    orders = many_orders(size)
    for apart in (
        1,
        2,
        b,
        (a // 2) * b,
    ):  # the same left half, and the same right half, which the first round leaves alone
        difference = (orders[:, apart] - orders[:, 0]) % size
        assert_uniform(difference - 1, size - 1)
        (left, right), (other_left, other_right) = (
            divmod(orders[:, 0], b),
            divmod(orders[:, apart], b),
        )
        if a * b == size:
            assert_uniform(((other_left - left) % a) * b + (other_right - right) % b - 1, size - 1)


@pytest.mark.parametrize("size", [17, 1000, 4096])
def test_fixed_points(size: int) -> None:
    count = 2000 if size < 1000 else 500
    fixed = (many_orders(size, count) == np.arange(size)).sum(axis=1)
    assert abs(float(fixed.mean()) - 1.0) < SIGMAS / math.sqrt(count)
    assert abs(float(fixed.var()) - 1.0) < SIGMAS * math.sqrt(
        3.0 / count
    )  # a Poisson number's fourth moment is 4
    assert abs(float((fixed == 0).mean()) - math.exp(-1)) < SIGMAS * math.sqrt(0.2325 / count)


# ---- how random it is: large sizes, a few orders ----


@pytest.mark.parametrize("size", LARGE)
def test_neighbours_are_not_correlated(size: int) -> None:
    b = permutation_network(size)[1]
    for step in range(3):
        order = order_of(size, step).double()
        centred = (order - order.mean()) / order.std()
        for lag in (1, 2, 3, b, 2 * b, 4096):
            assert abs(float((centred[lag:] * centred[:-lag]).mean())) < SIGMAS / math.sqrt(size)
        inverse = order.argsort().double()
        centred = (inverse - inverse.mean()) / inverse.std()
        for lag in (1, b, 4096):
            assert abs(float((centred[lag:] * centred[:-lag]).mean())) < SIGMAS / math.sqrt(size)


@pytest.mark.parametrize("size", LARGE)
def test_rows_go_any_distance(size: int) -> None:
    position = np.arange(size)
    for step in range(3):
        order = order_of(size, step).numpy()
        assert_uniform((order - position) % size * 256 // size, 256)
        cells = np.bincount(position * 16 // size * 16 + order * 16 // size, minlength=256)
        assert_chi_square(float(((cells - size / 256) ** 2).sum() / (size / 256)), 225)
        cells = np.bincount(position % 16 * 16 + order % 16, minlength=256)  # the low bits too
        assert_chi_square(float(((cells - size / 256) ** 2).sum() / (size / 256)), 225)


@pytest.mark.parametrize("size", LARGE)
def test_who_shares_a_minibatch(size: int) -> None:
    b = permutation_network(size)[1]
    place = [
        order_of(size, step).argsort() * 4 // size for step in range(4)
    ]  # [size] the minibatch of each row
    for batch in place:
        for apart in (1, 2, b, 4096, 32_768):
            same = float((batch[apart:] == batch[:-apart]).double().mean())
            assert abs(same - 0.25) < SIGMAS * math.sqrt(0.1875 / (size - apart))
    for first, second in itertools.combinations(place, 2):
        cells = np.bincount((first * 4 + second).numpy(), minlength=16)
        assert_chi_square(float(((cells - size / 16) ** 2).sum() / (size / 16)), 9)


def test_consecutive_steps_are_independent() -> None:
    orders = many_orders(1000, 500)
    assert_uniform((orders[1:, ::37] - orders[:-1, ::37]) % 1000 // 50, 20)
