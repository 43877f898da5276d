"""Selection by hand-worked numbers, and by the laws that every rule obeys."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from gpurl.selection import (
    Span,
    draw,
    explore,
    generation,
    greedy_soup,
    softmax_of_z,
    tournament,
    truncation,
)

NAN, INF = math.nan, math.inf
Rule = Callable[[Sequence[float], Sequence[float]], list[int]]
RULES: list[Rule] = [
    lambda scores, uniforms: truncation(scores, 0.25, uniforms),
    tournament,
    lambda scores, uniforms: generation(scores, max(len(scores) // 4, 1), uniforms),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=["truncation", "tournament", "generation"])


# ---- the rules by hand ----


def test_truncation_replaces_the_worst_by_the_best() -> None:
    scores = [5.0, 1.0, 9.0, 3.0, 7.0, 8.0, 2.0, 4.0]
    # best 2 and 5, worst 1 and 6; the first draws the first of the best, the other the second
    uniforms = [0.9, 0.49, 0.9, 0.9, 0.9, 0.9, 0.5, 0.9]
    assert truncation(scores, 0.25, uniforms) == [0, 2, 2, 3, 4, 5, 5, 7]
    # one at least, half of them at most
    assert truncation(scores, 0.01, [0.0] * 8) == [0, 2, 2, 3, 4, 5, 6, 7]
    assert truncation([1.0, 2.0, 3.0], 0.5, [0.0] * 3) == [2, 1, 2]
    # members that diverged are more than the fraction
    assert truncation([NAN, 1.0, INF, 2.0, -INF], 0.2, [0.0] * 5) == [3, 3, 3, 3, 3]
    assert truncation([NAN, 1.0, NAN, 2.0, 3.0, 4.0, 5.0, 6.0], 0.25, [0.0] * 8)[:4] == [7, 7, 7, 7]


def test_a_tournament_copies_a_better_opponent() -> None:
    scores = [3.0, 1.0, 2.0]
    # 0 draws 1 or 2, 1 draws 0 or 2, 2 draws 0 or 1
    assert tournament(scores, [0.0, 0.0, 0.0]) == [0, 0, 0]
    assert tournament(scores, [0.5, 0.5, 0.5]) == [0, 2, 2]
    # who diverged draws among the others, and is drawn by none
    assert tournament([NAN, 1.0, NAN, 2.0], [0.0, 0.99, 0.5, 0.0]) == [3, 3, 1, 3]


def test_a_generation_keeps_its_elite_and_draws_the_others() -> None:
    scores = [1.0, 3.0, 2.0]
    # z-scores of the deviation sqrt(2 / 3), the best first: members 1, 2, 0
    weights = [math.exp(math.sqrt(1.5)), 1.0, math.exp(-math.sqrt(1.5))]
    total = sum(weights)
    first, second = weights[0] / total, (weights[0] + weights[1]) / total
    few = 1e-9
    assert generation(scores, 1, [first - few, 0.99, first + few]) == [1, 1, 2]
    assert generation(scores, 1, [second - few, 0.99, second + few]) == [2, 1, 0]
    assert generation(scores, 2, [0.0, 0.99, 0.0]) == [1, 1, 2]
    assert generation([NAN, 5.0, NAN], 1, [0.3, 0.3, 0.9]) == [1, 1, 1]


def test_softmax_of_z_scores() -> None:
    found = softmax_of_z([1.0, 3.0])  # z = -1, 1
    assert found == pytest.approx([1 / (1 + math.e**2), 1 / (1 + math.e**-2)])
    # whatever the scale and the offset of returns
    base = softmax_of_z([0.0, 1.0, 5.0])
    for scale, offset in ((1e-9, 0.0), (1e6, -3e5), (1e300, 0.0)):
        moved = softmax_of_z([offset + scale * each for each in (0.0, 1.0, 5.0)])
        assert moved == pytest.approx(base, rel=1e-6)
    assert softmax_of_z([2.0, NAN, 2.0]) == [0.5, 0.0, 0.5]
    assert softmax_of_z([0.0, -INF]) == [1.0, 0.0]
    assert softmax_of_z([NAN, INF]) == [0.0, 0.0]
    assert softmax_of_z([0.1 + 0.2, 0.3]) == [0.5, 0.5]


def test_a_draw_follows_its_probabilities() -> None:
    probabilities = [0.0, 0.25, 0.0, 0.75, 0.0]
    assert [draw(probabilities, each) for each in (0.0, 0.2499, 0.25, 0.9999)] == [1, 1, 3, 3]
    # tenths add up to less than 1
    assert draw([0.1] * 10 + [0.0], 1.0 - 2.0**-53) == 9
    numbers = random.Random(0)
    counts = Counter(draw([0.2, 0.8], numbers.random()) for _ in range(10_000))
    assert counts[0] == pytest.approx(2000, abs=5 * math.sqrt(10_000 * 0.2 * 0.8))


# ---- laws of all rules ----


@each_rule
def test_one_member_or_equal_ones_stay_as_they_are(rule: Rule) -> None:
    assert rule([3.0], [0.9]) == [0]
    assert rule([NAN], [0.9]) == [0]
    for count in (2, 5, 8):
        for number in (0.0, 0.5, 0.99):
            assert rule([7.0] * count, [number] * count) == list(range(count))
            assert rule([NAN] * count, [number] * count) == list(range(count))


@each_rule
def test_laws_of_a_selection(rule: Rule) -> None:
    numbers = random.Random(1)
    for _ in range(300):
        count = numbers.randint(1, 12)
        scores = [numbers.choice([NAN, INF, *map(float, range(6))]) for _ in range(count)]
        uniforms = [numbers.random() for _ in range(count)]
        parents = rule(scores, uniforms)
        finite = [score for score in scores if math.isfinite(score)]
        assert len(parents) == count
        if not finite:
            assert parents == list(range(count))
            continue
        # nobody goes on from a member that diverged, and none of those stays
        assert all(math.isfinite(scores[parent]) for parent in parents)
        # one of the best stays what it is
        assert any(parents[k] == k for k, score in enumerate(scores) if score == max(finite))


@each_rule
def test_the_order_of_members_does_not_matter(rule: Rule) -> None:
    """Members in another order, with their random numbers, choose the same ones: without ties."""
    numbers = random.Random(2)
    for _ in range(100):
        count = numbers.randint(2, 8)
        scores = [float(each) for each in numbers.sample(range(100), count)]
        scores[0] = numbers.choice([scores[0], NAN])
        uniforms = [numbers.random() for _ in range(count)]
        order = numbers.sample(range(count), count)
        found = rule(scores, uniforms)
        moved = rule([scores[k] for k in order], [uniforms[k] for k in order])
        assert [found[k] for k in order] == [order[parent] for parent in moved]


@pytest.mark.parametrize("rule", RULES[:2], ids=["truncation", "tournament"])
def test_nobody_takes_over_a_worse_one(rule: Rule) -> None:
    numbers = random.Random(3)
    for _ in range(200):
        scores = [float(numbers.randint(0, 5)) for _ in range(7)]
        for k, parent in enumerate(rule(scores, [numbers.random() for _ in scores])):
            assert parent == k or scores[parent] > scores[k]


# ---- explore ----


def test_a_value_is_perturbed_or_drawn_anew() -> None:
    span = Span(1e-5, 1e-1, is_log=True)
    assert explore(1e-3, span, 0.25, (0.25, 0.49)) == pytest.approx(0.8e-3)
    assert explore(1e-3, span, 0.25, (0.25, 0.5)) == pytest.approx(1.2e-3)
    assert explore(1e-3, span, 0.25, (0.24, 0.5)) == pytest.approx(1e-3)  # the middle of logarithms
    assert explore(1e-3, Span(1.0, 3.0), 1.0, (0.9, 0.25)) == 1.5
    # within the range, from outside too
    assert explore(0.09, span, 0.0, (0.0, 0.9)) == 0.1
    assert explore(0.0, span, 0.0, (0.0, 0.9)) == 1e-5
    # 0 would stay 0
    assert explore(0.0, Span(0.0, 0.1), 0.0, (0.9, 0.25)) == 0.025


def test_a_discount_factor_is_explored_by_its_distance_from_one() -> None:
    span = Span(0.9, 0.999, is_log=True, from_one=True)
    assert explore(0.99, span, 0.0, (0.0, 0.9)) == pytest.approx(0.988)
    assert explore(0.99, span, 0.0, (0.0, 0.1)) == pytest.approx(0.992)
    assert explore(0.5, span, 1.0, (0.0, 0.5)) == pytest.approx(0.99)
    assert explore(0.999, span, 0.0, (0.0, 0.1)) == 0.999
    # 1, which no factor of its distance moves, is drawn anew
    assert explore(1.0, Span(0.5, 1.0, from_one=True), 0.0, (0.0, 0.9)) == pytest.approx(0.55)


def test_integers_stay_integers_and_move() -> None:
    span = Span(1, 4, is_whole=True)
    assert [explore(2, span, 0.0, (0.0, where)) for where in (0.1, 0.9)] == [1, 3]
    assert explore(10, Span(1, 100, is_whole=True), 0.0, (0.0, 0.9)) == 12
    drawn = Counter(explore(2, span, 1.0, (0.0, (i + 0.5) / 400)) for i in range(400))
    assert drawn == {1: 100, 2: 100, 3: 100, 4: 100}
    log = [explore(2, Span(1, 64, True, True), 1.0, (0.0, i / 400)) for i in range(400)]
    assert {1, 2, 8, 64} < {*log}
    assert all(each == int(each) for each in log)


# ---- soup ----


def test_a_soup_takes_only_what_is_not_worse() -> None:
    values = {(2, 0): 9.0, (2, 1): 10.0, (2, 1, 3): 10.5}
    asked = []

    def evaluate(members: Sequence[int]) -> float:
        asked.append(tuple(members))
        return values[tuple(members)]

    found = greedy_soup([8.0, 7.0, 10.0, 6.0, NAN], evaluate)
    assert found == ([2, 1, 3], 10.5)
    assert asked == [(2, 0), (2, 1), (2, 1, 3)]


def test_a_soup_is_never_worse_than_the_best_member() -> None:
    numbers = random.Random(4)
    for _ in range(100):
        scores = [numbers.random() for _ in range(5)]
        _, score = greedy_soup(scores, lambda members: numbers.random())
        assert score >= max(scores)
    assert greedy_soup([1.0], lambda members: 5.0) == ([0], 1.0)
    with pytest.raises(ValueError, match="none of the scores is finite"):
        greedy_soup([NAN], lambda members: 0.0)
