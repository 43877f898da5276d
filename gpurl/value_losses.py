"""Losses of critics: of values, of categorical and of quantile distributions, and what goes around
them. Differentiable functions of tensors.

A loss takes the predictions of an ensemble [E, B] or [E, B, Z] for the actions taken, a target that
all members share, and a weight [B]: that of prioritised replay, 0 where a row is no transition,
which may then hold anything. It gives (loss 0-d, differentiable by the predictions; error [B]). The
loss is the sum over members of each one's weighted mean, sum(w l) / max(number of rows with w > 0,
1): the gradient of a member is what it would be alone. The error, 0 where the weight is, is what
prioritised replay takes (Schaul et al. 2016).
"""

import torch
from torch import Tensor
from torch.nn import functional

RESCALE_EPSILON = 1e-3
Result = tuple[Tensor, Tensor]


def td_loss(q: Tensor, target: Tensor, weight: Tensor, huber_delta: float | None) -> Result:
    """Of e = q - target: e^2 (no half), or Huber's (1964): 0.5 e^2 inside +-huber_delta and
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


def categorical_td_loss(logits: Tensor, target: Tensor, weight: Tensor) -> Result:
    """Cross-entropy -sum_i t_i log p_i of the projected target with p = softmax(logits): Bellemare
    et al. 2017, algorithm 1.

    logits: [E, B, Z]; target: [B, Z], rows sum to 1. The error is the mean over members of
    KL(target || p) (Hessel et al. 2018), >= 0.
    """
    counts = weight.unsqueeze(1) != 0.0
    target = _selected(counts, target)
    log_prob = _selected(counts, logits).log_softmax(-1)
    cross_entropy = -(target * log_prob).sum(-1)
    entropy = torch.special.entr(target).sum(-1)
    # below 0 by rounding only
    error = (cross_entropy.detach().mean(0) - entropy).clamp_(min=0.0)
    return _weighted_mean(cross_entropy, weight), error


def quantile_td_loss(
    quantiles: Tensor, target: Tensor, weight: Tensor, kappa: float = 1.0
) -> Result:
    """Quantile Huber loss sum_i mean_j |tau_i - 1{u_ij < 0}| L(u_ij), u_ij = target_j - quantile_i,
    tau_i = (2i + 1) / 2Z.

    Dabney et al. 2018 ("Distributional reinforcement learning with quantile regression"), equations
    9 and 10; L is Huber's with `kappa`, not divided by it. quantiles: [E, B, Z]; target: [B, Z']
    samples. The error is the mean over members of |mean quantile - mean target|.
    """
    counts = weight.unsqueeze(1) != 0.0
    quantiles = _selected(counts, quantiles)
    target = _selected(counts, target)
    error = (quantiles.detach().mean(-1) - target.mean(-1)).abs().mean(0)
    # every quantile with every sample: [E, B, Z, Z']
    quantile, sample = torch.broadcast_tensors(quantiles.unsqueeze(-1), target.unsqueeze(1))
    rows = functional.huber_loss(quantile, sample, reduction="none", delta=kappa)
    count = quantiles.shape[-1]
    place = torch.arange(count, dtype=target.dtype, device=target.device).unsqueeze(1)
    tau = (place + 0.5) / count
    tilted = torch.where(sample < quantile, 1.0 - tau, tau) * rows
    return _weighted_mean(tilted.mean(-1).sum(-1), weight), error


def _selected(counts: Tensor, numbers: Tensor) -> Tensor:
    """`numbers`, 0 where a row does not count: before all else, since the gradient of what is not
    selected afterwards would be 0 * infinity.
    """
    return torch.where(counts, numbers, 0.0)


def _weighted_mean(rows: Tensor, weight: Tensor) -> Tensor:
    """Of losses [E, B] the sum over members of each one's weighted mean."""
    return (rows * (weight / (weight > 0.0).sum().clamp_(min=1))).sum()


def taken(values: Tensor, action: Tensor) -> Tensor:
    """[E, B, ...]: of values of all actions [E, *action.shape, A, ...] those of the actions taken,
    whole numbers of any dtype.

    By a product, not a gather, whose gradient a GPU adds into memory in any order.
    """
    choices = torch.arange(values.shape[1 + action.dim()], device=values.device)
    is_taken = action.unsqueeze(-1) == choices
    rest = values.dim() - 1 - is_taken.dim()
    return (values * is_taken.view(*is_taken.shape, *[1] * rest)).sum(1 + action.dim())


def min_mean_pmf(pmf: Tensor, values: Tensor) -> Tensor:
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
