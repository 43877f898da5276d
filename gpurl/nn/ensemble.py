"""Stacked networks: E members of one shape as one module, weights [E, out, in], with the backward
pass written out.

A tape is the list of what the backward pass will need; without one a forward pass keeps nothing.
Every member starts on its own.
"""

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpurl.checks import check_choices
from gpurl.errors import UsageError
from gpurl.kernels.backend import use_c
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.stack_cpu import Kept, StackCpu
from gpurl.nn.networks import SLOPE, stacked_affine, stacked_input_gradient, stacked_weight_gradient

Tape = list[Any]
LAYER_NORM_EPSILON = 1e-5
ACTIVATE = {
    "none": lambda z: z,
    "tanh": torch.tanh_,
    "elu": torch.nn.functional.elu_,
    "relu": torch.relu_,
}  # in place


@dataclass(frozen=True)
class BodyConfig:
    """Shape of the networks of off-policy algorithms."""

    hidden: tuple[int, ...] = (256, 256)
    """Units of the hidden layers; of the residual blocks, all alike, for simba and bro."""
    activation: str = "relu"
    """tanh, elu or relu; simba and bro have relu."""
    layer_norm: bool = False
    """Normalise every hidden layer before its activation (mlp)."""
    body: str = "mlp"
    """mlp, or residual blocks: simba (Lee et al. 2024) or bro (Nauman et al. 2024)."""

    def __post_init__(self) -> None:
        check_choices(
            self, {"activation": ("tanh", "elu", "relu"), "body": ("mlp", "simba", "bro")}
        )
        if min(self.hidden, default=1) < 1:
            raise UsageError(f"hidden must be at least 1, got {self.hidden}")
        if self.body == "mlp":
            return
        if len(set(self.hidden)) != 1:
            raise UsageError(
                f"body {self.body} has residual blocks of one width, hidden is {self.hidden}"
            )
        if self.activation != "relu" or self.layer_norm:
            raise UsageError(
                f"body {self.body} has relu and layer norms of its own: leave out activation and "
                f"layer_norm"
            )


