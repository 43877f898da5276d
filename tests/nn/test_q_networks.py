"""Networks of action values: outputs and gradients against plain formulas under autograd, in
float64, and what each form means.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.mlp import Dense, Sequential, set_dtype
from gpurl.nn.q_networks import (
    ActionEmbedding,
    Dueling,
    ExpandToHeads,
    NoisyDense,
    QNetworkConfig,
    make_q_network,
)

ROWS, INPUTS, ACTIONS, ATOMS = 6, 4, 3, 2
SHAPES: list[dict[str, Any]] = [
    {},
    {"dueling": True},
    {"noisy": True},
    {"noisy": True, "dueling": True, "layer_norm": True},
    {"heads": 4},
    {"heads": 4, "dueling": True},
    {"action_embedding": 5},
    {"action_embedding": 5, "heads": 3},
    {"hidden": (6,), "heads": 2},
    {"hidden": (6, 6), "body": "simba", "dueling": True},
    {"hidden": (6,), "body": "bro", "noisy": True},
]


def plain(step: Any, x: Tensor, noise: CounterRandom | None) -> Tensor:
    """The network as autograd can follow it: every step by the formula of its docstring."""
    if isinstance(step, Dueling):
        value, advantage = plain(step.value, x, noise), plain(step.advantage, x, noise)
        advantage = advantage.view(*advantage.shape[:2], ACTIONS, -1)
        return (value.unsqueeze(2) + advantage - advantage.mean(2, keepdim=True)).flatten(2)
    if isinstance(step, ExpandToHeads):
        return torch.stack([x.reshape(ROWS, -1)] * step.members)
    if isinstance(step, ActionEmbedding):
        outputs = []
        for member in range(step.embedding.shape[0]):
            features = x if x.dim() == 2 else x[member if x.shape[0] > 1 else 0]
            each = [
                torch.cat((features, step.embedding[member, a].expand(ROWS, -1)), 1)
                for a in range(ACTIONS)
            ]
            stacked = torch.stack(
                [torch.cat([row[i : i + 1] for row in each]) for i in range(ROWS)]
            ).flatten(0, 1)
            outputs.append(stacked)
        return plain(step.head, torch.stack(outputs), noise).reshape(len(outputs), ROWS, -1)
    if isinstance(step, Dense):
        z = (
            torch.einsum("ebi,eoi->ebo", x.expand(step.weight.shape[0], *x.shape[-2:]), step.weight)
            + step.bias
        )
        if isinstance(step, NoisyDense) and noise is not None:
            drawn = noise.normal((step.weight.shape[2] + step.weight.shape[1],)).double()
            factor = drawn.sign() * drawn.abs().sqrt()
            e_in, e_out = factor[:, : step.weight.shape[2]], factor[:, step.weight.shape[2] :]
            # the explicit form: a weight matrix of each row
            weight = torch.einsum("eoi,bo,bi->eboi", step.noise_weight, e_out, e_in)
            z = (
                z
                + torch.einsum("eboi,ebi->ebo", weight, x.expand(z.shape[0], *x.shape[-2:]))
                + step.noise_bias * e_out
            )
        if step.norm is not None:
            z = torch.nn.functional.layer_norm(z, z.shape[-1:]) * step.norm.gain + step.norm.shift
        return torch.relu(z) if step.activation == "relu" else z
    if isinstance(step, Sequential):
        y = x
        for inner in step.layers:
            y = plain(inner, y, noise)
        return x + y if type(step).__name__ == "Residual" else y
    return torch.nn.functional.layer_norm(x, x.shape[-1:]) * step.gain + step.shift


@pytest.mark.parametrize("with_noise", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_the_formulas_and_so_are_their_gradients(
    shape: dict[str, Any], with_noise: bool
) -> None:
    torch.manual_seed(0)
    config = QNetworkConfig(**{"hidden": (6, 5)} | shape)
    network = make_q_network(1 if config.heads > 1 else 2, INPUTS, ACTIONS, ATOMS, config).double()
    members = config.heads if config.heads > 1 else 2
    x = torch.randn(ROWS, INPUTS, dtype=torch.float64, requires_grad=True)
    of_output = torch.randn(members, ROWS, ACTIONS * ATOMS, dtype=torch.float64)
    noise = [CounterRandom(7, ROWS) if with_noise else None for _ in range(2)]
    expected = plain(network, x, noise[0])
    output = network(x, noise[1])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    inputs = [*network.parameters(), x]
    slopes = torch.autograd.grad((expected * of_output).sum(), inputs, allow_unused=True)
    for got, slope in zip(
        torch.autograd.grad(output, inputs, of_output, allow_unused=True), slopes, strict=True
    ):
        if got is None or slope is None:  # the noise's own, without noise
            assert got is slope
        else:
            torch.testing.assert_close(got, slope, rtol=1e-9, atol=1e-10)


def test_noise_is_new_each_draw_different_in_each_row_and_absent_without() -> None:
    torch.manual_seed(0)
    network = make_q_network(1, INPUTS, ACTIONS, 1, QNetworkConfig(hidden=(8,), noisy=True))
    x, random = torch.ones(50, INPUTS), CounterRandom(0, 50)
    with torch.no_grad():
        first = network(x, random)
        second = network(x, random)
        greedy = network(x)
    assert float(first[0, :, 0].std()) > 0.01
    assert float((first - second).abs().min()) > 0.0
    assert float(greedy[0, :, 0].std()) < 1e-6


def test_a_noisy_layer_computes_in_bfloat16_too() -> None:
    torch.manual_seed(0)
    network, x = (
        make_q_network(1, INPUTS, ACTIONS, 1, QNetworkConfig(hidden=(16,), noisy=True)),
        torch.randn(50, INPUTS),
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        set_dtype(network, dtype)
        output = network(x, CounterRandom(0, 50))
        gradients = torch.autograd.grad(output.sum(), list(network.parameters()))
        results.append([output.detach(), *gradients])
    for exact, rounded in zip(*results):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05 * float(exact.abs().max()))
    assert float((results[0][0] - results[1][0]).abs().max()) > 1e-4


def test_the_noise_starts_as_a_share_of_the_inputs_root_and_the_last_layer_has_no_activation() -> (
    None
):
    """Fortunato et al. 2018, section 3.2."""
    network = make_q_network(
        2,
        INPUTS,
        ACTIONS,
        1,
        QNetworkConfig(hidden=(16, 9), noisy=True, noise_scale=0.3, dueling=True),
    )
    layers = [layer for layer in network.modules() if isinstance(layer, Dense)]
    assert [type(layer) for layer in layers] == [Dense] + [NoisyDense] * 4
    assert [layer.activation for layer in layers] == ["relu", "relu", "none", "relu", "none"]
    for layer in layers:
        if isinstance(layer, NoisyDense):
            for noise in (layer.noise_weight, layer.noise_bias):
                torch.testing.assert_close(
                    noise.detach(), torch.full_like(noise, 0.3 / layer.weight.shape[2] ** 0.5)
                )


def test_a_head_learns_by_itself_and_the_trunk_from_all() -> None:
    torch.manual_seed(0)
    network = make_q_network(1, INPUTS, ACTIONS, 1, QNetworkConfig(hidden=(6, 5), heads=3))
    gradient = torch.zeros(3, ROWS, ACTIONS)
    gradient[1] = 1.0
    y = network(torch.randn(ROWS, INPUTS))
    of_trunk, _, *of_heads = torch.autograd.grad(y, list(network.parameters()), gradient)
    assert float(of_trunk.abs().max()) > 0
    for of_head in of_heads:
        assert float(of_head[[0, 2]].abs().max()) == 0.0
        assert float(of_head[1].abs().max()) > 0.0


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"leave out dueling and noisy"):
        QNetworkConfig(action_embedding=4, dueling=True)
    with pytest.raises(UsageError, match=r"noise_scale above 0, got 0, 0 and 0.5"):
        QNetworkConfig(heads=0)
