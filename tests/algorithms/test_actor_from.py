"""`actor_from`: a run that starts with the actor of another, and which actors do not fit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.algorithms.sac import SAC
from gpurl.api import resume, train
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer as trainer_of
from gpurl.run.trainer import Trainer
from tests.small_runs import assert_same, small_run, small_settings, some_demonstrations

ENVS, CPU = 8, torch.device("cpu")
SMALL: dict[str, Any] = small_settings("bc") | {
    "num_envs": ENVS,
    "horizon": 2,
    "device": "cpu",
    "quiet": True,
    "log_every": 0.0,
}
ITERATION = ENVS * 2


def weights_of(algorithm: Any, name: str = "actor") -> dict[str, Tensor]:
    return {key: value.clone() for key, value in getattr(algorithm, name).state_dict().items()}


def cloned(folder: Path, env: str = "pendulum", **changes: Any) -> Path:
    path = some_demonstrations(folder, make_env(env, 1, "cpu", 0))
    shape = SMALL | {
        "dataset": path,
        "total_steps": 2 * ITERATION,
        "eval_episodes": 0,
        "run_dir": str(folder / "bc"),
        "seed": 5,
    }
    return train("bc", env, **(shape | changes)).folder


def successor(name: str, env: str, folder: Path, **changes: Any) -> Trainer:
    settings = make_settings(
        name,
        env,
        **(
            small_settings(name)
            | {"num_envs": 4, "actor_from": str(folder), "threads": 1}
            | changes
        ),
    )
    return trainer_of(settings, CPU)


@pytest.mark.parametrize(
    ("name", "env", "head", "normalize"),
    [
        ("sac", "pendulum", "squashed", True),
        ("mod_sac", "pendulum", "squashed", False),
        ("td3", "pendulum", "deterministic", False),
        ("fast_td3", "pendulum", "deterministic", True),
        ("sac", "cart_pole", "squashed", False),
    ],
)
def test_others_go_on_from_a_clone(
    tmp_path: Path, name: str, env: str, head: str, normalize: bool
) -> None:
    shape = {
        "normalize_obs": normalize,
        "actor_network": {"hidden": [8], "layer_norm": name == "fast_td3"},
    }
    folder = cloned(tmp_path, env, head=head, **shape)
    expected = gpurl.load(folder).algorithm
    trainer = successor(name, env, folder, critic_network={"hidden": [8]}, **shape)
    learner: Any = trainer.algorithm
    drawn, critic = weights_of(learner), weights_of(learner, "critic")
    trainer.start()
    assert not any(
        torch.equal(value, drawn[key])
        for key, value in weights_of(learner).items()
        if "weight" in key
    )
    assert_same(weights_of(learner), weights_of(expected))
    assert_same(weights_of(learner, "critic"), critic)
    if learner.target_actor is not None:
        assert_same(weights_of(learner, "target_actor"), weights_of(expected))
    assert torch.equal(
        learner.act(trainer.engine.obs, explore=False).action,
        expected.act(trainer.engine.obs, explore=False).action,
    )
    for _ in range(3):
        trainer.iterate()
    assert not torch.equal(
        next(iter(weights_of(learner).values())), next(iter(weights_of(expected).values()))
    )


def test_the_actor_that_was_taken_plays_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAC, "random_action", lambda self: pytest.fail("a random action"))
    trainer = successor("sac", "pendulum", cloned(tmp_path), learning_starts=64)
    trainer.start()
    for _ in range(3):
        trainer.iterate()


def test_the_first_run_is_needed_at_the_start_only(tmp_path: Path, balancer: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(balancer, folder)
    shape = small_settings("sac") | {
        "actor_network": {"hidden": [64, 64]},
        "quiet": True,
        "device": "cpu",
        "num_envs": 16,
    }
    shape |= {"learning_starts": 10**6, "total_steps": 16, "actor_from": str(folder)}
    run = train("sac", "cart_pole", run_dir=str(tmp_path / "run"), **shape)
    assert run.outcome.evaluation["eval/mean_reward"] >= 475  # nothing was learnt yet
    shutil.rmtree(folder)
    assert_same(
        weights_of(gpurl.load(run.folder).algorithm), weights_of(gpurl.load(balancer).algorithm)
    )
    assert resume(run.folder, total_steps=32).outcome.evaluation["eval/mean_reward"] >= 475
    with pytest.raises(CheckpointError, match="actor_from"):
        resume(run.folder, total_steps=48, actor_from="another")
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        train("sac", "cart_pole", run_dir=str(tmp_path / "again"), **shape)


@pytest.mark.parametrize(
    ("name", "env", "changes", "message"),
    [
        (
            "sac",
            "pendulum",
            {"actor_network": {"hidden": [9]}},
            r"its actor_network is .*\(8,\).* wanted .*\(9,\)",
        ),
        (
            "sac",
            "pendulum",
            {"actor_network": {"activation": "tanh"}},
            "its actor_network is .*relu.* wanted .*tanh",
        ),
        ("sac", "chasing", {}, r"its action shape is \(1,\), wanted \(2,\)"),
        ("td3", "pendulum", {}, r"its actor\.layers\.1\.weight is \(1, 2, 8\), wanted \(1, 1, 8\)"),
        (
            "sac",
            "mountain_car_continuous",
            {},
            r"its actor\.layers\.0\.weight is \(1, 8, 3\), wanted \(1, 8, 2\)",
        ),
        (
            "sac",
            "pendulum",
            {"normalize_obs": True},
            r"its normalizer\.mean is None, wanted \(3,\)",
        ),
    ],
    ids=str,
)
def test_an_actor_of_another_form_is_refused(
    tmp_path: Path, name: str, env: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=rf"actor_from .*bc does not fit: {message}"):
        successor(name, env, cloned(tmp_path), **changes).start()


def test_what_has_no_such_actor_is_refused(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    with pytest.raises(
        UsageError, match=r"does not fit: its actor_network is None, wanted BodyConfig"
    ):
        successor("sac", "pendulum", folder).start()
