"""Squashed Gaussian actions against torch.distributions, quadrature and autograd, in float64."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from gpurl.squash import LOG_STD_LIMITS, squashed_backward, squashed_mode, squashed_sample


def numbers(rows: int = 50, actions: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 2 * actions, dtype=torch.float64).clamp(max=2.0), torch.randn(rows, actions, dtype=torch.float64)


def test_drawing_and_log_probability_are_those_of_torch() -> None:
    output, noise = numbers()
    drawn = squashed_sample(output, noise)
    mean, log_std = output.chunk(2, -1)
    distribution = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    torch.testing.assert_close(drawn.action, torch.tanh(mean + log_std.exp() * noise))
    torch.testing.assert_close(drawn.log_prob, distribution.log_prob(drawn.action).sum(-1), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(squashed_mode(output), mean.tanh())


@pytest.mark.parametrize("u", [-20.0, -8.0, -1e-3, 0.0, 5.0, 12.0, 20.0])
def test_log_probability_far_out(u: float) -> None:
    """log(1 - tanh^2 u) = 2 (log 2 - |u|) + O(e^-2|u|) where tanh itself is 1 to float32."""
    output = torch.tensor([[u, 0.0]])
    found = float(squashed_sample(output, torch.zeros(1, 1)).log_prob)
    exact = torch.tensor(u, dtype=torch.float64)
    slope = 2.0 * (torch.log(torch.tensor(2.0, dtype=torch.float64)) - exact - torch.nn.functional.softplus(-2.0 * exact))
    assert found == pytest.approx(-0.9189385332046727 - float(slope), rel=1e-6)


def test_density_integrates_to_one() -> None:
    u = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64)
    mean, log_std = 0.4, -0.3
    output = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(u), 2)
    drawn = squashed_sample(output, ((u - mean) / torch.tensor(log_std, dtype=torch.float64).exp()).unsqueeze(1))
    slope = 1.0 - u.tanh() ** 2  # da = (1 - tanh^2 u) du
    assert float(torch.trapezoid(drawn.log_prob.exp() * slope, u)) == pytest.approx(1.0, abs=1e-9)


def test_backward_is_the_gradient() -> None:
    output, noise = numbers()
    output[:5, 3:] = 10.0  # beyond the limits
    output[5:10, 3:] = -9.0
    leaf = output.clone().requires_grad_()
    drawn = squashed_sample(leaf, noise)
    of_action, of_log_prob = torch.randn_like(drawn.action), torch.randn(len(noise), 1, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((drawn.action * of_action).sum() + (drawn.log_prob * of_log_prob.squeeze(1)).sum(), leaf)
    got = squashed_backward(squashed_sample(output, noise), of_action, of_log_prob)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert float(got[:10, 3:].abs().max()) == 0.0
    assert LOG_STD_LIMITS == (-5.0, 2.0)
    constant = squashed_backward(squashed_sample(output, noise), of_action, 0.7)
    (wanted,) = torch.autograd.grad(
        (squashed_sample(leaf, noise).action * of_action).sum() + 0.7 * squashed_sample(leaf, noise).log_prob.sum(), leaf
    )
    torch.testing.assert_close(constant, wanted, rtol=1e-10, atol=1e-12)
