"""Losses by hand-worked numbers and against float64 autograd of the plain formula."""

import math

import pytest
import torch
from torch import Tensor

from gpurl.kernels.ppo_loss import PARTS
from gpurl.losses import PpoTerms, explained_variance, ppo_loss


def terms_of(
    advantage: Tensor,
    old: Tensor,
    returns: Tensor,
    old_value: Tensor,
    weight: Tensor | None = None,
    clip: float = 0.2,
    entropy: float = 0.01,
) -> PpoTerms:
    dtype = advantage.dtype
    return PpoTerms(
        old,
        advantage,
        returns,
        old_value,
        weight,
        torch.tensor(clip, dtype=dtype),
        torch.tensor(entropy, dtype=dtype),
    )


def plain_ppo(
    log_prob: Tensor,
    value: Tensor,
    entropy: Tensor,
    terms: PpoTerms,
    value_coef: float,
    value_clip: float | None,
) -> Tensor:
    """The loss as papers print it, differentiated by autograd."""
    weight = (
        torch.full_like(log_prob, 1.0 / log_prob.numel()) if terms.weight is None else terms.weight
    )
    ratio = (log_prob - terms.old_log_prob).clamp(max=20.0).exp()
    clipped = ratio.clamp(1 - float(terms.clip_range), 1 + float(terms.clip_range))
    policy = -(torch.min(ratio * terms.advantage, clipped * terms.advantage) * weight).sum()
    error = (value - terms.returns) ** 2
    if value_clip is not None:
        error = torch.max(
            error,
            (
                terms.old_value
                + (value - terms.old_value).clamp(-value_clip, value_clip)
                - terms.returns
            )
            ** 2,
        )
    mean_entropy = entropy if entropy.dim() == 0 else (entropy * weight).sum()
    return policy + value_coef * (error * weight).sum() - terms.entropy_coef * mean_entropy


def loss_of(parts: dict[str, Tensor], terms: PpoTerms, value_coef: float) -> Tensor:
    return (
        -parts["surrogate"]
        + value_coef * parts["value_loss"]
        - terms.entropy_coef * parts["entropy"]
    )


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scalar_entropy", [False, True])
def test_ppo_loss_and_gradient_equal_autograd_in_float64(
    value_clip: float | None, weighted: bool, scalar_entropy: bool
) -> None:
    torch.manual_seed(0)
    batch = 257
    log_prob, value = torch.randn(2, batch, dtype=torch.float64).mul(0.4).requires_grad_()
    entropy = torch.randn(() if scalar_entropy else (batch,), dtype=torch.float64).requires_grad_()
    leaf = [torch.randn(batch, dtype=torch.float64) * scale for scale in (1.0, 0.4, 1.0, 0.5)]
    weight = None
    if weighted:
        mask = (torch.rand(batch) < 0.7).double()
        weight = mask / mask.sum()
    terms = terms_of(*leaf, weight=weight)
    inputs = (log_prob, value, entropy)
    with torch.no_grad():
        slopes, parts = ppo_loss(*inputs, terms, 0.7, value_clip)
    expected = plain_ppo(*inputs, terms, 0.7, value_clip)
    torch.testing.assert_close(
        loss_of(parts, terms, 0.7), expected.detach(), rtol=1e-12, atol=1e-12
    )
    for got, wanted in zip(slopes, torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    ratio = (log_prob - terms.old_log_prob).clamp(max=20.0).exp()
    outside = ((ratio - 1).abs() > 0.2).double()
    mean = outside.mean() if weight is None else (outside * weight).sum()
    torch.testing.assert_close(parts["clip_fraction"], mean.detach())
    assert tuple(parts) == PARTS


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_ratio_that_would_overflow_is_bounded(kind: str) -> None:
    """Its slope is autograd's of the bounded one; a policy infinitely far away costs a finite
    loss.
    """
    shift = torch.tensor([19.0, 19.0, 21.0, 21.0, 1e3, 1e3, 1e38, 1e38, -1e3, -1e3])
    log_prob, advantage = shift.clone().requires_grad_(), torch.tensor([1.0, -1.0] * 5)
    terms = terms_of(advantage, *torch.zeros(3, 10))
    value, entropy = torch.zeros(10), torch.tensor(0.0)
    (wanted,) = torch.autograd.grad(plain_ppo(log_prob, value, entropy, terms, 0.0, None), log_prob)
    given = (
        (shift, value, entropy)
        if kind == "torch"
        else tuple(x.numpy() for x in (shift, value, entropy))
    )
    if kind == "numpy":
        terms = PpoTerms(*(None if x is None else x.numpy() for x in terms))
    slopes, parts = ppo_loss(*given, terms, 0.0)
    torch.testing.assert_close(torch.as_tensor(slopes.log_prob), wanted)
    assert torch.as_tensor(slopes.log_prob).count_nonzero() == 1
    assert all(math.isfinite(float(part)) for part in parts.values())


def test_ppo_loss_by_hand() -> None:
    """Ratios 1.5 and 0.5 with clip 0.2: A > 0 is held at 1.2, A < 0 at 0.8; the clipped rows have
    no gradient.
    """
    old = torch.zeros(3)
    log_prob = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.1)])
    value = torch.tensor([1.0, 2.0, 3.0])
    terms = terms_of(
        torch.tensor([2.0, -1.0, 1.0]),
        old,
        torch.tensor([0.0, 2.0, 5.0]),
        torch.zeros(3),
        entropy=0.5,
    )
    slopes, parts = ppo_loss(log_prob, value, torch.tensor(4.0), terms, 2.0)
    surrogate = (1.2 * 2.0 - 0.8 * 1.0 + 1.1) / 3
    assert math.isclose(
        float(loss_of(parts, terms, 2.0)),
        -surrogate + 2.0 * (1 + 0 + 4) / 3 - 0.5 * 4.0,
        rel_tol=1e-6,
    )
    assert torch.allclose(slopes.log_prob, torch.tensor([0.0, 0.0, -1.1 / 3]))
    assert torch.allclose(slopes.value, torch.tensor([2 * 2 * 1.0, 0.0, 2 * 2 * -2.0]) / 3)
    assert float(slopes.entropy) == -0.5
    kl = float((log_prob.exp() - 1 - log_prob).mean())
    for name, wanted in {
        "surrogate": surrogate,
        "value_loss": 5 / 3,
        "entropy": 4.0,
        "approx_kl": kl,
        "clip_fraction": 2 / 3,
    }.items():
        assert float(parts[name]) == pytest.approx(wanted, abs=1e-6)


def test_rows_of_weight_zero_change_nothing() -> None:
    torch.manual_seed(1)
    columns = [torch.randn(20) for _ in range(6)]
    weight = torch.full((20,), 1 / 15)
    weight[15:] = 0.0

    def parts_of(rows: int, weighted: bool) -> dict[str, Tensor]:
        log_prob, value, *rest = [column[:rows] for column in columns]
        slopes, parts = ppo_loss(
            log_prob,
            value,
            log_prob,
            terms_of(*rest, weight=weight[:rows] if weighted else None),
            1.0,
        )
        assert all(bool((slope[15:] == 0.0).all()) for slope in slopes)
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
