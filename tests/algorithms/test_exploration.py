"""Noise that lasts some steps: the lengths of its spans, and SAC that explores by it."""

import itertools
from pathlib import Path

import pytest
import torch

import gpurl
from gpurl.algorithms.base import restart_policy_state
from gpurl.algorithms.exploration import repeat_noise, zeta_cdf
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from tests.small_runs import off_policy, small_settings

ACTIONS = 3


def test_spans_have_the_probabilities_of_a_truncated_zeta_distribution() -> None:
    total = sum(n**-2.0 for n in range(1, 17))
    cdf = zeta_cdf(2.0, 16)
    assert float(cdf[0]) == pytest.approx(1.0 / total)
    assert float(cdf[3]) == pytest.approx((1.0 + 1 / 4 + 1 / 9 + 1 / 16) / total)
    assert float(cdf[-1]) == 1.0
    random = CounterRandom(5, 20_000)
    left = torch.zeros(20_000, 1)
    _, after = repeat_noise(torch.zeros(20_000, 1), left, cdf, random)
    spans = after.squeeze(1).long() + 1
    share = torch.bincount(spans, minlength=17)[1:] / 20_000
    expected = torch.tensor([n**-2.0 / total for n in range(1, 17)])
    # 5 standard deviations of a share
    assert ((share - expected).abs() < 5.0 * (expected / 20_000).sqrt()).all()


def test_noise_stays_for_its_span_and_is_then_new() -> None:
    random, envs, steps = CounterRandom(3, 50), 50, 200
    noise, left = torch.zeros(envs, ACTIONS), torch.zeros(envs, 1)
    cdf = zeta_cdf(2.0, 4)
    rows, changes = [], 0
    for _ in range(steps):
        last_noise, last_left = noise, left
        noise, left = repeat_noise(noise, left, cdf, random)
        random.advance()
        same = (noise == last_noise).all(1, keepdim=True)
        assert torch.equal(same, last_left > 0.0)
        assert torch.equal(left[same], last_left[same] - 1.0)
        assert ((left >= 0.0) & (left < 4.0)).all()
        changes += int((~same).sum())
        rows.append(noise)
    mean_span = sum(n**-1.0 for n in range(1, 5)) / sum(n**-2.0 for n in range(1, 5))
    assert steps * envs / changes == pytest.approx(mean_span, rel=0.05)
    every = torch.stack(rows)
    assert abs(float(every.mean())) < 0.05
    assert float(every.std()) == pytest.approx(1.0, abs=0.05)


def test_a_span_of_1_is_new_noise_in_every_step() -> None:
    _, left = repeat_noise(
        torch.zeros(9, 2), torch.zeros(9, 1), zeta_cdf(2.0, 1), CounterRandom(0, 9)
    )
    assert not left.any()


def test_an_exponent_without_spans_is_refused() -> None:
    with pytest.raises(UsageError, match="noise_span steps, which is 1: give noise_span too"):
        off_policy("sac", make_env("pendulum", 1), noise_exponent=0.5)


def test_sac_repeats_its_noise_until_the_span_or_the_episode_ends() -> None:
    env = make_env("pendulum", 64)
    algorithm = off_policy("sac", env, noise_span=8, noise_exponent=0.0)
    algorithm.is_random = False
    obs = torch.full((64, 3), 0.1)
    policy_state = algorithm.initial_policy_state(64)
    greedy = algorithm.act(obs, policy_state, explore=False)
    actions, lasts = [], []
    for step in range(200):
        decision = algorithm.act(obs, policy_state)
        actions.append(decision.action)
        policy_state = decision.policy_state
        if step % 20 == 19:  # the episodes of half of the environments end
            ended = torch.arange(64) < 32
            policy_state = restart_policy_state(policy_state, ended)
        lasts.append(policy_state[1].squeeze(1))
    # the same observation: the action changes where the noise does, and only there
    changes = torch.stack([(a != b).any(1) for a, b in itertools.pairwise(actions)])
    assert torch.equal(changes, torch.stack(lasts[:-1]) == 0.0)
    # all spans from 1 to 8 are as likely; those that an end of an episode cuts are shorter
    kept = changes[:, 32:]
    assert float(kept.sum(0).float().mean()) == pytest.approx(199 / 4.5, rel=0.05)
    assert changes[19, :32].all()
    assert int(changes.sum(0)[:32].sum()) > int(changes.sum(0)[32:].sum())
    assert torch.equal(algorithm.act(obs, policy_state, explore=False).action, greedy.action)


def test_a_resumed_run_may_have_other_spans(tmp_path: Path) -> None:
    settings = small_settings("sac") | {"num_envs": 4, "eval_episodes": 0, "quiet": True}
    run = gpurl.train("sac", "pendulum", run_dir=str(tmp_path / "run"), total_steps=64, **settings)
    folder = run.folder
    for steps, span in ((128, 8), (192, 3), (256, 1)):
        run = gpurl.resume(folder, total_steps=steps, noise_span=span)
        assert run.outcome.steps == steps
        states = load_checkpoint(folder)[0]["trainer"]["policy_state"]
        assert len(states) == (0 if span == 1 else 2)


def test_what_draws_no_noise_has_none_that_lasts() -> None:
    with pytest.raises(
        UsageError, match=r"DiscreteSAC draws actions, without noise: .* noise_span"
    ):
        off_policy("sac", make_env("cart_pole", 4), noise_span=8)
    assert off_policy("sac", make_env("pendulum", 4)).initial_policy_state(4) == ()
