"""Losses by hand-worked numbers, against the papers' formulas row by row in float64, and against
rlax's.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpurl.buffers.minibatches import Minibatch
from gpurl.kernels.ppo_loss import METRICS
from gpurl.losses import (
    categorical_td_loss,
    dueling,
    explained_variance,
    min_mean_pmf,
    ppo_loss,
    quantile_td_loss,
    rescale,
    td_loss,
    unrescale,
    values_of_actions,
)

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
    expected, slopes = written_out(*inputs, batch, 0.7, value_clip)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)
    for got, slope in zip(slopes_of(loss, inputs), slopes):
        torch.testing.assert_close(got, slope, rtol=1e-10, atol=1e-12)
    of_parts = -parts["surrogate"] + 0.7 * parts["value_loss"] - ENTROPY_COEF * parts["entropy"]
    torch.testing.assert_close(of_parts, expected, rtol=1e-12, atol=1e-12)
    ratio = (log_prob - batch.log_prob).exp()
    outside = ((ratio - 1).abs() > CLIP).double()
    mean = outside.mean() if weight is None else (outside * weight).sum()
    torch.testing.assert_close(parts["clip_fraction"], mean.detach())
    assert tuple(parts) == METRICS
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
    expected = torch.zeros(10)
    expected[1] = math.exp(19.0) / 10  # A > 0 is held at 1.2, all others are beyond the bound or 0
    torch.testing.assert_close(slope, expected)
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
    expected = -surrogate + 2.0 * (1 + 0 + 4) / 3 - 0.5 * 4.0
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
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


def test_rows_of_weight_zero_change_nothing_of_ppo_loss() -> None:
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
    # of valid rows only, whatever the others hold
    valid = torch.tensor([True, True, False, True, True, False])
    for other in (0.0, torch.nan, torch.inf):
        rows = torch.full((6,), other)
        rows[valid] = returns
        assert float(explained_variance(-rows, rows, valid)) == pytest.approx(-3.0)
    assert math.isnan(float(explained_variance(rows, rows, torch.zeros(6, dtype=torch.bool))))


# ---- critics ----

Loss = Callable[..., tuple[Tensor, Tensor]]
E, B, Z = 3, 6, 5
PEER = json.loads((Path(__file__).parent / "rlax_value_learning.json").read_text())


# ---- the formulas as printed, one member and one row at a time, for autograd ----


def plain_td(q: Tensor, target: Tensor, huber_delta: float | None) -> tuple[Tensor, Tensor]:
    error = (q - target).abs()
    if huber_delta is None:
        return error**2, error
    return (
        0.5 * error**2 if error <= huber_delta else huber_delta * (error - 0.5 * huber_delta)
    ), error


def plain_categorical(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_prob = logits - logits.exp().sum().log()
    return -sum(target * log_prob), sum(target * (target / log_prob.exp()).log())


def plain_quantile(quantiles: Tensor, target: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    loss = torch.zeros((), dtype=torch.float64)
    for i, quantile in enumerate(quantiles):
        for sample in target:
            u = sample - quantile
            huber = 0.5 * u**2 if u.abs() <= kappa else kappa * (u.abs() - 0.5 * kappa)
            loss = loss + abs((2 * i + 1) / (2 * len(quantiles)) - float(u < 0)) * huber / len(
                target
            )
    return loss, (sum(quantiles) / len(quantiles) - sum(target) / len(target)).abs()


CASES: dict[str, tuple[Loss, Callable[..., tuple[Tensor, Tensor]], tuple[Any, ...]]] = {
    "square": (td_loss, plain_td, (None,)),
    "huber 1": (td_loss, plain_td, (1.0,)),
    "huber 0.3": (td_loss, plain_td, (0.3,)),
    "categorical": (categorical_td_loss, plain_categorical, ()),
    "quantile 1": (quantile_td_loss, plain_quantile, (1.0,)),
    "quantile 0.4": (quantile_td_loss, plain_quantile, (0.4,)),
}
every_loss = pytest.mark.parametrize("name", CASES)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(predictions of E members, target, weight with zeros) for B rows."""
    generator = torch.Generator().manual_seed(3)
    shape, target_shape = (
        ((E, B), (B,))
        if name.startswith(("square", "huber"))
        else ((E, B, Z), (B, 7 if "quantile" in name else Z))
    )
    predictions, target = (
        torch.randn(size, dtype=torch.float64, generator=generator)
        for size in (shape, target_shape)
    )
    target = target.softmax(-1) if name == "categorical" else target
    weight = torch.tensor([0.3, 1.0, 0.0, 0.7, 0.05, 0.0], dtype=dtype)
    return predictions.to(dtype), target.to(dtype), weight


