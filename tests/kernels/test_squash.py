"""Squashed Gaussian actions against torch.distributions, quadrature and autograd, in float64; and
their form in C.
"""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from gpurl.kernels import backend, c_library
from gpurl.kernels import squash as module
from gpurl.kernels.squash import (
    LOG_STD_LIMITS,
    squashed_backward_c,
    squashed_backward_reference,
    squashed_likelihood,
    squashed_mode,
    squashed_sample,
    squashed_sample_c,
    squashed_sample_reference,
)
from tests import squash_laws
from tests.squash_laws import Backward, GuardedMemory, Sample

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
FORMS = pytest.mark.parametrize(
    ("sample", "backward"),
    [
        pytest.param(squashed_sample_reference, squashed_backward_reference, id="torch"),
        pytest.param(squashed_sample_c, squashed_backward_c, id="C", marks=needs_c),
    ],
)


def numbers(rows: int = 50, actions: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 2 * actions, dtype=torch.float64).clamp(max=2.0), torch.randn(
        rows, actions, dtype=torch.float64
    )


def test_drawing_and_log_probability_are_those_of_torch() -> None:
    output, noise = numbers()
    drawn = squashed_sample_reference(output, noise)
    mean, log_std = output.chunk(2, -1)
    distribution = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    torch.testing.assert_close(drawn.action, torch.tanh(mean + log_std.exp() * noise))
    torch.testing.assert_close(
        drawn.log_prob, distribution.log_prob(drawn.action).sum(-1), rtol=1e-7, atol=1e-7
    )
    torch.testing.assert_close(squashed_mode(output), mean.tanh())


@pytest.mark.parametrize("u", [-20.0, -8.0, -1e-3, 0.0, 5.0, 12.0, 20.0])
@FORMS
def test_log_probability_far_out(sample: Sample, backward: Backward, u: float) -> None:
    """log(1 - tanh^2 u) = 2 (log 2 - |u|) + O(e^-2|u|) where tanh itself is 1 to float32."""
    output = torch.tensor([[u, 0.0]])
    got = float(sample(output, torch.zeros(1, 1)).log_prob)
    exact = torch.tensor(u, dtype=torch.float64)
    slope = 2.0 * (
        torch.log(torch.tensor(2.0, dtype=torch.float64))
        - exact
        - torch.nn.functional.softplus(-2.0 * exact)
    )
    assert got == pytest.approx(-0.9189385332046727 - float(slope), rel=3e-7)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_sample_is_the_same_with_and_without_a_gradient(requires_grad: bool) -> None:
    output, noise = (tensor.float() for tensor in numbers())
    with torch.set_grad_enabled(requires_grad):
        got = squashed_sample(output.requires_grad_(requires_grad), noise)
    assert len(got) == 2
    for number, expected in zip(got, squashed_sample_reference(output.detach(), noise)):
        torch.testing.assert_close(number.detach(), expected)


def test_density_integrates_to_one() -> None:
    u = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64)
    mean, log_std = 0.4, -0.3
    output = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(u), 2)
    drawn = squashed_sample_reference(
        output, ((u - mean) / torch.tensor(log_std, dtype=torch.float64).exp()).unsqueeze(1)
    )
    slope = 1.0 - u.tanh() ** 2  # da = (1 - tanh^2 u) du
    assert float(torch.trapezoid(drawn.log_prob.exp() * slope, u)) == pytest.approx(1.0, abs=1e-9)


