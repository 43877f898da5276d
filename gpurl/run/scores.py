"""Statistics of few trainings (Agarwal et al. 2021, "Deep reinforcement learning at the edge of the
statistical precipice", sections 4.1 and 4.3; their package is rliable): the interquartile mean of
the returns and its interval by a stratified bootstrap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from gpurl.errors import UsageError, install_extra

Array = NDArray[np.float64]
RESAMPLES = 10_000
CONFIDENCE = 0.95
POINTS = 41  # at which curves are averaged


@dataclass(frozen=True)
class Estimate:
    """A statistic with the interval that contains it with 95 % confidence."""

    value: float
    low: float
    high: float


def _stats() -> ModuleType:
    """scipy.stats, which only these functions need."""
    try:
        from scipy import stats
    except ImportError:
        raise UsageError(
            f"statistics over seeds need scipy, which is missing: {install_extra('plot')}"
        ) from None
    return stats


def interquartile_mean(values: Array, axis: int = -1) -> Array:
    """The mean of the middle half: scipy's `trim_mean`, which leaves out int(n / 4) values at each
    end, as rliable does. Below four values it is the mean.
    """
    return np.asarray(_stats().trim_mean(values, 0.25, axis=axis))


def iqm(returns: Sequence[float]) -> Estimate:
    """The interquartile mean over the seeds of one case, with its percentile bootstrap interval;
    the interval of one seed, or of equal ones, is the value itself.
    """
    values = np.asarray(returns, np.float64)
    value = float(interquartile_mean(values))
    if np.ptp(values) == 0:
        return Estimate(value, value, value)
    interval = (
        _stats()
        .bootstrap(
            (values,),
            interquartile_mean,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(0),
        )
        .confidence_interval
    )
    return Estimate(value, float(interval.low), float(interval.high))


def stratified_iqm(returns: Mapping[str, Sequence[float]]) -> Estimate:
    """The interquartile mean over the seeds of all tasks. A resample draws each task's seeds from
    that task, so every task keeps its number of seeds (its stratum).

    returns: of each task, in units that may be averaged over tasks, such as fractions of a
    reference.
    """
    rng = np.random.default_rng(0)
    strata = [np.asarray(values, np.float64) for values in returns.values()]
    draws = [values[rng.integers(0, len(values), (RESAMPLES, len(values)))] for values in strata]
    resampled = interquartile_mean(np.concatenate(draws, axis=1))
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(resampled, (tail, 100.0 - tail))
    return Estimate(float(interquartile_mean(np.concatenate(strata))), float(low), float(high))


def interpolate(
    curves: Sequence[Sequence[tuple[float, float]]], points: int = POINTS
) -> tuple[Array, Array]:
    """(x [P], values [S, P]): S curves of (x, value) at the same x, linearly between their points,
    over the range that all of them have.
    """
    arrays = [np.asarray(curve, np.float64) for curve in curves]
    first = max(curve[0, 0] for curve in arrays)
    last = min(curve[-1, 0] for curve in arrays)
    x = np.linspace(first, last, points)
    return x, np.stack([np.interp(x, curve[:, 0], curve[:, 1]) for curve in arrays])


def band(values: Array) -> tuple[Array, Array, Array]:
    """(IQM, low, high), each [P], of values [S, P] over the S seeds: the interval at each point."""
    estimates = [iqm(column) for column in values.T]
    value, low, high = np.asarray([(each.value, each.low, each.high) for each in estimates]).T
    return value, low, high
