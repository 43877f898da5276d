"""Losses as pure functions of tensors. Where a gradient is short it is written out: autograd's walk through forty small nodes costs more.

Means are over the batch, or weighted by `weight` [B] summing to 1 (rows that are not real transitions weigh 0).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG_2PI = math.log(2.0 * math.pi)
PPO_STATS = ("policy_gradient_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class _GaussianLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        inv_std = (-log_std).exp()
        z = (action - mean).mul_(inv_std)
        ctx.save_for_backward(z, inv_std)
        return z.square().sum(-1).mul_(-0.5).sub_(log_std.sum() + 0.5 * LOG_2PI * mean.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        z, inv_std = ctx.saved_tensors
        gradient = gradients[0]
        weighted = gradient.unsqueeze(-1) * z
        log_std_gradient = (weighted * z).flatten(0, -2).sum(0).sub_(gradient.sum())
        return weighted.mul_(inv_std), log_std_gradient, None


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """[...] log density of `action` [..., A] under a diagonal normal with `mean` [..., A] and `log_std` [A]. No gradient to the action."""
    return _GaussianLogProb.apply(mean, log_std, action)


class PpoTerms(NamedTuple):
    """What the loss needs beside the networks' outputs: [B] tensors, and 0-d ones for what a schedule may change."""

    old_log_prob: Tensor
    advantage: Tensor
    returns: Tensor
    old_value: Tensor
    weight: Tensor | None
    clip_range: Tensor
    entropy_coef: Tensor


class _PpoLoss(torch.autograd.Function):
    """Loss and its gradient to log_prob, value and entropy in one pass."""

    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, value: Tensor, entropy: Tensor, terms: PpoTerms, value_coef: float, clip_range_value: float | None
    ) -> tuple[Tensor, Tensor]:
        weight: Any = 1.0 / log_prob.numel() if terms.weight is None else terms.weight
        log_ratio = log_prob - terms.old_log_prob
        ratio = log_ratio.exp()
        clipped_ratio = torch.clamp(ratio, 1.0 - terms.clip_range, 1.0 + terms.clip_range)
        surrogate, clipped_surrogate = ratio * terms.advantage, clipped_ratio * terms.advantage
        square, half_slope = _value_error(value, terms, clip_range_value)
        kl = (ratio - 1.0).sub_(log_ratio)  # k3 of Schulman 2020: unbiased, never negative
        rows = torch.stack((-torch.minimum(surrogate, clipped_surrogate), square, kl, (ratio != clipped_ratio).float()))
        policy_loss, value_loss, mean_kl, clip_fraction = rows.mul_(weight).sum(1).unbind()
        mean_entropy = entropy if entropy.dim() == 0 else (entropy * weight).sum()
        entropy_slope = -terms.entropy_coef if entropy.dim() == 0 else (-terms.entropy_coef * weight).expand_as(entropy)
        policy_slope = (surrogate * -weight).mul_(surrogate <= clipped_surrogate)
        ctx.save_for_backward(policy_slope, half_slope * (2.0 * value_coef * weight), entropy_slope)
        stats = torch.stack((policy_loss, value_loss, mean_entropy, mean_kl, clip_fraction))
        ctx.mark_non_differentiable(stats)
        return policy_loss + value_coef * value_loss - terms.entropy_coef * mean_entropy, stats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        policy_slope, value_slope, entropy_slope = ctx.saved_tensors
        gradient = gradients[0]
        return policy_slope * gradient, value_slope * gradient, entropy_slope * gradient, None, None, None


def _value_error(value: Tensor, terms: PpoTerms, clip_range_value: float | None) -> tuple[Tensor, Tensor]:
    """([B] squared error, [B] half its derivative); with a clip the larger of plain and clipped error (PPO2, Dhariwal et al. 2017)."""
    error = value - terms.returns
    if clip_range_value is None:
        return error.square(), error
    step = value - terms.old_value
    clipped_error = terms.old_value + step.clamp(-clip_range_value, clip_range_value) - terms.returns
    square, clipped_square = error.square(), clipped_error.square()
    inside = step.abs() <= clip_range_value
    return torch.maximum(square, clipped_square), torch.where(square >= clipped_square, error, clipped_error * inside)


def ppo_loss(
    log_prob: Tensor, value: Tensor, entropy: Tensor, terms: PpoTerms, value_coef: float, clip_range_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """(0-d loss, its PPO_STATS [5]) = -mean min(r A, clip(r, 1 +- c) A) + value_coef mean (V - R)^2 - entropy_coef mean H.

    Schulman et al. 2017, equations 7 and 9. log_prob, value: [B]; entropy: [B] or 0-d.
    """
    return _PpoLoss.apply(log_prob, value, entropy, terms, value_coef, clip_range_value)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """0-d: 1 - Var(returns - value) / Var(returns); NaN where the returns do not vary."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1.0 - (returns - value).var(correction=0) / variance, torch.full_like(variance, torch.nan))
