"""The reward scaler against a direct computation of every return."""

import math

import pytest
import torch

from gpurl.nn.reward_scaler import RewardScaler

STEPS, ENVS, GAMMA, BOUND = 40, 3, 0.9, 5.0


def rollout(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(reward, ended, valid)."""
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(STEPS, ENVS, generator=generator) * 3.0 + 1.0
    ended = torch.rand(STEPS, ENVS, generator=generator) < 0.1
    # the step after an end is a reset, which is no transition
    valid = torch.cat((torch.ones(1, ENVS, dtype=torch.bool), ~ended[:-1]))
    return reward, ended, valid


def direct_returns(
    reward: torch.Tensor, ended: torch.Tensor, valid: torch.Tensor | None
) -> list[float]:
    """The discounted return after every step that counts."""
    returns = []
    for env in range(ENVS):
        total = 0.0
        for step in range(STEPS):
            if valid is not None and not valid[step, env]:
                total = 0.0
                continue
            total = GAMMA * total + float(reward[step, env])
            returns.append(total)
            if ended[step, env]:
                total = 0.0
    return returns


@pytest.mark.parametrize("has_valid", [False, True])
@pytest.mark.parametrize("horizon", [1, 8, STEPS])
def test_the_factor_is_that_of_a_direct_computation(has_valid: bool, horizon: int) -> None:
    reward, ended, valid = rollout()
    scaler = RewardScaler(ENVS, GAMMA, bound=1000.0)
    for start in range(0, STEPS, horizon):
        part = slice(start, start + horizon)
        scaler.record(reward[part], ended[part], valid[part] if has_valid else None)
    returns = torch.tensor(
        direct_returns(reward, ended, valid if has_valid else None), dtype=torch.float64
    )
    std = math.sqrt(float(returns.var(correction=0)) + 1e-8)
    torch.testing.assert_close(scaler(torch.tensor([2.0])), torch.tensor([2.0 / std]))
    assert float(scaler.largest) == pytest.approx(float(returns.abs().max()))


def test_no_return_is_beyond_the_bound() -> None:
    scaler = RewardScaler(ENVS, GAMMA, BOUND)
    reward = torch.ones(200, ENVS) * 0.01
    reward[100, 1] = 50.0  # many standard deviations
    ended = torch.zeros(200, ENVS, dtype=torch.bool)
    scaler.record(reward, ended)
    assert float(scaler.inv_std) * float(scaler.largest) > BOUND
    scaled = scaler(reward)
    total, largest = torch.zeros(ENVS), 0.0
    for row in scaled:
        total = GAMMA * total + row
        largest = max(largest, float(total.abs().max()))
    assert largest == pytest.approx(BOUND, rel=1e-4)


def test_rewards_are_as_they_are_before_the_first_return() -> None:
    scaler = RewardScaler(ENVS, GAMMA, BOUND)
    assert scaler(torch.tensor([3.0, -2.0])).tolist() == [3.0, -2.0]
    scaler.record(torch.zeros(1, ENVS), torch.zeros(1, ENVS, dtype=torch.bool))
    assert scaler(torch.tensor([0.0])).tolist() == [0.0]


def test_an_episode_that_is_cut_off_starts_anew() -> None:
    scaler = RewardScaler(ENVS, GAMMA, BOUND)
    scaler.record(torch.ones(2, ENVS), torch.zeros(2, ENVS, dtype=torch.bool))
    torch.testing.assert_close(scaler.returned, torch.full((ENVS,), 1.9))
    scaler.begin_episodes(torch.tensor([True, False, True]))
    torch.testing.assert_close(scaler.returned, torch.tensor([0.0, 1.9, 0.0]))
    scaler.begin_episodes()
    assert not scaler.returned.any()
