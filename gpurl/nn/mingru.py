"""A minimal gated recurrent unit: its gates read the input only, so that a rollout is unrolled by
one scan in place of a loop over its steps.
"""

import torch
from torch import Tensor, nn

from gpurl.kernels.linear_scan import linear_scan
from gpurl.nn.memory import Memory
from gpurl.nn.mlp import Dense

# of the gates at the start: units forget 95 % of their state in a step, or 5 %, or a share between.
# With one bias for all of them they average over the same steps and cannot tell how an input
# changes: CartPole without velocities took 401,408 steps in place of 155,648.
GATE_BIAS = 3.0


class MinGru(Memory):
    """The minGRU of Feng et al. 2024 ("Were RNNs all we needed?", arXiv 2410.01201, section 3.1),
    weights orthogonal at the start. Its state is its features.

        h_t = (1 - z_t) h_{t-1} + z_t tanh(v_t),   1 - z_t = sigmoid(u_t),   u, v = W x + b

    tanh bounds the candidate, as in torch.nn.GRU. The positive g of their appendix B exists for a
    scan of logarithms, which cannot forget an earlier episode: it needs 1 - z_t > 0.
    """

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = self.state_size = size
        self.input = Dense(1, num_inputs, 2 * size, gain=1.0)
        torch.linspace(-GATE_BIAS, GATE_BIAS, size, out=self.input.bias.detach()[0, 0, :size])

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, D] -> (1 - z, the candidate), each [B, H]."""
        return keep_and_candidate(self.input(x).squeeze(0))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        keep, candidate = self._gates(x)
        h = torch.lerp(candidate, state, keep)
        return h, h

    def unroll(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.size)
        keep, candidate = (each.view(shape) for each in self._gates(x.flatten(0, 1)))
        new = torch.addcmul(candidate, keep, candidate, value=-1.0)
        return linear_scan(keep.masked_fill(starts.unsqueeze(2), 0.0), new, state)

    def to_torch(self) -> nn.Module:
        return MinGruCell(self.input.to_torch())


class MinGruCell(nn.Module):
    """One step in torch's own modules."""

    def __init__(self, of_input: nn.Module) -> None:
        super().__init__()
        self.input = of_input

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D], state [N, H] -> (features [N, H], next state, the same)."""
        keep, candidate = keep_and_candidate(self.input(x))
        h = torch.lerp(candidate, state, keep)
        return h, h


def keep_and_candidate(output: Tensor) -> tuple[Tensor, Tensor]:
    """u and v side by side, [B, 2H] -> (1 - z [B, H], candidate [B, H])."""
    gate, candidate = output.chunk(2, -1)
    return torch.sigmoid(gate), torch.tanh(candidate)
