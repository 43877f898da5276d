"""Networks of bounded weights: batch norms between dense layers whose rows have length 1, residual
blocks, and one more norm before the last layer (FlashSAC, Kim et al. 2026).

    BN -> W -> N times [x + relu BN W_2 relu BN W_1 x] -> RMS norm -> W + b

`project_` brings the weights back after every optimiser step: rows of W to length 1, gain and shift
of a norm over D features together to length sqrt(D). A forward pass inside `batch_statistics`
normalises with its batch, any other one with running statistics.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gpurl.checks import Choices
from gpurl.kernels.random import CounterRandom
from gpurl.nn.acting import row_of, with_values
from gpurl.nn.batch_norm import BatchNorm
from gpurl.nn.mlp import BodyConfig, Dense, Layer, Residual, Sequential

EXPANSION = 4  # a block is inside so many times as wide
RMS_EPSILON = 1e-6
SQUARE_EPSILON = 1e-16  # of a length: a row of zeros stays one


@dataclass(frozen=True)
class UnitBodyConfig(BodyConfig):
    """Shape of the hidden layers of a unit network."""

    choices: ClassVar[Choices] = {"body": ("unit",)}

    hidden: tuple[int, ...] = (128, 128)
    """Units of the residual blocks, all alike; inside a block is four times as wide."""
    body: str = "unit"
    """unit: residual blocks with batch norms and rows of weights of length 1."""


class OnSphere(Layer):
    """A layer whose parameters have a fixed length: rows [..., D] of `fixed` together have length
    sqrt(D), or 1 if they are weights.
    """

    @abstractmethod
    def fixed(self) -> tuple[Tensor, ...]:
        """The parameters."""


class UnitDense(Dense, OnSphere):
    """Affine, with rows of weights of length 1. has_bias: as the last layer has, which stays in
    float32; else the bias is 0 and not trained, and results stay in the precision of the products.
    """

    def __init__(self, members: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
        super().__init__(members, num_inputs, num_outputs, gain=1.0, keep_float32=has_bias)
        if not has_bias:
            zeros = self.bias.detach()
            del self.bias
            self.register_buffer("bias", zeros, persistent=False)
        self.stays_low = not has_bias

    def fixed(self) -> tuple[Tensor, ...]:
        return (self.weight,)


class UnitBatchNorm(BatchNorm, OnSphere):
    """Batch normalisation whose gain and shift have together length sqrt(D)."""

    def fixed(self) -> tuple[Tensor, ...]:
        return self.gain, self.shift


class UnitRMSNorm(OnSphere):
    """x / sqrt(mean x^2 + 1e-6) times a gain of length sqrt(D) (Zhang and Sennrich 2019,
    equation 4).
    """

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(members, 1, size))

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        x = x.to(self.gain.dtype)
        inv_rms = (x.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt()
        return x * inv_rms * self.gain

    def to_torch(self, member: int = 0) -> nn.Module:
        norm = nn.RMSNorm(self.gain.shape[-1], RMS_EPSILON)
        return with_values(norm, weight=row_of(self.gain, member))

    def fixed(self) -> tuple[Tensor, ...]:
        return (self.gain,)


@torch.no_grad()
def project_(network: nn.Module, changes: Tensor | None = None) -> None:
    """Bring all parameters of `network` to their lengths, if `changes`, 0-d bool, is true or not
    given; biases are free.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, OnSphere)]
    parameters = [parameter for layer in layers for parameter in layer.fixed()]
    if not parameters:  # a network of somebody's own
        return
    squares = iter(torch._foreach_mul(parameters, parameters))
    # squared lengths of the rows of each layer, divided by those they should have
    excess = list[Tensor]()
    for layer in layers:
        rows = [next(squares) for _ in layer.fixed()]
        if isinstance(layer, UnitDense):
            excess.append(rows[0].sum(-1, keepdim=True))
        else:
            means = [row.mean(-1, keepdim=True) for row in rows]
            excess.append(means[0] if len(means) == 1 else means[0] + means[1])
    # all rows as one column, in a few launches
    factor = (torch.cat([each.flatten() for each in excess]) + SQUARE_EPSILON).rsqrt()
    factor = factor if changes is None else torch.where(changes, factor, 1.0)
    parts = zip(layers, excess, factor.split([each.numel() for each in excess]))
    factors = [part.view_as(each) for layer, each, part in parts for _ in layer.fixed()]
    torch._foreach_mul_(parameters, factors)


def make_unit_network(
    members: int, num_inputs: int, num_outputs: int, config: UnitBodyConfig, *heads: Layer
) -> Sequential:
    """`members` networks from [B, num_inputs] to [E, B, num_outputs], followed by `heads`."""
    width = (num_inputs, *config.hidden)[-1]
    inner = EXPANSION * width
    layers: list[Layer] = [UnitBatchNorm(members, num_inputs)]
    layers.append(UnitDense(members, num_inputs, width, has_bias=False))
    for _ in config.hidden:
        block: list[Layer] = [
            UnitDense(members, width, inner, has_bias=False),
            UnitBatchNorm(members, inner, "relu"),
            UnitDense(members, inner, width, has_bias=False),
            UnitBatchNorm(members, width, "relu"),
        ]
        layers.append(Residual(block))
    layers.append(UnitRMSNorm(members, width))
    layers.append(UnitDense(members, width, num_outputs, has_bias=True))
    network = Sequential([*layers, *heads])
    project_(network)
    return network
