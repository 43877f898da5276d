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
        self.uses_batch = False  # set by `batch_statistics`
        # mean and variance of the last batch; the latter not finite if that has one row
        self.last_batch: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        x = x.unsqueeze(0) if x.dim() == 2 else x
        if self.uses_batch:
            y, mean, variance = _Normalized.apply(x, self.gain, self.shift, self.ranks)
            self.last_batch = mean, variance
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
    """(y [E, B, D], mean, variance) of x [1 or E, B, D], which is a rank's part of the batch; the
    variance is that of running statistics, both [1 or E, 1, D]. One process computes in torch's
    batch norm, member by member.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, ranks: Alone
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ranks = ranks
        if ranks.count > 1:
            y, mean, variance, inv_std = _normalize_on_ranks(x, gain, shift, ranks)
            ctx.save_for_backward(x, gain, mean, inv_std)
        else:
            # what members share is the network's input; far from 0 torch's mean would be rounded,
            # in bf16 the difference
            is_input = x.shape[0] == 1 and x.dtype == gain.dtype
            origin = x[:, :1] if is_input else None
            x = (x if origin is None else x - origin).contiguous()
            y, mean, variance, inv_std = _normalize(x, gain, shift)
            ctx.save_for_backward(x, gain, mean, inv_std)
            mean = mean if origin is None else mean + origin
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, None]:
        refuse_second_derivative()
        x, gain, mean, inv_std = ctx.saved_tensors
        if ctx.ranks.count > 1:
            of_gain, of_shift = _differentiate_parameters(gradient, x, mean, inv_std)
            if not ctx.needs_input_grad[0]:  # nor then an exchange
                return None, of_gain, of_shift, None
            sums = ctx.ranks.average(torch.stack((of_gain, of_shift)))
            of_x = _differentiate_on_ranks(gradient, x, gain, mean, inv_std, sums)
        else:
            of_x, of_gain, of_shift = _differentiate(gradient, x, gain, mean, inv_std)
        # members may share their input
        return of_x.sum_to_size(x.shape), of_gain, of_shift, None


def _normalize(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """(y, mean, variance, 1 / standard deviation) by torch, of contiguous x: of others it leaves
    the mean unwritten on a CPU.
    """
    y = x.new_empty(gain.shape[0], *x.shape[1:])
    mean, inv_std = torch.empty_like(gain), torch.empty_like(gain)
    # with a momentum of 1 those of the batch alone, if what they replace is finite
    running = gain.new_zeros(2, *gain.shape)
    for k, rows in enumerate(x.expand_as(y)):
        weights = gain[k, 0], shift[k, 0], running[0, k, 0], running[1, k, 0]
        out = y[k], mean[k, 0], inv_std[k, 0]
        torch.native_batch_norm(rows, *weights, True, 1.0, EPSILON, out=out)
    return y, running[0], running[1], inv_std


def _differentiate(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, ...]:
    """(dL/dx [E, B, D], dL/dgain, dL/dshift) by torch."""
    of_x = torch.empty_like(gradient)
    of_gain, of_shift = torch.empty_like(gain), torch.empty_like(gain)
    for k, rows in enumerate(x.expand_as(gradient)):
        torch.ops.aten.native_batch_norm_backward.out(
            *(gradient[k], rows, gain[k, 0], None, None, mean[k, 0], inv_std[k, 0]),
            *(True, EPSILON, [True] * 3),
            out0=of_x[k],
            out1=of_gain[k, 0],
            out2=of_shift[k, 0],
        )
    return of_x, of_gain, of_shift


def _normalize_on_ranks(x: Tensor, gain: Tensor, shift: Tensor, ranks: Alone) -> tuple[Tensor, ...]:
    """As `_normalize`, of the rows of all ranks."""
    dtype, x = x.dtype, x.to(gain.dtype)
    # two passes: E[x^2] - E[x]^2 would cancel
    own = x.mean(1, keepdim=True)
    variance = (x - own).square().mean(1, keepdim=True)
    means, variances = ranks.stack(torch.stack((own, variance))).unbind(1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    inv_std = (variance + EPSILON).rsqrt()
    rows = x.shape[1] * ranks.count
    y = torch.addcmul(shift, (x - mean) * inv_std, gain).to(dtype)
    return y, mean, variance * (rows / (rows - 1)), inv_std


def _differentiate_parameters(
    gradient: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor]:
    """(dL/dgain, dL/dshift), of the rows of this rank."""
    gradient = gradient.to(mean.dtype)
    of_gain = (gradient * (x - mean)).sum(1, keepdim=True) * inv_std
    return of_gain, gradient.sum(1, keepdim=True)


def _differentiate_on_ranks(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, inv_std: Tensor, sums: Tensor
) -> Tensor:
    """dL/dx with g = dL/dy and n = (x - mean) / std: gain / std (g - mean g - n mean(g n)), the
    means over the rows of all ranks. sums [2, E, 1, D]: of g n and of g, averaged over ranks. L is
    a rank's own loss: the optimiser averages what comes of it over the ranks, as that of their
    mean.
    """
    normal = (x - mean) * inv_std
    of_gain, of_shift = sums / x.shape[1]
    return (gradient - torch.addcmul(of_shift, normal, of_gain)) * (gain * inv_std)


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
    running, seen = list[Tensor](), list[Tensor]()
    for layer in layers:
        if layer.last_batch is None:
            continue
        running += [layer.running_mean, layer.running_variance]
        # the members may share their input
        seen += [each.expand_as(layer.running_mean) for each in layer.last_batch]
    if not running:
        return
    old = torch.cat([each.flatten() for each in running])
    batch = torch.cat([each.flatten() for each in seen])
    new = torch.lerp(old, batch, MOMENTUM)
    # 0 times NaN or infinity is NaN
    new = torch.where(new * 0.0 == 0.0, new, old)
    parts = new.split([each.numel() for each in running])
    torch._foreach_copy_(running, [part.view_as(each) for part, each in zip(parts, running)])
