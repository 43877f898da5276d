"""Losses and values as pure functions of tensors, for autograd to differentiate.

A loss of critics takes the predictions of an ensemble [E, B] or [E, B, Z] for the actions of a
batch, a target that all members share, and a weight [B]: the importance weight of prioritised
replay, 0 where a row is not a transition; such a row may hold anything. It returns (loss 0-d, error
[B] without gradient). The loss is the sum over members of each member's weighted mean, sum(w l) /
max(number of rows with w > 0, 1), so a member's gradient is what it would be alone. The error, 0
where the weight is 0, sets the priority of the row (Schaul et al. 2016).
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpurl.buffers.minibatches import Minibatch
from gpurl.kernels.ppo_loss import LARGEST_LOG_RATIO, METRICS

RESCALE_EPSILON = 1e-3
LossAndError = tuple[Tensor, Tensor]

# ---- PPO ----


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
    """(-mean min(r A, clip(r, 1 +- c) A) + value_coef mean (V - R)^2 - entropy_coef mean H, metrics
    without gradient), all 0-d.

    Schulman et al. 2017, equations 7 and 9. Log ratios are clamped at LARGEST_LOG_RATIO, above
    which their gradient is 0. With clip_range_value the value loss is the larger of the plain and
    the clipped one (PPO2, Dhariwal et al. 2017). Means are weighted by `batch.weight` if it is
    given. With mirrored rows the entropy and the KL divergence are those of the original ones, as
    in rsl_rl. log_prob, value: of the batch's shape; entropy: the same, or 0-d. The metrics, in the
    order of METRICS, are the means of min(r A, clip(r) A), the squared value error, the KL
    divergence from the acting policy, the fraction of clipped ratios, and the entropy.
    """

    def mean(x: Tensor) -> Tensor:
        return weighted_mean(x, batch.weight)

    def mean_of_originals(x: Tensor) -> Tensor:
        if batch.originals is None:
            return mean(x)
        weight = batch.weight
        if weight is not None:
            weight = weight[: batch.originals] * (len(weight) / batch.originals)
        return weighted_mean(x[: batch.originals], weight)

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
        # not torch.maximum, which halves the gradient where both are equal
        square = torch.where(square >= clipped_square, square, clipped_square)
    value_loss = mean(square)

    mean_entropy = entropy if entropy.dim() == 0 else mean_of_originals(entropy)
    loss = -surrogate + value_coef * value_loss - entropy_coef * mean_entropy
    # the policy that acted has not seen mirrored rows, so their ratio does not begin at 1
    kl = mean_of_originals(ratio - 1.0 - log_ratio)  # k3 of Schulman 2020: unbiased, never negative
    clip_fraction = mean((ratio != clipped_ratio).to(value.dtype))
    metrics = (surrogate, value_loss, kl, clip_fraction, mean_entropy)
    return loss, {name: metric.detach() for name, metric in zip(METRICS, metrics)}


def weighted_mean(x: Tensor, weight: Tensor | None) -> Tensor:
    """0-d mean of x; weight: of the shape of x and of sum 1, None for equal weights."""
    return x.mean() if weight is None else (x * weight).sum()


def explained_variance(value: Tensor, returns: Tensor, valid: Tensor | None = None) -> Tensor:
    """0-d: 1 - Var(returns - value) / Var(returns), where valid; NaN where the returns do not vary.
    valid: bool of the shape of value and returns, None if all rows are.
    """
    both = torch.stack((returns, returns - value)).flatten(1)
    if valid is None:
        variances = both.var(1, correction=0)
    else:
        # selected, not multiplied: rows that are not valid may hold NaN
        valid, zero = valid.flatten(), both.new_zeros(())
        count = valid.sum().clamp(min=1)
        mean = torch.where(valid, both, zero).sum(1, keepdim=True) / count
        variances = torch.where(valid, both - mean, zero).square().sum(1) / count
    of_returns, of_errors = variances.unbind()
    return torch.where(of_returns > 0, 1.0 - of_errors / of_returns, torch.nan)


# ---- critics ----


def td_loss(q: Tensor, target: Tensor, weight: Tensor, huber_delta: float | None) -> LossAndError:
    """Of e = q - target: e^2 (no half), or Huber's loss (1964): 0.5 e^2 inside +-huber_delta and
    huber_delta (|e| - 0.5 huber_delta) outside.

    q: [E, B]; target: [B]. The error is the mean over members of |e|.
    """
    zero = weight.new_zeros(())
    difference = torch.where(weight != 0.0, q - target, zero)
    zeros = zero.expand_as(difference)
    if huber_delta is None:
        rows = functional.mse_loss(difference, zeros, reduction="none")
    else:
        rows = functional.huber_loss(difference, zeros, reduction="none", delta=huber_delta)
    return _weighted_mean(rows, weight), difference.detach().abs().mean(0)


def categorical_td_loss(logits: Tensor, target: Tensor, weight: Tensor) -> LossAndError:
    """Cross-entropy -sum_i t_i log p_i of the projected target with p = softmax(logits): Bellemare
    et al. 2017, algorithm 1.

    logits: [E, B, Z]; target: [B, Z], rows sum to 1. The error is the mean over members of
    KL(target || p) (Hessel et al. 2018), >= 0.
    """
    counts = weight.unsqueeze(1) != 0.0
    target = _mask(target, counts)
    log_prob = _mask(logits, counts).log_softmax(-1)
    cross_entropy = -(target * log_prob).sum(-1)
    entropy = torch.special.entr(target).sum(-1)
    # below 0 by rounding only
    error = (cross_entropy.detach().mean(0) - entropy).clamp_(min=0.0)
    return _weighted_mean(cross_entropy, weight), error


def quantile_td_loss(
    quantiles: Tensor, target: Tensor, weight: Tensor, kappa: float = 1.0
) -> LossAndError:
    """Quantile Huber loss sum_i mean_j |tau_i - 1{u_ij < 0}| L(u_ij), u_ij = target_j - quantile_i,
    tau_i = (2i + 1) / 2Z.

    Dabney et al. 2018 ("Distributional reinforcement learning with quantile regression"), equations
    9 and 10; L is Huber's with `kappa`, not divided by it. quantiles: [E, B, Z]; target: [B, Z']
    samples. The error is the mean over members of |mean quantile - mean target|.
    """
    counts = weight.unsqueeze(1) != 0.0
    quantiles = _mask(quantiles, counts)
    target = _mask(target, counts)
    error = (quantiles.detach().mean(-1) - target.mean(-1)).abs().mean(0)
    # every quantile against every sample: [E, B, Z, Z']
    quantile, sample = torch.broadcast_tensors(quantiles.unsqueeze(-1), target.unsqueeze(1))
    rows = functional.huber_loss(quantile, sample, reduction="none", delta=kappa)
    count = quantiles.shape[-1]
    number = torch.arange(count, dtype=target.dtype, device=target.device).unsqueeze(1)
    tau = (number + 0.5) / count
    tilted = torch.where(sample < quantile, 1.0 - tau, tau) * rows
    return _weighted_mean(tilted.mean(-1).sum(-1), weight), error


def _mask(values: Tensor, counts: Tensor) -> Tensor:
    """`values` [..., B, Z], 0 in rows that do not count [B, 1]. Done before anything else: masked
    afterwards, a gradient would be 0 * infinity.
    """
    return torch.where(counts, values, 0.0)


def _weighted_mean(rows: Tensor, weight: Tensor) -> Tensor:
    """The sum over members of the weighted mean of each one's losses [E, B]."""
    return (rows * (weight / (weight > 0.0).sum().clamp_(min=1))).sum()


