"""Policy heads against torch.distributions, quadrature and their own samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from gpurl.buffers.minibatches import Minibatch
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.losses import ppo_loss
from gpurl.nn.distributions import (
    Beta,
    Categorical,
    Gaussian,
    Head,
    TanhGaussian,
    gamma_sample,
    make_head,
)

BOX = Box(-1.0, 1.0, (2,), np.float32)


def entropy_of(head: Head, output: torch.Tensor) -> torch.Tensor:
    return head.log_prob_and_entropy(output, head.mode(output))[1]


SCALAR: dict[str, Any] = {"std_type": "scalar"}
BY_STATE: dict[str, Any] = {"state_dependent_std": True}
# a space and the options of its head
PEERS: list[tuple[object, dict[str, Any]]] = [
    *(
        (BOX, {"squash": squash} | options)
        for squash in (False, True)
        for options in ({}, SCALAR, BY_STATE, SCALAR | BY_STATE)
    ),
    (BOX, {"distribution": "beta"}),
    (Discrete(5), {}),
    (MultiDiscrete([2, 3, 4]), {}),
]
STD = 0.7  # at the start


def normal_of(head: Gaussian, output: torch.Tensor) -> torch.distributions.Normal:
    """The normal distribution of a head that began at STD, by what its options say."""
    if not head.state_dependent_std:
        std = head.log_std.exp() if head.std_type == "log" else head.std
        return torch.distributions.Normal(output, std)
    mean, change = output.chunk(2, dim=-1)
    std = STD * change.exp() if head.std_type == "log" else STD + change
    return torch.distributions.Normal(mean, std)


def peer_of(
    head: Head, output: torch.Tensor, action: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch.distributions; of a squashed policy the entropy is estimated by an action
    that moves with it.
    """
    if isinstance(head, Beta):
        alpha, beta = (torch.nn.functional.softplus(output) + 1.0).chunk(2, dim=-1)
        scale = torch.distributions.AffineTransform(-1.0, 2.0)
        peer = torch.distributions.Beta(alpha, beta)
        scaled = torch.distributions.TransformedDistribution(peer, scale)
        return scaled.log_prob(action).sum(-1), (peer.entropy() + math.log(2.0)).sum(-1)
    if isinstance(head, Gaussian):
        normal = normal_of(head, output)
        if not isinstance(head, TanhGaussian):
            return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)
        tanh = torch.distributions.TanhTransform()
        slope = tanh.log_abs_det_jacobian(action, action.tanh()).sum(-1)
        z = ((action - normal.mean) / normal.scale).detach()
        moving = normal.mean + normal.scale * z
        of_moving = tanh.log_abs_det_jacobian(moving, moving.tanh()).sum(-1)
        return normal.log_prob(action).sum(-1) - slope, normal.entropy().sum(-1) + of_moving
    sizes = [head.num_outputs] if action.dim() == 1 else [2, 3, 4]
    parts = [torch.distributions.Categorical(logits=x) for x in output.split(sizes, -1)]
    choices = action.unsqueeze(-1) if action.dim() == 1 else action
    log_prob = sum(part.log_prob(x) for part, x in zip(parts, choices.unbind(-1)))
    return log_prob, sum(part.entropy() for part in parts)


@pytest.mark.parametrize(("space", "options"), PEERS, ids=str)
def test_log_prob_entropy_and_their_gradients_are_those_of_torch_distributions(
    space: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    head = make_head(space, initial_std=STD, **options).double()
    output = torch.randn(50, head.num_outputs, dtype=torch.float64)
    if options.get("std_type") == "scalar" and options.get("state_dependent_std"):
        output[:, 2:] = 0.9 * STD * output[:, 2:].tanh()  # std = STD + change stays above 0
    output.requires_grad_()
    action, _ = head.sample(output.detach().float(), CounterRandom(3, 50))
    action = action.detach().double() if action.is_floating_point() else action
    of_log_prob, of_entropy = torch.randn(2, 50, dtype=torch.float64)
    found = []
    for log_prob, entropy in (
        head.log_prob_and_entropy(output, action),
        peer_of(head, output, action),
    ):
        total = (log_prob * of_log_prob).sum() + (entropy * of_entropy).sum()
        gradients = torch.autograd.grad(total, [output, *head.parameters()])
        found.append([log_prob, entropy.expand(50), *gradients])
    for got, expected in zip(*found):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("space", "options"), PEERS, ids=str)
