"""Networks and their gradients against torch.nn in float64."""

import pytest
import torch
from torch import Tensor, nn

from gpurl.errors import UsageError
from gpurl.nn.networks import ActorCritic, Gru, Layer, NetworkConfig

ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU, "relu": nn.ReLU}


def as_sequential(network: ActorCritic, tower: int, head: Layer, activation: str) -> nn.Sequential:
    """One of the two networks in float64, from torch.nn."""
    modules: list[nn.Module] = []
    for weight, bias in zip(network.towers.weights, network.towers.biases):
        modules += [linear_of(weight[tower], bias[tower, 0]), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules, linear_of(head.weight, head.bias))


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(*reversed(weight.shape), dtype=torch.float64)
    linear.weight.data, linear.bias.data = weight.detach().double(), bias.detach().double().clone()
    return linear


@pytest.mark.parametrize(
    "rows", [11, 3000]
)  # few rows go through one batched multiplication, many through one each
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [(7, 6), (40,), ()])
def test_actor_critic_and_its_gradients_equal_torch_nn(
    hidden: tuple[int, ...], activation: str, shared: bool, rows: int
) -> None:
    if shared and not hidden:
        pytest.skip("nothing to share")
    torch.manual_seed(0)
    network = ActorCritic(NetworkConfig(hidden=hidden, activation=activation, shared=shared), 5, 3)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.5)
    peers = [
        as_sequential(network, 0, network.actor, activation),
        as_sequential(network, -1, network.critic, activation),
    ]
    x, of_output, of_value = torch.randn(rows, 5), torch.randn(rows, 3), torch.randn(rows)
    output, value = network(x)
    ((output * of_output).sum() + (value * of_value).sum()).backward()
    wanted_output, wanted_value = peers[0](x.double()), peers[1](x.double()).squeeze(1)
    torch.testing.assert_close(output.double(), wanted_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value.double(), wanted_value, rtol=1e-5, atol=1e-5)
    ((wanted_output * of_output).sum() + (wanted_value * of_value).sum()).backward()
    close = {"rtol": 1e-4, "atol": 1e-5 * rows}
    for layer in range(len(hidden)):
        found = [[peer[2 * layer].weight.grad, peer[2 * layer].bias.grad] for peer in peers]
        pairs = [[sum(both) for both in zip(*found)]] if shared else found
        for tower, (weight, bias) in enumerate(pairs):
            torch.testing.assert_close(
                network.towers.weights[layer].grad[tower].double(), weight, **close
            )
            torch.testing.assert_close(
                network.towers.biases[layer].grad[tower, 0].double(), bias, **close
            )
    for head, peer in zip((network.actor, network.critic), peers):
        torch.testing.assert_close(head.weight.grad.double(), peer[-1].weight.grad, **close)
        torch.testing.assert_close(head.bias.grad.double(), peer[-1].bias.grad, **close)


@pytest.mark.parametrize("rows", [11, 3000])
def test_gradients_lie_as_the_weights_do(rows: int) -> None:
    """So that all of them go into the flat gradient in one copy."""
    network = ActorCritic(NetworkConfig(hidden=(7, 6)), 5, 3)
    output, value = network(torch.randn(rows, 5))
    parameters = list(network.parameters())
    for gradient in torch.autograd.grad(output.sum() + value.sum(), parameters):
        assert gradient.is_contiguous()


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_reaches_the_memory(shared: bool) -> None:
    """That of its weights is the one of torch.nn's layers behind it."""
    torch.manual_seed(0)
    network = ActorCritic(
        NetworkConfig(hidden=(6,), memory="gru", memory_size=4, shared=shared), 3, 2
    )
    assert network.memory is not None
    x, h, starts = torch.randn(5, 7, 3), torch.randn(7, 4), torch.rand(5, 7) < 0.3
    of_output, of_value = torch.randn(35, 2), torch.randn(35)
    parameters = list(network.memory.parameters())
    output, value = network(network.unroll(x, h, starts).flatten(0, 1))
    loss = (output * of_output).sum() + (value * of_value).sum()
    peers = [
        as_sequential(network, 0, network.actor, "tanh"),
        as_sequential(network, -1, network.critic, "tanh"),
    ]
    flat = network.memory.unroll(x, h, starts).flatten(0, 1).double()
    wanted = (peers[0](flat) * of_output).sum() + (peers[1](flat).squeeze(1) * of_value).sum()
    for got, want in zip(*(torch.autograd.grad(each, parameters) for each in (loss, wanted))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_one_step_at_a_time_is_the_sequence() -> None:
    """What acting remembers is what the update unrolls."""
    network = ActorCritic(NetworkConfig(hidden=(6,), memory="gru", memory_size=4), 3, 2)
    x, policy_state = torch.randn(5, 7, 3), network.initial_policy_state(7, torch.device("cpu"))
    never = torch.zeros(5, 7, dtype=torch.bool)
    unrolled = network.unroll(x, policy_state[0], never)
    for step in range(5):
        features, policy_state = network.remember(x[step], policy_state)
        torch.testing.assert_close(features, unrolled[step])
        assert policy_state[0] is features


def test_weights_are_orthogonal_with_their_gain() -> None:
    network = ActorCritic(NetworkConfig(hidden=(16, 16)), 16, 4)
    for stack in network.towers.weights:
        for weight in stack:
            torch.testing.assert_close(weight @ weight.t(), 2.0 * torch.eye(16), atol=1e-5, rtol=0)
        assert not torch.equal(stack[0], stack[1])
    actor, critic = network.actor.weight, network.critic.weight
    torch.testing.assert_close(actor @ actor.t(), 1e-4 * torch.eye(4), atol=1e-9, rtol=1e-4)
    torch.testing.assert_close(critic @ critic.t(), torch.eye(1), atol=1e-5, rtol=0)


def test_gru_equals_torch_gru() -> None:
    torch.manual_seed(1)
    gru, peer = Gru(3, 5), nn.GRU(3, 5)
    for layer in (gru.input, gru.recurrent):
        layer.bias.data.normal_()
    peer.weight_ih_l0.data, peer.bias_ih_l0.data = (
        gru.input.weight.detach().clone(),
        gru.input.bias.detach().clone(),
    )
    peer.weight_hh_l0.data, peer.bias_hh_l0.data = (
        gru.recurrent.weight.detach().clone(),
        gru.recurrent.bias.detach().clone(),
    )
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


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"^activation is 'gelu'; it must be one of tanh, elu, relu"
    ):
        NetworkConfig(activation="gelu")
