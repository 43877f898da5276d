"""Losses of critics and their gradients, written out: of values, of categorical and of quantile
distributions, and what goes around them.

A loss takes the predictions of an ensemble [E, B] or [E, B, Z] for the actions taken, a target that
all members share, and a weight [B]:
that of prioritised replay, 0 where a row is no transition, which may then hold anything finite. It
gives (gradient by the predictions, loss 0-d, error [B]). The loss is the sum over members of each
one's weighted mean, sum(w l) / max(number of rows with w > 0, 1): the gradient of a member is what
it would be alone. The error, 0 where the weight is, is what prioritised replay takes (Schaul et al.
2016).
"""

import torch
from torch import Tensor

RESCALE_EPSILON = 1e-3
Result = tuple[Tensor, Tensor, Tensor]


def td_loss(q: Tensor, target: Tensor, weight: Tensor, huber_delta: float | None) -> Result:
    """Of e = q - target: e^2 (no half), or Huber's (1964): 0.5 e^2 inside +-huber_delta and
    huber_delta (|e| - 0.5 huber_delta) outside.

    q: [E, B]; target: [B]. The error is the mean over members of |e|.
    """
    scale = _row_scale(weight)
    difference = _select(scale, q - target)
    if huber_delta is None:
        gradient, rows = 2.0 * difference, difference.square()
    else:
        gradient = difference.clamp(-huber_delta, huber_delta)
        rows = gradient * (difference - 0.5 * gradient)
    return gradient * scale, (rows * scale).sum(), difference.abs().mean(0)


def categorical_td_loss(logits: Tensor, target: Tensor, weight: Tensor) -> Result:
    """Cross-entropy -sum_i t_i log p_i of the projected target with p = softmax(logits): Bellemare
    et al. 2017, algorithm 1.

    logits: [E, B, Z]; target: [B, Z], rows sum to 1. The error is the mean over members of
    KL(target || p) (Hessel et al. 2018), >= 0.
    """
    scale = _row_scale(weight)
    log_prob = logits.log_softmax(-1)
    cross_entropy = _select(scale, -(target * log_prob).sum(-1))
    entropy = _select(scale, torch.special.entr(target).sum(-1))
    gradient = (log_prob.exp_() - target).mul_(scale.unsqueeze(-1))
    return (
        gradient,
        (cross_entropy * scale).sum(),
        (cross_entropy.mean(0) - entropy).clamp_(min=0.0),
    )  # below 0 by rounding only


def quantile_td_loss(
    quantiles: Tensor, target: Tensor, weight: Tensor, kappa: float = 1.0
) -> Result:
    """Quantile Huber loss sum_i mean_j |tau_i - 1{u_ij < 0}| L(u_ij), u_ij = target_j - quantile_i,
    tau_i = (2i + 1) / 2Z.

    Dabney et al. 2018 ("Distributional reinforcement learning with quantile regression"), equations
    9 and 10; L is Huber's with `kappa`, not divided by it. quantiles: [E, B, Z]; target: [B, Z']
    samples. The error is the mean over members of |mean quantile - mean target|.
    """
    scale, count = _row_scale(weight), quantiles.shape[-1]
    tau = (
        (torch.arange(count, dtype=quantiles.dtype, device=quantiles.device) + 0.5)
        .div_(count)
        .unsqueeze(1)
    )
    difference = target.unsqueeze(1) - quantiles.unsqueeze(-1)  # [E, B, Z, Z']
    slope = difference.clamp(-kappa, kappa)
    tilted = torch.where(difference < 0.0, 1.0 - tau, tau).mul_(slope)
    rows = _select(scale, difference.sub_(slope, alpha=0.5).mul_(tilted).mean(-1).sum(-1))
    gradient = tilted.mean(-1).mul_(-scale.unsqueeze(-1))
    error = _select(scale, (quantiles.mean(-1) - target.mean(-1)).abs())
    return gradient, (rows * scale).sum(), error.mean(0)


def _row_scale(weight: Tensor) -> Tensor:
    """[B]: the factor of each row's loss in the weighted mean."""
    return weight / (weight > 0.0).sum().clamp_(min=1)


def _select(scale: Tensor, rows: Tensor) -> Tensor:
    """Rows [..., B], 0 where they weigh nothing: selected, because 0 * infinity is NaN."""
    return torch.where(scale != 0.0, rows, 0.0)


def whole_pmf_min(pmf: Tensor, values: Tensor) -> Tensor:
    """[B, Z]: of each row the whole distribution of the member whose mean is least; the least of
    scalar critics is values.amin(0).

    Clipped double Q-learning (Fujimoto et al. 2018) of distributions: an elementwise minimum would
    not sum to 1. pmf: [E, B, Z], or logits or quantiles alike; values: [E, B], their means. A mean
    that is NaN counts as the least.
    """
    least = values.argmin(0)[None, :, None]
    return pmf.gather(0, least.expand(1, *pmf.shape[1:])).squeeze(0)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """[..., A, Z]: Q = V + A - mean over actions of A, Wang et al. 2016, equation 9; of
    distributions per atom, before the softmax.

    value: [..., Z]; advantage: [..., A, Z]; Z is 1 for scalars.
    """
    return advantage + (value.unsqueeze(-2) - advantage.mean(-2, keepdim=True))


def dueling_backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient by value [..., Z], gradient by advantage [..., A, Z]) from that by `dueling`'s
    result [..., A, Z].
    """
    return gradient.sum(-2), gradient - gradient.mean(-2, keepdim=True)


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, Pohlen et al. 2018, proposition A.2; without
    a difference of near numbers.
    """
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + RESCALE_EPSILON * x


def unrescale(x: Tensor) -> Tensor:
    """The inverse of `rescale`.

    v = sqrt(|h^-1(x)| + 1) - 1 solves epsilon v^2 + (1 + 2 epsilon) v = |x|; its root as 2c / (b +
    sqrt(b^2 + 4ac)) loses no digits, where the inverse as printed loses all of a small x in
    float32.
    """
    size, slope = x.abs(), 1.0 + 2.0 * RESCALE_EPSILON
    per_size = 2.0 / ((size * (4.0 * RESCALE_EPSILON) + slope * slope).sqrt() + slope)
    return x * per_size * (size * per_size + 2.0)
