"""Networks of action values: backward passes against finite plain formulas under autograd, in
float64, and what each form means.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.ensemble import Dense, Stack, Tape, set_dtype
from gpurl.nn.q_networks import (
    ActionEmbedding,
    Dueling,
    Fan,
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
    if isinstance(step, Fan):
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
    if isinstance(step, Stack):
        y = x
        for inner in step.steps:
            y = plain(inner, y, noise)
        return x + y if type(step).__name__ == "Residual" else y
    return torch.nn.functional.layer_norm(x, x.shape[-1:]) * step.gain + step.shift


@pytest.mark.parametrize("with_noise", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_is_the_gradient(shape: dict[str, Any], with_noise: bool) -> None:
    torch.manual_seed(0)
    config = QNetworkConfig(**{"hidden": (6, 5)} | shape)
    network = make_q_network(1 if config.heads > 1 else 2, INPUTS, ACTIONS, ATOMS, config).double()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    members = config.heads if config.heads > 1 else 2
    x = torch.randn(ROWS, INPUTS, dtype=torch.float64, requires_grad=True)
    of_output = torch.randn(members, ROWS, ACTIONS * ATOMS, dtype=torch.float64)
    noise = [CounterRandom(7, ROWS) if with_noise else None for _ in range(2)]
    wanted = plain(network, x, noise[0])
    tape = Tape()
    with torch.inference_mode():
        output = network.forward(x.detach(), tape, noise[1])
        by_input = network.backward(of_output.clone(), tape).sum(0)
    assert not tape
    torch.testing.assert_close(output, wanted.detach(), rtol=1e-10, atol=1e-11)
    parameters = list(network.parameters())
    slopes = torch.autograd.grad((wanted * of_output).sum(), [*parameters, x], allow_unused=True)
    torch.testing.assert_close(by_input, slopes[-1], rtol=1e-9, atol=1e-10)
    for parameter, slope in zip(parameters, slopes):
        wanted_slope = (
            torch.zeros_like(parameter) if slope is None else slope
        )  # the noise's own, without noise
        torch.testing.assert_close(parameter.grad, wanted_slope, rtol=1e-9, atol=1e-10)


def test_noise_is_new_each_draw_different_in_each_row_and_absent_without() -> None:
    torch.manual_seed(0)
    network = make_q_network(1, INPUTS, ACTIONS, 1, QNetworkConfig(hidden=(8,), noisy=True))
    x, random = torch.ones(50, INPUTS), CounterRandom(0, 50)
    with torch.inference_mode():
        first = network.forward(x, None, random)
        second = network.forward(x, None, random)
        greedy = network.forward(x)
    assert float(first[0, :, 0].std()) > 0.01
    assert float((first - second).abs().min()) > 0.0
    assert float(greedy[0, :, 0].std()) < 1e-6


def test_a_noisy_layer_computes_in_bfloat16_too() -> None:
    torch.manual_seed(0)
    network, x = (
        make_q_network(1, INPUTS, ACTIONS, 1, QNetworkConfig(hidden=(16,), noisy=True)),
        torch.randn(50, INPUTS),
    )
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        set_dtype(network, dtype)
        tape = Tape()
        with torch.inference_mode():
            output = network.forward(x, tape, CounterRandom(0, 50))
            network.backward(torch.ones(1, 50, ACTIONS), tape)
        results.append(
            [
                output,
                *(
                    parameter.grad.clone()
                    for parameter in network.parameters()
                    if parameter.grad is not None
                ),
            ]
        )
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
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tape, gradient = Tape(), torch.zeros(3, ROWS, ACTIONS)
    gradient[1] = 1.0
    with torch.inference_mode():
        network.forward(torch.randn(ROWS, INPUTS), tape)
        network.backward(gradient, tape)
    trunk, *heads = network.parameters()
    assert trunk.grad is not None
    assert float(trunk.grad.abs().max()) > 0
    for parameter in heads[1:]:
        assert parameter.grad is not None
        assert float(parameter.grad[[0, 2]].abs().max()) == 0.0
        assert float(parameter.grad[1].abs().max()) > 0.0


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"leave out dueling and noisy"):
        QNetworkConfig(action_embedding=4, dueling=True)
    with pytest.raises(UsageError, match=r"noise_scale above 0, got 0, 0 and 0.5"):
        QNetworkConfig(heads=0)