@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_the_loss_of_a_head_is_that_of_its_log_prob_and_entropy(
    space: Any, options: dict[str, Any], value_clip: float | None
) -> None:
    """In whatever form it is computed, over steps and over sequences."""
    head = make_head(space, initial_std=STD, **options)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(24, head.num_outputs, generator=generator).requires_grad_()
    with torch.no_grad():
        action, log_prob = head.sample(output, CounterRandom(3, 24))
    columns = torch.randn(5, 24, generator=generator)
    value = columns[0].clone().requires_grad_()
    old = log_prob + 0.2 * columns[1]
    numbers = torch.tensor(0.2), torch.tensor(0.01), 0.5, value_clip
    batch = Minibatch(torch.empty(0), action, old, *columns[2:])
    loss, parts = head.ppo_loss(output, value, batch, *numbers)
    expected, wanted_parts = ppo_loss(
        head.log_prob_and_entropy(output, action)[0],
        value,
        head.log_prob_and_entropy(output, action)[1],
        batch,
        *numbers,
    )
    sequences = Minibatch(
        *(x.unflatten(0, (4, 6)) if x.numel() else x for x in vars(batch).values() if x is not None)
    )
    again, _ = head.ppo_loss(
        output.unflatten(0, (4, 6)), value.unflatten(0, (4, 6)), sequences, *numbers
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(parts, wanted_parts)
    leaves = [output, value, *head.parameters()]
    gradients = [torch.autograd.grad(x, leaves) for x in (loss, expected, again)]
    for got, want, also in zip(*gradients):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(also, want)


def test_kernels_take_no_subclass_for_the_distribution_they_know() -> None:
    class Wide(Gaussian):
        """Whose density is another one."""

    assert Gaussian(BOX).has_kernels
    assert Categorical(3).has_kernels
    assert not Wide(BOX).has_kernels
    assert not TanhGaussian(BOX).has_kernels
    for options in (SCALAR, BY_STATE, {"distribution": "beta"}):
        assert not make_head(BOX, **options).has_kernels


def test_a_standard_deviation_beyond_its_limit_is_not_moved() -> None:
    head = Gaussian(BOX)
    head.log_std.data = torch.tensor([5.0, 0.0])
    log_prob, entropy = head.log_prob_and_entropy(torch.zeros(3, 2), torch.ones(3, 2))
    (gradient,) = torch.autograd.grad(log_prob.sum() + 2.0 * entropy, head.log_std)
    assert gradient[0] == 0.0
    assert gradient[1] != 0.0


@pytest.mark.parametrize(
    ("space", "options"), [*PEERS, (Box(-2.0, 4.0, (1,), np.float32), {})], ids=str
)
def test_sampling_gives_the_log_prob_of_what_it_sampled(
    space: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    head = make_head(space, initial_std=STD, **options)
    output = torch.randn(300, head.num_outputs)
    action, log_prob = head.sample(output, CounterRandom(3, 300))
    torch.testing.assert_close(
        head.log_prob(output, action).detach(), log_prob.detach(), rtol=1e-5, atol=3e-5
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


def test_beta_samples_follow_the_density() -> None:
    """Of a flat, a lopsided and a narrow one, against the integral of torch's density."""
    rows, rng = 100_000, CounterRandom(3, 100_000)
    head = make_head(Box(-1.0, 1.0, (3,), np.float32), distribution="beta")
    alpha, beta = torch.tensor([1.0, 1.5, 60.0]), torch.tensor([1.0, 4.0, 30.0])
    # softplus(x) + 1 = alpha; 1 itself is the limit of -infinity
    output = torch.cat((alpha, beta)).sub(1.0).clamp(min=1e-6).expm1().log()
    action, log_prob = head.sample(output.expand(rows, 6), rng)
    assert bool((action.abs() < 1.0).all())
    grid = torch.linspace(0.0, 1.0, 20_001, dtype=torch.float64)[1:-1]
    for dim in range(3):
        peer = torch.distributions.Beta(alpha[dim].double(), beta[dim].double())
        cumulative = torch.cumulative_trapezoid(peer.log_prob(grid).exp(), grid)
        points = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.66, 0.75, 0.9])
        below = (0.5 * (action[:, dim] + 1.0) < points.unsqueeze(1)).float().mean(1)
        wanted = cumulative[(points * 20_000).long() - 1].float()
        torch.testing.assert_close(below, wanted, atol=0.006, rtol=0.0)
    assert float(-log_prob.mean()) == pytest.approx(float(entropy_of(head, output)), abs=0.02)
    # the greedy action and the deviation are those of the samples
    torch.testing.assert_close(head.mode(output), action.mean(0), atol=0.006, rtol=0.0)
    state_std = head.state_std(output)
    assert state_std is not None
    torch.testing.assert_close(state_std, action.std(0), atol=0.006, rtol=0.0)


def test_gamma_variates_follow_the_density_and_no_proposal_is_needed_twice() -> None:
    shape = torch.tensor([1.0, 1.7, 40.0]).expand(100_000, 3)
    draws = gamma_sample(shape, CounterRandom(1, 100_000))
    for dim, points in enumerate(((0.1, 1.0, 3.0), (0.3, 1.4, 4.0), (30.0, 40.0, 52.0))):
        for point in points:
            wanted = torch.special.gammainc(shape[0, dim], torch.tensor(point))
            below = (draws[:, dim] < point).float().mean()
            assert float(below) == pytest.approx(float(wanted), abs=0.006)


def test_beta_actions_span_the_box_and_extreme_outputs_stay_finite() -> None:
    head = make_head(Box(np.float32([-2.0, 0.0]), np.float32([2.0, 10.0])), distribution="beta")
    assert head.to_env(head.mode(torch.zeros(1, 4))).tolist() == [[0.0, 5.0]]
    output = torch.tensor([[1e4, -1e4, -1e4, 1e4]]).requires_grad_()
    assert head.to_env(head.mode(output.detach()))[0].tolist() == pytest.approx(
        [2.0, 0.0], abs=2e-3
    )
    action, _ = head.sample(output.detach(), CounterRandom(0, 1))
    edges = torch.tensor([[1.0, -1.0]])
    for each in (action, edges, -edges):
        log_prob, entropy = head.log_prob_and_entropy(output, each)
        (gradient,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), output)
        assert all(bool(x.isfinite().all()) for x in (log_prob, entropy, gradient))


