"""PPO's loss in Triton against its specification: gpurl.losses of what gpurl.nn.distributions
gives, differentiated by autograd in float64.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.buffers.minibatches import Minibatch
from gpurl.kernels import ppo_loss as module
from gpurl.kernels.ppo_loss import METRICS, PpoOptions, fused_ppo_loss
from gpurl.losses import ppo_loss
from gpurl.nn.distributions import Categorical, Gaussian, Head

SIZES = [(1, 1), (1, 2), (5, 3), (64, 2), (131, 1), (131, 8), (200, 5), (70, 18), (33, 128)]  # B, A
OPTIONS = PpoOptions(0.7, None, -1.5, 0.5)
CLIPPED = PpoOptions(0.7, 0.3, -1.5, 0.5)
WILD = (1e30, 3e38, -3e38)  # an invalid row's numbers: finite, but what is made of them is not
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
COLUMNS = ("log_prob", "value", "advantage", "returns")
Results = tuple[Tensor, ...]
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # numpy's, in the wild rows


class Problem(NamedTuple):
    """What the loss of a policy takes; log_std is None of a categorical one."""

    output: Tensor
    log_std: Tensor | None
    value: Tensor
    rows: Minibatch
    clip_range: Tensor
    entropy_coef: Tensor


def rows_of(action: Tensor, columns: tuple[Tensor, ...], weight: Tensor | None = None) -> Minibatch:
    """columns: COLUMNS."""
    return Minibatch(torch.empty(0), action, *columns, weight)


def problem(
    kind: str, size: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Problem:
    """Ratios within and beyond a clip of 0.2, values within and beyond one of 0.3, log_std below,
    at, inside and above its limits.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, width = size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    output, value = normal(batch, width), normal(batch)
    log_std = torch.tensor([-0.3, -1.5, 0.2, 0.5, -2.0, 0.9, 0.0])[torch.arange(width) % 7].double()
    if kind == "gaussian":
        bounded = log_std.clamp(OPTIONS.min_log_std, OPTIONS.max_log_std)
        action = output + normal(batch, width) * bounded.exp()
        log_prob = (-0.5 * ((action - output) / bounded.exp()) ** 2 - bounded - HALF_LOG_2PI).sum(1)
    else:
        action = torch.randint(width, (batch, 1), generator=generator)
        log_prob = output.log_softmax(1).gather(1, action).squeeze(1)
        action = action.squeeze(1)
    columns = (
        log_prob + 0.3 * normal(batch),
        value + 0.4 * normal(batch),
        2.0 * normal(batch) + 0.5,
        value + normal(batch),
    )
    return Problem(
        output.to(dtype),
        log_std.to(dtype) if kind == "gaussian" else None,
        value.to(dtype),
        rows_of(
            action.to(dtype) if kind == "gaussian" else action,
            tuple(column.to(dtype) for column in columns),
        ),
        torch.tensor(0.2, dtype=dtype),
        torch.tensor(0.02, dtype=dtype),
    )


def doubled(case: Problem) -> Problem:
    """The same numbers in float64."""
    columns = {
        name: column.double()
        for name, column in vars(case.rows).items()
        if column is not None and column.is_floating_point()
    }
    numbers = (None if x is None else x.double() for x in (case.output, case.log_std, case.value))
    scalars = case.clip_range.double(), case.entropy_coef.double()
    return Problem(*numbers, replace(case.rows, **columns), *scalars)


def differentiated(loss: Tensor, metrics: Tensor, leaves: list[Tensor]) -> Results:
    """(gradients by output and value, parts, loss and, of a Gaussian, the log_std gradient)."""
    of_output, of_value, *own = torch.autograd.grad(loss, leaves)
    return of_output, of_value, metrics.detach(), loss.detach(), *own


def leaves_of(case: Problem) -> list[Tensor]:
    """Output, value and, of a Gaussian, log_std; of the same memory layout."""
    tensors = [x for x in (case.output, case.value, case.log_std) if x is not None]
    return [x.detach().requires_grad_() for x in tensors]


def fused(case: Problem, options: PpoOptions) -> Results:
    """By the kernel."""
    leaves = leaves_of(case)
    output, value, *own = leaves
    log_std = own[0] if own else None
    loss, metrics = fused_ppo_loss(output, log_std, value, *case[3:], options)
    return differentiated(loss, metrics, leaves)


def reference(case: Problem, options: PpoOptions) -> Results:
    """By the policy head and gpurl.losses, in float64."""
    case = doubled(case)
    leaves = leaves_of(case)
    output, value, *own = leaves
    head: Head = Categorical(output.shape[1])
    if own:
        limits = options.min_log_std, options.max_log_std
        head = Gaussian(Box(-1, 1, own[0].shape, np.float32), limits=limits)
        del head.log_std
        head.log_std = own[0]
    log_prob, entropy = head.log_prob_and_entropy(output, case.rows.action)
    numbers = *case[4:], options.value_coef, options.clip_range_value
    loss, metrics = ppo_loss(log_prob, value, entropy, case.rows, *numbers)
    assert tuple(metrics) == METRICS
    return differentiated(loss, torch.stack(list(metrics.values())), leaves)


