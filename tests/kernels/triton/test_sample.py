"""Actions drawn in one launch against `gpurl.nn.distributions`: the same bits, hence the same
actions.
"""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from gpurl.kernels import backend
from gpurl.kernels.random import CounterRandom
from gpurl.nn.distributions import Categorical, Gaussian, TanhGaussian
from tests.kernels.triton.conftest import DEVICE


def boxes() -> list[Box]:
    wide = np.array([1.0, 2.0, np.inf], np.float32)
    return [
        Box(-1.0, 1.0, (2,)),
        Box(-3.0, 5.0, (2, 2)),
        Box(-wide, wide),
        Box(-2.0, 2.0, ()),
        Box(-np.inf, np.inf, (5,)),
    ]


@pytest.mark.parametrize("space", boxes(), ids=str)
@pytest.mark.parametrize("num_envs", [1, 130])
def test_gaussian(space: Box, num_envs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, rng = Gaussian(space, initial_std=2.0), CounterRandom(3, num_envs, DEVICE)
    head.log_std.data[0] = 9.0  # beyond its limit
    rng.advance(by=2**33)
    mean = torch.randn(num_envs, head.num_outputs + 3)[:, 3:]  # not contiguous
    results = []
    for choice in ("triton", "torch"):
        monkeypatch.setattr(backend, "choice", choice)
        with torch.no_grad():
            results.append(head.decide(mean, rng))
        rng.offset = 0
    for got, expected in zip(*results):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert results[1][2].shape == (num_envs, *space.shape)


@pytest.mark.parametrize("num_actions", [1, 2, 3, 18])
def test_categorical(num_actions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, rng = Categorical(num_actions), CounterRandom(4, 300, DEVICE)
    logits = torch.randn(300, num_actions) * 3
    results = []
    for choice in ("triton", "torch"):
        monkeypatch.setattr(backend, "choice", choice)
        results.append(head.decide(logits, rng))
        rng.offset = 0
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].dtype == torch.int64
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)
    assert len(set(results[0][0].tolist())) == num_actions


def test_heads_without_a_kernel_draw_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    head = TanhGaussian(Box(-1.0, 1.0, (2,)))
    action, log_prob, env_action = head.decide(torch.zeros(7, 2), CounterRandom(0, 7, DEVICE))
    torch.testing.assert_close(env_action, action.tanh())
    torch.testing.assert_close(log_prob, head.log_prob(torch.zeros(7, 2), action))
