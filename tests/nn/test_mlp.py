"""Stacked networks against separate ones under autograd, in float64."""

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs, use_c
from gpurl.nn.mlp import SPLIT_ROWS, BodyConfig, Dense, Sequential, make_network, set_dtype
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.q_networks import QNetworkConfig, make_q_network
from gpurl.nn.unit_network import UnitBodyConfig, make_unit_network

MEMBERS, ROWS, INPUTS, OUTPUTS = 3, 7, 4, 2
BODIES = [
    {"hidden": (5, 6)},
    {"hidden": ()},
    {"hidden": (5, 6), "activation": "tanh"},
    {"hidden": (5,), "activation": "elu", "layer_norm": True},
    {"hidden": (5, 6), "layer_norm": True},
    {"hidden": (5, 6), "activation": "silu"},
    {"hidden": (5, 6), "activation": "gelu"},
    {"hidden": (6, 6), "body": "simba"},
    {"hidden": (6,), "body": "bro"},
]


def make(config: dict[str, Any], members: int = MEMBERS) -> Sequential:
    torch.manual_seed(0)
    network = make_network(members, INPUTS, OUTPUTS, BodyConfig(**config)).double()
    for parameter in network.parameters():  # no layer norm at its start
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


def dense(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, norm: tuple[Tensor, Tensor] | None
) -> Tensor:
    z = functional.linear(x, weight, bias)
    if norm is not None:
        z = functional.layer_norm(z, z.shape[-1:], *norm)
    return {
        "none": lambda y: y,
        "relu": torch.relu,
        "tanh": torch.tanh,
        "elu": functional.elu,
        "silu": lambda y: y * torch.sigmoid(y),
        "gelu": lambda y: y * torch.special.ndtr(y),
    }[activation](z)


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
    network = make(config)
    x = torch.randn(
        *(() if shared_input else (MEMBERS,)), ROWS, INPUTS, dtype=torch.float64, requires_grad=True
    )
    weight = torch.randn(MEMBERS, ROWS, OUTPUTS, dtype=torch.float64)
    output = network(x)
    parameters = list(network.parameters())
    of_input, *gradients = torch.autograd.grad(output, [x, *parameters], weight)
    of_all = torch.zeros_like(x)
    for member in range(MEMBERS):
        copies = [
            parameter[member].detach().clone().requires_grad_()
            for parameter in network.parameters()
        ]
        of_member = (
            x.detach()[member].requires_grad_() if not shared_input else x.detach().requires_grad_()
        )
        expected = member_output(config, copies, of_member)
        torch.testing.assert_close(output[member], expected, rtol=1e-12, atol=1e-12)
        slopes = torch.autograd.grad((expected * weight[member]).sum(), [*copies, of_member])
        of_all[... if shared_input else member] += slopes[-1]
        for gradient, slope in zip(gradients, slopes):
            torch.testing.assert_close(gradient[member], slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_input, of_all, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", BODIES, ids=str)
def test_a_network_may_be_used_twice_and_be_frozen(config: dict[str, Any]) -> None:
    """What it gives the second time is an input of the first kind; frozen it has the same gradient
    by its input and none by its weights.
    """
    network = make(config)
    x = torch.randn(ROWS, INPUTS, dtype=torch.float64, requires_grad=True)
    again = torch.nn.functional.pad(network(x), (1, 1))
    parameters = list(network.parameters())
    twice = torch.autograd.grad(network(again).sum(), [x, *parameters])
    copy = make(config)
    apart = torch.autograd.grad(copy(again.detach()).sum(), list(copy.parameters()))
    inner = again.detach().requires_grad_()
    (of_inner,) = torch.autograd.grad(copy(inner).sum(), [inner])
    rest = torch.autograd.grad(
        torch.nn.functional.pad(network(x), (1, 1)), [x, *parameters], of_inner
    )
    torch.testing.assert_close(twice[0], rest[0], rtol=1e-10, atol=1e-12)
    for got, one, other in zip(twice[1:], apart, rest[1:]):
        torch.testing.assert_close(got, one + other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_c", [True, False])
def test_frozen_weights_have_no_gradient_and_the_input_has_its_own(in_c: bool) -> None:
    torch.manual_seed(0)
    network = make_network(2, INPUTS, OUTPUTS, BodyConfig(hidden=(8,)))
    optimizer = FlatAdam(network, 1e-3)
    x = torch.randn(ROWS, INPUTS, requires_grad=True)
    with nullcontext() if in_c else no_host_syncs():
        (expected,) = torch.autograd.grad(network(x).sum(), [x])
        with optimizer.frozen():
            y = network(x)
            assert not network(x.detach()).requires_grad
        (got,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(y.sum(), optimizer.parameters)
        assert network(x.detach()).requires_grad


def test_a_gradient_of_one_member_moves_no_other() -> None:
    network = make({"hidden": (5, 5), "layer_norm": True})
    gradient = torch.zeros(MEMBERS, ROWS, OUTPUTS, dtype=torch.float64)
    gradient[1] = 1.0
    y = network(torch.randn(ROWS, INPUTS, dtype=torch.float64))
    for of_parameter in torch.autograd.grad(y, list(network.parameters()), gradient):
        assert float(of_parameter[[0, 2]].abs().max()) == 0.0
        assert float(of_parameter[1].abs().max()) > 0.0


def test_gradients_of_weights_lie_as_the_weights_do() -> None:
    """Else a GPU copies them one by one into the optimiser's memory."""
    network = make({"hidden": (5, 6), "layer_norm": True})
    y = network(torch.randn(ROWS, INPUTS, dtype=torch.float64))
    for parameter, gradient in zip(
        network.parameters(), torch.autograd.grad(y.sum(), list(network.parameters()))
    ):
        assert gradient.stride() == parameter.stride()


def test_many_rows_are_summed_by_one_product_for_each_member() -> None:
    """On a GPU; the same numbers, and nothing else of the network changes."""
    torch.manual_seed(0)
    network = make_network(2, INPUTS, OUTPUTS, BodyConfig(hidden=(8,))).double()
    x = torch.randn(SPLIT_ROWS, INPUTS, dtype=torch.float64)
    weights = torch.randn(2, SPLIT_ROWS, OUTPUTS, dtype=torch.float64)
    results = []
    for context in (nullcontext(), no_host_syncs()):
        with context, torch.profiler.profile() as profile:
            loss = (network(x) * weights).sum()
            results.append(torch.autograd.grad(loss, list(network.parameters())))
        calls = {event.key: event.count for event in profile.key_averages()}
        results[-1] += (torch.tensor(calls.get("aten::mm", 0)),)
    assert [int(result[-1]) for result in results] == [0, 4]
    torch.testing.assert_close(results[1][:-1], results[0][:-1])


def test_second_derivatives_are_there_in_torch_and_refused_in_c() -> None:
    network, x = make({"hidden": (5,), "activation": "tanh"}, 1), torch.randn(ROWS, INPUTS).double()
    assert torch.autograd.gradgradcheck(lambda x: network(x), x.requires_grad_())
    if use_c(torch.zeros(1)):
        network, x = network.float(), x.detach().float().requires_grad_()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(network(x).sum(), [x], create_graph=True)


def test_a_traced_network_is_no_constant() -> None:
    torch.manual_seed(0)
    network = make_network(1, INPUTS, OUTPUTS, BodyConfig(hidden=(8, 8), layer_norm=True))
    x, other = torch.randn(2, 5, INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(network, (x,))
    exported = torch.export.export(network, (x,)).module()
    for function in (traced, exported):
        torch.testing.assert_close(function(other), network(other), rtol=1e-5, atol=1e-6)
        assert not torch.equal(function(other), function(x))


def test_layers_may_start_orthogonal() -> None:
    """Of a gain; biases at 0."""
    torch.manual_seed(0)
    layer = Dense(3, 20, 6, "tanh", gain=2.0)
    for weight in layer.weight.detach():
        torch.testing.assert_close(weight @ weight.t(), 4.0 * torch.eye(6), rtol=1e-5, atol=1e-5)
    assert float(layer.bias.detach().abs().max()) == 0.0
    assert not torch.equal(layer.weight[0], layer.weight[1])


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
    x, outputs, gradients = torch.randn(50, INPUTS), [], []
    for dtype in (None, torch.bfloat16):
        if dtype is not None:
            set_dtype(network, dtype)
        y = network(x)
        outputs.append(y.detach())
        gradients.append(torch.autograd.grad(y.sum(), list(network.parameters())))
    assert outputs[1].dtype == torch.float32
    assert 1e-5 < float((outputs[0] - outputs[1]).abs().max()) < 0.05
    for exact, rounded in zip(*gradients):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05 * float(exact.abs().max()))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"blocks of one width, hidden is \(4, 5\)"):
        BodyConfig(hidden=(4, 5), body="simba")
    with pytest.raises(UsageError, match="always has relu and layer norms"):
        BodyConfig(hidden=(4,), body="bro", layer_norm=True)
    with pytest.raises(UsageError, match=r"^body is 'mpl'; it must be one of mlp, simba, bro"):
        BodyConfig(body="mpl")


FUNCTORCH_BODIES = [
    {"hidden": (8, 8), "activation": "tanh"},
    {"hidden": (8,), "activation": "elu", "layer_norm": True},
    {"hidden": (8, 8), "body": "simba"},
    {"hidden": (8, 8), "activation": "silu"},
    {"hidden": (8,), "activation": "gelu"},
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("members", [1, MEMBERS])
@pytest.mark.parametrize("config", FUNCTORCH_BODIES, ids=str)
def test_functorch_computes_what_a_loop_computes(
    config: dict[str, Any], members: int, grad: bool
) -> None:
    torch.manual_seed(0)
    network = make_network(members, INPUTS, OUTPUTS, BodyConfig(**config))
    x = torch.randn(5, ROWS, INPUTS)
    close = {"rtol": 1e-5, "atol": 1e-6}
    with torch.set_grad_enabled(grad):
        rows = torch.func.vmap(network)(x)
        torch.testing.assert_close(rows, torch.stack([network(each) for each in x]), **close)
        # one example at a time, and its Jacobian
        single = torch.func.vmap(lambda row: network(row.unsqueeze(0)).squeeze(1))(x[0])
        torch.testing.assert_close(single, network(x[0]).transpose(0, 1), **close)
        jacobian = torch.func.jacrev(network)(x[0])
        per_row = torch.func.vmap(torch.func.jacrev(lambda row: network(row.unsqueeze(0))))(x[0])
    for member, row, output in itertools.product(range(members), range(ROWS), range(OUTPUTS)):
        leaf = x[0].clone().requires_grad_()
        (expected,) = torch.autograd.grad(network(leaf)[member, row, output], leaf)
        torch.testing.assert_close(jacobian[member, row, output], expected, **close)
        torch.testing.assert_close(per_row[row, member, 0, output], expected[row], **close)


def test_rows_of_a_vmap_share_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are more rows, not copies of the weights for each."""
    network, shapes, real = make({"hidden": (8,)}, 2), [], torch.baddbmm

    def noted(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return real(bias, x, weight)

    monkeypatch.setattr(torch, "baddbmm", noted)
    torch.func.vmap(network)(torch.randn(5, ROWS, INPUTS, dtype=torch.float64))
    assert shapes == [
        ((2, 5 * ROWS, INPUTS), (2, INPUTS, 8)),
        ((2, 5 * ROWS, 8), (2, 8, OUTPUTS)),
    ]


@pytest.mark.parametrize("config", FUNCTORCH_BODIES, ids=str)
def test_functorch_over_parameters(config: dict[str, Any]) -> None:
    """An ensemble by functional_call, and gradients of each row by the weights."""
    torch.manual_seed(0)
    networks = [make_network(1, INPUTS, OUTPUTS, BodyConfig(**config)) for _ in range(3)]
    stacked, buffers = torch.func.stack_module_state(networks)
    x = torch.randn(ROWS, INPUTS)

    def call(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(networks[0], (parameters, buffers), (x,))

    close = {"rtol": 1e-5, "atol": 1e-6}
    outputs = torch.func.vmap(call, in_dims=(0, None))(stacked, x)
    torch.testing.assert_close(outputs, torch.stack([each(x) for each in networks]), **close)
    gradients = torch.func.vmap(
        torch.func.grad(lambda parameters, row: call(parameters, row.unsqueeze(0)).sum()),
        in_dims=(None, 0),
    )(dict(networks[0].named_parameters()), x)
    for row in range(ROWS):
        parameters = dict(networks[0].named_parameters())
        expected = torch.autograd.grad(networks[0](x[row : row + 1]).sum(), parameters.values())
        for name, gradient in zip(parameters, expected):
            torch.testing.assert_close(gradients[name][row], gradient, **close)


@pytest.mark.parametrize("grad", [False, True])
def test_replaced_parameters_are_computed_with(grad: bool) -> None:
    """By functional_call, a parametrisation, or load_state_dict(assign=True)."""
    torch.manual_seed(0)
    network, other = (make_network(1, INPUTS, OUTPUTS, BodyConfig(hidden=(8,))) for _ in range(2))
    x = torch.randn(ROWS, INPUTS)
    close = {"rtol": 1e-5, "atol": 1e-6}
    with torch.set_grad_enabled(grad):
        before = network(x)
        parameters = dict(network.named_parameters())
        last = {name: dict(other.named_parameters())[name] for name in list(parameters)[2:]}
        partly = torch.func.functional_call(network, last, (x,))
        assert not torch.allclose(partly, before)
        expected = other.layers[1](network.layers[0](x))
        torch.testing.assert_close(partly, expected, **close)
        torch.testing.assert_close(network(x), before, rtol=0, atol=0)
        network.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(network(x), other(x), **close)


@pytest.mark.parametrize("body", ["mlp", "bro", "simba", "unit", "dueling", "noisy"])
def test_the_last_layer_stays_in_float32(body: str) -> None:
    """A value near 700 would have steps of 4 in bf16."""
    torch.manual_seed(0)
    if body == "unit":
        network = make_unit_network(2, 5, 3, UnitBodyConfig(hidden=(8, 8)))
    elif body in ("dueling", "noisy"):
        config = QNetworkConfig(hidden=(8, 8), **{body: True})
        network = make_q_network(2, 5, 3, 1, config)
    else:
        network = make_network(2, 5, 3, BodyConfig(hidden=(8, 8), body=body))
    x = torch.randn(64, 5)
    expected = network(x)
    assert set_dtype(network, torch.bfloat16) > 0
    y = network(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.0, atol=0.1)
    assert (y != expected).any()
    rounded = y.to(torch.bfloat16).float()
    assert (y != rounded).float().mean() > 0.9
