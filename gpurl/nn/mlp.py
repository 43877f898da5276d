"""Multilayer perceptrons: E members of one shape as one module, weights [E, out, in]. On a CPU runs
of plain layers go through the C kernels.

Each member has its own initial weights. A forward pass is differentiable by the input and by the
weights.
"""

import copy
import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpurl.checks import Choices, check_choices
from gpurl.errors import UsageError, first_line
from gpurl.kernels.backend import MembersAsRows, host_sync_is_free, transforms_are_active, use_c
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.stack_cpu import ACTIVATIONS as IN_C
from gpurl.kernels.stack_cpu import MAX_LAYERS, StackCpu
from gpurl.nn.acting import (
    OneOutput,
    Sum,
    activations,
    chain,
    linear,
    member_of,
    row_of,
    with_values,
)

MAX_WIDTH = 1 << 20  # units: no memory holds two such layers
LAYER_NORM_EPSILON = 1e-5
# from so many rows and up to so many members weight gradients are one product for each member
SPLIT_ROWS, SPLIT_MEMBERS = 2048, 8
ACTIVATE = {
    "none": lambda z: z,
    "tanh": torch.tanh_,
    "elu": functional.elu_,
    "relu": torch.relu_,  # these three in place
    # their derivatives are no functions of their results
    "silu": functional.silu,
    "gelu": functional.gelu,
}


@dataclass(frozen=True)
class BodyConfig:
    """Shape of the hidden layers of a network."""

    choices: ClassVar[Choices] = {
        "activation": ("tanh", "elu", "relu", "silu", "gelu"),
        "body": ("mlp", "simba", "bro"),
    }

    hidden: tuple[int, ...] = (256, 256)
    """Units of the hidden layers. For simba and bro of the residual blocks, all alike."""
    activation: str = "relu"
    """tanh, elu or relu, which fast kernels know, silu or gelu; simba and bro always have relu."""
    layer_norm: bool = False
    """Normalise every hidden layer before its activation (mlp)."""
    body: str = "mlp"
    """mlp, or residual blocks: simba (Lee et al. 2024) or bro (Nauman et al. 2024)."""

    def __post_init__(self) -> None:
        check_choices(self)
        if min(self.hidden, default=1) < 1:
            raise UsageError(f"hidden must be at least 1, got {self.hidden}")
        if max(self.hidden, default=1) > MAX_WIDTH:
            raise UsageError(f"hidden must be at most {MAX_WIDTH:,}, got {self.hidden}")
        if self.body == "mlp":
            return
        if len(set(self.hidden)) != 1:
            raise UsageError(
                f"body {self.body} has residual blocks of one width, hidden is {self.hidden}"
            )
        # the user did not set the default of a subclass
        if self.activation not in ("relu", type(self).activation) or self.layer_norm:
            raise UsageError(
                f"body {self.body} always has relu and layer norms: leave out activation and "
                f"layer_norm"
            )

    @property
    def is_plain(self) -> bool:
        """Whether all hidden layers are dense, without norms and residual blocks."""
        return self.body == "mlp" and not self.layer_norm


