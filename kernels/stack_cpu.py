"""Stacks of dense layers on a CPU, forward and backward in one call each: what stack_cpu.c does,
for tensors and for autograd.

The reference is gpurl/nn/mlp.py's layers one by one: torch makes a pass over all activations an
operation, this goes through all layers with a block of rows that stays in the cache.
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
WIDE = 16  # a row of what is kept of a layer is padded to a multiple of it, and once more
Layer = tuple[nn.Parameter, nn.Parameter, str]  # weight [E, out, in], bias [E, 1, out], activation


class StackCpu:
    """Layers of E members, one after the other; their parameters are float32 and contiguous.

    Results do not depend on the number of threads, torch.get_num_threads(), nor does a row's result
    on the other rows.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        assert 0 < len(layers) <= MAX_LAYERS
        self.parameters = [parameter for layer in layers for parameter in layer[:2]]
        self._shapes = list[int]()
        for weight, _, activation in layers:
            num_outputs, num_inputs = weight.shape[1:]
            self._shapes += [num_inputs, num_outputs, ACTIVATIONS.index(activation)]
        self.members = layers[0][0].shape[0]
        self.num_inputs = self._shapes[0]
        self.num_outputs = self._shapes[-2]
        self._kept_width = sum(outputs + -outputs % WIDE + WIDE for outputs in self._shapes[1:-2:3])

    def __call__(self, x: Tensor) -> Tensor:
        """x: [E, B, in], or [B, in] for all, float32 -> y [E, B, out], once differentiable by x and
        by the parameters that require it. Keeps nothing in torch.no_grad().
        """
        if torch.is_grad_enabled():
            return _Differentiable.apply(self, x, *self.parameters)
        return self.forward(_rows(x), keeps=False)[0]

    def forward(self, x: Tensor, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """x: as above and contiguous -> (y, what the layers between gave, as stack_cpu.c lays it
        out, if wanted).
        """
        rows = self._check(x)
        y = torch.empty(self.members, rows, self.num_outputs)
        hidden = torch.empty(self.members * rows * self._kept_width) if keeps else None
        tensors = [x, y, hidden, None, None]
        for number in range(0, len(self.parameters), 2):
            tensors += [self.parameters[number], self.parameters[number + 1], None, None]
        self._call(c_library.functions().stack_forward, x, tensors, keeps, False, False)
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
        """(the gradient by x [E, B, in], those by the parameters), each if needed, from that by y
        [E, B, out]; x, y and hidden as `forward` had and gave them.

        A row of zeros adds nothing to any of them, whatever else of it is not finite.
        """
        gradient = gradient.contiguous()
        of_input = torch.empty(self.members, x.shape[-2], self.num_inputs) if needs_input else None
        of_parameters: list[Tensor | None] = [
            torch.empty_like(each) if needs_weights else None for each in self.parameters
        ]
        tensors = [x, y, hidden, gradient, of_input]
        for number in range(0, len(self.parameters), 2):
            tensors += self.parameters[number : number + 2]
            tensors += of_parameters[number : number + 2]
        function = c_library.functions().stack_backward
        self._call(function, x, tensors, False, needs_input, needs_weights)
        return of_input, of_parameters

    def _check(self, x: Tensor) -> int:
        """How many rows x has; C reads what lies there."""
        wanted = (self.members, x.shape[-2], self.num_inputs)[-x.dim() :]
        got = tuple(x.shape), x.dtype, x.is_contiguous()
        assert got == (wanted, torch.float32, True), (*got, wanted)
        for each in self.parameters:
            is_plain = each.dtype == torch.float32 and each.is_cpu and each.is_contiguous()
            assert is_plain, each
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
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        sizes_c = _array(ctypes.c_int64, len(sizes))(*sizes)
        if function(sizes_c, _array(ctypes.c_void_p, len(addresses))(*addresses)):
            raise MemoryError("no memory for the layers' buffers")


class _Differentiable(torch.autograd.Function):
    """A stack as one node of the graph."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, stack: StackCpu, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        rows = _rows(x)
        y, hidden = stack.forward(rows, keeps=True)
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
        of_input, of_parameters = ctx.stack.backward(
            gradient, x, y, hidden, needs_input, any(needs)
        )
        if of_input is not None and ctx.is_shared:
            of_input = of_input.squeeze(0) if len(of_input) == 1 else of_input.sum(0)
        if not all(needs):
            of_parameters = [each if need else None for each, need in zip(of_parameters, needs)]
        return None, of_input, *of_parameters


def _rows(x: Tensor) -> Tensor:
    """[B, in] where all members have the same rows, else [E, B, in]; contiguous."""
    return (x[0] if x.dim() == 3 and x.stride(0) == 0 else x).contiguous()


@functools.cache  # a type costs more than its values
def _array(kind: Any, length: int) -> Any:
    return kind * length
