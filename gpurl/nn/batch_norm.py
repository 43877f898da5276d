"""Batch normalisation of E stacked members, with running statistics for acting.

    y = gain (x - mean) / sqrt(variance + 1e-5) + shift        Ioffe and Szegedy 2015, algorithm 1

Mean and variance are those of the batch inside a `with batch_statistics(network)` block, as losses
need them, and running ones everywhere else: an action never depends on the other rows of its batch.
A batch of several ranks is the rows of all, as many of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpurl.kernels.backend import refuse_second_derivative
from gpurl.kernels.random import CounterRandom
from gpurl.nn.acting import activations, chain, row_of, with_values
from gpurl.nn.mlp import ACTIVATE, Layer
from gpurl.nn.ranks import ALONE, Alone

EPSILON = 1e-5
MOMENTUM = 0.01  # fraction by which running statistics move towards those of a batch


class BatchNorm(Layer):
    """Batch normalisation with a gain and a shift of each member, then the activation."""

    running_mean: Tensor  # [E, 1, D]
    running_variance: Tensor  # [E, 1, D], as torch has it: sums divided by rows - 1
    ranks: Alone = ALONE

    def __init__(self, members: int, size: int, activation: str = "none") -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(members, 1, size))
        self.shift = nn.Parameter(torch.zeros(members, 1, size))
        self.register_buffer("running_mean", torch.zeros(members, 1, size))
        self.register_buffer("running_variance", torch.ones(members, 1, size))
        self.activation = activation
        # set by `batch_statistics`; then mean and variance of the last batch, and its rows
        self.uses_batch = False
        self.last_batch: tuple[Tensor, Tensor, int] | None = None

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        x = x.unsqueeze(0) if x.dim() == 2 else x
        if self.uses_batch:
            y, mean, variance = _Normalized.apply(x, self.gain, self.shift, self.ranks)
            self.last_batch = mean, variance, x.shape[1] * self.ranks.count
        else:
            scale = self.gain * (self.running_variance + EPSILON).rsqrt()
            y = torch.addcmul(self.shift - self.running_mean * scale, x, scale)
        return ACTIVATE[self.activation](y)

    def to_torch(self, member: int = 0) -> nn.Module:
        norm = nn.BatchNorm1d(self.gain.shape[-1], EPSILON).eval()
        values = {
            "weight": self.gain,
            "bias": self.shift,
            "running_mean": self.running_mean,
            "running_var": self.running_variance,
        }
        rows = {name: row_of(value, member) for name, value in values.items()}
        return chain(with_values(norm, **rows), *activations(self.activation))


class _Normalized(torch.autograd.Function):
    """(y [E, B, D], mean, variance) of x [1 or E, B, D], which is a rank's part of the batch.
    torch's own derivative of a variance along the rows takes a CPU twenty times as long as a
    product of the same numbers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, ranks: Alone
    ) -> tuple[Tensor, Tensor, Tensor]:
        # two passes: E[x^2] - E[x]^2 would cancel
        mean = x.mean(1, keepdim=True)
        normal = x - mean
        variance = normal.square().mean(1, keepdim=True)
        if ranks.count > 1:
            own = mean
            means, variances = ranks.stack(torch.stack((mean, variance))).unbind(1)
            mean = means.mean(0)
            variance = variances.mean(0) + (means - mean).square().mean(0)
            normal += own - mean
        inv_std = (variance + EPSILON).rsqrt()
        normal *= inv_std
        ctx.ranks = ranks
        ctx.save_for_backward(normal, gain, inv_std)
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(shift, normal, gain), mean, variance

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """Of x and the parameters, with g = dL/dy and n = (x - mean) / std: dL/dx = gain / std
        (g - mean g - n mean(g n)), the means over the rows of all ranks. L is a rank's own loss:
        the optimiser averages what comes of it over the ranks, as that of their mean.
        """
        refuse_second_derivative()
        normal, gain, inv_std = ctx.saved_tensors
        rows = normal.shape[1]
        shift_gradient = gradient.sum(1, keepdim=True)
        gain_gradient = (gradient * normal).sum(1, keepdim=True)
        if not ctx.needs_input_grad[0]:
            return None, gain_gradient, shift_gradient, None
        sums = gain_gradient, shift_gradient
        if ctx.ranks.count > 1:
            sums = ctx.ranks.average(torch.stack(sums)).unbind(0)
        x_gradient = torch.addcmul(gradient, normal, sums[0], value=-1.0 / rows)
        x_gradient -= sums[1] / rows
        x_gradient *= gain * inv_std
        return x_gradient.sum_to_size(normal.shape), gain_gradient, shift_gradient, None


@contextmanager
def batch_statistics(*networks: nn.Module, tracks: bool = True) -> Iterator[None]:
    """A `with` block in which the batch norms of `networks` normalise with the statistics of the
    batch they get. tracks: at its end, the last ones are averaged into the running ones.
    """
    layers = [
        layer for network in networks for layer in network.modules() if isinstance(layer, BatchNorm)
    ]
    try:
        for layer in layers:
            layer.uses_batch = True
        yield
        if tracks:
            _average(layers)
    finally:
        for layer in layers:
            layer.uses_batch = False
            layer.last_batch = None


@torch.no_grad()
def _average(layers: list[BatchNorm]) -> None:
    """Average the last statistics into the running ones, those of all layers in a few launches. NaN
    and infinity would stay for ever: a column keeps what it has.
    """
    running, seen, factors = list[Tensor](), list[Tensor](), list[float]()
    for layer in layers:
        if layer.last_batch is None:
            continue
        mean, variance, rows = layer.last_batch
        running += [layer.running_mean, layer.running_variance]
        # the members may share their input
        seen += [each.expand_as(layer.running_mean) for each in (mean, variance)]
        factors += [1.0, rows / max(rows - 1, 1)]
    if not running:
        return
    old = torch.cat([each.flatten() for each in running])
    batch = torch.cat([each.flatten() for each in torch._foreach_mul(seen, factors)])
    new = torch.lerp(old, batch, MOMENTUM)
    # 0 times NaN or infinity is NaN
    new = torch.where(new * 0.0 == 0.0, new, old)
    parts = new.split([each.numel() for each in running])
    torch._foreach_copy_(running, [part.view_as(each) for part, each in zip(parts, running)])
