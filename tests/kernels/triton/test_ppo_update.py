"""PPO's fused minibatch steps, for layers of 16 to 64 units, and for whom they stand in."""

from typing import Any

import pytest
import torch

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.fused_update import fused_update_obstacle, update_shape
from gpurl.kernels import backend, ppo_update
from gpurl.kernels.ppo_update import PpoUpdate
from tests.kernels.triton.conftest import COMPILED_ON
from tests.kernels.triton.ppo_updates import (
    HEADS,
    check_against_autograd,
    check_against_float64,
    check_ten_iterations,
    fused,
    made,
    played,
    trained,
)


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small tile as for a large one."""
    if COMPILED_ON is None:
        monkeypatch.setitem(ppo_update.TILE_ROWS, "tf32x3", dict.fromkeys((16, 32, 64), 64))
        monkeypatch.setattr(PpoUpdate, "reduce_columns", 1024)


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the fused steps, which ask nobody."""
    monkeypatch.setattr(backend, "choice", "torch")


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_range_value": 0.05, "entropy_coef": 0.1, "max_grad_norm": 0.1},
        {"network": {"hidden": (16,), "activation": "elu", "shared": True}, "minibatches": 1},
        {
            "network": {"hidden": (16, 16, 32), "activation": "relu"},
            "normalize_advantage": "none",
            "normalize_value": False,
            "weight_decay": 0.1,
        },
        {"schedule": "kl_minibatch", "target_kl": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", HEADS)
def test_it_learns_what_autograd_learns(
    head: str, settings: dict[str, Any], has_gaps: bool
) -> None:
    check_against_autograd(head, settings, has_gaps)


def test_many_tiles_a_program_and_many_programs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of programs gives the same gradient; more than one block of their sums too."""
    monkeypatch.setitem(ppo_update.TILE_ROWS, "tf32x3", {16: 16})
    monkeypatch.setattr(PpoUpdate, "reduce_columns", 64)
    results = []
    for processors in (1, 3, 90):
        monkeypatch.setattr(ppo_update, "PROCESSORS", processors)
        algorithm = made("gaussian", minibatches=1, epochs=1, network={"hidden": (16, 16)})
        trained(algorithm, fused(algorithm), True, 1)
        results.append(algorithm.optimizer.gradient.clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip_range_value", [None, 0.05])
@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_is_that_of_float64(head: str, clip_range_value: float | None) -> None:
    check_against_float64(head, clip_range_value, (16, 32))


@pytest.mark.parametrize(
    ("hidden", "inputs", "outputs"), [((64, 64), 28, 8), ((64,), 3, 15), ((32, 64), 64, 31)]
)
@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_of_many_observations_and_actions_is_that_of_float64(
    head: str, hidden: tuple[int, ...], inputs: int, outputs: int
) -> None:
    """Other tiles than for few, and the whole width of the heads."""
    check_against_float64(head, None, hidden, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("head", HEADS)
def test_ten_iterations_stay_near_autograd(head: str) -> None:
    check_ten_iterations(head, 16)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    algorithm, other = made("gaussian"), made("gaussian")
    for each in (algorithm, other):
        learner = fused(each) if each is other else each
        buffer = played(each)
        buffer["reward"][2, 5] = torch.inf
        before = each.optimizer.flat.clone()
        learner.learn(each.prepare(buffer))
        assert torch.equal(each.optimizer.flat, before)
    assert other.optimizer.skipped.counts.tolist() == algorithm.optimizer.skipped.counts.tolist()
    assert int(other.optimizer.skipped.counts[1]) == 4


# ---- for whom it does not stand in ----


class OwnLoss(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
        return super().loss(batch)


class OwnAct(PPO):
    def initial_policy_state(self, num_envs: int) -> Any:
        return super().initial_policy_state(num_envs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"network": {"hidden": (48,), "shared": True}},
            "it takes shared layers of 16, 32 or 64 units only",
        ),
        ({"network": {"hidden": (48,)}}, ""),
        ({"network": {"hidden": ()}}, "it needs a hidden layer"),
        ({"network": {"hidden": (16,), "layer_norm": True}}, "layer norms"),
        ({"network": {"memory": "gru"}}, "without memory"),
        ({"normalize_advantage": "minibatch"}, "the advantages of each minibatch"),
        ({"kind": OwnLoss}, "OwnLoss overrides loss"),
        ({"kind": OwnAct}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_whom_it_refuses(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = made("gaussian", **change)
    assert fused_update_obstacle(algorithm) == "Triton does not run on cuda:0"
    monkeypatch.setattr(backend, "choice", "triton")
    obstacle = fused_update_obstacle(algorithm)
    assert reason in obstacle
    assert bool(reason) == bool(obstacle)


def test_an_optimiser_hook_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = made("gaussian")
    monkeypatch.setattr(backend, "choice", "triton")
    algorithm.optimizer.reduce = lambda gradient: None  # type: ignore[method-assign]
    assert fused_update_obstacle(algorithm) == "reduce of FlatAdam is replaced"


def test_layers_of_128_units_are_left_to_the_wide_update() -> None:
    for precision in ("float32", "tf32"):
        algorithm = made("gaussian", network={"hidden": (128,)})
        algorithm.precision = precision
        assert PpoUpdate.obstacle_of(update_shape(algorithm)).endswith("not of 128")