class Op(nn.Module):
    """One step of a stack: x [E, B, in], or [B, in] for all members, -> [E, B, out]."""

    @abstractmethod
    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        """noise: where layers are noisy, what they draw from; without it they are not."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        """The gradient by x [E, B, in], from that by the result, overwritten; writes those of the
        parameters into their `.grad` if wanted.

        Takes its entries off the end of the tape. Without `needs_input` what it returns means
        nothing.
        """


class Dense(Op):
    """Affine, then normalised if wanted, then activated. Weights and biases start uniform in
    +-1/sqrt(in), as torch.nn.Linear's do.
    """

    def __init__(
        self,
        members: int,
        num_inputs: int,
        num_outputs: int,
        activation: str = "none",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(num_inputs)
        self.weight = nn.Parameter(
            torch.empty(members, num_outputs, num_inputs).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.empty(members, 1, num_outputs).uniform_(-bound, bound))
        self.activation, self.norm = activation, Norm(members, num_outputs) if layer_norm else None
        self.dtype: torch.dtype | None = (
            None  # of the products, where they are not to have the parameters' own
        )

    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        return self._activated(self._affine(x, self.weight, self.bias), tape, x)

    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        gradient, (x,) = self._before_activation(gradient, tape, needs_weights)
        if needs_weights:
            self._write_gradients(gradient, x, self.weight, self.bias)
        return self._input_gradient(gradient, self.weight) if needs_input else gradient

    def _activated(self, z: Tensor, tape: Tape | None, *inputs: Tensor) -> Tensor:
        """What the layer gives for the products z of `inputs`, which the tape keeps beside it."""
        y = ACTIVATE[self.activation](z if self.norm is None else self.norm(z, tape))
        if tape is not None:
            tape.append((y, *inputs))
        return y

    def _before_activation(
        self, gradient: Tensor, tape: Tape, needs_weights: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """(gradient by the products, the `inputs` that `_activated` was given)."""
        y, *inputs = tape.pop()
        gradient = SLOPE[self.activation](gradient, y)
        return gradient if self.norm is None else self.norm.backward(
            gradient, tape, needs_weights=needs_weights
        ), inputs

    def _affine(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return stacked_affine(self._cast(x), self._cast(weight), self._cast(bias)).to(x.dtype)

    def _write_gradients(
        self, gradient: Tensor, x: Tensor, weight: nn.Parameter, bias: nn.Parameter
    ) -> None:
        assert weight.grad is not None
        torch.sum(gradient, 1, keepdim=True, out=bias.grad)
        stacked_weight_gradient(self._cast(gradient), self._cast(x), weight.grad)

    def _input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return stacked_input_gradient(self._cast(gradient), self._cast(weight)).to(gradient.dtype)

    def _cast(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)


class Norm(Op):
    """Layer normalisation (Ba et al. 2016) with a gain and a shift of each member."""

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.gain, self.shift = (
            nn.Parameter(torch.ones(members, 1, size)),
            nn.Parameter(torch.zeros(members, 1, size)),
        )

    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        normal, mean, inv_std = torch.native_layer_norm(
            x, x.shape[-1:], None, None, LAYER_NORM_EPSILON
        )
        if tape is not None:
            tape.append((x, normal, mean, inv_std))
        return torch.addcmul(self.shift, normal, self.gain)

    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        x, normal, mean, inv_std = tape.pop()
        if needs_weights:
            torch.sum(gradient * normal, 1, keepdim=True, out=self.gain.grad)
            torch.sum(gradient, 1, keepdim=True, out=self.shift.grad)
        of_normal, only_input = gradient * self.gain, [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(
            of_normal, x, x.shape[-1:], mean, inv_std, None, None, only_input
        )[0]


class Run(Op):
    """Dense layers without a norm, one after the other: on a CPU one call of C. They belong to the
    stack, which lists their parameters.
    """

    def __init__(self, layers: list[Dense]) -> None:
        super().__init__()
        self.layers = tuple(layers)  # no nn.ModuleList

    @functools.cached_property
    def _in_c(self) -> StackCpu:
        return StackCpu([(layer.weight, layer.bias, layer.activation) for layer in self.layers])

    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        if (
            torch.is_grad_enabled()
            or x.dtype != torch.float32
            or self.layers[0].dtype is not None
            or not use_c(x)
        ):
            for layer in self.layers:
                x = layer.forward(x, tape)
            return x
        x = x[0] if x.dim() == 3 and x.stride(0) == 0 else x  # the same rows for all members
        x = x.contiguous()
        y, kept = self._in_c.forward(x, keeps=tape is not None)
        if tape is not None:
            tape.append(kept)
        return y

    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        if isinstance(tape[-1], Kept):
            return self._in_c.backward(gradient, tape.pop(), needs_input, needs_weights)
        for number in reversed(range(len(self.layers))):
            gradient = self.layers[number].backward(
                gradient, tape, needs_input or number > 0, needs_weights
            )
        return gradient


def _in_runs(steps: Iterable[Op]) -> list[Op]:
    """The steps, of stacks in stacks too, as one list, layers that a run can take together in
    one.
    """
    flat = [
        inner
        for step in steps
        for inner in (cast(list[Op], list(step.steps)) if type(step) is Stack else [step])
    ]
    found = list[Op]()
    for is_plain, group in itertools.groupby(
        flat, lambda step: type(step) is Dense and step.norm is None
    ):
        members = list(group)
        found += [Run(cast(list[Dense], members))] if is_plain else members
    return found


class Stack(Op):
    """Steps one after the other."""

    def __init__(self, steps: list[Op]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self._steps = _in_runs(
            steps
        )  # a plain list: walking an nn.Module costs more than a small layer

    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        for step in self._steps:
            x = step.forward(x, tape, noise)
        return x

    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        for number in reversed(range(len(self._steps))):
            gradient = self._steps[number].backward(
                gradient, tape, needs_input or number > 0, needs_weights
            )
        return gradient


class Residual(Stack):
    """x plus what the steps make of it, the last of which has no activation: it would overwrite the
    gradient; x: [E, B, H].
    """

    def forward(
        self, x: Tensor, tape: Tape | None = None, noise: CounterRandom | None = None
    ) -> Tensor:
        return x + super().forward(x, tape, noise)

    def backward(
        self, gradient: Tensor, tape: Tape, needs_input: bool = True, needs_weights: bool = True
    ) -> Tensor:
        return gradient + super().backward(gradient, tape, True, needs_weights)


def make_trunk(members: int, num_inputs: int, config: BodyConfig) -> tuple[list[Op], int]:
    """(hidden layers of `members` networks, the size of what they give)."""
    sizes = (num_inputs, *config.hidden)
    if config.body == "mlp":
        layers = [
            Dense(members, *pair, config.activation, config.layer_norm)
            for pair in itertools.pairwise(sizes)
        ]
        return list[Op](layers), sizes[-1]
    width = sizes[-1]
    if config.body == "bro":
        blocks = [
            Residual(
                [
                    Dense(members, width, width, "relu", True),
                    Dense(members, width, width, "none", True),
                ]
            )
            for _ in config.hidden
        ]
        return [Dense(members, num_inputs, width, "relu", True), *blocks], width
    blocks = [
        Residual(
            [
                Norm(members, width),
                Dense(members, width, 4 * width, "relu"),
                Dense(members, 4 * width, width),
            ]
        )
        for _ in config.hidden
    ]
    return [Dense(members, num_inputs, width), *blocks, Norm(members, width)], width


def make_network(members: int, num_inputs: int, num_outputs: int, config: BodyConfig) -> Stack:
    """`members` networks from [B, num_inputs] to [E, B, num_outputs]."""
    trunk, width = make_trunk(members, num_inputs, config)
    return Stack([*trunk, Dense(members, width, num_outputs)])


def set_dtype(network: nn.Module, dtype: torch.dtype) -> int:
    """Compute the products of all layers in `dtype`; parameters and gradients stay float32. Returns
    how many layers there are.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, Dense)]
    for layer in layers:
        layer.dtype = dtype
    return len(layers)
