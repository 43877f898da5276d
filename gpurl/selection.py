"""Selection among the members of a population, as pure functions of numbers: who takes over whom,
how settings are explored, and which models are worth averaging.

The exploit functions return `parents`: parents[k] is the member whose state member k has from then
on, k itself where it keeps its own. So a population on one device applies them as a gather over
members, and one on many machines as files to load. Scores are returns, higher is better; one that
is NaN or infinite is that of a member that diverged: it is replaced by any rule, and copied by
none. Where all scores are equal, nothing changes. Random numbers are arguments: `uniforms` has one
in [0, 1) for each member, and what it draws depends on the order of scores, not on that of members.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

FACTORS = 0.8, 1.2  # of Jaderberg et al. 2017, section 4.1.1


class Span(NamedTuple):
    """The legal values of a setting while it is explored."""

    low: float
    high: float
    is_log: bool = False  # new values are drawn evenly over logarithms
    is_whole: bool = False  # the setting is an integer
    from_one: bool = False  # its distance from 1 is what counts, as of a discount factor


# ---- exploit: whose state a member has from now on ----


def truncation(scores: Sequence[float], fraction: float, uniforms: Sequence[float]) -> list[int]:
    """Each member of the worst `fraction` copies a random one of the best `fraction`, if that is
    better (truncation selection; Jaderberg et al. 2017, "Population based training", section
    4.1.1). At least one member counts as worst and one as best; members that diverged always do.
    """
    ranked = _ranked(scores)
    count = max(int(fraction * len(scores)), 1)
    best = ranked[:count]
    worst = {*ranked[count:][-count:]}
    parents = []
    for k, uniform in enumerate(uniforms):
        other = best[int(uniform * len(best))] if best else k
        is_replaced = k in worst or not math.isfinite(scores[k])
        parents.append(other if is_replaced and _is_better(scores, other, k) else k)
    return parents


def tournament(scores: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """Each member draws another one and copies it, if that is better (binary tournament; Jaderberg
    et al. 2017). Nobody draws a member that diverged.
    """
    ranked = _ranked(scores)
    parents = []
    for k, uniform in enumerate(uniforms):
        others = [j for j in ranked if j != k]
        other = others[int(uniform * len(others))] if others else k
        parents.append(other if _is_better(scores, other, k) else k)
    return parents


def generation(scores: Sequence[float], elite: int, uniforms: Sequence[float]) -> list[int]:
    """The `elite` best members are kept, every other place goes to a member drawn by
    `softmax_of_z`: generational evolution (Li et al. 2021, "FinRL-Podracer"), with the draw of
    ElegantRL's ensembles. Nothing changes where all scores are equal.
    """
    ranked = _ranked(scores)
    if not ranked or len({*scores}) == 1:
        return list(range(len(scores)))
    probabilities = softmax_of_z([scores[k] for k in ranked])
    kept = {*ranked[:elite]}
    return [
        k if k in kept else ranked[draw(probabilities, uniform)]
        for k, uniform in enumerate(uniforms)
    ]


def softmax_of_z(scores: Sequence[float]) -> list[float]:
    """Probabilities exp(z_k) / sum exp(z), z the scores less their mean, by their standard
    deviation; 0 of scores that are not finite, equal ones if all are the same.
    """
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        return [0.0] * len(scores)
    # scaled first: squares of large returns must not overflow
    scale = max(map(abs, finite)) or 1.0
    scaled = [score / scale for score in finite]
    mean = math.fsum(scaled) / len(finite)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in scaled) / len(finite))
    # rounding alone is no difference
    deviation = deviation if deviation > 1e-12 else math.inf
    weights = [
        math.exp((score / scale - mean) / deviation) if math.isfinite(score) else 0.0
        for score in scores
    ]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def draw(probabilities: Sequence[float], uniform: float) -> int:
    """The index that a uniform number in [0, 1) draws: that of the first sum of probabilities above
    it; never one of probability 0.
    """
    total = 0.0
    for k, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return k
    # the sum may be below 1 by rounding
    return max(k for k, probability in enumerate(probabilities) if probability > 0)


def _ranked(scores: Sequence[float]) -> list[int]:
    """The members with finite scores, the best first; of equal ones the first."""
    finite = [k for k, score in enumerate(scores) if math.isfinite(score)]
    return sorted(finite, key=lambda k: -scores[k])


def _is_better(scores: Sequence[float], one: int, other: int) -> bool:
    if not math.isfinite(scores[other]):
        return math.isfinite(scores[one])
    return scores[one] > scores[other]


# ---- explore: another value of a setting ----


def explore(value: float, span: Span, resample: float, uniforms: tuple[float, float]) -> float:
    """With probability `resample` a new value of `span`, else `value` times 0.8 or 1.2, whichever
    the second number says, within the span (Jaderberg et al. 2017, section 4.1.1). An integer
    changes by 1 at least, 0 always to a new value.
    """
    if span.from_one:
        mirrored = Span(1.0 - span.high, 1.0 - span.low, span.is_log)
        moved = explore(1.0 - value, mirrored, resample, uniforms)
        return min(max(1.0 - moved, span.low), span.high)
    # 0 times any factor stays 0
    is_new, where = (
        uniforms[0] < resample or (value == 0.0 == span.low and not span.is_whole),
        uniforms[1],
    )
    if is_new:
        moved = _between(span, where)
    else:
        moved = value * FACTORS[where >= 0.5]
        if span.is_whole:
            moved = value + math.copysign(max(round(abs(moved - value)), 1), where - 0.5)
    return min(max(moved, span.low), span.high)


def _between(span: Span, uniform: float) -> float:
    """The value that a uniform number draws from the span."""
    end = span.high + span.is_whole  # all integers are equally likely
    if span.is_log:
        drawn = span.low * (end / span.low) ** uniform
    else:
        drawn = span.low + uniform * (end - span.low)
    return math.floor(drawn) if span.is_whole else drawn


# ---- average: which models to average ----


def greedy_soup(
    scores: Sequence[float], evaluate: Callable[[Sequence[int]], float]
) -> tuple[list[int], float]:
    """(members whose weights to average, score of the average): from the best member on, each takes
    part if the average is then not worse (Wortsman et al. 2022, "Model soups", recipe 1).

    evaluate: the score of the average of these members, as `scores` have it. Members that diverged
    never take part. ValueError if all have.
    """
    ranked = _ranked(scores)
    if not ranked:
        raise ValueError("none of the scores is finite")
    chosen, best = ranked[:1], scores[ranked[0]]
    for k in ranked[1:]:
        if (score := evaluate([*chosen, k])) >= best:
            chosen, best = [*chosen, k], score
    return chosen, best