def stacked_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x_e W_e^T + b_e, [E, B, out]; x: [E, B, in], or [B, in] for all members; weight: [E, out,
    in]; bias: [E, 1, out].
    """
    if x.dim() == 2:
        x = x.unsqueeze(0).expand(weight.shape[0], -1, -1)
    if (torch.is_grad_enabled() or transforms_are_active()) and not torch.jit.is_tracing():
        return _Affine.apply(x, weight, bias)
    return _Affine.forward(x, weight, bias)


class _OfNetworks(MembersAsRows):
    """An operation on rows [E, B, ...] with weights of E networks."""

    @classmethod
    def vmap(cls, info: Any, dims: Sequence[Any], rows: Tensor, *weights: Tensor) -> Any:
        if any(dim is not None for dim in dims[1:]):
            return super().vmap(info, dims, rows, *weights)
        # with the same weights they are only more rows
        more = rows.movedim(dims[0], 1)
        result = cls.apply(more.flatten(1, 2), *weights)
        return result.unflatten(1, more.shape[1:3]), 1


class _Affine(_OfNetworks):
    """torch's own gradient of the weight is transposed: each one would need its own copy into the
    flat gradient of the optimiser. And torch.func.vmap makes four operations of a baddbmm.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias, x, weight.transpose(1, 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight) if needs_input else None,
            _weight_gradient(gradient, x) if needs_weight else None,
            gradient.sum(1, keepdim=True) if needs_bias else None,
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[E, n, k] of a [E, n, m] and b [E, m, k]."""
    return _Product.apply(a, b) if transforms_are_active() else torch.bmm(a, b)


class _Product(_OfNetworks):
    """torch.bmm, of which torch.func.vmap copies more."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _product(gradient, b.transpose(1, 2)), _product(a.transpose(1, 2), gradient)


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[E, out, in] of gradient [E, B, out] and x [E, B, in].

    On a GPU a batched product does not split its sum over rows (NVIDIA/cutlass issue 1033): few
    members and many rows would occupy a few multiprocessors. A product of matrices does.
    """
    members, rows, _ = gradient.shape
    if rows < SPLIT_ROWS or members > SPLIT_MEMBERS or host_sync_is_free(gradient.device):
        return _product(gradient.transpose(1, 2), x)
    products = [each.t().mm(inputs) for each, inputs in zip(gradient.unbind(), x.unbind())]
    return torch.stack(products) if members > 1 else products[0].unsqueeze(0)


class Layer(nn.Module):
    """What networks consist of: x [E, B, in], or [B, in] for all members, -> [E, B, out]."""

    @abstractmethod
    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        """noise: the random stream of noisy layers; None: no noise."""

    def to_torch(self, member: int = 0) -> nn.Module:
        """One member of this layer without noise, [B, in] -> [B, out], in torch's own modules with
        copies of its weights: what `gpurl.policy.Policy.module` consists of.
        """
        raise UsageError(
            f"{type(self).__name__} cannot be exported: define to_torch(member), which returns one "
            f"member of the layer in modules of torch"
        )


class LowPrecision:
    """A layer whose products `set_dtype` may compute in low precision."""

    keep_float32 = False  # `set_dtype` leaves this layer as it is
    dtype: torch.dtype | None = None  # of the products; None: the parameters' own


class Dense(LowPrecision, Layer):
    """Affine, then an optional layer norm, then the activation.

    gain: weights start orthogonal with this gain (Saxe et al. 2014) and biases at 0; by default
    both start uniform in +-1/sqrt(in), as torch.nn.Linear's do. keep_float32: `set_dtype` leaves
    this layer as it is.
    """

    stays_low = False  # results are in the dtype of the products, not in that of the input

    def __init__(
        self,
        members: int,
        num_inputs: int,
        num_outputs: int,
        activation: str = "none",
        layer_norm: bool = False,
        gain: float | None = None,
        keep_float32: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, num_outputs))
        if gain is None:
            bound = 1.0 / math.sqrt(num_inputs)
            nn.init.uniform_(self.weight, -bound, bound)
            nn.init.uniform_(self.bias, -bound, bound)
        else:
            for weight in self.weight.detach():
                nn.init.orthogonal_(weight, gain)
        self.activation = activation
        self.norm = Norm(members, num_outputs) if layer_norm else None
        self.keep_float32 = keep_float32

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        return self._activated(self._affine(x, self.weight, self.bias))

    def _affine(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.dtype is None:
            return stacked_affine(x, weight, bias)
        low = stacked_affine(*(each.to(self.dtype) for each in (x, weight, bias)))
        return low if self.stays_low else low.to(x.dtype)

    def _activated(self, z: Tensor) -> Tensor:
        return ACTIVATE[self.activation](z if self.norm is None else self.norm.forward(z))

    def to_torch(self, member: int = 0) -> nn.Module:
        affine = linear(member_of(self.weight, member), row_of(self.bias, member))
        norms = [] if self.norm is None else [self.norm.to_torch(member)]
        return chain(affine, *norms, *activations(self.activation))


class Norm(Layer):
    """Layer normalisation (Ba et al. 2016) with a gain and a shift of each member."""

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.members, self.size = members, (size,)
        self.gain = nn.Parameter(torch.ones(members, 1, size))
        self.shift = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        size = self.size  # a trace would record x.shape as tensors
        if self.members == 1:
            gain, shift = self.gain.view(size), self.shift.view(size)
            return functional.layer_norm(x, size, gain, shift, LAYER_NORM_EPSILON)
        normal = functional.layer_norm(x, size, eps=LAYER_NORM_EPSILON)
        return normal * self.gain + self.shift

    def to_torch(self, member: int = 0) -> nn.Module:
        norm = nn.LayerNorm(self.size, LAYER_NORM_EPSILON)
        weight, bias = row_of(self.gain, member), row_of(self.shift, member)
        return with_values(norm, weight=weight, bias=bias)


class _Run:
    """Dense layers without a norm, one after the other: on a CPU one call of C."""

    def __init__(self, layers: list[Dense]) -> None:
        self.layers = layers

    @functools.cached_property
    def _in_c(self) -> StackCpu:
        return StackCpu([(layer.weight, layer.bias, layer.activation) for layer in self.layers])

    @functools.cached_property
    def _parameters_in_c(self) -> list[tuple[dict[str, Any], nn.Parameter, nn.Parameter]]:
        weights, biases = self._in_c.parameters[::2], self._in_c.parameters[1::2]
        return list(zip([layer._parameters for layer in self.layers], weights, biases))

    def _are_parameters_in_c(self) -> bool:
        """Whether the layers still have the parameters that C reads: torch.func.functional_call,
        a parametrisation and load_state_dict(assign=True) replace them.
        """
        # not layer.weight, which costs five times as much
        for parameters, weight, bias in self._parameters_in_c:
            if parameters.get("weight") is not weight or parameters.get("bias") is not bias:
                return False
        return True

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        dtype = self.layers[0].dtype
        if x.dtype == torch.float32 and dtype is None and use_c(x) and self._are_parameters_in_c():
            return self._in_c(x)
        # activations between layers of low precision stay in it
        y = x
        for layer in self.layers:
            y = layer.forward(y.to(layer.dtype or x.dtype))
        return y.to(x.dtype)


def _in_runs(layers: Iterable[Layer]) -> list[Layer | _Run]:
    """Flattens nested `Sequential`s and joins consecutive plain dense layers to runs."""
    flat = list[Layer]()
    for layer in layers:
        flat += layer.layers if type(layer) is Sequential else [layer]  # type: ignore[arg-type]
    runs: list[Layer | _Run] = []
    for layer in flat:
        last = runs[-1] if runs else None
        if type(layer) is not Dense or layer.norm is not None or layer.activation not in IN_C:
            runs.append(layer)
        elif isinstance(last, _Run) and len(last.layers) < MAX_LAYERS:
            last.layers.append(layer)
        else:
            runs.append(_Run([layer]))
    return runs


class Sequential(Layer):
    """Layers one after the other."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        # a plain list: walking an nn.Module costs more than a small layer
        self._runs = _in_runs(self.layers)  # type: ignore[arg-type]

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        for run in self._runs:
            x = run.forward(x, noise)
        return x

    def to_torch(self, member: int = 0) -> nn.Module:
        layers = cast(Iterable[Layer], self.layers)
        return chain(*(layer.to_torch(member) for layer in layers))

    def leave_c(self) -> None:
        """From now on compute layer by layer in torch, never in C."""
        self._runs = list(self.layers)  # type: ignore[arg-type]


