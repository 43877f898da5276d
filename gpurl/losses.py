"""Losses as pure functions of tensors, with the derivative written out where it is short:
autograd's walk through forty nodes costs more.

Means are over the batch, or weighted by `weight` [B] summing to 1 (rows that are not real
transitions weigh 0). `ppo_loss` takes tensors or numpy arrays.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.ppo_loss import LARGEST_LOG_RATIO
from gpurl.nn.arrays import Array, at_most, clip, namespace


class PpoTerms(NamedTuple):
    """What the loss needs beside the networks' outputs: [B] arrays, and 0-d ones for what a
    schedule may change.
    """

    old_log_prob: Array
    advantage: Array
    returns: Array
    old_value: Array
    weight: Array | None
    clip_range: Array
    entropy_coef: Array


class PpoSlopes(NamedTuple):
    """Derivatives of the loss by log_prob [B], value [B] and entropy, [B] or 0-d."""

    log_prob: Array
    value: Array
    entropy: Array


def ppo_loss(
    log_prob: Array,
    value: Array,
    entropy: Array,
    terms: PpoTerms,
    value_coef: float,
    clip_range_value: float | None = None,
) -> tuple[PpoSlopes, dict[str, Array]]:
    """(derivatives, 0-d parts) of -mean min(r A, clip(r, 1 +- c) A) + value_coef mean (V - R)^2 -
    entropy_coef mean H.

    Schulman et al. 2017, equations 7 and 9. A log ratio counts as LARGEST_LOG_RATIO at most, beyond
    which it has no slope.
    log_prob, value: [B]; entropy: [B] or 0-d. The parts, in the order of the kernel's PARTS, are
    the means of min(r A, clip(r) A), the squared value error, the KL divergence from the acting
    policy, the share of clipped ratios, and the entropy.
    """
    xp = namespace(log_prob)
    weight = 1.0 / len(log_prob) if terms.weight is None else terms.weight
    log_ratio = log_prob - terms.old_log_prob
    bounded = at_most(log_ratio, LARGEST_LOG_RATIO)
    ratio = xp.exp(bounded)
    clipped_ratio = clip(ratio, 1.0 - terms.clip_range, 1.0 + terms.clip_range)
    surrogate, clipped_surrogate = ratio * terms.advantage, clipped_ratio * terms.advantage
    square, half_slope = _value_error(value, terms, clip_range_value)
    policy_slope = surrogate * -weight * ((surrogate <= clipped_surrogate) & (log_ratio == bounded))
    value_slope = half_slope * (weight * (2.0 * value_coef))
    entropy_slope = -terms.entropy_coef * (
        1.0 if entropy.ndim == 0 else xp.ones_like(entropy) * weight
    )
    slopes = PpoSlopes(policy_slope, value_slope, entropy_slope)
    kl = ratio - 1.0 - bounded  # k3 of Schulman 2020: unbiased, never negative
    rows = (
        xp.stack((xp.minimum(surrogate, clipped_surrogate), square, kl, ratio != clipped_ratio))
        * weight
    )
    parts = dict(zip(("surrogate", "value_loss", "approx_kl", "clip_fraction"), rows.sum(1)))
    return slopes, parts | {"entropy": entropy if entropy.ndim == 0 else (entropy * weight).sum()}


def _value_error(
    value: Array, terms: PpoTerms, clip_range_value: float | None
) -> tuple[Array, Array]:
    """([B] squared error, [B] half its derivative); with a clip the larger of plain and clipped
    error (PPO2, Dhariwal et al. 2017).
    """
    error = value - terms.returns
    if clip_range_value is None:
        return error * error, error
    xp = namespace(value)
    step = value - terms.old_value
    clipped_error = (
        terms.old_value + clip(step, -clip_range_value, clip_range_value) - terms.returns
    )
    square, clipped_square = error * error, clipped_error * clipped_error
    inside = abs(step) <= clip_range_value
    return xp.maximum(square, clipped_square), xp.where(
        square >= clipped_square, error, clipped_error * inside
    )


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """0-d: 1 - Var(returns - value) / Var(returns); NaN where the returns do not vary."""
    variance = returns.var(correction=0)
    return torch.where(
        variance > 0,
        1.0 - (returns - value).var(correction=0) / variance,
        torch.full_like(variance, torch.nan),
    )
