"""The GRU against torch.nn.GRU, and where episodes start."""

import torch
from torch import nn

from gpurl.nn.gru import Gru


def test_gru_equals_torch_gru() -> None:
    torch.manual_seed(1)
    gru, peer = Gru(3, 5), nn.GRU(3, 5)
    for layer in (gru.input, gru.recurrent):
        layer.bias.data.normal_()
    peer.weight_ih_l0.data = gru.input.weight[0].detach().clone()
    peer.bias_ih_l0.data = gru.input.bias[0, 0].detach().clone()
    peer.weight_hh_l0.data = gru.recurrent.weight[0].detach().clone()
    peer.bias_hh_l0.data = gru.recurrent.bias[0, 0].detach().clone()
    x, h = torch.randn(9, 4, 3), torch.randn(4, 5)
    never = torch.zeros(9, 4, dtype=torch.bool)
    torch.testing.assert_close(gru.unroll(x, h, never), peer(x, h.unsqueeze(0))[0])


def test_gru_unroll_empties_the_memory_at_episode_starts() -> None:
    gru = Gru(3, 5)
    x, h = torch.randn(6, 2, 3), torch.randn(2, 5)
    start = torch.zeros(6, 2, dtype=torch.bool)
    start[3, 1] = True
    unrolled = gru.unroll(x, h, start)
    fresh = gru.unroll(x[3:, 1:], torch.zeros(1, 5), torch.zeros(3, 1, dtype=torch.bool))
    torch.testing.assert_close(unrolled[3:, 1:], fresh)
    assert (
        unrolled[3, 0] - gru(x[3], torch.zeros(2, 5))[0]
    ).abs().max() > 1e-3  # the other environment kept its memory
