"""Rollouts in bfloat16: observations and values take half the memory, whatever engine collects
them, and training goes nearly where it goes with float32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.buffers.rollout import STORED
from gpurl.engine.persistent import persistent_obstacle
from gpurl.errors import UsageError
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer

SHAPE: dict[str, Any] = {
    "num_envs": 16,
    "horizon": 8,
    "minibatches": 2,
    "device": "cpu",
    "network": {"hidden": [16]},
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "in C": ("ppo", "chasing", {}),
    "autograd": ("ppo", "chasing", {"squash": True, "normalize_obs": False}),
    "memory": ("ppo", "pendulum", {"network": {"hidden": [16], "memory": "gru"}}),
    "asynchronous": ("ppo", "chasing", {"asynchronous": True}),
    "a2c": ("a2c", "cart_pole", {"minibatches": 1}),
    "pqn": ("pqn", "cart_pole", {}),
}


def trained(case: str, storage: str, iterations: int = 2) -> Trainer:
    algorithm, env, changes = CASES[case]
    torch.manual_seed(0)
    settings = make_settings(algorithm, env, storage=storage, **SHAPE | changes)
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.folder = Path("unused")
    trainer.start()
    for _ in range(iterations):
        trainer.iterate()
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_rollouts_take_half_and_training_goes_nearly_the_same_way(case: str) -> None:
    trainers = {storage: trained(case, storage) for storage in ("float32", "bfloat16")}
    for storage, trainer in trainers.items():
        columns = trainer.engine.buffer.columns
        stored = {name: column for name, column in columns.items() if name in STORED}
        assert {"obs", "value"} <= stored.keys()
        assert {column.dtype for column in stored.values()} == {getattr(torch, storage)}
        others = {column.dtype for name, column in columns.items() if name not in STORED}
        assert torch.bfloat16 not in others
        assert {trainer.engine.buffer[name].dtype for name in stored} == {torch.float32}
    weights = [
        torch.cat([tensor.flatten() for tensor in trainer.algorithm.network.parameters()])
        for trainer in trainers.values()
    ]
    begun = torch.cat(
        [tensor.flatten() for tensor in trained(case, "float32", 0).algorithm.network.parameters()]
    )
    exact, rounded = (weight.detach() - begun.detach() for weight in weights)
    assert not torch.equal(exact, rounded)
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.9


def test_rollouts_in_other_types_are_refused() -> None:
    with pytest.raises(UsageError, match="storage is 'float16'; did you mean bfloat16"):
        make_settings("ppo", "chasing", storage="float16")


def test_what_is_not_finite_is_zeroed_where_it_is_stored() -> None:
    trainer = trained("autograd", "bfloat16", 0)
    trainer.engine.collect()
    buffer = trainer.engine.buffer
    buffer.columns["obs"][2, 3, 0] = torch.nan
    before = buffer["obs"].clone()
    bad_envs = trainer.engine.guards.finite.clean(buffer)
    assert bad_envs is not None
    assert bad_envs.nonzero().flatten().tolist() == [3]
    assert torch.equal(buffer["obs"], before.nan_to_num(0.0))
    # the rows before the bad one led to it
    assert (~buffer["valid"]).nonzero().tolist() == [[1, 3], [2, 3]]


def test_one_kernel_does_not_store_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.engine.obstacles.use_triton", lambda tensor: True)
    trainer = trained("in C", "bfloat16", 0)
    assert persistent_obstacle(trainer.algorithm, trainer.env) == (
        "it stores rollouts in float32, not in bfloat16"
    )
