"""Long short-term memory: step by step while acting, unrolled over a rollout for the update."""

import torch
from torch import Tensor, nn

from gpurl.nn.gru import cell_weights, with_cell_weights
from gpurl.nn.memory import Memory
from gpurl.nn.mlp import Dense


class Lstm(Memory):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
    2000, in the form of torch.nn.LSTM), orthogonal at the start, forget gates with a bias of 1
    (Jozefowicz et al. 2015). The state is the features and the cell side by side, [N, 2H].
    """

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.state_size = 2 * size
        self.input = Dense(1, num_inputs, 4 * size, gain=1.0, keep_float32=True)
        self.recurrent = Dense(1, size, 4 * size, gain=1.0, keep_float32=True)
        # torch's order of gates: input, forget, cell, output
        self.input.bias.detach()[..., size : 2 * size].fill_(1.0)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        weights = cell_weights(self.input, self.recurrent)
        h, cell = torch.lstm_cell(x, state.chunk(2, -1), *weights)
        return h, torch.cat((h, cell), -1)

    def unroll(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        weights = cell_weights(self.input, self.recurrent)
        h, cell = state.chunk(2, -1)
        outputs = []
        for x_now, starts_now in zip(x.unbind(0), starts.unsqueeze(2).unbind(0)):
            # filled and not multiplied, so that no NaN goes on into the next episode
            before = h.masked_fill(starts_now, 0.0), cell.masked_fill(starts_now, 0.0)
            h, cell = torch.lstm_cell(x_now, before, *weights)
            outputs.append(h)
        return torch.stack(outputs)

    def to_torch(self) -> nn.Module:
        num_inputs = self.input.weight.shape[-1]
        cell = nn.utils.skip_init(LstmCell, num_inputs, self.size)
        return with_cell_weights(cell, self.input, self.recurrent)


class LstmCell(nn.LSTMCell):
    """torch's cell with the arguments and results of a memory."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [N, D], state [N, 2H] -> (features [N, H], next state [N, 2H])."""
        h, cell = state.chunk(2, -1)
        h, cell = super().forward(x, (h, cell))
        return h, torch.cat((h, cell), -1)
