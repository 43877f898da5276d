"""Losses as pure functions of tensors, for autograd to differentiate."""

import torch
from torch import Tensor

from gpurl.buffers.minibatches import Minibatch
from gpurl.kernels.ppo_loss import LARGEST_LOG_RATIO, PARTS


def ppo_loss(
    log_prob: Tensor,
    value: Tensor,
    entropy: Tensor,
    batch: Minibatch,
    clip_range: Tensor | float,
    entropy_coef: Tensor | float,
    value_coef: float,
    clip_range_value: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean min(r A, clip(r, 1 +- c) A) + value_coef mean (V - R)^2 - entropy_coef mean H, 0-d; and
    its parts without gradient.

    Schulman et al. 2017, equations 7 and 9. A log ratio counts as LARGEST_LOG_RATIO at most, beyond
    which it has no slope. With clip_range_value the larger of plain and clipped error of the value
    (PPO2, Dhariwal et al. 2017). Means are weighted by `batch.weight` where there is one.
    log_prob, value: of the batch's shape; entropy: the same, or 0-d. The parts, in the order of
    PARTS, are the means of min(r A, clip(r) A), the squared value error, the KL divergence from the
    acting policy, the share of clipped ratios, and the entropy.
    """

    def mean(x: Tensor) -> Tensor:
        return x.mean() if batch.weight is None else (x * batch.weight).sum()

    # policy
    log_ratio = (log_prob - batch.log_prob).clamp(max=LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)  # type: ignore[arg-type]
    surrogate = mean(torch.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage))

    # value
    square = (value - batch.returns).square()
    if clip_range_value is not None:
        step = (value - batch.value).clamp(-clip_range_value, clip_range_value)
        clipped_square = (batch.value + step - batch.returns).square()
        # not torch.maximum, which halves the slope where both are equal
        square = torch.where(square >= clipped_square, square, clipped_square)
    value_loss = mean(square)

    mean_entropy = entropy if entropy.dim() == 0 else mean(entropy)
    loss = -surrogate + value_coef * value_loss - entropy_coef * mean_entropy
    kl = mean(ratio - 1.0 - log_ratio)  # k3 of Schulman 2020: unbiased, never negative
    clip_fraction = mean((ratio != clipped_ratio).to(value.dtype))
    parts = (surrogate, value_loss, kl, clip_fraction, mean_entropy)
    return loss, {name: part.detach() for name, part in zip(PARTS, parts)}


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """0-d: 1 - Var(returns - value) / Var(returns); NaN where the returns do not vary."""
    variance = returns.var(correction=0)
    return torch.where(
        variance > 0,
        1.0 - (returns - value).var(correction=0) / variance,
        torch.full_like(variance, torch.nan),
    )
