"""A gated recurrent unit: step by step while acting, unrolled over a rollout for the update."""

import torch
from torch import Tensor, nn

from gpurl.nn.acting import member_of, row_of, with_values
from gpurl.nn.memory import Memory
from gpurl.nn.mlp import Dense


class Gru(Memory):
    """Gated recurrent unit (Cho et al. 2014, in the form of torch.nn.GRU), orthogonal at the
    start. Its state is its features.
    """

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = self.state_size = size
        self.input = Dense(1, num_inputs, 3 * size, gain=1.0, keep_float32=True)
        self.recurrent = Dense(1, size, 3 * size, gain=1.0, keep_float32=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.gru_cell(x, state, *cell_weights(self.input, self.recurrent))
        return h, h

    def unroll(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        weights = cell_weights(self.input, self.recurrent)
        outputs = []
        for x_now, starts_now in zip(x.unbind(0), starts.unsqueeze(2).unbind(0)):
            # filled and not multiplied, so that no NaN goes on into the next episode
            state = torch.gru_cell(x_now, state.masked_fill(starts_now, 0.0), *weights)
            outputs.append(state)
        return torch.stack(outputs)

    def to_torch(self) -> nn.Module:
        num_inputs = self.input.weight.shape[-1]
        cell = nn.utils.skip_init(GruCell, num_inputs, self.size)
        return with_cell_weights(cell, self.input, self.recurrent)


class GruCell(nn.GRUCell):
    """torch's cell with the arguments and results of a memory."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [N, D], state [N, H] -> (features [N, H], next state, the same)."""
        h = super().forward(x, state)
        return h, h


def cell_weights(of_input: Dense, recurrent: Dense) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weight_ih, weight_hh, bias_ih, bias_hh) of G gates as torch's cells take them: [G H, D],
    [G H, H] and twice [G H].
    """
    return (
        of_input.weight.squeeze(0),
        recurrent.weight.squeeze(0),
        of_input.bias.flatten(),
        recurrent.bias.flatten(),
    )


def with_cell_weights(cell: nn.RNNCellBase, of_input: Dense, recurrent: Dense) -> nn.Module:
    """`cell` with copies of the weights."""
    return with_values(
        cell,
        weight_ih=member_of(of_input.weight, 0),
        weight_hh=member_of(recurrent.weight, 0),
        bias_ih=row_of(of_input.bias, 0),
        bias_hh=row_of(recurrent.bias, 0),
    )
