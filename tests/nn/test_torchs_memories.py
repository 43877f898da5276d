"""The GRU and the LSTM against torch.nn.GRU and torch.nn.LSTM: outputs and gradients, with episodes
that start in between.
"""

import pytest
import torch
from torch import Tensor, nn

from gpurl.nn.gru import Gru
from gpurl.nn.lstm import Lstm
from gpurl.nn.mlp import Dense

KINDS = pytest.mark.parametrize(("kind", "peer"), [(Gru, nn.GRU), (Lstm, nn.LSTM)])


def weights(memory: Gru | Lstm) -> dict[str, nn.Parameter]:
    """By torch's names of layer 0."""

    def of(layer: Dense, name: str) -> dict[str, nn.Parameter]:
        return {f"weight_{name}_l0": layer.weight, f"bias_{name}_l0": layer.bias}

    return of(memory.input, "ih") | of(memory.recurrent, "hh")


def peer_output(
    peer: nn.GRU | nn.LSTM, x: Tensor, state: Tensor, starts: list[int]
) -> list[Tensor]:
    """Of one environment, x [T, D], each episode by itself, from zeros except the first."""
    outputs = []
    for start, end in zip([0, *starts], [*starts, len(x)]):
        parts = [each.view(1, -1) for each in state.split(peer.hidden_size)]
        first = (parts[0], parts[1]) if isinstance(peer, nn.LSTM) else parts[0]
        outputs.append(peer(x[start:end], first)[0])
        state = torch.zeros_like(state)
    return outputs


@KINDS
def test_outputs_and_gradients_are_torchs_of_each_episode_by_itself(
    kind: type[Gru | Lstm], peer: type[nn.GRU | nn.LSTM]
) -> None:
    torch.manual_seed(1)
    memory, reference = kind(3, 5), peer(3, 5)
    for parameter in memory.parameters():
        parameter.data.normal_()
    values = {
        name: weight.detach().view_as(reference.get_parameter(name))
        for name, weight in weights(memory).items()
    }
    reference.load_state_dict(values)
    x = torch.randn(9, 3, 3, requires_grad=True)
    state = torch.randn(3, memory.state_size, requires_grad=True)
    starts_of = [[], [4], [0, 1, 7]]
    starts = torch.zeros(9, 3, dtype=torch.bool)
    for env, steps in enumerate(starts_of):
        starts[steps, env] = True
    features = memory.unroll(x, state, starts)
    columns = [
        torch.cat(peer_output(reference, x[:, env], state[env], steps))
        for env, steps in enumerate(starts_of[:2])
    ]
    columns.append(torch.cat(peer_output(reference, x[:, 2], 0.0 * state[2], [1, 7])))
    expected = torch.stack(columns, 1)
    torch.testing.assert_close(features, expected)

    of_features = torch.randn_like(features)
    mine = torch.autograd.grad(features, [*weights(memory).values(), x, state], of_features)
    peers = [reference.get_parameter(name) for name in weights(memory)]
    theirs = torch.autograd.grad(expected, [*peers, x, state], of_features)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def test_the_forget_gate_of_an_lstm_begins_open() -> None:
    """A cell with zero inputs and outputs keeps sigmoid(1) of its state."""
    lstm = Lstm(3, 5)
    for layer in (lstm.input, lstm.recurrent):
        layer.weight.data.zero_()
    _, state = lstm(torch.zeros(2, 3), torch.cat((torch.zeros(2, 5), torch.ones(2, 5)), 1))
    torch.testing.assert_close(state[:, 5:], torch.full((2, 5), 0.7310586))
