"""A rollout cut into minibatches: every row once in each pass, in an order of its own, with weights
and advantages as they are defined.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.buffers.minibatches import Minibatches, PackedRows
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.permutation import permutation
from gpurl.kernels.random import CounterRandom, stream_constants

STEPS, ENVS = 6, 4


def make_minibatches(
    count: int = 4, normalizes: bool = False, valid: bool = False
) -> tuple[Minibatches, dict[str, Tensor], Tensor]:
    """And columns [T, N, ...] whose rows are told apart by `row`, and these packed."""
    random = torch.Generator().manual_seed(0)
    columns = {
        "row": torch.arange(STEPS * ENVS).view(STEPS, ENVS),
        "obs": torch.randn(STEPS, ENVS, 3, generator=random),
    }
    columns["advantage"] = torch.randn(STEPS, ENVS, generator=random)
    if valid:
        columns["valid"] = torch.arange(STEPS * ENVS).view(STEPS, ENVS) % 3 > 0
    minibatches = Minibatches(count, normalizes, CounterRandom(0, 1, torch.device("cpu")))
    return minibatches, columns, minibatches.pack(columns)


def flat(columns: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
    return {name: column.flatten(0, 1)[rows] for name, column in columns.items()}


def normalised(advantage: Tensor, weight: Tensor | None) -> Tensor:
    """Of float64, with numpy."""
    values, shares = advantage.double().numpy(), None if weight is None else weight.double().numpy()
    mean = np.average(values, weights=shares)
    return torch.from_numpy(
        (values - mean) / np.sqrt(np.average((values - mean) ** 2, weights=shares))
    ).float()


@pytest.mark.parametrize("looks", [nullcontext, no_host_syncs])
def test_each_pass_has_every_row_once(looks: Any) -> None:
    minibatches, columns, packed = make_minibatches()
    orders = []
    for _ in range(2):
        with looks():
            batches = list(minibatches.of_steps(packed))
        assert [len(batch["row"]) for batch in batches] == [6] * 4
        for batch in batches:
            expected = flat(columns, batch["row"])
            assert set(batch) == set(expected)
            assert all(torch.equal(batch[name], expected[name]) for name in expected)
        orders.append(torch.cat([batch["row"] for batch in batches]).tolist())
        assert sorted(orders[-1]) == list(range(STEPS * ENVS))
    assert orders[0] != orders[1]
    assert orders[0] == make_minibatches()[0].order(STEPS * ENVS).tolist()


def test_a_stream_gives_a_new_order_each_time() -> None:
    minibatches = make_minibatches()[0]
    first, second = minibatches.order(1000), minibatches.order(1000)
    assert not torch.equal(first, second)
    assert torch.equal(first, permutation(*stream_constants(0, 1), torch.tensor(1), 0, 1000))
    assert torch.equal(second, permutation(*stream_constants(0, 1), torch.tensor(2), 0, 1000))


@pytest.mark.parametrize("valid", [False, True])
def test_weights_and_advantages_are_those_of_the_minibatch(valid: bool) -> None:
    minibatches, columns, packed = make_minibatches(normalizes=True, valid=valid)
    for batch in minibatches.of_steps(packed):
        expected = flat(columns, batch["row"])
        assert "valid" not in batch
        weight = batch.get("weight")
        assert (weight is not None) is valid
        if weight is not None:
            torch.testing.assert_close(weight, expected["valid"].float() / expected["valid"].sum())
        torch.testing.assert_close(
            batch["advantage"], normalised(expected["advantage"], weight), rtol=1e-5, atol=1e-5
        )


def test_the_rollout_stays_as_it_was() -> None:
    minibatches, columns, packed = make_minibatches(normalizes=True, valid=True)
    before = packed.clone(), {name: column.clone() for name, column in columns.items()}
    list(minibatches.of_steps(packed))
    list(minibatches.of_envs(columns))
    assert torch.equal(packed, before[0])
    assert all(torch.equal(columns[name], column) for name, column in before[1].items())


def only_minibatch(advantage: list[float], valid: list[bool] | None = None) -> dict[str, Tensor]:
    """One of these rows, in their order."""
    columns = {"advantage": torch.tensor([advantage])}
    if valid is not None:
        columns["valid"] = torch.tensor([valid])
    columns["row"] = torch.arange(len(advantage)).unsqueeze(0)
    minibatches = Minibatches(1, True, CounterRandom(0, 1))
    (batch,) = minibatches.of_steps(minibatches.pack(columns))
    return {name: column[batch["row"].argsort()] for name, column in batch.items()}


def test_equal_advantages_and_rows_that_all_do_not_count_give_zeros() -> None:
    assert only_minibatch([3.0] * 5)["advantage"].tolist() == [0.0] * 5
    tiny = only_minibatch([1e-8, -1e-8])["advantage"]
    # which are mostly rounding are not made large
    torch.testing.assert_close(tiny, torch.tensor([0.5, -0.5]))
    nothing = only_minibatch([1.0, 2.0], [False, False])
    assert nothing["weight"].tolist() == [0.0, 0.0]
    assert bool(nothing["advantage"].isfinite().all())
    one = only_minibatch([1.0, 2.0, 4.0], [False, False, True])
    assert one["weight"].tolist() == [0.0, 0.0, 1.0]


def test_whole_environments_stay_together() -> None:
    minibatches, columns, _ = make_minibatches(count=2, valid=True)
    seen_envs = []
    for batch in minibatches.of_envs(columns):
        assert batch["row"].shape == (STEPS, 2)
        envs = batch["row"][0]
        seen_envs += envs.tolist()
        for name in ("row", "obs", "advantage"):
            assert torch.equal(batch[name], columns[name][:, envs])
        valid = columns["valid"][:, envs].float()
        torch.testing.assert_close(batch["weight"], valid / valid.sum())
    assert sorted(seen_envs) == [0, 1, 2, 3]


@pytest.mark.parametrize("valid", [False, True])
def test_advantages_of_whole_environments_are_normalised(valid: bool) -> None:
    minibatches, columns, _ = make_minibatches(count=2, normalizes=True, valid=valid)
    for batch in minibatches.of_envs(columns):
        advantage = columns["advantage"][:, batch["row"][0]]
        expected = normalised(advantage, batch.get("weight"))
        torch.testing.assert_close(batch["advantage"], expected, rtol=1e-5, atol=1e-5)


# ---- packed rows ----


def test_what_is_packed_comes_back() -> None:
    columns = {
        "obs": torch.randn(3, 4, 5),
        "action": torch.randint(0, 2**24, (3, 4, 2)),
        "choice": torch.tensor([[0, 1, 2**24, 3]] * 3),
        "advantage": torch.randn(3, 4),
        "valid": torch.rand(3, 4) < 0.5,
    }
    packing = PackedRows(columns)
    rows = packing.pack(columns)
    assert rows.shape == (12, 12)  # 5 + 2 + 1 + 1 + 1 floats, to a multiple of 4
    assert rows.dtype == torch.float32
    for shape in ((12,), (3, 4)):
        for name, column in packing.unpack(rows.view(*shape, 12)).items():
            expected = columns[name].reshape(*shape, *columns[name].shape[2:])
            assert column.dtype == (
                torch.float32 if expected.dtype == torch.bool else expected.dtype
            )
            assert torch.equal(column, expected.to(column.dtype)), name
    # row t N + n is step t of environment n, and nothing is copied that is float32
    obs = packing.unpack(rows[4:8])["obs"]
    assert torch.equal(obs, columns["obs"][1])
    assert obs.data_ptr() == rows[4:].data_ptr()


def test_rows_are_as_wide_as_the_next_sixteen_bytes() -> None:
    for width, expected in ((1, 4), (4, 4), (5, 8), (7, 8), (9, 12)):
        column = torch.randn(2, 3, width)
        packing = PackedRows({"reward": column})
        rows = packing.pack({"reward": column})
        assert rows.shape == (6, expected)
        assert torch.equal(rows[:, :width], column.flatten(0, 1))  # the first column stands first
        assert not rows[:, width:].any()
