"""Losses by hand-worked numbers and against the papers' formulas, row by row in float64."""

import math

import pytest
import torch
from torch import Tensor

from gpurl.buffers.minibatches import Minibatch
from gpurl.kernels.ppo_loss import PARTS
from gpurl.losses import explained_variance, ppo_loss

CLIP, ENTROPY_COEF = 0.2, 0.01


def batch_of(
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    returns: Tensor,
    weight: Tensor | None = None,
) -> Minibatch:
    """Without what the loss does not read."""
    nothing = torch.empty(0)
    return Minibatch(nothing, nothing, old_log_prob, old_value, advantage, returns, weight)


def slopes_of(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def written_out(
    log_prob: Tensor,
    value: Tensor,
    entropy: Tensor,
    batch: Minibatch,
    value_coef: float,
    value_clip: float | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The loss and its derivatives by log_prob, value and entropy, row by row as the papers have
    them.
    """
    shape = log_prob.shape
    even = torch.full(shape, 1.0 / log_prob.numel(), dtype=torch.float64)
    weight = even if batch.weight is None else batch.weight
    loss, of_log_prob, of_value = torch.zeros(()).double(), *torch.zeros(2, *shape).double()
    for row in range(log_prob.numel()):
        w, log_ratio, advantage, v, old, target = (
            float(x.flatten()[row].detach())
            for x in (
                weight,
                log_prob - batch.log_prob,
                batch.advantage,
                value,
                batch.value,
                batch.returns,
            )
        )
        ratio = math.exp(min(log_ratio, 20.0))
        held = min(max(ratio, 1.0 - CLIP), 1.0 + CLIP)
        loss -= w * min(ratio * advantage, held * advantage)
        if ratio * advantage <= held * advantage and log_ratio <= 20.0:
            of_log_prob.view(-1)[row] = -w * ratio * advantage
        error, slope = v - target, 1.0
        if value_clip is not None:
            kept = old + min(max(v - old, -value_clip), value_clip)
            if abs(kept - target) > abs(error):
                error, slope = kept - target, float(abs(v - old) <= value_clip)
        loss += w * value_coef * error**2
        of_value.view(-1)[row] = w * value_coef * 2.0 * error * slope
    mean_entropy = entropy.detach() if entropy.dim() == 0 else (entropy.detach() * weight).sum()
    of_entropy = -ENTROPY_COEF * (torch.ones(()).double() if entropy.dim() == 0 else weight)
    return loss - ENTROPY_COEF * mean_entropy, (of_log_prob, of_value, of_entropy)


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scalar_entropy", [False, True])
@pytest.mark.parametrize("shape", [(257,), (8, 31)])
def test_ppo_loss_and_its_gradients_are_those_of_the_papers_in_float64(
    shape: tuple[int, ...], scalar_entropy: bool, weighted: bool, value_clip: float | None
) -> None:
    torch.manual_seed(0)
    log_prob, value = torch.randn(2, *shape, dtype=torch.float64).mul(0.4).requires_grad_()
    entropy = torch.randn(() if scalar_entropy else shape, dtype=torch.float64).requires_grad_()
    columns = [torch.randn(shape, dtype=torch.float64) * scale for scale in (0.4, 0.5, 1.0, 1.0)]
    weight = None
    if weighted:
        mask = (torch.rand(shape) < 0.7).double()
        weight = mask / mask.sum()
    batch, inputs = batch_of(*columns, weight), (log_prob, value, entropy)
    loss, parts = ppo_loss(*inputs, batch, CLIP, ENTROPY_COEF, 0.7, value_clip)
    wanted, slopes = written_out(*inputs, batch, 0.7, value_clip)
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-12, atol=1e-12)
    for got, slope in zip(slopes_of(loss, inputs), slopes):
        torch.testing.assert_close(got, slope, rtol=1e-10, atol=1e-12)
    of_parts = -parts["surrogate"] + 0.7 * parts["value_loss"] - ENTROPY_COEF * parts["entropy"]
    torch.testing.assert_close(of_parts, wanted, rtol=1e-12, atol=1e-12)
    ratio = (log_prob - batch.log_prob).exp()
    outside = ((ratio - 1).abs() > CLIP).double()
    mean = outside.mean() if weight is None else (outside * weight).sum()
    torch.testing.assert_close(parts["clip_fraction"], mean.detach())
    assert tuple(parts) == PARTS
    assert not any(part.requires_grad for part in parts.values())


def test_a_ratio_that_would_overflow_is_bounded() -> None:
    """Its slope is that of the bounded one, none; a policy infinitely far away costs a finite
    loss.
    """
    log_prob = torch.tensor([19.0, 19.0, 21.0, 21.0, 1e3, 1e3, 1e38, 1e38, -1e3, -1e3])
    log_prob.requires_grad_()
    advantage = torch.tensor([1.0, -1.0] * 5)
    batch = batch_of(torch.zeros(10), torch.zeros(10), advantage, torch.zeros(10))
    loss, parts = ppo_loss(log_prob, torch.zeros(10), torch.tensor(0.0), batch, CLIP, 0.0, 0.0)
    (slope,) = slopes_of(loss, (log_prob,))
    wanted = torch.zeros(10)
    wanted[1] = math.exp(19.0) / 10  # A > 0 is held at 1.2, all others are beyond the bound or 0
    torch.testing.assert_close(slope, wanted)
    assert all(math.isfinite(float(part)) for part in parts.values())


def test_ppo_loss_by_hand() -> None:
    """Ratios 1.5 and 0.5 with clip 0.2: A > 0 is held at 1.2, A < 0 at 0.8; the clipped rows have
    no gradient.
    """
    log_prob = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.1)])
    value, entropy = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)
    inputs = tuple(x.requires_grad_() for x in (log_prob, value, entropy))
    batch = batch_of(
        torch.zeros(3),
        torch.zeros(3),
        torch.tensor([2.0, -1.0, 1.0]),
        torch.tensor([0.0, 2.0, 5.0]),
    )
    loss, parts = ppo_loss(*inputs, batch, torch.tensor(0.2), torch.tensor(0.5), 2.0)
    surrogate = (1.2 * 2.0 - 0.8 * 1.0 + 1.1) / 3
    wanted = -surrogate + 2.0 * (1 + 0 + 4) / 3 - 0.5 * 4.0
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-6)
    of_log_prob, of_value, of_entropy = slopes_of(loss, inputs)
    torch.testing.assert_close(of_log_prob, torch.tensor([0.0, 0.0, -1.1 / 3]))
    torch.testing.assert_close(of_value, torch.tensor([2 * 2 * 1.0, 0.0, 2 * 2 * -2.0]) / 3)
    assert float(of_entropy) == -0.5
    kl = float((log_prob.exp() - 1 - log_prob).detach().mean())
    for name, part in {
        "surrogate": surrogate,
        "value_loss": 5 / 3,
        "entropy": 4.0,
        "approx_kl": kl,
        "clip_fraction": 2 / 3,
    }.items():
        assert float(parts[name]) == pytest.approx(part, abs=1e-6)


def test_of_equal_errors_the_plain_one_has_the_slope() -> None:
    value = torch.tensor([1.0]).requires_grad_()  # clipped to 0: 0.5 off on the other side
    batch = batch_of(torch.zeros(1), torch.tensor([-1.0]), torch.zeros(1), torch.tensor([0.5]))
    loss, parts = ppo_loss(torch.zeros(1), value, torch.tensor(0.0), batch, CLIP, 0.0, 1.0, 1.0)
    (slope,) = slopes_of(loss, (value,))
    assert slope.tolist() == [1.0]
    assert float(parts["value_loss"]) == 0.25


def test_rows_of_weight_zero_change_nothing() -> None:
    torch.manual_seed(1)
    columns = [torch.randn(20) for _ in range(6)]
    weight = torch.full((20,), 1 / 15)
    weight[15:] = 0.0

    def parts_of(rows: int, weighted: bool) -> dict[str, Tensor]:
        log_prob, value, *rest = [column[:rows].clone() for column in columns]
        inputs = log_prob.requires_grad_(), value.requires_grad_()
        batch = batch_of(*rest, weight[:rows] if weighted else None)
        loss, parts = ppo_loss(*inputs, log_prob, batch, CLIP, ENTROPY_COEF, 1.0)
        assert all(bool((slope[15:] == 0.0).all()) for slope in slopes_of(loss, inputs))
        return parts

    before = parts_of(20, True)
    torch.testing.assert_close(before, parts_of(15, False))
    for column in columns:
        column[15:] = 3.0
    torch.testing.assert_close(before, parts_of(20, True))


def test_explained_variance_of_known_cases() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float(explained_variance(returns + 7.0, returns)) == pytest.approx(1.0)
    assert float(explained_variance(torch.zeros(4), returns)) == pytest.approx(0.0)
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3.0)
    assert float(explained_variance(returns / 20.0, returns / 10.0)) == pytest.approx(0.75)
    assert math.isnan(float(explained_variance(returns, torch.ones(4))))