@pytest.mark.parametrize("options", [{}, SCALAR, BY_STATE, SCALAR | BY_STATE], ids=str)
def test_every_standard_deviation_begins_where_it_should_and_stays_in_its_limits(
    options: dict[str, Any],
) -> None:
    head = make_head(BOX, initial_std=STD, **options)
    assert isinstance(head, Gaussian)
    output = torch.zeros(5, head.num_outputs)
    _, log_std = head.mean_and_log_std(output)
    torch.testing.assert_close(log_std.exp(), torch.full_like(log_std, STD))
    assert (head.state_std(output) is None) == (not head.state_dependent_std)
    # far beyond: the limits, whatever learns it
    for far, limit in ((-1e3, -5.0), (1e3, 2.0)):
        for parameter in head.parameters():
            parameter.data.fill_(far)
        far_output = torch.full_like(output, far)
        _, log_std = head.mean_and_log_std(far_output)
        torch.testing.assert_close(log_std, torch.full_like(log_std, limit))
        head.clamp_log_std_()
        for parameter in head.parameters():
            value = parameter if head.std_type == "log" else parameter.log()
            torch.testing.assert_close(value.detach(), torch.full((2,), limit))


def test_the_excess_of_means_is_that_of_rl_games() -> None:
    """Its soft bound is 1.1, squares are summed over actions; unbounded ones have no bound."""
    head = Gaussian(Box(np.float32([-2.0, -np.inf, 0.0]), np.float32([2.0, np.inf, 10.0])))
    means = torch.tensor([[1.1, 50.0, -1.1], [1.6, 50.0, -2.1], [-1.3, -50.0, 0.0]])
    wanted = torch.tensor([0.0, 0.5**2 + 1.0**2, 0.2**2])
    torch.testing.assert_close(head.excess(means), wanted)
    by_state = make_head(BOX, **BY_STATE)
    outputs = torch.tensor([[1.6, -0.5, 9.0, 9.0]])  # deviations have no bounds
    torch.testing.assert_close(by_state.excess(outputs), torch.tensor([0.25]))
    for other in (make_head(BOX, squash=True), make_head(BOX, distribution="beta")):
        with pytest.raises(UsageError, match=r"actions do not exceed: leave it out"):
            other.excess(torch.zeros(1, other.num_outputs))
    free = Gaussian(Box(-np.inf, np.inf, (2,), np.float32))
    with pytest.raises(UsageError, match="mean actions in the bounds of a Box, this one has none"):
        free.excess(torch.zeros(1, 2))


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("log_std", [-1e3, -6.0, 2.5, 1e3])
def test_a_deviation_far_beyond_its_limits_stays_finite_and_comes_back(
    log_std: float, squash: bool
) -> None:
    """It has no gradient there; brought back to the limit, which PPO does each iteration, it moves
    again.
    """
    head = (TanhGaussian if squash else Gaussian)(Box(-1.0, 1.0, (2,), np.float32))
    output, rng = torch.zeros(16, 2, requires_grad=True), CounterRandom(0, 16)
    head.log_std.data.fill_(log_std)
    for is_back in (False, True):
        action, log_prob = head.sample(output, rng)
        found, entropy = head.log_prob_and_entropy(output, action.detach())
        gradients = torch.autograd.grad(found.sum() + 0.1 * entropy.sum(), (output, head.log_std))
        numbers = (action, log_prob, found, entropy, *gradients)
        assert all(bool(x.isfinite().all()) for x in numbers)
        assert bool(gradients[1].any()) == is_back
        head.clamp_log_std_()
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
    output = torch.full((rows, 1), mean, dtype=torch.float64, requires_grad=True)
    action = head.sample(output, CounterRandom(5, rows))[0].detach()
    _, entropy = head.log_prob_and_entropy(output, action)
    of_output, of_std = torch.autograd.grad(entropy.mean(), (output, head.log_std))
    assert float(entropy.detach().mean()) == pytest.approx(integral(mean, std), abs=0.03)
    of_mean = (integral(mean + step, std) - integral(mean - step, std)) / (2 * step)
    of_log_std = (integral(mean, std * math.exp(step)) - integral(mean, std * math.exp(-step))) / (
        2 * step
    )
    assert float(of_output.sum()) == pytest.approx(of_mean, abs=0.02)
    assert float(of_std[0]) == pytest.approx(of_log_std, abs=0.03)


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
    for options in ({"squash": True}, {"distribution": "beta"}):
        with pytest.raises(UsageError, match="bounded Box"):
            make_head(Box(-np.inf, np.inf, (2,), np.float32), **options)  # type: ignore[arg-type]
    for options in ({"distribution": "beta"}, SCALAR, BY_STATE):
        with pytest.raises(UsageError, match=r"is for continuous actions, a Box; .* Discrete\(4\)"):
            make_head(Discrete(4), **options)  # type: ignore[arg-type]
    for options in ({"squash": True}, BY_STATE):
        with pytest.raises(UsageError, match=r"distribution beta stays in its bounds.* leave out "):
            make_head(BOX, distribution="beta", **options)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError,
        match=r"squash is for continuous actions, a Box; this action space is Discrete\(4\)",
    ):
        make_head(Discrete(4), squash=True)
