"""A rollout cut into minibatches: every row once in each pass, in an order of its own, with weights
and advantages as they are defined.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.buffers import minibatches as module
from gpurl.buffers.minibatches import Minibatches
from gpurl.kernels.backend import no_host_looks
from gpurl.kernels.permutation import permutation
from gpurl.kernels.random import CounterRandom, stream_constants

STEPS, ENVS = 6, 4


def made(
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


@pytest.mark.parametrize(
    "gathered", [8192, 13, 3], ids=["all at once", "a few at a time", "less than one"]
)
@pytest.mark.parametrize(
    ("looks", "few"), [(nullcontext, 0), (no_host_looks, 0), (nullcontext, 6), (nullcontext, 5)]
)
def test_each_pass_has_every_row_once(
    looks: Any, few: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, real = [], module.gather_rows
    monkeypatch.setattr(
        module,
        "gather_rows",
        lambda *arguments, **where: launched.append(1) or real(*arguments, **where),
    )
    monkeypatch.setattr(module, "GATHERED_ROWS", gathered)
    minibatches, columns, packed = made()
    orders = []
    for _ in range(2):
        with looks():
            batches = list(minibatches.of_steps(packed, few))
        assert [len(batch["row"]) for batch in batches] == [6] * 4
        assert all(
            isinstance(batch["row"], np.ndarray if few == 6 else Tensor) for batch in batches
        )
        for batch in batches:
            wanted = flat(columns, torch.as_tensor(batch["row"]))
            assert set(batch) == set(wanted)
            assert all(torch.equal(torch.as_tensor(batch[name]), wanted[name]) for name in wanted)
        orders.append(np.concatenate([batch["row"] for batch in batches]).tolist())
        assert sorted(orders[-1]) == list(range(STEPS * ENVS))
    assert orders[0] != orders[1]
    assert len(launched) == (2 if looks is no_host_looks else 0)  # one of a GPU does it all
    assert (
        orders[0] == made()[0].order(STEPS * ENVS).tolist()
    )  # whatever the form, the order is the stream's


def test_a_stream_gives_a_new_order_each_time() -> None:
    minibatches = made()[0]
    first, second = minibatches.order(1000), minibatches.order(1000)
    assert not torch.equal(first, second)
    assert torch.equal(first, permutation(*stream_constants(0, 1), torch.tensor(1), 0, 1000))
    assert torch.equal(second, permutation(*stream_constants(0, 1), torch.tensor(2), 0, 1000))


def test_tensors_stay_tensors_unless_arrays_are_asked_for() -> None:
    minibatches, _, packed = made(count=STEPS * ENVS)
    assert all(isinstance(batch["obs"], Tensor) for batch in minibatches.of_steps(packed))


@pytest.mark.parametrize("few", [0, 6])
@pytest.mark.parametrize("valid", [False, True])
def test_weights_and_advantages_are_those_of_the_minibatch(valid: bool, few: int) -> None:
    minibatches, columns, packed = made(normalizes=True, valid=valid)
    for batch in minibatches.of_steps(packed, few):
        wanted = flat(columns, torch.as_tensor(batch["row"]))
        assert "valid" not in batch
        weight = torch.as_tensor(batch["weight"]) if valid else None
        if weight is not None:
            torch.testing.assert_close(weight, wanted["valid"].float() / wanted["valid"].sum())
        torch.testing.assert_close(
            torch.as_tensor(batch["advantage"]),
            normalised(wanted["advantage"], weight),
            rtol=1e-5,
            atol=1e-5,
        )


def test_equal_advantages_and_rows_that_all_do_not_count_give_zeros() -> None:
    minibatches = made(normalizes=True)[0]
    assert (
        minibatches.weighted({"advantage": torch.full((5,), 3.0)})["advantage"].tolist()
        == [0.0] * 5
    )
    tiny = minibatches.weighted({"advantage": torch.tensor([1e-8, -1e-8])})["advantage"]
    torch.testing.assert_close(
        tiny, torch.tensor([0.5, -0.5])
    )  # which are mostly rounding are not made large
    for make in (torch.tensor, np.array):
        batch = minibatches.weighted({"advantage": make([1.0, 2.0]), "valid": make([0.0, 0.0])})
        assert batch["weight"].tolist() == [0.0, 0.0]
        assert np.isfinite(np.asarray(batch["advantage"])).all()
    one = minibatches.weighted(
        {"advantage": torch.tensor([1.0, 2.0, 4.0]), "valid": torch.tensor([0.0, 0.0, 1.0])}
    )
    assert one["weight"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
def test_in_place_are_the_same_minibatches(normalizes: bool, valid: bool) -> None:
    minibatches, _, packed = made(normalizes=normalizes, valid=valid)
    twin, columns, _ = made(normalizes=normalizes, valid=valid)
    for batch, other in zip(minibatches.in_place(packed), list(twin.of_steps(packed)), strict=True):
        assert torch.equal(batch["row"].long(), other["row"])
        assert torch.equal(batch["obs"], other["obs"])
        assert torch.equal(batch["advantage"], other["advantage"])
        assert ("num_valid" in batch) is valid
        if valid:
            wanted = flat(columns, other["row"])["valid"].float()
            assert torch.equal(batch["valid"], wanted)
            assert float(batch["num_valid"]) == float(wanted.sum())
            assert batch["num_valid"].dim() == 0


def test_whole_environments_stay_together() -> None:
    minibatches, columns, _ = made(count=2, valid=True)
    found = []
    for batch in minibatches.of_envs(columns):
        assert batch["row"].shape == (STEPS, 2)
        envs = batch["row"][0]
        found += envs.tolist()
        for name in ("row", "obs", "advantage"):
            assert torch.equal(batch[name], columns[name][:, envs])
        valid = columns["valid"][:, envs].float()
        torch.testing.assert_close(batch["weight"], valid / valid.sum())
    assert sorted(found) == [0, 1, 2, 3]
