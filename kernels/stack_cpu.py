"""Stacks of dense layers on a CPU, forward and backward in one call of stack_cpu.c each, for
tensors and for autograd.

The reference is gpurl/nn/mlp.py layer by layer. There each operation of torch passes over all
activations; C takes a block of rows, which stays in the cache, through all layers.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gpurl.kernels import c_library
from gpurl.kernels.backend import refuse_second_derivative

ACTIVATIONS = ("tanh", "elu", "relu", "none")
MAX_LAYERS = 64
# a stored row of hidden outputs is padded to a multiple of this, and by one multiple more
WIDE = 16
Layer = tuple[nn.Parameter, nn.Parameter, str]  # weight [E, out, in], bias [E, 1, out], activation


class StackCpu:
    """Layers of E members, one after the other; their parameters are float32 and contiguous.

    Results do not depend on the number of threads, torch.get_num_threads(), nor does a row's result
    on the other rows.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        assert 0 < len(layers) <= MAX_LAYERS
        self.parameters = [parameter for layer in layers for parameter in layer[:2]]
        self._parameter_shapes = [parameter.shape for parameter in self.parameters]
        self._shapes = list[int]()
        for weight, bias, activation in layers:
            # sizes of the layer for C: inputs, outputs, activation
            members, num_outputs, num_inputs = weight.shape
            expected = (layers[0][0].shape[0], self._shapes[-2] if self._shapes else num_inputs)
            if (members, num_inputs) != expected or bias.shape != (members, 1, num_outputs):
                raise ValueError(
                    f"layers do not fit each other: wanted one of {expected[0]} members with "
                    f"{expected[1]} inputs, got weights {list(weight.shape)} and biases "
                    f"{list(bias.shape)}"
                )
            self._shapes += [num_inputs, num_outputs, ACTIVATIONS.index(activation)]
        self.members = layers[0][0].shape[0]
        self.num_inputs = self._shapes[0]
        self.num_outputs = self._shapes[-2]
        widths = self._shapes[1:-2:3]  # of the hidden layers
        self._hidden_width = sum(width + -width % WIDE + WIDE for width in widths)

    def __call__(self, x: Tensor) -> Tensor:
        """[E, B, out] of x [E, B, in], or [B, in] for all members, float32; once differentiable by
        x and by the parameters that require it. Stores nothing in torch.no_grad().
        """
        if torch.is_grad_enabled():
            return _Differentiable.apply(self, x, *self.parameters)
        return self.forward(_rows(x), keep_hidden=False)[0]

    def forward(self, x: Tensor, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
        """(y, the outputs of the hidden layers in the layout of stack_cpu.c, or None) of x as
        above, contiguous.
        """
        rows = self._check(x)
        y = _empty(self.members, rows, self.num_outputs)
        hidden = _empty(self.members * rows * self._hidden_width) if keep_hidden else None
        # addresses in the order that C expects; the forward pass has no gradients
        tensors = [x, y, hidden, None, None]
        for number in range(0, len(self.parameters), 2):
            tensors += [self.parameters[number], self.parameters[number + 1], None, None]
        self._call(c_library.functions().stack_forward, x, tensors, keep_hidden, False, False)
        return y, hidden

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        y: Tensor,
        hidden: Tensor,
        needs_input: bool,
        needs_weights: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """(gradient by x [E, B, in], gradients by the parameters), each if it is needed.

        gradient: [E, B, out] by y; x, y, hidden: argument and results of `forward`. A row of zeros
        adds nothing, also where x, y or hidden is not finite in it.
        """
        gradient = gradient.contiguous()
        # memory for the gradients that are needed
        input_gradient = _empty(self.members, x.shape[-2], self.num_inputs) if needs_input else None
        gradients: list[Tensor | None] = [
            torch.empty_like(parameter) if needs_weights else None for parameter in self.parameters
        ]
        tensors = [x, y, hidden, gradient, input_gradient]
        for number in range(0, len(self.parameters), 2):
            tensors += self.parameters[number : number + 2]
            tensors += gradients[number : number + 2]
        function = c_library.functions().stack_backward
        self._call(function, x, tensors, False, needs_input, needs_weights)
        return input_gradient, gradients

    def _check(self, x: Tensor) -> int:
        """The number of rows of x; AssertionError unless C can read x and the parameters."""
        expected_shape = (self.members, x.shape[-2], self.num_inputs)[-x.dim() :]
        got = tuple(x.shape), x.dtype, x.is_contiguous()
        assert got == (expected_shape, torch.float32, True), (*got, expected_shape)
        for parameter, shape in zip(self.parameters, self._parameter_shapes):
            assert parameter.dtype == torch.float32, parameter
            assert parameter.is_contiguous(), parameter
            assert parameter.shape == shape, (parameter.shape, shape)
        return x.shape[-2]

    def _call(self, function: Any, x: Tensor, tensors: list[Tensor | None], *flags: bool) -> None:
        rows = x.shape[-2]
        sizes = (
            self.members,
            rows,
            0 if x.dim() == 2 else rows * self.num_inputs,
            *flags,
            torch.get_num_threads(),
            len(self.parameters) // 2,
            *self._shapes,
        )
        addresses = c_library.addresses(tensors)
        sizes_c = _array(ctypes.c_int64, len(sizes))(*sizes)
        if function(sizes_c, _array(ctypes.c_void_p, len(addresses))(*addresses)):
            raise MemoryError("no memory for the layers' buffers")


def _empty(*shape: int) -> Tensor:
    """For results of C, whatever torch's default type is."""
    return torch.empty(shape, dtype=torch.float32)


class _Differentiable(torch.autograd.Function):
    """A stack as one node of the autograd graph."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, stack: StackCpu, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        rows = _rows(x)
        y, hidden = stack.forward(rows, keep_hidden=True)
        assert hidden is not None
        ctx.save_for_backward(rows, y, hidden)
        ctx.stack = stack  # type: ignore[attr-defined]
        ctx.is_shared = x.dim() == 2  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        _, needs_input, *needs = ctx.needs_input_grad
        x, y, hidden = ctx.saved_tensors
        input_gradient, gradients = ctx.stack.backward(
            gradient, x, y, hidden, needs_input, any(needs)
        )
        # rows that all members share get the sum of the members' gradients
        if input_gradient is not None and ctx.is_shared:
            one_member = len(input_gradient) == 1
            input_gradient = input_gradient.squeeze(0) if one_member else input_gradient.sum(0)
        # C computes the gradients by all parameters or by none
        gradients = [each if need else None for each, need in zip(gradients, needs)]
        return None, input_gradient, *gradients


def _rows(x: Tensor) -> Tensor:
    """[B, in] where all members have the same rows, else [E, B, in]; contiguous."""
    return (x[0] if x.dim() == 3 and x.stride(0) == 0 else x).contiguous()


@functools.cache  # a type costs more than its values
def _array(kind: Any, length: int) -> Any:
    return kind * length