def differentiated(function: Loss, predictions: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """(gradient by the predictions, loss, error)."""
    leaf = predictions.detach().clone().requires_grad_()
    loss, error = function(leaf, *arguments)
    assert not error.requires_grad
    return torch.autograd.grad(loss, leaf)[0], loss.detach(), error


@every_loss
def test_loss_gradient_and_error_equal_autograd_of_the_printed_formula(name: str) -> None:
    function, plain, options = CASES[name]
    predictions, target, weight = inputs(name)
    predictions.requires_grad_()
    expected, errors = torch.zeros((), dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    for member in predictions:
        for row in range(B):
            loss, error = plain(member[row], target[row], *options)
            expected = expected + weight[row] * loss / 4  # of six rows four weigh something
            if weight[row] > 0:
                errors[row] += error.detach() / E
    gradient, loss, error = differentiated(function, predictions, target, weight, *options)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, predictions)[0], rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(error, errors, rtol=1e-10, atol=1e-12)


@every_loss
def test_a_member_learns_as_if_it_were_alone(name: str) -> None:
    function, _, options = CASES[name]
    predictions, target, weight = inputs(name)
    gradient, loss, error = differentiated(function, predictions, target, weight, *options)
    alone = [
        differentiated(function, predictions[e : e + 1], target, weight, *options) for e in range(E)
    ]
    assert torch.equal(gradient, torch.cat([each[0] for each in alone]))
    torch.testing.assert_close(
        loss, torch.stack([each[1] for each in alone]).sum(), rtol=1e-12, atol=0.0
    )
    torch.testing.assert_close(
        error, torch.stack([each[2] for each in alone]).mean(0), rtol=1e-10, atol=1e-15
    )


@every_loss
@pytest.mark.parametrize("garbage", [100.0, 1e30, 3e38, math.inf, math.nan])
def test_rows_of_weight_zero_change_nothing(name: str, garbage: float) -> None:
    """Of both signs, so that squares and differences of them overflow."""
    function, _, options = CASES[name]
    predictions, target, weight = inputs(name, torch.float32)
    used = weight > 0
    expected = differentiated(function, predictions[:, used], target[used], weight[used], *options)
    for place in (predictions[:, 2], predictions[:, 5], target[2:3], target[5:]):
        place.copy_(garbage * (torch.arange(place.numel()) % 2 * 2.0 - 1.0).view_as(place))
    gradient, loss, error = differentiated(function, predictions, target, weight, *options)
    assert bool((gradient[:, ~used] == 0.0).all())
    assert error[~used].tolist() == [0.0, 0.0]
    for got, number in zip((gradient[:, used], loss, error[used]), expected):
        torch.testing.assert_close(got, number)


@every_loss
def test_without_any_row_there_is_no_loss(name: str) -> None:
    function, _, options = CASES[name]
    predictions, target, weight = inputs(name)
    nothing = torch.zeros_like(weight)
    gradient, loss, error = differentiated(function, predictions, target, nothing, *options)
    assert float(loss) == float(gradient.abs().max()) == float(error.max()) == 0.0


@every_loss
@pytest.mark.parametrize("place", ["predictions", "target", "weight"])
def test_nan_is_seen(name: str, place: str) -> None:
    function, _, options = CASES[name]
    arguments = dict(zip(("predictions", "target", "weight"), inputs(name)))
    broken = arguments[place]
    broken[(1, 0) if place == "predictions" else 0] = torch.nan
    gradient, loss, error = differentiated(function, *arguments.values(), *options)
    assert bool(loss.isnan())
    assert bool(gradient[1, 0].isnan().all())
    assert bool(error[0].isnan()) or place == "weight"


@every_loss
def test_nothing_is_read_by_the_host(name: str) -> None:
    """Fake tensors have no values."""
    function, _, options = CASES[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = [mode.from_tensor(tensor) for tensor in inputs(name)]
        gradient, loss, error = differentiated(function, *arguments, *options)
    assert (gradient.shape, loss.shape, error.shape) == (arguments[0].shape, (), (B,))


# ---- by hand ----


def test_td_loss_by_hand() -> None:
    """Errors 3, -0.5 and one that weighs nothing; 4 and 0 of the second member. Two rows weigh
    something.
    """
    q, target = torch.tensor([[4.0, 1.5, 7.0], [5.0, 2.0, 9.0]]), torch.tensor([1.0, 2.0, 0.0])
    weight = torch.tensor([0.5, 1.0, 0.0])
    gradient, loss, error = differentiated(td_loss, q, target, weight, None)
    assert float(loss) == (0.5 * 9.0 + 0.25) / 2 + (0.5 * 16.0) / 2
    assert gradient.tolist() == [[0.5 * 6.0 / 2, -1.0 / 2, 0.0], [0.5 * 8.0 / 2, 0.0, 0.0]]
    assert error.tolist() == [3.5, 0.25, 0.0]
    gradient, loss, error = differentiated(td_loss, q, target, weight, 2.0)
    assert float(loss) == (0.5 * 2.0 * 2.0 + 0.125) / 2 + (0.5 * 2.0 * 3.0) / 2
    assert gradient.tolist() == [[0.5 * 2.0 / 2, -0.5 / 2, 0.0], [0.5 * 2.0 / 2, 0.0, 0.0]]
    assert error.tolist() == [3.5, 0.25, 0.0]


def test_categorical_td_loss_by_hand() -> None:
    """p = (1/4, 3/4) and (1/2, 1/2) against a target of (0, 1): KL is the cross-entropy then."""
    logits = torch.tensor([[[0.0, math.log(3.0)]], [[2.0, 2.0]]])
    target = torch.tensor([[0.0, 1.0]])
    gradient, loss, error = differentiated(categorical_td_loss, logits, target, torch.ones(1))
    assert float(loss) == pytest.approx(math.log(4 / 3) + math.log(2), rel=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([0.25, -0.25, 0.5, -0.5], rel=1e-6)
    assert float(error) == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, rel=1e-6)


def test_quantile_td_loss_by_hand() -> None:
    """Quantiles 0 and 1 (tau 1/4 and 3/4), samples 2 and 0.5, kappa 1: u = 2, 0.5 and 1, -0.5."""
    samples = torch.tensor([[2.0, 0.5]])
    gradient, loss, error = differentiated(
        quantile_td_loss, torch.tensor([[[0.0, 1.0]]]), samples, torch.ones(1)
    )
    assert float(loss) == 0.25 * (1.5 + 0.125) / 2 + (0.75 * 0.5 + 0.25 * 0.125) / 2
    assert gradient.flatten().tolist() == [-0.25 * (1.0 + 0.5) / 2, -(0.75 * 1.0 - 0.25 * 0.5) / 2]
    assert float(error) == 0.75


# ---- laws ----


def test_a_categorical_critic_that_is_the_target_is_at_rest() -> None:
    torch.manual_seed(0)
    target = torch.randn(200, 51).mul(3.0).softmax(-1)
    gradient, loss, error = differentiated(
        categorical_td_loss, target.log().expand(2, -1, -1) + 5.0, target, torch.ones(200)
    )
    assert float(gradient.abs().max()) < 1e-8
    torch.testing.assert_close(loss, 2.0 * torch.special.entr(target).sum(-1).mean())
    assert 0.0 <= float(error.min()) <= float(error.max()) < 2e-6
    shifted = categorical_td_loss(target.log().roll(1, -1).unsqueeze(0), target, torch.ones(200))[1]
    assert float(shifted.min()) > 0.05


def test_quantiles_are_at_rest_where_the_target_is_theirs() -> None:
    same = torch.full((2, 3, 4), 1.5)
    gradient, loss, error = differentiated(
        quantile_td_loss, same, torch.full((3, 6), 1.5), torch.ones(3)
    )
    assert float(loss) == float(gradient.abs().max()) == float(error.max()) == 0.0
    # of samples 0, 1 ... 2Z - 1 the fraction tau_i lies below 2i + 0.5; within kappa of that lies
    # none, so only counts matter
    samples, middles = torch.arange(8.0).unsqueeze(0), (2.0 * torch.arange(4) + 0.5).view(1, 1, 4)
    gradient, _, error = differentiated(quantile_td_loss, middles, samples, torch.ones(1), 0.25)
    assert float(gradient.abs().max()) < 1e-8
    assert float(error) == 0.0
    above, _, _ = differentiated(quantile_td_loss, middles + 1.0, samples, torch.ones(1), 0.25)
    assert float(above.min()) > 0.02


def test_the_least_member_is_taken_whole() -> None:
    pmf = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], [[0.4, 0.6], [1.0, 0.0], [0.3, 0.7]]])
    values = (pmf * torch.tensor([-1.0, 1.0])).sum(-1)
    least = min_mean_pmf(pmf, values)
    assert least.tolist() == torch.stack((pmf[0, 0], pmf[1, 1], pmf[1, 2])).tolist()
    torch.testing.assert_close((least * torch.tensor([-1.0, 1.0])).sum(-1), values.amin(0))
    values[0, 2] = torch.nan  # the other would hide it
    assert torch.equal(min_mean_pmf(pmf, values)[2], pmf[0, 2])
    with FakeTensorMode() as mode:
        assert min_mean_pmf(mode.from_tensor(pmf), mode.from_tensor(values)).shape == (3, 2)


