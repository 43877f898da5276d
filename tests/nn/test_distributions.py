"""Policy heads against torch.distributions, quadrature and their own samples."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.distributions import Gaussian, Head, TanhGaussian, make_head

BOX = Box(-1.0, 1.0, (2,), np.float32)


def entropy_of(head: Head, output: torch.Tensor) -> torch.Tensor:
    return head.evaluate(output, head.mode(output))[1]


@pytest.mark.parametrize(
    ("space", "squash"),
    [(BOX, False), (BOX, True), (Discrete(5), False), (MultiDiscrete([2, 3, 4]), False)],
)
def test_the_gradient_written_out_is_autograds(space: object, squash: bool) -> None:
    torch.manual_seed(0)
    head = make_head(space, squash, initial_std=0.7).double()  # type: ignore[arg-type]
    output = torch.randn(50, head.num_outputs, dtype=torch.float64, requires_grad=True)
    action, _ = head.sample(output.detach().float(), CounterRandom(3, 50))
    action = action.detach().double() if action.is_floating_point() else action
    for parameter in head.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    log_prob, entropy, backward = head.evaluate(output, action)
    # its entropy moves with an action that moves with the policy, its log-probability is of an
    # action that stays
    if squash:
        assert isinstance(head, TanhGaussian)
        std = head.bounded_log_std().exp()
        entropy = head.evaluate(output, output + std * ((action - output) / std).detach())[1]
    of_log_prob = torch.randn(50, dtype=torch.float64)
    of_entropy = torch.randn(entropy.shape, dtype=torch.float64)
    leaves = [output, *head.parameters()]
    wanted = torch.autograd.grad(
        (log_prob * of_log_prob).sum() + (entropy * of_entropy).sum(), leaves
    )
    with torch.no_grad():
        got = [
            backward(of_log_prob, of_entropy),
            *(parameter.grad for parameter in head.parameters()),
        ]
    for ours, autograds in zip(got, wanted):
        torch.testing.assert_close(ours, autograds, rtol=1e-9, atol=1e-10)


def test_a_standard_deviation_at_its_limit_is_not_moved() -> None:
    head = Gaussian(BOX)
    head.log_std.data = torch.tensor([5.0, 0.0])
    head.log_std.grad = torch.full((2,), torch.nan)
    with torch.no_grad():
        _, _, backward = head.evaluate(torch.zeros(3, 2), torch.ones(3, 2))
        backward(torch.ones(3), torch.tensor(1.0))
    assert head.log_std.grad[0] == 0.0
    assert head.log_std.grad[1] != 0.0


@pytest.mark.parametrize(
    "space", [BOX, Box(-2.0, 4.0, (1,), np.float32), Discrete(5), MultiDiscrete([2, 3, 4])]
)
def test_sampling_gives_the_log_prob_of_what_it_sampled(space: object) -> None:
    torch.manual_seed(0)
    head = make_head(space, initial_std=0.7)  # type: ignore[arg-type]
    output = torch.randn(300, head.num_outputs)
    action, log_prob = head.sample(output, CounterRandom(3, 300))
    torch.testing.assert_close(
        head.log_prob(output, action).detach(), log_prob.detach(), rtol=1e-5, atol=1e-5
    )


def test_categorical_samples_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    head = make_head(Discrete(4))
    action, _ = head.sample(logits.expand(200_000, 4), CounterRandom(0, 200_000))
    frequency = torch.bincount(action, minlength=4) / 200_000
    torch.testing.assert_close(frequency, logits.softmax(0), atol=0.005, rtol=0)
    peer = torch.distributions.Categorical(logits=logits)
    assert float(entropy_of(head, logits)) == pytest.approx(float(peer.entropy()), rel=1e-6)
    assert int(head.mode(logits)) == 3


def test_multi_categorical_sums_its_parts() -> None:
    head = make_head(MultiDiscrete([2, 3]))
    output, action = torch.randn(7, 5), torch.tensor([[1, 2]] * 7)
    parts = [
        torch.distributions.Categorical(logits=logits) for logits in output.split([2, 3], dim=1)
    ]
    torch.testing.assert_close(
        head.log_prob(output, action),
        parts[0].log_prob(action[:, 0]) + parts[1].log_prob(action[:, 1]),
    )
    torch.testing.assert_close(entropy_of(head, output), parts[0].entropy() + parts[1].entropy())


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("log_std", [-1e3, -6.0, 2.5, 1e3])
def test_a_deviation_far_beyond_its_limits_stays_finite_and_comes_back(
    log_std: float, squash: bool
) -> None:
    """It has no gradient there; brought back to the limit, which PPO does each iteration, it moves
    again.
    """
    head = (TanhGaussian if squash else Gaussian)(Box(-1.0, 1.0, (2,), np.float32))
    head.log_std.grad = torch.zeros(2)
    output, rng = torch.zeros(16, 2), CounterRandom(0, 16, torch.device("cpu"))
    with torch.no_grad():
        head.log_std.fill_(log_std)
        for is_back in (False, True):
            action, log_prob = head.sample(output, rng)
            found, entropy, backward = head.evaluate(output, action)
            gradient = backward(torch.ones(16), torch.full((16,), 0.1))
            assert all(
                bool(x.isfinite().all())
                for x in (action, log_prob, found, entropy, gradient, head.log_std.grad)
            )
            assert bool(head.log_std.grad.any()) == is_back
            head.stay_inside()
        assert head.log_std.tolist() == [-5.0 if log_std < 0 else 2.0] * 2


def test_a_deviation_beyond_its_limits_cannot_be_asked_for() -> None:
    for std in (1e-3, 8.0):
        with pytest.raises(
            UsageError,
            match=rf"initial_std must be from 0.0067 to 7.4, between which the deviation stays, "
            rf"got {std}",
        ):
            Gaussian(BOX, initial_std=std)


def test_gaussian_entropy_samples_and_limits() -> None:
    head = Gaussian(BOX, initial_std=0.5)
    peer = torch.distributions.Normal(torch.zeros(2), 0.5)
    assert float(entropy_of(head, torch.zeros(4, 2)).detach()) == pytest.approx(
        float(peer.entropy().sum()), rel=1e-6
    )
    action, _ = head.sample(torch.ones(100_000, 2), CounterRandom(0, 100_000))
    assert action.mean(0).detach().numpy() == pytest.approx([1.0, 1.0], abs=0.01)
    assert action.std(0).detach().numpy() == pytest.approx([0.5, 0.5], abs=0.01)
    head.log_std.data.fill_(50.0)
    assert float(head.bounded_log_std()[0].detach()) == 2.0


def test_box_actions_are_clipped_and_scaled_on_the_way_out_only() -> None:
    head = Gaussian(Box(np.float32([-2.0, 0.0]), np.float32([2.0, 10.0])))
    raw = torch.tensor([[0.5, 0.5], [7.0, -7.0]])
    assert head.to_env(raw).tolist() == [[1.0, 7.5], [2.0, 0.0]]
    free = Gaussian(Box(-np.inf, np.inf, (2,), np.float32))
    assert torch.equal(free.to_env(raw), raw)
    mixed = Gaussian(
        Box(np.float32([-np.inf, -1e30]), np.float32([2.0, 1e30]))
    )  # one limit, and limits that limit nothing
    assert torch.equal(mixed.to_env(raw), torch.tensor([[0.5, 0.5], [2.0, -7.0]]))
    grid = Gaussian(Box(-1.0, 1.0, (2, 3), np.float32))
    assert grid.to_env(torch.zeros(4, 6)).shape == (4, 2, 3)


def test_squashed_density_integrates_to_one() -> None:
    head = TanhGaussian(Box(-1.0, 1.0, (1,), np.float32), initial_std=0.8)
    head.double()
    a = torch.linspace(-1 + 1e-7, 1 - 1e-7, 400_001, dtype=torch.float64)
    density = head.log_prob(
        torch.full((400_001, 1), 0.3, dtype=torch.float64), torch.atanh(a).unsqueeze(1)
    ).exp()
    assert float(torch.trapezoid(density, a).detach()) == pytest.approx(1.0, abs=1e-4)


def test_squashed_log_prob_is_exact_far_out() -> None:
    """At u = 8 the naive log(1 - tanh(u)^2 + 1e-6) is off by more than 1; float64 has -14.6137 for
    the slope.
    """
    head = TanhGaussian(Box(-1.0, 1.0, (1,), np.float32))
    u = torch.tensor([[8.0]])
    exact = 2 * (math.log(2.0) - 8.0 - math.log1p(math.exp(-16.0)))
    assert float((head.log_prob(u, u)).detach()) == pytest.approx(
        -0.5 * math.log(2 * math.pi) - exact, rel=1e-6
    )


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.5), (0.0, 2.0), (1.0, 1.0), (-0.5, 5.0)])
def test_the_squashed_entropy_and_its_slopes_are_those_of_the_integral(
    mean: float, std: float
) -> None:
    def integral(mean: float, std: float) -> float:
        """Entropy in nats of tanh(u), u normal: that of u and the mean log slope of tanh."""
        z = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
        u, density = mean + std * z, torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        log_slope = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
        return (
            math.log(std)
            + 0.5 * math.log(2 * math.pi * math.e)
            + float(torch.trapezoid(log_slope * density, z))
        )

    rows, step = 200_000, 1e-4
    head = TanhGaussian(Box(-1.0, 1.0, (1,), np.float32), initial_std=std).double()
    head.log_std.grad = torch.full_like(head.log_std, torch.nan)
    output = torch.full((rows, 1), mean, dtype=torch.float64)
    with torch.no_grad():
        action, _ = head.sample(output, CounterRandom(5, rows))
        _, entropy, backward = head.evaluate(output, action)
        of_output = backward(
            torch.zeros(rows, dtype=torch.float64),
            torch.full((rows,), 1.0 / rows, dtype=torch.float64),
        )
    assert float(entropy.mean()) == pytest.approx(integral(mean, std), abs=0.03)
    of_mean = (integral(mean + step, std) - integral(mean - step, std)) / (2 * step)
    of_log_std = (integral(mean, std * math.exp(step)) - integral(mean, std * math.exp(-step))) / (
        2 * step
    )
    assert float(of_output.sum()) == pytest.approx(of_mean, abs=0.02)
    assert float(head.log_std.grad[0]) == pytest.approx(of_log_std, abs=0.03)


def test_spaces_without_a_head_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"PPO needs a Box of at least one number, a Discrete or .* action space, this one "
        r"is Dict",
    ):
        make_head(Dict({"a": Discrete(2)}), algorithm="PPO")
    for space in (MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete([2, 3], start=[1, 0])):
        with pytest.raises(UsageError, match="from 0 and in one row"):
            make_head(space)
    with pytest.raises(UsageError, match="at least one number"):
        make_head(Box(-1.0, 1.0, (0,), np.float32))
    with pytest.raises(UsageError, match="bounded Box"):
        make_head(Box(-np.inf, np.inf, (2,), np.float32), squash=True)
    with pytest.raises(
        UsageError,
        match=r"squash is for continuous actions, a Box; this action space is Discrete\(4\)",
    ):
        make_head(Discrete(4), squash=True)
