"""Normalisers of several ranks hold what one process computes from the rows of all, and one rank
alone changes nothing.
"""

import pytest
import torch

from gpurl.nn.normalizer import Normalizer
from gpurl.nn.ranks import ALONE
from gpurl.nn.reward_scaler import RewardScaler
from tests.thread_ranks import ThreadRank, together

STATISTICS = ("mean", "variance", "count", "shift", "inv_std")


def rollouts(num_envs: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three of (rows [T, N, D] with means far from 0, valid [T, N])."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1.0, 1e-3, 50.0])
    return [
        (
            torch.randn(5, num_envs, 3, generator=generator) * spread + 1e3 * spread,
            torch.rand(5, num_envs, generator=generator) < 0.7,
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_normaliser_of_ranks_is_that_of_one_process(count: int, masked: bool) -> None:
    """To 12 digits: the running values are float64."""
    data = rollouts(8)
    alone = Normalizer(3)
    for rows, valid in data:
        alone.update(rows, valid if masked else None)

    def of_rank(rank: ThreadRank) -> Normalizer:
        normalizer = Normalizer(3)
        normalizer.ranks = rank
        for rows, valid in data:
            mine = valid.chunk(count, 1)[rank.index] if masked else None
            normalizer.update(rows.chunk(count, 1)[rank.index], mine)
        return normalizer

    first, *others = together(count, of_rank)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(first, name), getattr(alone, name), rtol=1e-12, atol=0)
        assert all(torch.equal(getattr(first, name), getattr(each, name)) for each in others)


def test_a_rank_without_valid_rows_counts_nothing() -> None:
    (rows, valid), *_ = rollouts(8)
    valid[:, :4] = False
    alone = Normalizer(3)
    alone.update(rows[:, 4:], valid[:, 4:])

    def of_rank(rank: ThreadRank) -> Normalizer:
        normalizer = Normalizer(3)
        normalizer.ranks = rank
        normalizer.update(rows.chunk(2, 1)[rank.index], valid.chunk(2, 1)[rank.index])
        return normalizer

    for normalizer in together(2, of_rank):
        for name in STATISTICS:
            torch.testing.assert_close(
                getattr(normalizer, name), getattr(alone, name), rtol=1e-12, atol=0
            )


def test_a_column_with_nan_on_one_rank_keeps_its_statistics_on_all() -> None:
    (rows, _), *_ = rollouts(4)
    rows[2, 3, 1] = torch.nan

    def of_rank(rank: ThreadRank) -> Normalizer:
        normalizer = Normalizer(3)
        normalizer.ranks = rank
        normalizer.update(rows.chunk(2, 1)[rank.index])
        return normalizer

    for normalizer in together(2, of_rank):
        assert normalizer.mean[1] == 0.0
        assert normalizer.variance[1] == 1.0
        assert normalizer.mean[0] != 0.0


def test_a_reward_scaler_of_ranks_is_that_of_one_process() -> None:
    reward = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    reward[4, 3] = 30.0  # the largest return is on the second rank
    ended = torch.zeros(6, 4, dtype=torch.bool)
    ended[2, 1] = True
    alone = RewardScaler(4, 0.9, 5.0)
    alone.record(reward, ended)

    def of_rank(rank: ThreadRank) -> RewardScaler:
        scaler = RewardScaler(2, 0.9, 5.0)
        scaler.ranks = rank
        scaler.record(reward.chunk(2, 1)[rank.index], ended.chunk(2, 1)[rank.index])
        return scaler

    for scaler in together(2, of_rank):
        assert scaler.largest == alone.largest
        torch.testing.assert_close(scaler(reward), alone(reward))


def test_alone_everything_is_ones_own() -> None:
    x = torch.arange(3.0)
    assert ALONE.average(x) is x
    assert torch.equal(ALONE.stack(x), x.unsqueeze(0))
    assert ALONE.any(True, False) == (True, False)
    assert ALONE.share("a") == ["a"]
    assert ALONE.of_first("a") == "a"
    (gathered,) = ALONE.gather(x)
    assert gathered is x