def test_dueling_by_hand() -> None:
    q = dueling(torch.tensor([[10.0, 1.0]]), torch.tensor([[[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]]]))
    assert q.tolist() == [[[8.0, 0.0], [9.0, 0.0], [13.0, 3.0]]]
    torch.manual_seed(0)
    value = torch.randn(2, 7, 5, dtype=torch.float64)
    advantage = torch.randn(2, 7, 4, 5, dtype=torch.float64)
    q = dueling(value, advantage)
    torch.testing.assert_close(q.mean(-2), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        q[..., 0, :] - q[..., 3, :], advantage[..., 0, :] - advantage[..., 3, :]
    )


def test_the_values_of_the_actions_taken() -> None:
    """By loops: of a few actions, of teams, of distributions; actions as a replay has them."""
    torch.manual_seed(0)
    values = torch.randn(2, 5, 3, 4, 6, requires_grad=True)
    action = torch.randint(4, (5, 3))
    expected = torch.stack(
        [torch.stack([values[:, b, g, int(action[b, g])] for g in range(3)], 1) for b in range(5)],
        1,
    )
    assert torch.equal(values_of_actions(values, action.float()), expected)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(values_of_actions(values, action), values, gradient),
        torch.autograd.grad(expected, values, gradient),
    )
    assert torch.equal(values_of_actions(values[:, :, 0, :, 0], action[:, 0]), expected[:, :, 0, 0])