def assert_same(got: Results, expected: Results, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    """Gradients by a row are compared as those of a sum over rows: a mean's are small, and any
    tolerance would do.
    """
    batch = expected[0].shape[0]
    for position, (one, other) in enumerate(zip(got, expected, strict=True)):
        scale = batch if position < 2 else 1
        torch.testing.assert_close(
            one.double() * scale, other.double() * scale, rtol=rtol, atol=atol
        )


def with_weight(case: Problem, share: float | None) -> tuple[Problem, Problem]:
    """The case with that share of rows that weigh something; the same with wild numbers in the
    other rows.
    """
    if share is None:
        return case, case
    batch = case.value.shape[0]
    valid = (torch.rand(batch, generator=torch.Generator().manual_seed(7)) < share).float()
    weight = valid / valid.sum().clamp(min=1)
    wild = torch.tensor(WILD)[torch.arange(batch) % len(WILD)]
    changed = {
        name: torch.where(
            valid.view(-1, *[1] * (x.ndim - 1)) > 0, x, wild.view(-1, *[1] * (x.ndim - 1))
        )
        for name, x in vars(case.rows).items()
        if name in (*COLUMNS, "action") and x.is_floating_point()
    }
    clean = case._replace(rows=replace(case.rows, weight=weight))
    return clean, case._replace(rows=replace(case.rows, weight=weight, **changed))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize(
    ("options", "share"), [(OPTIONS, None), (CLIPPED, 0.6)], ids=["plain", "all"]
)
def test_the_kernel_is_its_specification(
    kind: str, size: tuple[int, int], options: PpoOptions, share: float | None
) -> None:
    clean, case = with_weight(problem(kind, size), share)
    expected = reference(clean, options)
    if size[0] > 60 and share is None:
        assert 0.2 < float(expected[2][3]) < 0.8  # ratios on both sides of the clip
    # a log_prob of 128 dimensions is about -150
    assert_same(fused(case, options), expected, rtol=1e-5 + 3e-7 * size[1])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_rows_without_weight_change_nothing(kind: str, share: float) -> None:
    clean, case = with_weight(problem(kind, (90, 4)), share)
    assert case.rows.weight is not None
    chosen = case.rows.weight > 0
    columns = {name: getattr(clean.rows, name)[chosen] for name in ("action", *COLUMNS)}
    rows = replace(clean.rows, weight=None, **columns)
    kept = clean._replace(output=clean.output[chosen], value=clean.value[chosen], rows=rows)
    output, value, *rest = fused(case, CLIPPED)
    assert not output[~chosen].any()
    assert not value[~chosen].any()
    if share:
        assert_same((output[chosen], value[chosen], *rest), reference(kept, CLIPPED))
    else:
        assert not rest[0][:4].any()


RUNS = pytest.mark.parametrize("run", [fused, reference])


def scalars(clip_range: float, entropy_coef: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(clip_range), torch.tensor(entropy_coef)


def row(*columns: float) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([number]) for number in columns)


def close(got: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got.float(), expected, rtol=1e-6, atol=atol)


@RUNS
def test_a_gaussian_by_hand(run: Callable[..., Results]) -> None:
    # z 1 and 2; ratios 1 and 2, the second beyond the clip but on the side where it counts
    log_prob = torch.tensor([-0.5, -2.0]) - HALF_LOG_2PI
    old_log_prob = log_prob - torch.tensor([0.0, math.log(2.0)])
    columns = old_log_prob, torch.ones(2), torch.tensor([2.0, -1.0]), torch.zeros(2)
    rows = rows_of(torch.tensor([[1.0], [2.0]]), columns)
    # values 0.2 and 3, old value 1 clipped by 0.5: (0.5)^2 over (0.2)^2 and flat there, 3^2 over
    # (1.5)^2
    value = torch.tensor([0.2, 3.0])
    case = Problem(torch.zeros(2, 1), torch.zeros(1), value, rows, *scalars(0.2, 0.1))
    output, value, metrics, loss, log_std = run(case, PpoOptions(0.5, 0.5, -5.0, 2.0))
    close(output, torch.tensor([[-1.0], [2.0]]))
    close(value, torch.tensor([0.0, 1.5]))
    close(log_std, torch.tensor([-1.0 * (1 - 1) + 1.0 * (4 - 1) - 0.1]))
    kl, entropy = (2.0 - 1.0 - math.log(2.0)) / 2, 0.5 + HALF_LOG_2PI
    close(metrics, torch.tensor([(2.0 - 2.0) / 2, (0.25 + 9.0) / 2, kl, 0.5, entropy]))
    close(loss, torch.tensor(0.5 * 9.25 / 2 - 0.1 * entropy))


@RUNS
def test_a_categorical_by_hand(run: Callable[..., Results]) -> None:
    probability = torch.tensor([0.25, 0.75])
    rows = rows_of(torch.tensor([1]), row(math.log(0.75), 0.0, 2.0, 1.0))
    logits = torch.tensor([[0.0, math.log(3.0)]])
    case = Problem(logits, None, torch.tensor([3.0]), rows, *scalars(0.2, 0.1))
    output, value, metrics, loss = run(case, PpoOptions(0.5))
    entropy = -float((probability * probability.log()).sum())
    expected = -2.0 * (torch.tensor([0.0, 1.0]) - probability) + 0.1 * probability * (
        probability.log() + entropy
    )
    close(output, expected.view(1, 2))
    close(value, torch.tensor([2.0]))
    close(metrics, torch.tensor([2.0, 4.0, 0.0, 0.0, entropy]))
    close(loss, torch.tensor(-2.0 + 0.5 * 4.0 - 0.1 * entropy))


@pytest.mark.parametrize(
    ("sign", "shift"),
    [(sign, shift) for sign in (1.0, -1.0) for shift in (-0.5, -0.1, 0.0, 0.1, 0.5)],
)
@RUNS
def test_which_ratios_pull(run: Callable[..., Results], sign: float, shift: float) -> None:
    """A ratio beyond the clip has no slope on the side where the advantage has pushed it; one
    exactly at a clip (of 0 here) has.
    """
    zero = torch.zeros(1)
    case = Problem(
        torch.zeros(1, 1),
        zero,
        zero,
        rows_of(torch.zeros(1, 1), row(-HALF_LOG_2PI, 0.0, sign, 0.0)),
        *scalars(0.2 if shift else 0.0, 0.0),
    )
    if run is reference:  # whose ratio is 1 to its last digit
        case, head = doubled(case), Gaussian(Box(-1, 1, (1,), np.float32)).double()
        case.rows.log_prob = head.log_prob(case.output, case.rows.action).detach()
    case.rows.log_prob -= shift
    _, _, metrics, _, log_std = run(case, OPTIONS)
    is_flat = (shift == 0.5 and sign > 0) or (shift == -0.5 and sign < 0)
    expected = (
        0.0 if is_flat else sign * math.exp(shift)
    )  # log_prob falls by 1 where log_std rises by 1, and so does the loss by -r A
    close(log_std, torch.tensor([expected]))
    assert float(metrics[3]) == (abs(shift) == 0.5)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_ratio_that_would_overflow_is_bounded_and_has_no_slope(kind: str) -> None:
    """On both sides of the bound, of either sign of the advantage."""
    case = problem(kind, (60, 3))
    shift = torch.zeros(60)
    shift[:8] = torch.tensor([15.0, 15.0, 25.0, 25.0, 1e3, 1e3, -1e3, -1e3])
    case = case._replace(rows=replace(case.rows, log_prob=case.rows.log_prob - shift))
    got = fused(case, OPTIONS)
    assert all(bool(part.isfinite().all()) for part in got)
    assert bool((got[0][2:6] == (0.0 if kind == "gaussian" else got[0][2:6])).all())
    assert_same(got, reference(case, OPTIONS), rtol=2e-3)


@RUNS
def test_log_std_beyond_its_limits_is_not_moved(run: Callable[..., Results]) -> None:
    case = problem("gaussian", (50, 7))
    assert case.log_std is not None
    _, _, metrics, _, gradient = run(case, OPTIONS)
    is_beyond = (case.log_std < OPTIONS.min_log_std) | (case.log_std > OPTIONS.max_log_std)
    assert int(is_beyond.sum()) == 2
    assert torch.equal(gradient == 0.0, is_beyond)
    expected = float(case.log_std.clamp(OPTIONS.min_log_std, OPTIONS.max_log_std).sum()) + 7 * (
        0.5 + HALF_LOG_2PI
    )
    torch.testing.assert_close(float(metrics[4]), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_strided_columns_give_the_same_bits(kind: str) -> None:
    _, case = with_weight(problem(kind, (37, 3)), 0.8)
    rows, action = case.rows, case.rows.action.view(37, -1).float()
    assert rows.weight is not None
    columns = [getattr(rows, name) for name in COLUMNS]
    packed = torch.cat(
        (torch.full((37, 2), torch.nan), action, torch.stack((*columns, rows.weight), 1)), 1
    )
    place = 2 + action.shape[1]
    of_action, of_columns = packed[:, 2:place], packed[:, place:].unbind(1)
    both = torch.cat((case.output, case.value.unsqueeze(1)), 1)  # one network's columns
    if kind == "categorical":
        of_action = of_action[:, 0]
    variants = [
        case._replace(rows=rows_of(of_action, of_columns[:4], of_columns[4])),
        case._replace(rows=rows_of(rows.action, of_columns[:4], of_columns[4])),
        case._replace(rows=rows_of(of_action, of_columns[:4], rows.weight)),
        case._replace(output=both[:, :3], value=both[:, 3]),
        case._replace(output=case.output.t().contiguous().t()),
    ]
    if kind == "gaussian":
        variants += [case._replace(rows=replace(rows, action=action.t().contiguous().t()))]
    expected = fused(case, CLIPPED)
    for variant in variants:
        for got, want in zip(fused(variant, CLIPPED), expected):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_sequences_are_rows_in_a_row(kind: str) -> None:
    _, case = with_weight(problem(kind, (42, 3)), 0.8)
    shaped = {
        name: column.unflatten(0, (7, 6))
        for name, column in vars(case.rows).items()
        if column is not None and column.numel()
    }
    sequences = case._replace(
        output=case.output.unflatten(0, (7, 6)),
        value=case.value.unflatten(0, (7, 6)),
        rows=replace(case.rows, **shaped),
    )
    for got, want in zip(fused(sequences, CLIPPED), fused(case, CLIPPED), strict=True):
        assert torch.equal(got.flatten(), want.flatten())


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_loss_of_more_terms_has_the_gradient_of_all(kind: str) -> None:
    """What comes back for the loss scales the gradients; the parts have none."""
    case = problem(kind, (42, 3))
    leaves = leaves_of(case)
    output, value, *own = leaves
    log_std = own[0] if own else None
    loss, metrics = fused_ppo_loss(output, log_std, value, *case[3:], OPTIONS)
    assert not metrics.requires_grad
    gradients = torch.autograd.grad(3.0 * loss + 2.0 * output.sum(), leaves)
    expected = fused(case, OPTIONS)
    torch.testing.assert_close(gradients[0], 3.0 * expected[0] + 2.0)
    torch.testing.assert_close(gradients[1], 3.0 * expected[1])
    assert all(torch.equal(*both) for both in zip(gradients[2:], (3.0 * x for x in expected[4:])))


@RUNS
def test_of_equal_errors_the_plain_one_has_the_slope(run: Callable[..., Results]) -> None:
    # the value 1 is clipped to 0: 0.5 off on the other side
    rows = rows_of(torch.tensor([0]), row(0.0, -1.0, 0.0, 0.5))
    case = Problem(torch.zeros(1, 2), None, torch.tensor([1.0]), rows, *scalars(0.2, 0.0))
    _, value, metrics, _ = run(case, PpoOptions(1.0, 1.0))
    assert value.tolist() == [1.0]
    assert float(metrics[1]) == 0.25


def test_partial_sums_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUMS_BLOCK", 32)
    monkeypatch.setattr(module, "_tile", lambda columns: (8, triton.next_power_of_2(columns), 1))
    for kind, size in (("gaussian", (70, 18)), ("categorical", (70, 3))):
        case = problem(kind, size)
        assert_same(fused(case, OPTIONS), reference(case, OPTIONS), rtol=3e-5)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_sums_over_many_rows_keep_their_digits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tile", lambda columns: (2048, 2, 4))
    case = problem(kind, (32_768, 2))
    for one, other in zip(fused(case, OPTIONS)[2:], reference(case, OPTIONS)[2:]):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@RUNS
def test_a_nan_reaches_the_gradient_and_stays_in_its_row(
    run: Callable[..., Results], kind: str
) -> None:
    case = problem(kind, (70, 3))
    case.output[5] = torch.nan
    case.value[66] = torch.nan
    output, value, metrics, loss, *own = run(case, CLIPPED)
    assert output.isnan().any(1).nonzero().tolist() == [[5]]
    assert value.isnan().nonzero().tolist() == [[66]]
    assert bool(metrics[:2].isnan().all())
    assert bool(loss.isnan())
    assert all(bool(gradient[0].isnan()) for gradient in own)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_head_takes_the_kernel_where_it_is_chosen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head: Head = Categorical(3) if kind == "categorical" else Gaussian(Box(-1, 1, (3,), np.float32))
    case, launched, real = problem(kind, (5, 3)), [], module._launch
    monkeypatch.setattr(
        module, "_launch", lambda *arguments: launched.append(1) or real(*arguments)
    )
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        loss, metrics = head.ppo_loss(case.output, *case[2:], 0.7, 0.3)
        assert tuple(metrics) == METRICS
        results.append([loss.detach(), *metrics.values()])
        assert len(launched) == (backend == "triton")
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)
