"""Interquartile means and their bootstrap intervals, against cases worked by hand."""

import math

import numpy as np
import pytest

from gpurl.run.scores import band, interpolate, interquartile_mean, iqm, stratified_iqm


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 3.0, -50.0])) == 2.0
    # of five and of seven one value at each end, int(5 / 4) = int(7 / 4) = 1
    assert interquartile_mean(np.array([5.0, 1.0, 2.0, 3.0, 100.0])) == pytest.approx(10 / 3)
    assert interquartile_mean(np.arange(7.0) ** 2) == pytest.approx((1 + 4 + 9 + 16 + 25) / 5)
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0  # of three it is the mean
    rows = np.array([[0.0, 1.0, 3.0, 9.0], [4.0, 4.0, 4.0, 4.0]])
    assert interquartile_mean(rows).tolist() == [2.0, 4.0]


def test_the_interval_of_two_seeds_is_known() -> None:
    """A resample of (0, 1) has the mean 0, 1/2 or 1 with probability 1/4, 1/2, 1/4: the 2.5th and
    97.5th percentiles are 0 and 1.
    """
    found = iqm([0.0, 1.0])
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)


def test_equal_seeds_have_no_interval() -> None:
    assert iqm([7.0]) == iqm([7.0, 7.0, 7.0])
    assert (iqm([7.0]).low, iqm([7.0]).high) == (7.0, 7.0)


def test_the_interval_of_two_tasks_with_two_seeds_is_known() -> None:
    """Of four draws of 0 or 1 the middle two are 0, 0 or 0, 1 or 1, 1 with probability 5/16, 6/16,
    5/16: the 2.5th and 97.5th percentiles of their mean are 0 and 1.
    """
    found = stratified_iqm({"a": [0.0, 1.0], "b": [1.0, 0.0]})
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)


def test_equal_strata_have_the_interval_of_all_their_values() -> None:
    """Four tasks with the same seeds: three draws from each are twelve draws from all. Simulated
    with another generator: the middle six of twelve sorted values.
    """
    returns = {f"task {index}": [0.0, 1.0, 2.0] for index in range(4)}
    rng = np.random.default_rng(5)
    draws = rng.choice(3, (20_000, 12)).astype(float)
    draws.sort(axis=1)
    simulated = draws[:, 3:9].mean(axis=1)
    found = stratified_iqm(returns)
    assert found.value == 1.0
    assert found.low == pytest.approx(np.percentile(simulated, 2.5), abs=0.05)
    assert found.high == pytest.approx(np.percentile(simulated, 97.5), abs=0.05)


def test_strata_keep_the_tasks_apart() -> None:
    """Tasks that differ, seeds that do not: resampling within the tasks changes nothing, while
    resampling over all values would give an interval from 0 to 1.
    """
    found = stratified_iqm({"easy": [1.0, 1.0, 1.0], "hard": [0.0, 0.0, 0.0]})
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_curves_are_read_at_the_same_steps_of_their_common_range() -> None:
    x, values = interpolate([[(0, 0.0), (10, 10.0)], [(5, 1.0), (15, 3.0)]], points=3)
    assert x.tolist() == [5.0, 7.5, 10.0]
    assert values.tolist() == [[5.0, 7.5, 10.0], [1.0, 1.5, 2.0]]


def test_a_band_holds_its_line() -> None:
    values = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    line, low, high = band(values)
    assert line.tolist() == [1.5, 1.0]
    assert low[1] == high[1] == 1.0
    assert low[0] < 1.5 < high[0]
    assert all(map(math.isfinite, low))
