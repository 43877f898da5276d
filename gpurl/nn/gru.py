"""A gated recurrent unit: step by step while acting, unrolled over a rollout for the update."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpurl.nn.acting import member_of, row_of, with_values
from gpurl.nn.mlp import Dense


class Gru(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, in the form of torch.nn.GRU), orthogonal at the
    start.
    """

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.input = Dense(1, num_inputs, 3 * size, gain=1.0)
        self.recurrent = Dense(1, size, 3 * size, gain=1.0)

    def _step(self, gates: Tensor, h: Tensor) -> Tensor:
        """gates: [N, 3H] of the input; h: [N, H] -> [N, H]."""
        reset_in, update_in, new_in = gates.chunk(3, dim=-1)
        # not self.recurrent(h): on a CPU T calls of an autograd function written in Python would
        # cost more than the products themselves
        weight, bias = self.recurrent.weight.squeeze(0), self.recurrent.bias.flatten()
        reset_h, update_h, new_h = functional.linear(h, weight, bias).chunk(3, dim=-1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
        return torch.lerp(new, h, torch.sigmoid(update_in + update_h))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step: x [N, in], h [N, H] -> next h [N, H]."""
        return self._step(self.input(x).squeeze(0), h)

    def unroll(self, x: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        """x: [T, N, in]; h: [N, H] before the first step; starts: [T, N] bool, where h is emptied
        before the step -> [T, N, H].
        """
        # the input's part of all steps at once, then the recurrent part step by step
        gates = self.input(x.flatten(0, 1)).view(*x.shape[:2], -1)
        keep = (~starts).unsqueeze(2)
        outputs = []
        for gates_now, keep_now in zip(gates.unbind(0), keep.unbind(0)):
            h = self._step(gates_now, h * keep_now)
            outputs.append(h)
        return torch.stack(outputs)

    def to_torch(self) -> nn.GRUCell:
        """The same cell in torch's own module."""
        num_inputs = self.input.weight.shape[-1]
        cell = nn.utils.skip_init(nn.GRUCell, num_inputs, self.size)
        return with_values(
            cell,
            weight_ih=member_of(self.input.weight, 0),
            weight_hh=member_of(self.recurrent.weight, 0),
            bias_ih=row_of(self.input.bias, 0),
            bias_hh=row_of(self.recurrent.bias, 0),
        )