def row_share(weight: Tensor) -> Tensor:
    """[B] the share of each row in an actor's mean over a batch: equal for all rows to learn from,
    whose weight [B] is above 0.
    """
    counts = weight > 0.0
    return counts / counts.sum().clamp_(min=1)


def values_of_actions(values: Tensor, action: Tensor) -> Tensor:
    """Picks from the values of all actions [E, *action.shape, A, ...] those of `action`, integers
    of any dtype: [E, *action.shape, ...].

    By a product with a one-hot mask: the gradient of a gather is added in any order on a GPU.
    """
    action_dim = 1 + action.dim()
    choices = torch.arange(values.shape[action_dim], device=values.device)
    mask = action.unsqueeze(-1) == choices
    trailing = (1,) * (values.dim() - 1 - mask.dim())
    return (values * mask.view(*mask.shape, *trailing)).sum(action_dim)


def min_mean_pmf(pmf: Tensor, values: Tensor) -> Tensor:
    """[B, Z]: each row's distribution of the member with the smallest mean.

    Clipped double Q-learning (Fujimoto et al. 2018) of distributions: an elementwise minimum would
    not sum to 1. pmf: [E, B, Z] probabilities, logits or quantiles; values: [E, B] their means. NaN
    counts as the smallest mean.
    """
    member = values.argmin(0)[None, :, None]
    return pmf.gather(0, member.expand(1, *pmf.shape[1:])).squeeze(0)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """[..., A, Z]: Q = V + A - mean over actions of A, Wang et al. 2016, equation 9.
    Distributions: per atom, before the softmax.

    value: [..., Z]; advantage: [..., A, Z]; Z is 1 for scalars.
    """
    return advantage + (value.unsqueeze(-2) - advantage.mean(-2, keepdim=True))


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, Pohlen et al. 2018, proposition A.2, in a
    form without cancellation.
    """
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + RESCALE_EPSILON * x


def unrescale(x: Tensor) -> Tensor:
    """The inverse of `rescale`.

    v = sqrt(|h^-1(x)| + 1) - 1 solves epsilon v^2 + (1 + 2 epsilon) v = |x|. Its root as 2c / (b +
    sqrt(b^2 + 4ac)) loses no digits; the inverse as printed loses all digits of a small x in
    float32.
    """
    size, slope = x.abs(), 1.0 + 2.0 * RESCALE_EPSILON
    per_size = 2.0 / ((size * (4.0 * RESCALE_EPSILON) + slope * slope).sqrt() + slope)
    return x * per_size * (size * per_size + 2.0)