class Residual(Sequential):
    """x + layers(x); x: [E, B, H]."""

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        return x + super().forward(x, noise)

    def to_torch(self, member: int = 0) -> nn.Module:
        return Sum(super().to_torch(member))


def make_trunk(
    members: int, num_inputs: int, config: BodyConfig, gain: float | None = None
) -> tuple[list[Layer], int]:
    """(hidden layers of `members` networks, the number of their outputs); gain: see `Dense`."""
    width = (num_inputs, *config.hidden)[-1]

    def dense(inputs: int, outputs: int, activation: str, layer_norm: bool) -> Dense:
        return Dense(members, inputs, outputs, activation, layer_norm, gain)

    if config.body == "mlp":
        sizes = itertools.pairwise((num_inputs, *config.hidden))
        return [dense(*pair, config.activation, config.layer_norm) for pair in sizes], width
    if config.body == "bro":
        layers: list[Layer] = [dense(num_inputs, width, "relu", True)]
        for _ in config.hidden:
            inner = dense(width, width, "relu", True)
            layers.append(Residual([inner, dense(width, width, "none", True)]))
        return layers, width
    layers = [dense(num_inputs, width, "none", False)]
    for _ in config.hidden:
        inner = dense(width, 4 * width, "relu", False)
        outer = dense(4 * width, width, "none", False)
        layers.append(Residual([Norm(members, width), inner, outer]))
    return [*layers, Norm(members, width)], width


def make_network(members: int, num_inputs: int, num_outputs: int, config: BodyConfig) -> Sequential:
    """`members` networks from [B, num_inputs] to [E, B, num_outputs]."""
    trunk, width = make_trunk(members, num_inputs, config)
    return Sequential([*trunk, Dense(members, width, num_outputs, keep_float32=True)])


def standalone(network: nn.Module, label: str) -> nn.Module:
    """A copy of somebody's module that computes in torch only; UsageError, with `label` as its
    subject, if it cannot be copied.
    """
    try:
        copied = copy.deepcopy(network)
    except Exception as error:
        raise UsageError(
            f"{label} cannot be exported, copy.deepcopy fails: {first_line(error)}; give the "
            f"module a __deepcopy__ or leave out what cannot be copied"
        ) from error
    for module in copied.modules():
        if isinstance(module, Sequential):
            module.leave_c()
    return copied


def to_torch(network: nn.Module, member: int = 0) -> nn.Module:
    """[B, D] -> [B, out] of one member of a stacked network, gpurl's or somebody's own, in torch's
    layers.
    """
    if isinstance(network, Layer):
        return network.to_torch(member)
    return OneOutput(standalone(network, f"the network {type(network).__name__}"), member)


def weights_and_biases(network: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(weight [E, out, in], bias [E, 1, out]) of each dense layer, in their order."""
    return [(layer.weight, layer.bias) for layer in network.modules() if isinstance(layer, Dense)]


def set_dtype(network: nn.Module, dtype: torch.dtype) -> int:
    """Compute the products of the layers that allow it in `dtype`; parameters and gradients stay
    float32. Returns the number of layers.
    """
    layers = [
        layer
        for layer in network.modules()
        if isinstance(layer, LowPrecision) and not layer.keep_float32
    ]
    for layer in layers:
        layer.dtype = dtype
    return len(layers)
