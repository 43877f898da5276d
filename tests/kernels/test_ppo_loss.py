"""PPO's loss in Triton against the reference and against gpurl.nn.distributions and gpurl.losses,
which write the same slopes another way.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.kernels import ppo_loss as module
from gpurl.kernels.ppo_loss import (
    PARTS,
    PpoOptions,
    PpoRows,
    PpoScalars,
    gaussian_ppo_loss_reference,
)
from gpurl.losses import PpoTerms, ppo_loss
from gpurl.nn.distributions import Categorical, Gaussian

SIZES = [(1, 1), (1, 2), (5, 3), (64, 2), (131, 1), (131, 8), (200, 5), (70, 18), (33, 128)]  # B, A
OPTIONS = PpoOptions(0.7, None, -1.5, 0.5)
CLIPPED = PpoOptions(0.7, 0.3, -1.5, 0.5)
WILD = (1e30, 3e38, -3e38)  # an invalid row's numbers: finite, but what is made of them is not
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
Results = tuple[Tensor, ...]
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # numpy's, in the wild rows


class Problem(NamedTuple):
    """What the loss of a policy takes; log_std is None of a categorical one, and `valid` is not
    among the rows yet.
    """

    output: Tensor
    log_std: Tensor | None
    value: Tensor
    rows: PpoRows
    scalars: PpoScalars


def problem(
    kind: str,
    size: tuple[int, int],
    with_moments: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
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
    old_log_prob, returns, old_value = (
        log_prob + 0.3 * normal(batch),
        value + normal(batch),
        value + 0.4 * normal(batch),
    )
    advantage = 2.0 * normal(batch) + 0.5
    moments = torch.stack((advantage.mean(), advantage.var(correction=0) + 0.1)).to(dtype)
    rows = PpoRows(
        *(column.to(dtype) for column in (action, old_log_prob, advantage, returns, old_value))
    )
    scalars = PpoScalars(
        torch.tensor(0.2, dtype=dtype),
        torch.tensor(0.02, dtype=dtype),
        moments if with_moments else None,
    )
    return Problem(
        output.to(dtype),
        log_std.to(dtype) if kind == "gaussian" else None,
        value.to(dtype),
        rows,
        scalars,
    )


def doubled(case: Problem) -> Problem:
    """The same numbers in float64."""
    output, log_std, value, rows, scalars = case
    rows, scalars = (
        type(columns)(*(None if x is None else x.double() for x in columns))
        for columns in (rows, scalars)
    )
    return Problem(
        output.double(),
        None if log_std is None else log_std.double(),
        value.double(),
        rows,
        scalars,
    )


def run(kind: str, suffix: str, case: Problem, options: PpoOptions) -> Results:
    """(output gradient, value gradient, parts and, of a Gaussian, the log_std gradient) of the
    function with that ending.
    """
    if case.log_std is None:
        return getattr(module, f"categorical_ppo_loss{suffix}")(
            case.output, case.value, case.rows, case.scalars, options
        )
    flat = torch.full((case.log_std.shape[0] + 8,), torch.nan, dtype=case.output.dtype)
    results = getattr(module, f"gaussian_ppo_loss{suffix}")(
        case.output, case.log_std, case.value, case.rows, case.scalars, options, flat[4:-4]
    )
    assert bool(flat[:4].isnan().all() and flat[-4:].isnan().all())
    return *results, flat[4:-4]


def todays(case: Problem, options: PpoOptions, valid: Tensor | None) -> Results:
    """The results of `run` from the policy head and gpurl.losses, in float64: in float32 the three
    round differently.
    """
    case, valid = doubled(case), None if valid is None else valid.double()
    advantage = case.rows.advantage
    if case.scalars.advantage_moments is not None:
        mean, variance = case.scalars.advantage_moments
        advantage = (advantage - mean) / (variance.sqrt() + 1e-8)
    weight = None if valid is None else valid / valid.sum().clamp(min=1)
    terms = PpoTerms(
        case.rows.old_log_prob,
        advantage,
        case.rows.returns,
        case.rows.old_value,
        weight,
        *case.scalars[:2],
    )
    head: Any = Categorical(case.output.shape[1])
    action = case.rows.action.view(-1).long()
    if case.log_std is not None:
        head = Gaussian(
            Box(-1, 1, case.log_std.shape, np.float32),
            limits=(options.min_log_std, options.max_log_std),
        )
        head.log_std.data, head.log_std.grad, action = (
            case.log_std,
            torch.zeros_like(case.log_std),
            case.rows.action,
        )
    with torch.no_grad():
        log_prob, entropy, backward = head.evaluate(case.output, action)
        slopes, parts = ppo_loss(
            log_prob, case.value, entropy, terms, options.value_coef, options.clip_range_value
        )
        gradient = backward(slopes.log_prob, slopes.entropy)
    assert tuple(parts) == PARTS
    own = () if case.log_std is None else (head.log_std.grad,)
    return gradient, slopes.value, torch.stack(list(parts.values())), *own


def assert_same(got: Results, wanted: Results, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    """Gradients by a row are compared as those of a sum over rows: a mean's are small, and any
    tolerance would do.
    """
    batch = wanted[0].shape[0]
    for position, (one, other) in enumerate(zip(got, wanted, strict=True)):
        scale = batch if position < 2 else 1
        torch.testing.assert_close(
            one.double() * scale, other.double() * scale, rtol=rtol, atol=atol
        )


def with_valid(
    case: Problem, share: float | None, counted: bool = True
) -> tuple[Problem, Tensor | None]:
    """The case with that share of valid rows, wild numbers in the others; and which are valid."""
    if share is None:
        return case, None
    batch = case.value.shape[0]
    valid = (torch.rand(batch, generator=torch.Generator().manual_seed(7)) < share).float()
    wild = torch.tensor(WILD)[torch.arange(batch) % len(WILD)]
    columns = [
        torch.where(valid.view(-1, *[1] * (x.ndim - 1)) > 0, x, wild.view(-1, *[1] * (x.ndim - 1)))
        for x in case.rows[:5]
    ]
    scalars = case.scalars._replace(num_valid=valid.sum() if counted else None)
    return case._replace(rows=PpoRows(*columns, valid), scalars=scalars), valid


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize(
    ("options", "with_moments", "share"),
    [(OPTIONS, True, None), (CLIPPED, False, 0.6)],
    ids=["plain", "all"],
)
def test_the_kernel_the_reference_and_the_heads_agree(
    kind: str, size: tuple[int, int], options: PpoOptions, with_moments: bool, share: float | None
) -> None:
    clean = problem(kind, size, with_moments)
    case, valid = with_valid(clean, share)
    wanted = todays(clean, options, valid)
    if size[0] > 60 and share is None:
        assert 0.2 < float(wanted[2][3]) < 0.8  # ratios on both sides of the clip
    for suffix in ("_reference", "_triton"):
        assert_same(
            run(kind, suffix, case, options), wanted, rtol=1e-5 + 3e-7 * size[1]
        )  # a log_prob of 128 dimensions is about -150


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_rows_that_are_not_valid_weigh_nothing(kind: str, counted: bool, share: float) -> None:
    clean = problem(kind, (90, 4))
    case, valid = with_valid(clean, share, counted)
    assert valid is not None
    chosen = valid > 0
    rows = PpoRows(*(column[chosen] for column in clean.rows[:5]))
    kept = clean._replace(output=clean.output[chosen], value=clean.value[chosen], rows=rows)
    for suffix in ("_reference", "_triton"):
        output, value, *rest = run(kind, suffix, case, CLIPPED)
        assert not output[~chosen].any()
        assert not value[~chosen].any()
        if share:
            assert_same(
                (output[chosen], value[chosen], *rest), run(kind, "_reference", kept, CLIPPED)
            )
        else:
            assert not rest[0][:4].any()


@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_a_gaussian_by_hand(suffix: str) -> None:
    # normalised advantages 2 and -1; z 1 and 2; ratios 1 and 2, the second beyond the clip but on
    # the side where it counts
    log_prob = torch.tensor([-0.5, -2.0]) - HALF_LOG_2PI
    old_log_prob = log_prob - torch.tensor([0.0, math.log(2.0)])
    rows = PpoRows(
        torch.tensor([[1.0], [2.0]]),
        old_log_prob,
        torch.tensor([5.0, -1.0]),
        torch.zeros(2),
        torch.ones(2),
    )
    scalars = PpoScalars(torch.tensor(0.2), torch.tensor(0.1), torch.tensor([1.0, 4.0, 2.0]))
    # values 0.2 and 3, old value 1 clipped by 0.5: (0.5)^2 over (0.2)^2 and flat there, 3^2 over
    # (1.5)^2
    case = Problem(torch.zeros(2, 1), torch.zeros(1), torch.tensor([0.2, 3.0]), rows, scalars)
    output, value, parts, log_std = run("gaussian", suffix, case, PpoOptions(0.5, 0.5, -5.0, 2.0))
    torch.testing.assert_close(output, torch.tensor([[-1.0], [2.0]]))
    torch.testing.assert_close(value, torch.tensor([0.0, 1.5]))
    torch.testing.assert_close(log_std, torch.tensor([-1.0 * (1 - 1) + 1.0 * (4 - 1) - 0.1]))
    wanted = torch.tensor(
        [
            (2.0 - 2.0) / 2,
            (0.25 + 9.0) / 2,
            (2.0 - 1.0 - math.log(2.0)) / 2,
            0.5,
            0.5 + HALF_LOG_2PI,
        ]
    )
    torch.testing.assert_close(parts, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_a_categorical_by_hand(suffix: str) -> None:
    probability = torch.tensor([0.25, 0.75])
    rows = PpoRows(*(torch.tensor([x]) for x in (1.0, math.log(0.75), 2.0, 1.0, 0.0)))
    case = Problem(
        torch.tensor([[0.0, math.log(3.0)]]),
        None,
        torch.tensor([3.0]),
        rows,
        PpoScalars(torch.tensor(0.2), torch.tensor(0.1)),
    )
    output, value, parts = run("categorical", suffix, case, PpoOptions(0.5))
    entropy = -float((probability * probability.log()).sum())
    wanted = -2.0 * (torch.tensor([0.0, 1.0]) - probability) + 0.1 * probability * (
        probability.log() + entropy
    )
    torch.testing.assert_close(output, wanted.view(1, 2))
    torch.testing.assert_close(value, torch.tensor([2.0]))
    torch.testing.assert_close(
        parts, torch.tensor([2.0, 4.0, 0.0, 0.0, entropy]), rtol=1e-6, atol=3e-7
    )


@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_a_deviation_near_nothing_is_a_little_more(suffix: str) -> None:
    rows = PpoRows(*(torch.tensor([x]) for x in (1.0, math.log(0.75), 1e-6, 0.0, 0.0)))
    scalars = PpoScalars(torch.tensor(0.2), torch.tensor(0.0), torch.tensor([0.0, 1e-12, 1.0]))
    case = Problem(torch.tensor([[0.0, math.log(3.0)]]), None, torch.tensor([0.0]), rows, scalars)
    _, _, parts = run("categorical", suffix, case, PpoOptions(0.5))
    assert abs(float(parts[0])) == pytest.approx(1e-6 / (1e-6 + 1e-8), rel=1e-5)


@pytest.mark.parametrize(
    ("sign", "shift"),
    [(sign, shift) for sign in (1.0, -1.0) for shift in (-0.5, -0.1, 0.0, 0.1, 0.5)],
)
@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_which_ratios_pull(suffix: str, sign: float, shift: float) -> None:
    """A ratio beyond the clip has no slope on the side where the advantage has pushed it; one
    exactly at a clip (of 0 here) has.
    """
    rows = PpoRows(*(torch.tensor([x]) for x in (0.0, -HALF_LOG_2PI - shift, sign, 0.0, 0.0)))
    scalars = PpoScalars(torch.tensor(0.2 if shift else 0.0), torch.tensor(0.0))
    case = Problem(
        torch.zeros(1, 1),
        torch.zeros(1),
        torch.zeros(1),
        rows._replace(action=torch.zeros(1, 1)),
        scalars,
    )
    _, _, parts, log_std = run("gaussian", suffix, case, OPTIONS)
    is_flat = (shift == 0.5 and sign > 0) or (shift == -0.5 and sign < 0)
    wanted = (
        0.0 if is_flat else sign * math.exp(shift)
    )  # log_prob falls by 1 where log_std rises by 1, and so does the loss by -r A
    torch.testing.assert_close(log_std, torch.tensor([wanted]), rtol=1e-6, atol=1e-6)
    assert float(parts[3]) == (abs(shift) == 0.5)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_a_ratio_that_would_overflow_is_bounded_and_has_no_slope(suffix: str, kind: str) -> None:
    """On both sides of the bound, of either sign of the advantage; the heads and gpurl.losses
    agree.
    """
    case = problem(kind, (60, 3))
    shift = torch.zeros(60)
    shift[:8] = torch.tensor([15.0, 15.0, 25.0, 25.0, 1e3, 1e3, -1e3, -1e3])
    case = case._replace(rows=case.rows._replace(old_log_prob=case.rows.old_log_prob - shift))
    got = run(kind, suffix, case, OPTIONS)
    assert all(bool(part.isfinite().all()) for part in got)
    assert bool((got[0][2:6] == (0.0 if kind == "gaussian" else got[0][2:6])).all())
    assert_same(got, todays(case, OPTIONS, None), rtol=2e-3)


@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_log_std_beyond_its_limits_is_not_moved(suffix: str) -> None:
    case = problem("gaussian", (50, 7))
    assert case.log_std is not None
    *_, parts, gradient = run("gaussian", suffix, case, OPTIONS)
    is_beyond = (case.log_std < OPTIONS.min_log_std) | (case.log_std > OPTIONS.max_log_std)
    assert int(is_beyond.sum()) == 2
    assert torch.equal(gradient == 0.0, is_beyond)
    wanted = float(case.log_std.clamp(OPTIONS.min_log_std, OPTIONS.max_log_std).sum()) + 7 * (
        0.5 + HALF_LOG_2PI
    )
    torch.testing.assert_close(float(parts[4]), wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_the_reference_against_finite_differences(kind: str) -> None:
    case = problem(kind, (6, 3), dtype=torch.float64)
    case = case._replace(
        log_std=None
        if case.log_std is None
        else torch.tensor([-0.3, 0.1, 0.2], dtype=torch.float64)
    )

    def loss(changed: Problem) -> float:
        surrogate, value_loss, _, _, entropy = run(kind, "_reference", changed, CLIPPED)[2].tolist()
        return (
            -surrogate
            + CLIPPED.value_coef * value_loss
            - float(case.scalars.entropy_coef) * entropy
        )

    results = run(kind, "_reference", case, CLIPPED)
    for name, gradient in zip(
        ("output", "value", "log_std"), (results[0], results[1], *results[3:])
    ):
        for index in np.ndindex(*gradient.shape):
            step = torch.zeros_like(gradient)
            step[index] = 1e-6
            ends = [
                loss(case._replace(**{name: getattr(case, name) + sign * step})) for sign in (1, -1)
            ]
            assert float(gradient[index]) == pytest.approx(
                (ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8
            )


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_strided_columns_give_the_same_bits(kind: str) -> None:
    case, valid = with_valid(problem(kind, (37, 3)), 0.8)
    assert valid is not None
    action = case.rows.action.shape[1]
    packed = torch.cat(
        (
            torch.full((37, 2), torch.nan),
            case.rows.action,
            torch.stack((*case.rows[1:5], valid), 1),
        ),
        1,
    )
    columns = packed[:, 2 : 2 + action], *packed[:, 2 + action :].unbind(1)
    both = torch.cat((case.output, case.value.unsqueeze(1)), 1)  # one network's columns
    variants = [
        case._replace(rows=PpoRows(*columns)),
        case._replace(rows=PpoRows(*columns[:5], valid)),
        case._replace(rows=PpoRows(case.rows.action.t().contiguous().t(), *columns[1:])),
        case._replace(output=both[:, :3], value=both[:, 3]),
        case._replace(output=case.output.t().contiguous().t()),
    ]
    if kind == "categorical":
        variants += [case._replace(rows=PpoRows(columns[0][:, 0], *columns[1:]))]
    wanted = run(kind, "_triton", case, CLIPPED)
    for variant in variants:
        for got, want in zip(run(kind, "_triton", variant, CLIPPED), wanted):
            assert torch.equal(got, want)
        assert_same(run(kind, "_reference", variant, CLIPPED), wanted)


@pytest.mark.parametrize("suffix", ["_reference", "_triton"])
def test_of_equal_errors_the_plain_one_has_the_slope(suffix: str) -> None:
    rows = PpoRows(
        *(torch.tensor([x]) for x in (0.0, 0.0, 0.0, 0.5, -1.0))
    )  # the value 1 is clipped to 0: 0.5 off on the other side
    case = Problem(
        torch.zeros(1, 2),
        None,
        torch.tensor([1.0]),
        rows,
        PpoScalars(torch.tensor(0.2), torch.tensor(0.0)),
    )
    _, value, parts = run("categorical", suffix, case, PpoOptions(1.0, 1.0))
    assert value.tolist() == [1.0]
    assert float(parts[1]) == 0.25


def test_partial_sums_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUMS_BLOCK", 32)
    monkeypatch.setattr(module, "_tile", lambda columns: (8, triton.next_power_of_2(columns), 1))
    for kind, size in (("gaussian", (70, 18)), ("categorical", (70, 3))):
        case = problem(kind, size)
        assert_same(
            run(kind, "_triton", case, OPTIONS), run(kind, "_reference", case, OPTIONS), rtol=3e-5
        )


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_sums_over_many_rows_keep_their_digits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tile", lambda columns: (2048, 2, 4))
    case = problem(kind, (32_768, 2))
    got, wanted = (
        run(kind, "_triton", case, OPTIONS),
        run(kind, "_reference", doubled(case), OPTIONS),
    )
    for one, other in zip(got[2:], wanted[2:]):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_nan_reaches_the_gradient_and_stays_in_its_row(kind: str) -> None:
    case = problem(kind, (70, 3))
    case.output[5] = torch.nan
    case.value[66] = torch.nan
    for suffix in ("_reference", "_triton"):
        output, value, parts, *own = run(kind, suffix, case, CLIPPED)
        assert output.isnan().any(1).nonzero().tolist() == [[5]]
        assert value.isnan().nonzero().tolist() == [[66]]
        assert bool(parts[:2].isnan().all())
        assert all(bool(gradient[0].isnan()) for gradient in own)


def test_the_reference_works_in_inference_mode_and_on_parameters() -> None:
    case = problem("gaussian", (9, 2))
    wanted = run("gaussian", "_reference", case, OPTIONS)
    with torch.inference_mode():
        case = problem("gaussian", (9, 2))
        gradient = torch.empty(2)
        results = gaussian_ppo_loss_reference(
            case.output,
            torch.nn.Parameter(case.log_std.clone()),
            case.value,
            case.rows,
            case.scalars,
            OPTIONS,
            gradient,
        )
    assert_same((*results, gradient), wanted, 0.0, 0.0)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_dispatch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, launched = problem(kind, (5, 3)), []
    real = getattr(module, f"{kind}_ppo_loss_triton")
    monkeypatch.setattr(
        module, f"{kind}_ppo_loss_triton", lambda *arguments: launched.append(1) or real(*arguments)
    )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        assert_same(run(kind, "", case, CLIPPED), run(kind, "_reference", case, CLIPPED))
        assert len(launched) == (backend == "triton")
