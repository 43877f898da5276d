"""Unit networks against plain formulas in float64, and the lengths of their weights."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpurl.errors import UsageError
from gpurl.nn.batch_norm import batch_statistics
from gpurl.nn.mlp import Sequential, set_dtype
from gpurl.nn.unit_network import UnitBodyConfig, make_unit_network, project_

MEMBERS, ROWS, INPUTS, OUTPUTS, WIDTH = 2, 7, 3, 4, 5


def make(hidden: tuple[int, ...] = (WIDTH, WIDTH)) -> Sequential:
    torch.manual_seed(0)
    return make_unit_network(MEMBERS, INPUTS, OUTPUTS, UnitBodyConfig(hidden=hidden))


def disturb(network: Sequential) -> None:
    """As an optimiser step of half their size does."""
    for parameter in network.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)


def member_output(parameters: dict[str, Tensor], x: Tensor, blocks: int) -> Tensor:
    """[B, OUTPUTS] of one member, whose parameters have their names in the module."""

    def norm(x: Tensor, at: str) -> Tensor:
        gain, shift = parameters[f"{at}.gain"][0], parameters[f"{at}.shift"][0]
        return functional.batch_norm(x, None, None, gain, shift, training=True)

    x = norm(x, "layers.0") @ parameters["layers.1.weight"].T
    for block in range(2, 2 + blocks):
        at = f"layers.{block}.layers"
        y = torch.relu(norm(x @ parameters[f"{at}.0.weight"].T, f"{at}.1"))
        x = x + torch.relu(norm(y @ parameters[f"{at}.2.weight"].T, f"{at}.3"))
    gain = parameters[f"layers.{2 + blocks}.gain"][0]
    x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain
    last = f"layers.{3 + blocks}"
    return x @ parameters[f"{last}.weight"].T + parameters[f"{last}.bias"][0]


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_network_is_its_formula(blocks: int) -> None:
    network = make((WIDTH,) * blocks)
    disturb(network)
    x = torch.randn(ROWS, INPUTS)
    with batch_statistics(network):
        got = network(x)
    for member in range(MEMBERS):
        parameters = {name: value[member] for name, value in network.named_parameters()}
        torch.testing.assert_close(got[member], member_output(parameters, x, blocks))


def lengths(network: Sequential) -> dict[str, Tensor]:
    """Of rows of weights, and of gains and shifts together divided by sqrt(D)."""
    values = dict(network.named_parameters())
    found = dict[str, Tensor]()
    for name, value in values.items():
        if name.endswith("weight"):
            found[name] = torch.linalg.vector_norm(value, dim=-1)
        if name.endswith("gain"):
            shift = values.get(name.replace("gain", "shift"), torch.zeros(()))
            size = (value.square() + shift.square()).sum(-1).sqrt()
            found[name] = size / math.sqrt(value.shape[-1])
    return found


def test_every_length_is_1_at_the_start_and_after_projecting() -> None:
    network = make()
    for name, length in lengths(network).items():
        torch.testing.assert_close(length, torch.ones_like(length), msg=name)
    disturb(network)
    assert all((length - 1.0).abs().max() > 0.01 for length in lengths(network).values())
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    project_(network)
    found = lengths(network)
    assert len(found) == 6 + 6  # dense layers and norms
    for name, length in found.items():
        torch.testing.assert_close(length, torch.ones_like(length), msg=name)
    # the direction stays
    for name, value in network.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(value, before[name])
        elif name.endswith("weight"):
            cosine = functional.cosine_similarity(value, before[name], dim=-1)
            torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_projecting_changes_nothing_where_it_should_not() -> None:
    network = make()
    disturb(network)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    project_(network, torch.tensor(False))
    assert all(map(torch.equal, network.parameters(), before))


def test_a_zero_row_stays_finite() -> None:
    network = make()
    for parameter in network.parameters():
        parameter.data.zero_()
    project_(network)
    assert all((parameter == 0).all() for parameter in network.parameters())


def test_inner_layers_have_no_bias() -> None:
    network = make()
    names = [name for name, _ in network.named_parameters() if name.endswith("bias")]
    assert names == ["layers.5.bias"]
    assert not [name for name in network.state_dict() if name.endswith("bias")][1:]


def test_products_can_be_in_low_precision() -> None:
    network, x = make(), torch.randn(ROWS, INPUTS)
    expected = network(x)
    assert set_dtype(network, torch.bfloat16) == 5  # all but the last
    assert network(x).dtype == torch.float32
    assert 0.0 < (network(x) - expected).abs().max() < 0.1


def test_between_layers_everything_stays_in_low_precision() -> None:
    """But for the input's norm, the last norm and the last layer; gradients are near float32's."""
    network, x = make(), torch.randn(64, INPUTS)
    weight = torch.randn(MEMBERS, 64, OUTPUTS)
    dtypes = list[torch.dtype]()

    def gradient() -> Tensor:
        dtypes.clear()
        y = x
        with batch_statistics(network):
            for layer in network.layers:
                y = layer.forward(y)
                dtypes.append(y.dtype)
        parameters = [each for each in network.parameters() if each.requires_grad]
        of = torch.autograd.grad((y * weight).sum(), parameters)
        assert {each.dtype for each in of} == {torch.float32}
        return torch.cat([each.flatten() for each in of])

    expected = gradient()
    set_dtype(network, torch.bfloat16)
    got = gradient()
    assert 0.0 < (got - expected).norm() < 0.1 * expected.norm()
    low = y = torch.randn(MEMBERS, 64, WIDTH).bfloat16()
    norm = network.layers[-2]
    assert torch.equal(norm.forward(low), norm.forward(y.float()))
    assert dtypes == [torch.float32, *3 * [torch.bfloat16], *2 * [torch.float32]]


def test_the_shape_is_checked() -> None:
    with pytest.raises(UsageError, match="of one width, hidden is"):
        UnitBodyConfig(hidden=(8, 16))
    with pytest.raises(UsageError, match="body"):
        UnitBodyConfig(body="mlp")
    with pytest.raises(UsageError, match="leave out activation"):
        UnitBodyConfig(activation="tanh")
