"""What each rank has of a run, by ranks that are threads: its share of what one process has, and
its part of a checkpoint, from which it continues exactly.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.algorithms.bc import BC
from gpurl.algorithms.flash_sac import FlashSAC
from gpurl.checkpoints.run_parts import Parts
from gpurl.envs.registry import make_env
from gpurl.nn.ranks import Alone
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer
from tests.small_runs import assert_same, small_run, small_settings, some_demonstrations
from tests.thread_ranks import ThreadRank, together

CPU = torch.device("cpu")
NUM_ENVS, HORIZON = 8, 4
COMMON: dict[str, Any] = {
    "num_envs": NUM_ENVS,
    "horizon": HORIZON,
    "total_steps": 8 * NUM_ENVS * HORIZON,
    "eval_episodes": 0,
    "device": "cpu",
    "threads": 1,
}


def made(algorithm: str, rank: Alone, **changes: Any) -> Trainer:
    settings = small_settings(algorithm) | COMMON | changes
    return make_trainer(make_settings(algorithm, "pendulum", **settings), CPU, ranks=rank)


def learned(trainer: Trainer, iterations: int) -> dict[str, Tensor]:
    """Weights and normalisers after so many iterations."""
    for _ in range(iterations):
        trainer.iterate()
    return {name: value.clone() for name, value in trainer.algorithm.state_dict().items()}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The folders of three policies that differ."""
    folder = tmp_path_factory.mktemp("teachers")
    runs = [small_run(folder / str(seed), 1, seed=seed, eval_episodes=0) for seed in range(3)]
    return tuple(str(run.folder) for run in runs)


@pytest.mark.parametrize("count", [2, 3])
def test_teachers_have_the_environments_that_they_have_in_one_process(
    teachers: tuple[str, ...], count: int
) -> None:
    """Rank 0 of two has the first teacher and a part of the second."""

    def played(rank: Alone) -> list[Tensor]:
        trainer = made("bc", rank, teacher=teachers[:count])
        trainer.start()
        trainer.engine.collect()
        columns = trainer.engine.buffer.columns
        return [columns[name].clone() for name in ("obs", "action")]

    whole = played(Alone())
    first, second = together(2, played)
    for got, expected in zip(zip(first, second), whole):
        torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["flash_sac", "bc on a dataset", "bc of teachers", "bc by memory"])
def test_ranks_continue_from_a_checkpoint_exactly(
    kind: str, teachers: tuple[str, ...], tmp_path: Path
) -> None:
    """Replay, random streams, and what belongs to the episodes of one rank."""
    algorithm, changes = "bc", dict[str, Any](save_replay=True)
    if kind == "flash_sac":
        algorithm, changes["noise_span"] = kind, 4
    elif kind == "bc on a dataset":
        changes = {"dataset": some_demonstrations(tmp_path, make_env("pendulum", 1))}
    else:
        changes |= {"teacher": teachers, "dagger": True, "normalize_obs": True}
        if kind == "bc by memory":
            changes["actor_network"] = {"hidden": [8], "memory": "gru", "memory_size": 4}
    saved: list[Parts] = []

    def whole(rank: ThreadRank) -> list[dict[str, Tensor]]:
        trainer = made(algorithm, rank, **changes)
        trainer.start()
        before = learned(trainer, 3)
        parts = trainer.state()
        if rank.index == 0:
            saved.append(copy.deepcopy(parts))
        return [before, learned(trainer, 2)]

    def continued(rank: ThreadRank) -> dict[str, Tensor]:
        trainer = made(algorithm, rank, **changes)
        trainer.restore(copy.deepcopy(saved[0]))
        return learned(trainer, 2)

    expected = together(2, whole)
    got = together(2, continued)
    for (before, after), mine in zip(expected, got):
        assert_same(mine, after)
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_ranks_draw_other_rows_of_a_dataset(tmp_path: Path) -> None:
    dataset = some_demonstrations(tmp_path, make_env("pendulum", 1))

    def drawn(rank: ThreadRank) -> Tensor:
        algorithm = made("bc", rank, dataset=dataset).algorithm
        assert isinstance(algorithm, BC)
        return algorithm.sample_batch()["action"]

    first, second = together(2, drawn)
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_other_environments_on_ranks_begin_their_episodes_anew() -> None:
    """As many as a rank has now were there before, of another run of episodes."""
    before = made("flash_sac", Alone(), num_envs=4)
    before.start()
    learned(before, 1)
    parts = before.state()
    assert parts["training"]["returned"].all()

    def returned(rank: ThreadRank) -> Tensor:
        trainer = made("flash_sac", rank, num_envs=8)
        trainer.restore(copy.deepcopy(parts))
        assert isinstance(trainer.algorithm, FlashSAC)
        assert trainer.algorithm.reward_scaler is not None
        return trainer.algorithm.reward_scaler.returned

    assert not torch.cat(together(2, returned)).any()
