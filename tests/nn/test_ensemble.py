"""Stacked networks against separate ones under autograd, in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpurl.errors import UsageError
from gpurl.nn.ensemble import BodyConfig, Op, Stack, Tape, make_network, set_dtype
from gpurl.nn.optimizer import flatten

MEMBERS, ROWS, INPUTS, OUTPUTS = 3, 7, 4, 2
BODIES = [
    {"hidden": (5, 6)},
    {"hidden": ()},
    {"hidden": (5, 6), "activation": "tanh"},
    {"hidden": (5,), "activation": "elu", "layer_norm": True},
    {"hidden": (5, 6), "layer_norm": True},
    {"hidden": (6, 6), "body": "simba"},
    {"hidden": (6,), "body": "bro"},
]


def make(config: dict[str, Any], members: int = MEMBERS) -> Stack:
    torch.manual_seed(0)
    network = make_network(members, INPUTS, OUTPUTS, BodyConfig(**config)).double()
    for parameter in network.parameters():  # no layer norm at its start
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.grad = torch.full_like(parameter, torch.nan)
    return network


def dense(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, norm: tuple[Tensor, Tensor] | None
) -> Tensor:
    z = functional.linear(x, weight, bias)
    if norm is not None:
        z = functional.layer_norm(z, z.shape[-1:], *norm)
    return {"none": lambda y: y, "relu": torch.relu, "tanh": torch.tanh, "elu": functional.elu}[
        activation
    ](z)


def member_output(config: dict[str, Any], parameters: list[Tensor], x: Tensor) -> Tensor:
    """The network of one member as a plain formula; parameters in the order in which the module
    lists them.
    """
    left = iter(parameters)

    def layer(x: Tensor, activation: str = "none", has_norm: bool = False) -> Tensor:
        weight, bias = next(left), next(left).squeeze(0)
        norm = (next(left).squeeze(0), next(left).squeeze(0)) if has_norm else None
        return dense(x, weight, bias, activation, norm)

    def norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], next(left).squeeze(0), next(left).squeeze(0))

    body, blocks = config.get("body", "mlp"), len(config["hidden"])
    if body == "simba":
        x = layer(x)
        for _ in range(blocks):
            x = x + layer(layer(norm(x), "relu"))
        x = norm(x)
    elif body == "bro":
        x = layer(x, "relu", True)
        for _ in range(blocks):
            x = x + layer(layer(x, "relu", True), "none", True)
    else:
        for _ in range(blocks):
            x = layer(x, config.get("activation", "relu"), config.get("layer_norm", False))
    result = layer(x)
    assert next(left, None) is None
    return result


@pytest.mark.parametrize("shared_input", [True, False])
@pytest.mark.parametrize("config", BODIES, ids=str)
def test_members_are_separate_networks(config: dict[str, Any], shared_input: bool) -> None:
    network, tape = make(config), Tape()
    x = torch.randn(
        *(() if shared_input else (MEMBERS,)), ROWS, INPUTS, dtype=torch.float64, requires_grad=True
    )
    weight = torch.randn(MEMBERS, ROWS, OUTPUTS, dtype=torch.float64)
    with torch.inference_mode():
        output = network.forward(x.detach(), tape)
        of_input = network.backward(weight.clone(), tape)
    assert not tape
    for member in range(MEMBERS):
        copies = [
            parameter[member].detach().clone().requires_grad_()
            for parameter in network.parameters()
        ]
        of_member = (
            x.detach()[member].requires_grad_() if not shared_input else x.detach().requires_grad_()
        )
        wanted = member_output(config, copies, of_member)
        torch.testing.assert_close(output[member], wanted, rtol=1e-12, atol=1e-12)
        slopes = torch.autograd.grad((wanted * weight[member]).sum(), [*copies, of_member])
        torch.testing.assert_close(of_input[member], slopes[-1], rtol=1e-10, atol=1e-12)
        for parameter, slope in zip(network.parameters(), slopes):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad[member], slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", BODIES, ids=str)
def test_what_is_not_needed_is_not_computed(config: dict[str, Any]) -> None:
    network, tape = make(config), Tape()
    x, weight = (
        torch.randn(ROWS, INPUTS, dtype=torch.float64),
        torch.randn(MEMBERS, ROWS, OUTPUTS, dtype=torch.float64),
    )
    with torch.inference_mode():
        network.forward(x, tape)
        of_input = network.backward(weight.clone(), tape, needs_weights=False)
        assert all(
            bool(parameter.grad.isnan().all())
            for parameter in network.parameters()
            if parameter.grad is not None
        )
        network.forward(x, tape)
        network.backward(weight.clone(), tape, needs_input=False)
        kept = [
            parameter.grad.clone()
            for parameter in network.parameters()
            if parameter.grad is not None
        ]
        network.forward(x, tape)
        torch.testing.assert_close(network.backward(weight.clone(), tape), of_input, rtol=0, atol=0)
    for parameter, gradient in zip(network.parameters(), kept):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_a_gradient_of_one_member_moves_no_other() -> None:
    network, tape = make({"hidden": (5, 5), "layer_norm": True}), Tape()
    gradient = torch.zeros(MEMBERS, ROWS, OUTPUTS, dtype=torch.float64)
    gradient[1] = 1.0
    with torch.inference_mode():
        network.forward(torch.randn(ROWS, INPUTS, dtype=torch.float64), tape)
        network.backward(gradient, tape)
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert float(parameter.grad[[0, 2]].abs().max()) == 0.0
        assert float(parameter.grad[1].abs().max()) > 0.0


def test_every_member_starts_on_its_own_and_as_torch_starts_a_layer() -> None:
    torch.manual_seed(0)
    network = make_network(4, 100, 10, BodyConfig(hidden=(300,)))
    first = next(iter(network.parameters())).detach()
    for one, other in itertools.combinations(range(4), 2):
        assert (
            abs(
                float(
                    torch.corrcoef(torch.stack((first[one].flatten(), first[other].flatten())))[
                        0, 1
                    ]
                )
            )
            < 0.02
        )
    usual = nn.Linear(100, 300)
    assert float(first.std()) == pytest.approx(float(usual.weight.detach().std()), rel=0.02)
    assert float(first.abs().max()) <= 0.1


def test_bfloat16_products_keep_parameters_and_gradients_float32() -> None:
    torch.manual_seed(0)
    network = make_network(2, INPUTS, OUTPUTS, BodyConfig(hidden=(64, 64), layer_norm=True))
    flatten(network)
    x, outputs, gradients = torch.randn(50, INPUTS), [], []
    for dtype in (None, torch.bfloat16):
        if dtype is not None:
            set_dtype(network, dtype)
        tape = Tape()
        with torch.inference_mode():
            outputs.append(network.forward(x, tape))
            network.backward(torch.ones(2, 50, OUTPUTS), tape)
        gradients.append(
            [
                parameter.grad.clone()
                for parameter in network.parameters()
                if parameter.grad is not None
            ]
        )
    assert outputs[1].dtype == torch.float32
    assert 1e-5 < float((outputs[0] - outputs[1]).abs().max()) < 0.05
    for exact, rounded in zip(*gradients):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05 * float(exact.abs().max()))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"blocks of one width, hidden is \(4, 5\)"):
        BodyConfig(hidden=(4, 5), body="simba")
    with pytest.raises(UsageError, match="relu and layer norms of its own"):
        BodyConfig(hidden=(4,), body="bro", layer_norm=True)
    with pytest.raises(UsageError, match=r"^body is 'mpl'; it must be one of mlp, simba, bro"):
        BodyConfig(body="mpl")
    assert issubclass(Stack, Op)
