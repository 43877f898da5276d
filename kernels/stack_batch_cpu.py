"""A stack of dense layers on a CPU with memory for a batch of fixed size: forward and backward are
one call of stack_cpu.c each, which writes gradients directly into the parameters' `.grad`.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.stack_cpu import Layer, StackCpu

NEEDS_INPUT, NEEDS_WEIGHTS, THREADS = 4, 5, 6  # indices in the sizes that stack_cpu.c reads


class StackBatch(StackCpu):
    """Reads its input from `x` [B, in], the same for all E members.

    C writes into the memory of x, parameters and gradients: never replace these tensors. Memory
    that moves, as by `share_memory()`, is followed.
    """

    def __init__(self, layers: Sequence[Layer], x: Tensor) -> None:
        super().__init__(layers)
        rows = self._check(x)
        self.x = x
        self.output = torch.zeros(self.members, rows, self.num_outputs, dtype=torch.float32)
        self.gradient = torch.zeros_like(self.output)  # by the output; `differentiate` reads it
        shape = self.members, rows, self.num_inputs
        self.input_gradient = torch.zeros(shape, dtype=torch.float32)
        # outputs of the hidden layers, kept for the backward pass
        hidden = torch.empty(self.members * rows * self._hidden_width, dtype=torch.float32)
        tensors: list[Tensor | None]
        tensors = [x, self.output, hidden, self.gradient, self.input_gradient]
        for weight, bias, _ in layers:
            tensors += [weight, bias, weight.grad, bias.grad]
        self._tensors = tensors  # keeps the memory alive that C reads and writes
        self._addresses = (ctypes.c_void_p * len(tensors))()
        weight = layers[0][0]
        self._first = [each for each in (weight, weight.grad) if each is not None]
        self._places = list[int | None]()  # of `_first`, when `_addresses` was filled
        self._follow_memory()
        # sizes and addresses are made once; a call sets the three that change
        sizes = (self.members, rows, 0, True, False, False, 1, len(layers), *self._shapes)
        self._sizes = (ctypes.c_int64 * len(sizes))(*sizes)

    def run(self) -> Tensor:
        """[E, B, out] of `x`; the next call overwrites it."""
        self._call_c("stack_forward")
        return self.output

    def differentiate(self, by_input: bool = False, by_weights: bool = False) -> None:
        """Compute from `gradient` the gradients by the input, into `input_gradient` [E, B, in], and
        by the parameters, into their `.grad`. A row of zeros adds nothing.
        """
        self._sizes[NEEDS_INPUT] = by_input
        self._sizes[NEEDS_WEIGHTS] = by_weights
        self._call_c("stack_backward")

    def _follow_memory(self) -> None:
        """Take the tensors' addresses again if the first weight's or its gradient's changed: a
        network's parameters move together.
        """
        places = c_library.addresses(self._first)
        if places != self._places:
            self._addresses[:] = c_library.addresses(self._tensors)
            self._places = places

    def _call_c(self, name: str) -> None:
        self._follow_memory()
        self._sizes[THREADS] = torch.get_num_threads()
        if getattr(c_library.functions(), name)(self._sizes, self._addresses):
            raise MemoryError("no memory for the layers' buffers")
