"""Squashed Gaussian actions against torch.distributions, quadrature and autograd, in float64."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from gpurl.squash import LOG_STD_LIMITS, squashed_backward, squashed_likelihood, squashed_mode, squashed_sample


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


def test_likelihood_of_what_others_did_is_that_of_torch_and_so_is_its_gradient() -> None:
    output, noise = numbers()
    action = noise.mul(0.5).tanh()
    leaf = output.clone().requires_grad_()
    mean, log_std = leaf.chunk(2, -1)
    wanted = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(action).sum(-1)
    (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
    log_prob, got = squashed_likelihood(output, action)
    torch.testing.assert_close(log_prob, wanted.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-10)


def test_a_deviation_beyond_its_limits_is_led_back_and_never_further_out() -> None:
    log_std = torch.tensor([-9.0, -9.0, 5.0, 5.0, -4.9])
    u = torch.tensor([0.5, 0.0, 1.0, 80.0, 0.0])  # far, at the mean; near, far; at the mean, within the limits
    output = torch.stack((torch.zeros(5), log_std), 1)
    _, gradient = squashed_likelihood(output, u.clamp(max=7.0).tanh().unsqueeze(1))
    slopes = gradient[:, 1].tolist()
    assert slopes[0] > 1.0  # a wider one would be likelier
    assert slopes[1] == 0.0
    assert slopes[2] < -0.5
    assert slopes[3] == pytest.approx((7.0 / 2.718281828**2) ** 2 - 1.0, abs=1e-2)
    assert slopes[4] == -1.0


def test_actions_at_the_limits_are_finite() -> None:
    output = torch.zeros(2, 2)
    log_prob, gradient = squashed_likelihood(output, torch.tensor([[1.0], [-1.0]]))
    assert bool(log_prob.isfinite().all())
    torch.testing.assert_close(gradient[:, 0], torch.tensor([1.0, -1.0]) * 7.254329, rtol=1e-2, atol=0)  # atanh(1 - 1e-6)
