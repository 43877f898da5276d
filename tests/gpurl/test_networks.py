"""Networks against torch.nn and float64 autograd."""

import pytest
import torch
from torch import nn

from gpurl.errors import UsageError
from gpurl.networks import ActorCritic, Gru, Mlp, NetworkConfig

ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU, "relu": nn.ReLU}


def as_sequential(mlp: Mlp) -> nn.Sequential:
    modules: list[nn.Module] = []
    for number, layer in enumerate(mlp.layers):
        linear = nn.Linear(*reversed(layer.weight.shape), dtype=torch.float64)
        linear.weight.data = layer.weight.detach().double()
        linear.bias.data = layer.bias.detach().double().clone()
        modules.append(linear)
        if mlp.activations[number] != "none":
            modules.append(ACTIVATIONS[mlp.activations[number]]())
    return nn.Sequential(*modules)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("last_activated", [False, True])
def test_mlp_and_its_gradients_equal_torch_nn(activation: str, last_activated: bool) -> None:
    torch.manual_seed(0)
    mlp = Mlp((5, 7, 6, 3), activation, last_activated=last_activated)
    for layer in mlp.layers:
        layer.bias.data.normal_()
    peer = as_sequential(mlp)
    x = torch.randn(11, 5, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    weight = torch.randn(11, 3)
    (mlp(x) * weight).sum().backward()
    (peer(x64) * weight).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(mlp(x).double(), peer(x64), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
    linears = [module for module in peer if isinstance(module, nn.Linear)]
    for layer, linear in zip(mlp.layers, linears):
        torch.testing.assert_close(layer.weight.grad.double(), linear.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.bias.grad.double(), linear.bias.grad, rtol=1e-5, atol=1e-5)


def test_mlp_takes_leading_axes() -> None:
    mlp = Mlp((4, 8, 2), "tanh")
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(mlp(x), mlp(x.flatten(0, 1)).unflatten(0, (3, 5)))


def test_weights_are_orthogonal_with_their_gain() -> None:
    layer = Mlp((16, 16, 4), "tanh", output_gain=0.01).layers
    torch.testing.assert_close(layer[0].weight @ layer[0].weight.t(), 2.0 * torch.eye(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer[1].weight @ layer[1].weight.t(), 1e-4 * torch.eye(4), atol=1e-9, rtol=1e-4)


def test_gru_equals_torch_gru() -> None:
    torch.manual_seed(1)
    gru, peer = Gru(3, 5), nn.GRU(3, 5)
    for layer in (gru.input, gru.recurrent):
        layer.bias.data.normal_()
    peer.weight_ih_l0.data, peer.bias_ih_l0.data = gru.input.weight.detach().clone(), gru.input.bias.detach().clone()
    peer.weight_hh_l0.data, peer.bias_hh_l0.data = gru.recurrent.weight.detach().clone(), gru.recurrent.bias.detach().clone()
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
    assert (unrolled[3, 0] - gru(x[3], torch.zeros(2, 5))[0]).abs().max() > 1e-3  # the other environment kept its memory


def test_shared_trunk_is_shared_and_separate_is_not() -> None:
    obs = torch.randn(4, 6)
    for shared in (True, False):
        network = ActorCritic(NetworkConfig(shared=shared), 6, 2)
        features, _ = network.features(obs, ())
        touched = {
            id(p)
            for p, g in zip(
                network.parameters(), torch.autograd.grad(network.actor(features).sum(), list(network.parameters()), allow_unused=True)
            )
            if g is not None
        }
        features, _ = network.features(obs, ())
        other = {
            id(p)
            for p, g in zip(
                network.parameters(), torch.autograd.grad(network.value(features).sum(), list(network.parameters()), allow_unused=True)
            )
            if g is not None
        }
        assert bool(touched & other) == shared


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"activation is 'gelu'; it must be one of tanh, elu, relu"):
        NetworkConfig(activation="gelu")
