"""V-trace in Triton, C and torch against the sum of Espeholt et al. in float64: odd shapes, episode
ends, invalid rows, NaN where nothing may be read; and against GAE where both policies are one.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpurl.kernels import vtrace as module
from gpurl.kernels.gae import gae_reference
from gpurl.kernels.vtrace import vtrace, vtrace_reference, vtrace_triton
from tests.kernels.triton.test_gae import GAMMA, LAMBDA, SHAPES
from tests.kernels.triton.test_gae import inputs as steps_of

Function = Callable[..., tuple[Tensor, Tensor, Tensor]]
EACH = pytest.mark.parametrize("function", [vtrace_reference, vtrace_triton])


def inputs(shape: tuple[int, int], probability: float, seed: int = 0) -> tuple[Tensor, ...]:
    """Those of GAE and the log-ratios, of both signs."""
    generator = torch.Generator().manual_seed(seed + 7)
    return *steps_of(shape, probability, seed), torch.randn(shape, generator=generator)


def exact(steps: tuple[Tensor, ...], valid: Tensor, max_rho: float, max_c: float) -> list[Tensor]:
    """(advantage, targets) by equation 1 as it is printed: a sum over the rest of the episode of
    discounted one-step errors, each with the product of the c before it; float64, one environment
    and step at a time.
    """
    r, v, f, term, trunc, log_ratio, counts = (tensor.tolist() for tensor in (*steps, valid))
    num_steps, num_envs = steps[0].shape
    ratio = [[math.exp(x) for x in row] for row in log_ratio]
    advantage = [[0.0] * num_envs for _ in range(num_steps)]
    target = [row.copy() for row in v[:-1]]

    def error_of(t: int, n: int) -> float:
        after = 0.0 if term[t][n] else f[t][n] if trunc[t][n] else v[t + 1][n]
        return r[t][n] + GAMMA * after - v[t][n]

    for s in range(num_steps):
        for n in range(num_envs):
            product = 1.0
            for t in range(s, num_steps):
                if not counts[t][n]:
                    break
                weight = GAMMA ** (t - s) * product
                target[s][n] += weight * min(max_rho, ratio[t][n]) * error_of(t, n)
                product *= LAMBDA * min(max_c, ratio[t][n])
                if term[t][n] or trunc[t][n]:
                    break
    # the advantage of an action by the targets after it: lambda mixes them with the value
    for s in range(num_steps):
        for n in range(num_envs):
            if counts[s][n]:
                advantage[s][n] = error_of(s, n)
                if s + 1 < num_steps and not (term[s][n] or trunc[s][n]):
                    advantage[s][n] += GAMMA * LAMBDA * (target[s + 1][n] - v[s + 1][n])
    return [torch.tensor(numbers, dtype=torch.float64) for numbers in (advantage, target)]


@EACH
@pytest.mark.parametrize("limits", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("invalid", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_it_is_the_sum_in_float64(
    shape: tuple[int, int],
    probability: float,
    invalid: float,
    limits: tuple[float, float],
    function: Function,
) -> None:
    steps = inputs(shape, probability)
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= invalid
    advantage, targets = exact(steps, valid, *limits)
    steps[-1].masked_fill_(~valid, torch.nan)
    mask = valid if invalid else None
    got = function(*steps, GAMMA, LAMBDA, mask, *limits)
    torch.testing.assert_close(got[0].double(), advantage, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(got[1].double(), targets, rtol=5e-6, atol=5e-6)
    entries = advantage[valid]
    moments = [float(entries.mean()), float(entries.var(correction=0))] if len(entries) else [0, 0]
    expected = torch.tensor([*moments, len(entries)], dtype=torch.float64)
    torch.testing.assert_close(got[2].double(), expected, rtol=1e-5, atol=5e-6)


@EACH
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_one_policy_it_is_gae(
    shape: tuple[int, int], gae_lambda: float, function: Function
) -> None:
    """Equation 2 for lambda 1."""
    *steps, log_ratio = inputs(shape, 0.2)
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= 0.1
    expected = gae_reference(*steps, GAMMA, gae_lambda, valid)
    got = function(*steps, torch.zeros_like(log_ratio), GAMMA, gae_lambda, valid)
    for value, other in zip(got, expected):
        torch.testing.assert_close(value, other, rtol=5e-6, atol=5e-6)


@EACH
def test_by_hand(function: Function) -> None:
    reward = torch.tensor([[1.0], [1.0], [1.0]])
    value = torch.tensor([[2.0], [4.0], [6.0], [8.0]])
    no = torch.zeros(3, 1, dtype=torch.bool)
    final = torch.full((3, 1), torch.nan)
    log_ratio = torch.tensor([[2.0], [0.5], [8.0]]).log()
    # deltas 1, 0, -1; e_2 = -1, e_1 = 0 + 0.5 * 0.25 * e_2, e_0 = 1 + 0.25 * e_1 (c_0 is cut to 1)
    advantage, returns, _ = function(reward, value, final, no, no, log_ratio, 0.5, 0.5)
    assert advantage.flatten().tolist() == [1 - 0.03125, -0.25, -1.0]
    assert returns.flatten().tolist() == [3 - 0.03125, 3.875, 5.0]
    # terminated at 1: delta_1 = -3, e_1 = -1.5
    ends = torch.tensor([[False], [True], [False]])
    advantage, returns, _ = function(reward, value, final, ends, no, log_ratio, 0.5, 0.5)
    assert advantage.flatten().tolist() == [1 - 0.375, -3.0, -1.0]
    assert returns.flatten().tolist() == [3 - 0.375, 2.5, 5.0]
    # truncated at 1 with a final value of 10: delta_1 = 2, e_1 = 1
    final = torch.full((3, 1), 10.0)
    advantage, returns, _ = function(reward, value, final, no, ends, log_ratio, 0.5, 0.5)
    assert advantage.flatten().tolist() == [1.25, 2.0, -1.0]
    assert returns.flatten().tolist() == [3.25, 5.0, 5.0]


@EACH
def test_what_the_present_policy_never_does_teaches_nothing(function: Function) -> None:
    """A ratio of 0: the target stays the value, and nothing later passes."""
    *steps, log_ratio = inputs((6, 3), 0.0)
    log_ratio[2] = -torch.inf
    _, returns, _ = function(*steps, log_ratio, GAMMA, LAMBDA)
    assert torch.equal(returns[2], steps[1][2])
    changed = [steps[0].clone(), *steps[1:]]
    changed[0][3:] += 100.0
    _, others, _ = function(*changed, log_ratio, GAMMA, LAMBDA)
    assert torch.equal(others[:3], returns[:3])
    assert bool((others[3:] != returns[3:]).any(0).all())


@EACH
@pytest.mark.parametrize("place", ["reward", "ratio"])
def test_a_broken_episode_stays_in_itself(place: str, function: Function) -> None:
    reward, value, final, terminated, truncated, log_ratio = inputs((12, 4), 0.0)
    terminated[5] = True
    (reward if place == "reward" else log_ratio)[7, 1] = torch.nan
    advantage, returns, _ = function(
        reward, value, final, terminated, truncated, log_ratio, GAMMA, LAMBDA
    )
    assert bool(returns[6:8, 1].isnan().all())
    advantage[6:8, 1] = returns[6:8, 1] = 0.0
    assert bool(advantage.isfinite().all())
    assert bool(returns.isfinite().all())


def test_dispatch_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs((9, 14), 0.2)
    strided = [array.t().contiguous().t() for array in arrays]
    launched = []
    monkeypatch.setattr(
        module, "vtrace_triton", lambda *given: launched.append(1) or vtrace_triton(*given)
    )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        for got, expected in zip(
            vtrace(*strided, GAMMA, LAMBDA), vtrace_reference(*arrays, GAMMA, LAMBDA)
        ):
            torch.testing.assert_close(got, expected, rtol=5e-6, atol=5e-6)
        assert len(launched) == (backend == "triton")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 2), (4, 2), (4, 2)), r"value must be \[T \+ 1, N\].* value is \(4, 2\)"),
        (((4, 2), (5, 2), (3, 2)), r"log_ratio must be \[T, N\].* got \(3, 2\) and \(4, 2\)"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    reward, value, log_ratio = map(torch.zeros, shapes)
    flag = torch.zeros(shapes[0], dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        vtrace(reward, value, reward, flag, flag, log_ratio, GAMMA, LAMBDA)
