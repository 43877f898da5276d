"""PPO's fused minibatch steps, for layers of any width."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from gpurl.kernels import backend, ppo_wide_update
from tests.kernels.triton.ppo_updates import (
    HEADS,
    check_against_autograd,
    check_against_float64,
    check_ten_iterations,
    fused,
    made,
    trained,
)


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the fused steps, which ask nobody."""
    monkeypatch.setattr(backend, "choice", "torch")


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"network": {"hidden": (20, 75), "activation": "elu"}, "clip_range_value": 0.05},
        {"network": {"hidden": (70,)}, "max_grad_norm": 0.1, "entropy_coef": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", HEADS)
def test_it_learns_what_autograd_learns(
    head: str, settings: dict[str, Any], has_gaps: bool
) -> None:
    check_against_autograd(head, settings, has_gaps)


def test_any_split_of_the_sum_over_rows_gives_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for rows in (1000, 64, 10):
        monkeypatch.setattr(ppo_wide_update, "SLOPE_ROWS", rows)
        algorithm = made("gaussian", minibatches=1, epochs=1, network={"hidden": (70,)})
        trained(algorithm, fused(algorithm), True, 1)
        results.append(algorithm.optimizer.gradient.clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip_range_value", [None, 0.05])
@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_is_that_of_float64(head: str, clip_range_value: float | None) -> None:
    check_against_float64(head, clip_range_value, (20, 75, 33))


def test_ten_iterations_stay_near_autograd() -> None:
    check_ten_iterations("gaussian", 70)


@pytest.mark.parametrize(
    ("major", "version", "stages"),
    [(9, "3.6.0", 3), (10, "3.6.0", 1), (12, "3.6.1", 1), (10, "3.7.1", 3), (10, "3.10.0", 3)],
)
def test_products_are_not_pipelined_where_triton_lacks_a_barrier(
    major: int, version: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton, "__version__", version)
    assert ppo_wide_update.pipeline_stages(torch.device("cuda")) == stages
    assert ppo_wide_update.pipeline_stages(torch.device("cpu")) == 3
