"""The actor-critic and its gradients against torch.nn in float64."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES, ActorCritic, AsymmetricActorCritic, NetworkConfig
from gpurl.nn.mlp import Dense, set_dtype, weights_and_biases

ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU, "relu": nn.ReLU}


def as_sequential(network: ActorCritic, member: int, head: Dense, activation: str) -> nn.Sequential:
    """One of the two networks in float64, from torch.nn."""
    modules: list[nn.Module] = []
    for weight, bias in weights_and_biases(network.trunk):
        modules += [linear_of(weight[member], bias[member, 0]), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules, linear_of(head.weight[0], head.bias[0, 0]))


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
    for layer, (weight, bias) in enumerate(weights_and_biases(network.trunk)):
        of_peers = [[peer[2 * layer].weight.grad, peer[2 * layer].bias.grad] for peer in peers]
        of_members = [[sum(both) for both in zip(*of_peers)]] if shared else of_peers
        for member, (of_weight, of_bias) in enumerate(of_members):
            torch.testing.assert_close(weight.grad[member].double(), of_weight, **close)
            torch.testing.assert_close(bias.grad[member, 0].double(), of_bias, **close)
    for head, peer in zip((network.actor, network.critic), peers):
        torch.testing.assert_close(head.weight.grad[0].double(), peer[-1].weight.grad, **close)
        torch.testing.assert_close(head.bias.grad[0, 0].double(), peer[-1].bias.grad, **close)


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("rows", [11, 3000])
def test_gradients_lie_as_the_weights_do(rows: int, in_c: bool) -> None:
    """So that all of them go into the flat gradient in one copy; outputs are rows in one piece, as
    kernels read them.
    """
    network = ActorCritic(NetworkConfig(hidden=(7, 6)), 5, 3)
    parameters = list(network.parameters())
    with nullcontext() if in_c else no_host_syncs():
        output, value = network(torch.randn(rows, 5))
        gradients = torch.autograd.grad(output.sum() + value.sum(), parameters)
    for tensor in (output, value, *gradients):
        assert tensor.is_contiguous()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [{"body": "simba"}, {"body": "bro"}, {"layer_norm": True}])
def test_residual_bodies_and_layer_norms_are_those_of_the_one_library(
    shape: dict[str, Any], shared: bool
) -> None:
    """Features of the stack go through the heads: member 0's are the actor's."""
    torch.manual_seed(0)
    network = ActorCritic(NetworkConfig(hidden=(8, 8), shared=shared, **shape), 5, 3)
    assert not network.config.is_plain
    x = torch.randn(11, 5)
    output, value = network(x)
    features = network.trunk(x)
    assert features.shape == (1 if shared else 2, 11, 8)
    actor, critic = network.actor, network.critic
    peer = linear_of(actor.weight[0], actor.bias[0, 0])(features[0].double())
    torch.testing.assert_close(output.double(), peer, rtol=1e-5, atol=1e-6)
    peer = linear_of(critic.weight[0], critic.bias[0, 0])(features[-1].double())
    torch.testing.assert_close(value.double(), peer[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_reaches_the_memory(shared: bool, memory: str) -> None:
    """That of its weights is the one of torch.nn's layers behind it."""
    torch.manual_seed(0)
    network = ActorCritic(
        NetworkConfig(hidden=(6,), memory=memory, memory_size=4, shared=shared), 3, 2
    )
    assert network.memory is not None
    x, starts = torch.randn(5, 7, 3), torch.rand(5, 7) < 0.3
    h = torch.randn(7, network.memory.state_size)
    of_output, of_value = torch.randn(35, 2), torch.randn(35)
    parameters = list(network.memory.parameters())
    output, value = network(network.unroll(x, h, starts).flatten(0, 1))
    loss = (output * of_output).sum() + (value * of_value).sum()
    peers = [
        as_sequential(network, 0, network.actor, "tanh"),
        as_sequential(network, -1, network.critic, "tanh"),
    ]
    flat = network.memory.unroll(x, h, starts).flatten(0, 1).double()
    expected = (peers[0](flat) * of_output).sum() + (peers[1](flat).squeeze(1) * of_value).sum()
    for got, want in zip(*(torch.autograd.grad(each, parameters) for each in (loss, expected))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
def test_one_step_at_a_time_is_the_sequence(memory: str) -> None:
    """What acting remembers is what the update unrolls."""
    network = ActorCritic(NetworkConfig(hidden=(6,), memory=memory, memory_size=4), 3, 2)
    assert network.memory is not None
    x, h = torch.randn(5, 7, 3), torch.zeros(7, network.memory.state_size)
    never = torch.zeros(5, 7, dtype=torch.bool)
    unrolled = network.unroll(x, h, never)
    for step in range(5):
        features, h = network.remember(x[step], h)
        torch.testing.assert_close(features, unrolled[step])


def test_weights_are_orthogonal_with_their_gain() -> None:
    network = ActorCritic(NetworkConfig(hidden=(16, 16)), 16, 4)
    for stack, bias in weights_and_biases(network.trunk):
        for weight in stack:
            torch.testing.assert_close(weight @ weight.t(), 2.0 * torch.eye(16), atol=1e-5, rtol=0)
        assert not torch.equal(stack[0], stack[1])
        assert not bool(bias.any())
    actor, critic = network.actor.weight[0], network.critic.weight[0]
    torch.testing.assert_close(actor @ actor.t(), 1e-4 * torch.eye(4), atol=1e-9, rtol=1e-4)
    torch.testing.assert_close(critic @ critic.t(), torch.eye(1), atol=1e-5, rtol=0)


def test_low_precision_leaves_the_heads_alone() -> None:
    network = AsymmetricActorCritic(NetworkConfig(hidden=(16,)), 8, 3, 2)
    assert set_dtype(network, torch.bfloat16) == 2
    dtypes = [layer.dtype for layer in network.modules() if isinstance(layer, Dense)]
    assert sorted(map(str, dtypes)) == ["None", "None", "torch.bfloat16", "torch.bfloat16"]
    assert (network.actor.dtype, network.critic.dtype) == (None, None)


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"^activation is 'selu'; did you mean .*elu.*\? it must be one of tanh, elu",
    ):
        NetworkConfig(activation="selu")