def test_rescale_and_its_inverse_lose_no_digits_in_float32() -> None:
    size = torch.logspace(-6.0, 5.0, 20_000)
    x = torch.cat((-size, torch.zeros(1), size))
    exact = x.double()
    exact = exact.sign() * ((exact.abs() + 1.0).sqrt() - 1.0) + 1e-3 * exact
    torch.testing.assert_close(rescale(x).double(), exact, rtol=3e-7, atol=1e-12)
    torch.testing.assert_close(unrescale(rescale(x)), x, rtol=1e-6, atol=0.0)
    assert rescale(torch.tensor([3.0, -8.0])).tolist() == pytest.approx([1.003, -2.008])
    assert unrescale(torch.tensor([1.003, -2.008])).tolist() == pytest.approx([3.0, -8.0])


# ---- a peer ----


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_peer(got: tuple[Tensor, ...], peer: dict[str, Any]) -> None:
    torch.testing.assert_close(got[1], doubles(peer["loss"]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[0], doubles(peer["gradient"]), rtol=1e-10, atol=1e-12)


def test_rlax_gives_the_same() -> None:
    td, categorical, quantile, scaled = (
        PEER[name] for name in ("td", "categorical", "quantile", "rescale")
    )
    weight = torch.ones(3, dtype=torch.float64)
    arguments = doubles(td["q"]), doubles(td["target"]), weight
    assert_peer(differentiated(td_loss, *arguments, None), td["square"])
    assert_peer(differentiated(td_loss, *arguments, td["huber_delta"]), td["huber"])
    target = doubles(categorical["target_logits"]).softmax(-1)
    got = differentiated(categorical_td_loss, doubles(categorical["logits"]), target, weight)
    assert_peer(got, categorical)
    torch.testing.assert_close(got[2], doubles(categorical["kl"]).mean(0), rtol=1e-10, atol=1e-12)
    assert_peer(
        differentiated(
            quantile_td_loss,
            doubles(quantile["quantiles"]),
            doubles(quantile["target"]),
            weight,
            quantile["kappa"],
        ),
        quantile,
    )
    torch.testing.assert_close(
        rescale(doubles(scaled["x"])), doubles(scaled["rescaled"]), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        unrescale(doubles(scaled["y"])), doubles(scaled["unrescaled"]), rtol=1e-9, atol=1e-12
    )
