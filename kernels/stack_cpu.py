"""Stacks of dense layers on a CPU, forward and backward in one call each: what stack_cpu.c does,
for tensors.

The reference is gpurl/nn/ensemble.py's layers one by one: torch makes a pass over all activations
an operation, this goes through all layers with a block of rows that stays in the cache.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpurl.kernels import c_library

ACTIVATIONS = ("tanh", "elu", "relu", "none")
MAX_LAYERS = 64
WIDE = 16  # a row of what is kept of a layer is padded to a multiple of it, and once more
Layer = tuple[nn.Parameter, nn.Parameter, str]  # weight [E, out, in], bias [E, 1, out], activation


class Kept(NamedTuple):
    """What the way back needs of a forward pass."""

    x: Tensor
    y: Tensor
    hidden: Tensor  # what the layers between gave, as stack_cpu.c lays it out


class StackCpu:
    """Layers of E members, one after the other; their parameters, and the `.grad` of these for
    `backward`, are float32 and contiguous.

    Results do not depend on the number of threads, torch.get_num_threads(), nor does a row's result
    on the other rows.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        assert 0 < len(layers) <= MAX_LAYERS
        self._parameters = [(weight, bias) for weight, bias, _ in layers]
        shapes = [
            (weight.shape[2], weight.shape[1], ACTIVATIONS.index(activation))
            for weight, _, activation in layers
        ]
        self.members, self.num_inputs, self.num_outputs = (
            layers[0][0].shape[0],
            shapes[0][0],
            shapes[-1][1],
        )
        self._shapes = [number for shape in shapes for number in shape]
        self._kept_width = sum(outputs + -outputs % WIDE + WIDE for _, outputs, _ in shapes[:-1])

    def forward(self, x: Tensor, keeps: bool) -> tuple[Tensor, Kept | None]:
        """x: [E, B, in], or [B, in] for all, float32 and contiguous -> (y [E, B, out], what
        `backward` needs if wanted).
        """
        rows = self._check(x)
        y = torch.empty(self.members, rows, self.num_outputs)
        kept = Kept(x, y, torch.empty(self.members * rows * self._kept_width)) if keeps else None
        tensors = [
            x,
            y,
            kept and kept.hidden,
            None,
            None,
            *(tensor for pair in self._parameters for tensor in (*pair, None, None)),
        ]
        self._call(c_library.functions().stack_forward, x, tensors, keeps, False, False)
        return y, kept

    def backward(
        self, gradient: Tensor, kept: Kept, needs_input: bool, needs_weights: bool
    ) -> Tensor:
        """The gradient by x [E, B, in] from that by y [E, B, out], if needed; else the latter.
        Writes those of the parameters if needed.

        A row of zeros adds nothing to any of them, whatever else of it is not finite.
        """
        x, y, hidden = kept
        rows, gradient = self._check(x), gradient.contiguous()
        assert (gradient.shape, gradient.dtype) == (y.shape, torch.float32), (
            gradient.shape,
            gradient.dtype,
            y.shape,
        )
        of_input = torch.empty(self.members, rows, self.num_inputs) if needs_input else None
        tensors = [x, y, hidden, gradient, of_input]
        for weight, bias in self._parameters:
            assert not needs_weights or (weight.grad is not None and bias.grad is not None), (
                "the parameters have no .grad to write into"
            )
            tensors += [weight, bias, weight.grad, bias.grad]
        self._call(
            c_library.functions().stack_backward, x, tensors, False, needs_input, needs_weights
        )
        return gradient if of_input is None else of_input

    def _check(self, x: Tensor) -> int:
        wanted = (self.members, x.shape[-2], self.num_inputs)[-x.dim() :]
        assert (tuple(x.shape), x.dtype, x.is_contiguous()) == (wanted, torch.float32, True), (
            x.shape,
            x.dtype,
            wanted,
        )
        for parameter in itertools.chain(*self._parameters):  # C reads what lies there
            is_plain = parameter.dtype == torch.float32 and parameter.is_contiguous()
            assert is_plain, parameter
            assert parameter.device.type == "cpu", parameter
        return x.shape[-2]

    def _call(self, function: Any, x: Tensor, tensors: list[Tensor | None], *flags: bool) -> None:
        rows, num_layers = x.shape[-2], len(self._parameters)
        sizes = (
            self.members,
            rows,
            0 if x.dim() == 2 else rows * self.num_inputs,
            *flags,
            torch.get_num_threads(),
            num_layers,
        )
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        sizes_c, addresses_c = (
            _array(ctypes.c_int64, len(sizes) + 3 * num_layers),
            _array(ctypes.c_void_p, len(addresses)),
        )
        if function(sizes_c(*sizes, *self._shapes), addresses_c(*addresses)):
            raise MemoryError("no memory for the layers' buffers")


@functools.cache  # a type costs more than its values
def _array(kind: Any, length: int) -> Any:
    return kind * length
