"""Running moments and normalising in Triton against the reference, float64 over all rows at once,
and hand numbers.
"""

from typing import Any

import pytest
import torch

from gpurl.kernels import moments as module
from gpurl.kernels.moments import (
    RunningMoments,
    batch_moments,
    normalize,
    normalize_reference,
    normalize_triton,
    pooled_moments,
    update_moments,
    update_moments_reference,
    update_moments_triton,
)

UPDATES = [update_moments_reference, update_moments_triton]


EPSILON = 1e-8


def fresh(columns: int) -> RunningMoments:
    return RunningMoments(
        torch.zeros(columns, dtype=torch.float64),
        torch.ones(columns, dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
        torch.full((columns,), torch.nan),
        torch.full((columns,), torch.nan),
    )


def assert_scale_fits(running: RunningMoments) -> None:
    """The float32 copies are those of the moments."""
    assert torch.equal(running.shift, running.mean.float())
    expected = (running.variance + EPSILON).rsqrt().float()
    torch.testing.assert_close(running.inv_std, expected, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (300, 7), (513, 70)])
@pytest.mark.parametrize("update", UPDATES)
def test_batches_merge_into_the_moments_of_all_rows(
    update: Any, rows: int, columns: int, share: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    running = fresh(columns)
    mean, variance, count, *_ = running
    kept = []
    for scale, shift in ((1.0, 0.0), (0.1, 5.0), (3.0, -2.0)):
        x = torch.randn(rows, columns, generator=generator) * scale + shift
        valid = None if share is None else torch.rand(rows, generator=generator) < share
        if valid is not None:
            x = torch.where(valid.unsqueeze(1), x, torch.nan)
        update(running, EPSILON, x, valid)
        assert_scale_fits(running)
        kept.append(x if valid is None else x[valid])
    rows_kept = torch.cat(kept).double()
    assert float(count) == len(rows_kept)
    if len(rows_kept):
        torch.testing.assert_close(mean, rows_kept.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, rows_kept.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_pooled_moments_are_those_of_all_rows() -> None:
    """Of batches of 3, 1, 0 and 7 rows; of column 3 one row counts, of column 4 none."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randn(rows, 5, generator=generator, dtype=torch.float64) * (1 + rows) - rows
        for rows in (3, 1, 0, 7)
    ]
    each = [batch_moments(batch, torch.ones(len(batch), dtype=torch.bool)) for batch in batches]
    numbers, means, variances = (torch.stack(column) for column in zip(*each, strict=True))
    numbers = numbers.unsqueeze(1).repeat(1, 5)
    numbers[:, 3] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    numbers[:, 4] = 0.0
    total, mean, variance = pooled_moments(numbers, means, variances)
    rows = torch.cat(batches)[:, :3]
    expected = torch.cat((rows.mean(0), batches[1][0, 3:4], torch.zeros(1)))
    assert total.tolist() == [11.0, 11.0, 11.0, 1.0, 0.0]
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    expected = torch.cat((rows.var(0, correction=0), torch.zeros(2)))
    torch.testing.assert_close(variance, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", UPDATES)
def test_by_hand(update: Any) -> None:
    running = fresh(1)
    mean, variance, count, *_ = running
    update(running, EPSILON, torch.tensor([[1.0], [3.0]]))
    assert (float(mean), float(variance), float(count)) == (2.0, 1.0, 2.0)
    update(running, EPSILON, torch.tensor([[5.0], [7.0]]))
    assert (float(mean), float(variance), float(count)) == (4.0, 5.0, 4.0)
    update(running, EPSILON, torch.full((2, 1), torch.nan), torch.zeros(2, dtype=torch.bool))
    assert (float(mean), float(variance), float(count)) == (4.0, 5.0, 4.0)


@pytest.mark.parametrize("update", UPDATES)
def test_no_valid_row_at_all_leaves_the_start(update: Any) -> None:
    running = fresh(3)
    mean, variance, count, *_ = running
    update(running, EPSILON, torch.ones(600, 3), torch.zeros(600, dtype=torch.bool))
    assert_scale_fits(running)
    assert mean.tolist() == [0.0] * 3
    assert variance.tolist() == [1.0] * 3
    assert float(count) == 0.0


@pytest.mark.parametrize("update", UPDATES)
def test_a_mean_far_from_zero_keeps_the_variance(update: Any) -> None:
    x = torch.randn(700, 4, generator=torch.Generator().manual_seed(1)) + 1e5
    running = fresh(4)
    update(running, EPSILON, x)
    variance = running.variance
    torch.testing.assert_close(variance, x.double().var(0, correction=0), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("update", UPDATES)
def test_more_blocks_than_are_merged_at_once(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 1)
    monkeypatch.setattr(module, "MIN_ROWS", 2)
    monkeypatch.setattr(module, "MERGED", 128)  # 4 of 32 columns
    x = torch.randn(23, 33, generator=torch.Generator().manual_seed(2)) + 3.0
    running = fresh(33)
    update(running, EPSILON, x)
    torch.testing.assert_close(running.mean, x.double().mean(0), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(
        running.variance, x.double().var(0, correction=0), rtol=1e-12, atol=0
    )
    assert float(running.count) == 23.0


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 5, 300), (0, 4), (1, 1025)])
@pytest.mark.parametrize("function", [normalize_reference, normalize_triton])
def test_normalize_in_float64(function: Any, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    x, mean = (
        torch.randn(shape, generator=generator) * 4.0,
        torch.randn(shape[-1], generator=generator),
    )
    inv_std = torch.rand(shape[-1], generator=generator) + 0.5
    expected = ((x.double() - mean.double()) * inv_std.double()).clamp(-3.0, 3.0)
    torch.testing.assert_close(
        function(x, mean, inv_std, 3.0).double(), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("function", [normalize_reference, normalize_triton])
def test_normalize_keeps_nan_and_clips_infinity(function: Any) -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    got = function(x, torch.zeros(4), torch.ones(4), 5.0)[0]
    assert bool(got[0].isnan())
    assert got[1:].tolist() == [5.0, -5.0, 1.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", [update_moments_reference, update_moments_triton])
def test_a_column_that_is_not_finite_keeps_its_moments(function: Any, bad: float) -> None:
    running = fresh(2)._replace(
        mean=torch.tensor([1.0, 2.0]).double(),
        variance=torch.tensor([3.0, 4.0]).double(),
        count=torch.tensor(5.0).double(),
    )
    mean, variance, count, *_ = running
    x = torch.full((700, 2), 1.0)
    x[650, 1] = bad
    function(running, EPSILON, x, None)
    assert_scale_fits(running)
    assert (float(mean[1]), float(variance[1]), float(count)) == (2.0, 4.0, 705.0)
    assert float(variance[0]) == pytest.approx(3.0 * 5 / 705)
    x[:, 0] = bad
    function(running, EPSILON, x, torch.ones(700, dtype=torch.bool))
    assert_scale_fits(running)
    assert float(count) == 705.0
    assert bool(torch.stack((mean, variance)).isfinite().all())


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for name in ("update_moments_triton", "normalize_triton"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *arrays, real=real, name=name: launched.append(name) or real(*arrays),
        )
    x = torch.arange(12.0).reshape(4, 3)
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        running = fresh(3)
        update_moments(running, EPSILON, x)
        results.append((*running, normalize(x, running.shift, running.inv_std, 1.0)))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected)
    assert launched == ["update_moments_triton", "normalize_triton"]