def test_backward_is_the_gradient() -> None:
    output, noise = numbers()
    output[:5, 3:] = 10.0  # beyond the limits
    output[5:10, 3:] = -9.0
    output[10, :3], noise[10] = 0.0, 0.0  # |u| has no slope at 0
    leaf = output.clone().requires_grad_()
    drawn = squashed_sample_reference(leaf, noise)
    of_action, of_log_prob = torch.randn_like(drawn.action), torch.randn_like(drawn.log_prob)
    (expected,) = torch.autograd.grad(drawn[:2], leaf, (of_action, of_log_prob))
    got = squashed_backward_reference(
        squashed_sample_reference(output, noise), of_action, of_log_prob
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert float(got[:10, 3:].abs().max()) == 0.0
    assert LOG_STD_LIMITS == (-5.0, 2.0)


def likelihood(output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability, its gradient by output)."""
    leaf = output.clone().requires_grad_()
    log_prob = squashed_likelihood(leaf, action)
    return log_prob.detach(), torch.autograd.grad(log_prob.sum(), leaf)[0]


def test_likelihood_of_what_others_did_is_that_of_torch_and_so_is_its_gradient() -> None:
    output, noise = numbers()
    action = noise.mul(0.5).tanh()
    leaf = output.clone().requires_grad_()
    mean, log_std = leaf.chunk(2, -1)
    expected = (
        TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
        .log_prob(action)
        .sum(-1)
    )
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    log_prob, got = likelihood(output, action)
    torch.testing.assert_close(log_prob, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-10)


def test_a_deviation_beyond_its_limits_is_led_back_and_never_further_out() -> None:
    log_std = torch.tensor([-9.0, -9.0, 5.0, 5.0, -4.9])
    u = torch.tensor(
        [0.5, 0.0, 1.0, 80.0, 0.0]
    )  # far, at the mean; near, far; at the mean, within the limits
    output = torch.stack((torch.zeros(5), log_std), 1)
    _, gradient = likelihood(output, u.clamp(max=7.0).tanh().unsqueeze(1))
    slopes = gradient[:, 1].tolist()
    assert slopes[0] > 1.0  # a wider one would be likelier
    assert slopes[1] == 0.0
    assert slopes[2] < -0.5
    assert slopes[3] == pytest.approx((7.0 / 2.718281828**2) ** 2 - 1.0, abs=1e-2)
    assert slopes[4] == -1.0


def test_actions_at_the_limits_are_finite() -> None:
    output = torch.zeros(2, 2)
    log_prob, gradient = likelihood(output, torch.tensor([[1.0], [-1.0]]))
    assert bool(log_prob.isfinite().all())
    torch.testing.assert_close(
        gradient[:, 0], torch.tensor([1.0, -1.0]) * 7.254329, rtol=1e-2, atol=0
    )  # atanh(1 - 1e-6)


# ---- all forms ----


@FORMS
@pytest.mark.parametrize(("rows", "actions"), squash_laws.SIZES)
def test_they_agree_with_float64_and_write_only_where_they_must(
    sample: Sample, backward: Backward, rows: int, actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = GuardedMemory()
    monkeypatch.setattr(torch, "empty", memory)
    squash_laws.draws_are_those_of_float64(sample, rows, actions)
    squash_laws.the_way_back_is_that_of_float64(backward, rows, actions)
    if sample is squashed_sample_c:
        memory.assert_untouched()


@FORMS
def test_what_is_not_finite_goes_through(sample: Sample, backward: Backward) -> None:
    squash_laws.what_is_not_finite_goes_through(sample, backward)
    squash_laws.a_broken_row_stays_in_itself(sample, backward)


@FORMS
def test_other_limits_apply(sample: Sample, backward: Backward) -> None:
    squash_laws.other_limits_apply(sample)


@needs_c
def test_rows_do_not_depend_on_their_batch() -> None:
    squash_laws.rows_do_not_depend_on_their_batch(squashed_sample_c, squashed_backward_c)


@needs_c
def test_c_is_right_to_a_few_roundings_all_along_the_curve() -> None:
    u = torch.linspace(-12.0, 12.0, 100_001)
    output, noise = torch.stack((u, torch.zeros_like(u)), 1), torch.zeros(len(u), 1)
    got, expected = (
        squashed_sample_c(output, noise),
        squashed_sample_reference(output.double(), noise.double()),
    )
    torch.testing.assert_close(got.action.double(), expected.action, rtol=0.0, atol=2e-7)
    torch.testing.assert_close(got.log_prob.double(), expected.log_prob, rtol=2e-7, atol=6e-7)


@needs_c
def test_float32_on_a_cpu_goes_to_c_and_all_else_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    for name in ("squashed_sample_c", "squashed_backward_c"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *arguments, name=name, real=real: called.append(name) or real(*arguments),
        )
    output, noise = (tensor.float() for tensor in numbers())
    output.requires_grad_()

    def with_gradient(output: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        drawn = squashed_sample(output, noise)
        return (*drawn, *torch.autograd.grad(drawn, output, (noise, noise[:, 0])))

    in_c = with_gradient(output, noise)
    assert called == ["squashed_sample_c", "squashed_backward_c"]
    with backend.no_host_syncs():
        torch.testing.assert_close(with_gradient(output, noise), in_c)
    doubles = with_gradient(output.detach().double().requires_grad_(), noise.double())
    assert {tensor.dtype for tensor in doubles} == {torch.float64}
    for got, expected in zip(in_c, doubles):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert squashed_sample(output.double(), noise)[0].dtype == torch.float64
    assert len(called) == 2
    with torch.no_grad():
        assert not squashed_sample(output, noise)[0].requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(squashed_sample(output, noise)[1].sum(), output, create_graph=True)


@needs_c
def test_slopes_may_have_any_strides() -> None:
    """Columns of a wider matrix are read where they stand, all else is copied."""
    slopes = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    views = [
        (slopes[:, 3:6], True),
        (slopes[:, :6:2], False),
        (slopes.t()[:, 1:3], False),
        (slopes.t()[:, 4:5], True),
    ]
    for slope, is_read_in_place in views:
        output, noise = squash_laws.inputs(16, slope.shape[1])
        drawn = squashed_sample_c(output, noise)
        of_log_prob = slopes[0]
        expected = squashed_backward_c(drawn, slope.contiguous(), of_log_prob)
        assert torch.equal(squashed_backward_c(drawn, slope, of_log_prob), expected)
        assert (module._with_dense_rows(slope).data_ptr() == slope.data_ptr()) is is_read_in_place


def test_shapes_that_do_not_fit_are_refused() -> None:
    for output, noise in (((4, 6), (4, 2)), ((4, 6), (3, 3)), ((6,), (3,))):
        with pytest.raises(ValueError, match=r"output must be \[B, 2A\] and noise \[B, A\], got"):
            squashed_sample(torch.zeros(output), torch.zeros(noise))
