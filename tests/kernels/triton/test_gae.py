"""GAE in Triton against the reference and a float64 loop: odd shapes, episode ends, invalid rows,
NaN where nothing may be read.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpurl.kernels import gae as module
from gpurl.kernels.gae import gae, gae_reference, gae_triton

GAMMA, LAMBDA = 0.97, 0.9
SHAPES = [(1, 1), (1, 7), (5, 1), (16, 8), (17, 33), (33, 65), (40, 3), (3, 1030)]


def inputs(shape: tuple[int, int], probability: float, seed: int = 0) -> tuple[Tensor, ...]:
    """reward, value, final_value (NaN where it must not be read), terminated, truncated."""
    generator = torch.Generator().manual_seed(seed)
    steps, envs = shape
    reward, value = (
        torch.randn(shape, generator=generator),
        torch.randn(steps + 1, envs, generator=generator),
    )
    ended = torch.rand(shape, generator=generator) < probability
    terminated = ended & (torch.rand(shape, generator=generator) < 0.5)
    truncated = ended & ~terminated
    final = torch.where(truncated, torch.randn(shape, generator=generator), torch.nan)
    return reward, value, final, terminated, truncated


def exact(
    reward: Tensor,
    value: Tensor,
    final: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
) -> Tensor:
    """Equation 11 of Schulman et al. 2016 written as the sum over the rest of the episode, float64,
    one environment and step at a time.
    """
    steps, envs = reward.shape
    r, v, f, term, trunc, counts = (
        tensor.tolist() for tensor in (reward, value, final, terminated, truncated, valid)
    )
    advantage = [[0.0] * envs for _ in range(steps)]
    for t in range(steps):
        for n in range(envs):
            weight = 1.0
            for k in range(t, steps):
                if not counts[k][n]:
                    break
                after = 0.0 if term[k][n] else f[k][n] if trunc[k][n] else v[k + 1][n]
                advantage[t][n] += weight * (r[k][n] + GAMMA * after - v[k][n])
                weight *= GAMMA * LAMBDA
                if term[k][n] or trunc[k][n]:
                    break
    return torch.tensor(advantage, dtype=torch.float64)


@pytest.mark.parametrize("invalid", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_agree_with_the_sum_in_float64(
    shape: tuple[int, int], probability: float, invalid: float
) -> None:
    arrays = inputs(shape, probability)
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= invalid
    expected = exact(*arrays, valid)
    entries = expected[valid]
    mean, variance = (
        (float(entries.mean()), float(entries.var(correction=0))) if len(entries) else (0.0, 0.0)
    )
    for function in (gae_reference, gae_triton):
        advantage, returns, moments = function(*arrays, GAMMA, LAMBDA, valid if invalid else None)
        torch.testing.assert_close(advantage.double(), expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(
            returns.double(), expected + arrays[1][:-1].double(), rtol=2e-6, atol=2e-6
        )
        torch.testing.assert_close(
            moments.double(),
            torch.tensor([mean, variance, len(entries)]).double(),
            rtol=1e-5,
            atol=2e-6,
        )


@pytest.mark.parametrize("function", [gae_reference, gae_triton])
def test_a_broken_episode_stays_in_itself(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> None:
    reward, value, final, terminated, truncated = inputs((12, 4), 0.0)
    terminated[5] = True
    reward[7, 1] = torch.nan
    advantage, _, _ = function(reward, value, final, terminated, truncated, GAMMA, LAMBDA)
    assert bool(advantage[6:8, 1].isnan().all())
    advantage[6:8, 1] = 0.0
    assert bool(advantage.isfinite().all())


@pytest.mark.parametrize("function", [gae_reference, gae_triton])
def test_by_hand(function: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    column = torch.tensor([[1.0], [1.0], [1.0]])
    value = torch.tensor([[2.0], [4.0], [6.0], [8.0]])
    ends = torch.tensor([[False], [True], [False]])
    nothing = torch.zeros(3, 1, dtype=torch.bool)
    # terminated at 1: A_2 = 1 + 4 - 6, A_1 = 1 + 0 - 4, A_0 = 1 + 2 - 2 + 0.25 A_1
    advantage, returns, moments = function(
        column, value, torch.full((3, 1), torch.nan), ends, nothing, 0.5, 0.5
    )
    assert advantage.flatten().tolist() == [0.25, -3.0, -1.0]
    assert returns.flatten().tolist() == [2.25, 1.0, 5.0]
    torch.testing.assert_close(
        moments, torch.tensor([-1.25, (1.5**2 + 1.75**2 + 0.25**2) / 3, 3.0])
    )
    # truncated at 1 with a final value of 10: A_1 = 1 + 5 - 4
    advantage, _, _ = function(column, value, torch.full((3, 1), 10.0), nothing, ends, 0.5, 0.5)
    assert advantage.flatten().tolist() == [1.5, 2.0, -1.0]
    # of one entry that counts: A_0 = 1 + 2 - 2
    moments = function(
        column,
        value,
        torch.full((3, 1), torch.nan),
        nothing,
        nothing,
        0.5,
        0.5,
        torch.arange(3)[:, None] == 0,
    )[2]
    assert moments.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("tile", [(8, 32, 1), (64, 32, 8), (16, 1, 4)])
def test_every_tile_gives_the_same(
    tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs((37, 40), 0.1)
    monkeypatch.setattr(module, "_tile", lambda steps, envs: tile)
    for got, expected in zip(
        gae_triton(*arrays, GAMMA, LAMBDA), gae_reference(*arrays, GAMMA, LAMBDA)
    ):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_moments_of_a_large_mean_keep_their_digits() -> None:
    arrays = inputs((16, 300), 0.05)
    reward = arrays[0] + 1e4
    exact_advantage = gae_reference(
        reward.double(),
        *(a.double() if a.is_floating_point() else a for a in arrays[1:]),
        0.0,
        LAMBDA,
    )[0]
    moments = gae_triton(reward, *arrays[1:], 0.0, LAMBDA)[2]
    torch.testing.assert_close(
        float(moments[1]), float(exact_advantage.var(correction=0)), rtol=1e-3, atol=0.0
    )


def test_dispatch_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs((9, 14), 0.2)
    strided = [array.t().contiguous().t() for array in arrays]
    launched = []
    monkeypatch.setattr(
        module, "gae_triton", lambda *arguments: launched.append(1) or gae_triton(*arguments)
    )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        for got, expected in zip(
            gae(*strided, GAMMA, LAMBDA), gae_reference(*arrays, GAMMA, LAMBDA)
        ):
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
        assert len(launched) == (backend == "triton")
