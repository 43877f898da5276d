"""Whole runs of behaviour cloning: how well they copy, who plays, what is stored, stopping, graphs,
teachers that do not fit.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gpurl
from gpurl.algorithms import make_algorithm
from gpurl.algorithms.base import episode_ends, restart_policy_state
from gpurl.algorithms.bc import BC, BCConfig
from gpurl.api import evaluate_run, resume, train
from gpurl.cli.main import main
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.load import Loaded
from gpurl.run.settings import build, make_settings
from gpurl.run.setup import make_trainer as trainer_of
from gpurl.run.trainer import Trainer
from tests.cloned_runs import clone, record
from tests.engine.test_graphs import assert_equal, results
from tests.engines import graph_level
from tests.fake_graphs import FakeGraphs
from tests.small_runs import small_run, small_settings, some_demonstrations

ENVS, CPU = 8, torch.device("cpu")
SMALL: dict[str, Any] = small_settings("bc") | {
    "num_envs": ENVS,
    "horizon": 2,
    "device": "cpu",
    "quiet": True,
    "log_every": 0.0,
}
ITERATION = ENVS * 2


# ---- whole runs ----


def test_ten_episodes_are_enough_to_balance(balancer: Path) -> None:
    assert evaluate_run(balancer, episodes=64, device="cpu", best=False)["eval/mean_reward"] >= 475


def test_a_pursuer_is_cloned_to_within_its_standard_error(tmp_path: Path) -> None:
    env = make_env("chasing", 64, "cpu", 0)
    path = record(tmp_path / "pursuit.npz", env, env.scripted_action, 400)  # type: ignore[attr-defined]
    run = clone(
        tmp_path / "run",
        "chasing",
        dataset=path,
        head="squashed",
        total_steps=16 * 250,
        batch_size=512,
        learning_starts=512,
    )
    ours, scripted = run.outcome.evaluation, run.baseline
    error = (ours["eval/std_reward"] ** 2 / 64 + scripted["eval/std_reward"] ** 2 / 64) ** 0.5
    assert abs(ours["eval/mean_reward"] - scripted["eval/mean_reward"]) <= error


def test_dagger_learns_from_a_teacher(tmp_path: Path, balancer: Path) -> None:
    run = clone(
        tmp_path / "run",
        "cart_pole",
        teacher=str(balancer),
        dagger=True,
        horizon=16,
        total_steps=16 * 16 * 60,
    )
    assert run.outcome.evaluation["eval/mean_reward"] >= 475


# ---- who plays, and what is stored ----


def make_trainer(env: str = "cart_pole", level: str = "off", **changes: Any) -> Trainer:
    """A started trainer, with graphs that are recorded on the CPU where a level is wanted."""
    settings = make_settings("bc", env, **(SMALL | {"threads": 1, "graph": level} | changes))
    trainer = trainer_of(settings, CPU, backend=None if level == "off" else FakeGraphs())
    trainer.start()
    return trainer


def watched(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(obs, action, what has ended after it) of every step from now on."""
    steps, step = [], trainer.env.step

    def watching(action: Tensor) -> Any:
        obs = trainer.engine.obs.clone()
        timestep = step(action)
        steps.append((obs, action.clone(), episode_ends(timestep).clone()))
        return timestep

    trainer.env.step = watching  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("dagger", [False, True])
def test_the_teacher_labels_and_the_student_plays_once_it_has_learnt(
    balancer: Path, dagger: bool
) -> None:
    trainer, teacher = (
        make_trainer(teacher=str(balancer), dagger=dagger, learning_rate=1e-12),
        gpurl.load(balancer),
    )
    assert isinstance(trainer.algorithm, BC)
    with torch.no_grad():
        list(trainer.algorithm.actor.parameters())[-1].copy_(
            torch.tensor([99.0, -99.0])
        )  # a student that goes left always
    steps = watched(trainer)
    for _ in range(4):
        trainer.iterate()
    for number, (obs, action, _) in enumerate(steps):
        assert torch.equal(
            action, torch.zeros_like(action) if dagger and number >= 2 else teacher.act(obs)
        ), number
    batch = trainer.algorithm.replay.sample(500, 0.9)
    assert torch.equal(batch["action"].long(), teacher.act(batch["obs"]))
    assert 0 < int(batch["action"].sum()) < 500
    torch.testing.assert_close(
        torch.cat([obs for obs, _, _ in steps]).unique(dim=0), batch["obs"].unique(dim=0)
    )


def test_with_a_dataset_the_student_plays_and_learns_nothing_of_it(tmp_path: Path) -> None:
    env = make_env("pendulum", 4, "cpu", 0)
    path = record(tmp_path / "some.npz", env, lambda obs: obs[:, :1] * 1.5, 30)
    trainer = make_trainer("pendulum", dataset=path, normalize_obs=True)
    algorithm, data = trainer.algorithm, np.load(path)
    assert isinstance(algorithm, BC)
    assert algorithm.normalizer is not None
    before = algorithm.replay.state_dict()["obs"].clone()
    for _ in range(4):
        trainer.iterate()
    algorithm.mark_episode_break()  # as when environments were reset because they gave NaN
    algorithm.mark_episode_break(torch.arange(ENVS) == 3)
    assert torch.equal(algorithm.replay.state_dict()["obs"], before)
    np.testing.assert_allclose(algorithm.normalizer.mean.numpy(), data["obs"].mean(0), atol=1e-6)
    batch = algorithm.replay.sample(3000, 0.99)
    assert bool((batch["weight"] == 1).all())
    assert len(batch["index"].unique()) == len(data["obs"]) == 120
    np.testing.assert_array_equal(batch["obs"], data["obs"][batch["index"]])
    np.testing.assert_allclose(
        batch["action"] * 2.0, data["action"][batch["index"]], atol=1e-6
    )  # torques go to 2


def test_images_stay_small(tmp_path: Path) -> None:
    algorithm = make_algorithm(
        "bc",
        build(BCConfig, {"dataset": str(tmp_path / "some.npz")}),
        Box(0, 255, (4, 4, 1), np.uint8),
        MultiDiscrete([2, 3]),
        ENVS,
    )
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 1), np.uint8)
    np.savez(tmp_path / "some.npz", obs=images, action=np.ones((9, 2), np.int64))
    algorithm.make_buffer()
    assert isinstance(algorithm, BC)
    batch = algorithm.replay.sample(20, 0.99)
    assert batch["obs"].dtype == torch.uint8
    np.testing.assert_array_equal(batch["obs"], images.reshape(9, 16)[batch["index"]])
    assert algorithm.learn({})["train/actor_loss"].isfinite()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_teacher_with_a_memory_keeps_it(tmp_path: Path, memory: str) -> None:
    network = {"hidden": [8], "memory": memory, "memory_size": 8}
    path = small_run(tmp_path / "teacher", 1, network=network).folder
    trainer, teacher = (
        make_trainer("pendulum", teacher=str(path)),
        gpurl.load(path, num_envs=ENVS).algorithm,
    )
    steps, policy_state = watched(trainer), teacher.initial_policy_state(ENVS)
    for _ in range(20):
        trainer.iterate()
    for obs, action, ended in steps:
        expected, policy_state, _ = teacher.act(obs, policy_state, explore=False)
        assert torch.equal(action, expected)
        policy_state = restart_policy_state(policy_state, ended)
    assert any(bool(ended.any()) for _, _, ended in steps)
    assert not torch.equal(
        action, teacher.act(obs, teacher.initial_policy_state(ENVS), explore=False).action
    )  # which a memory changes


# ---- stopping, loading, graphs ----


def settings_of(kind: str, folder: Path, balancer: Path) -> dict[str, Any]:
    if kind == "dataset":
        return {
            "dataset": some_demonstrations(folder, make_env("cart_pole", 1, "cpu", 0)),
            "normalize_obs": True,
        }
    return {"teacher": str(balancer), "dagger": kind == "dagger", "save_replay": True}


@pytest.mark.parametrize("kind", ["dataset", "teacher"])
def test_a_policy_needs_neither_dataset_nor_teacher(
    tmp_path: Path, balancer: Path, kind: str
) -> None:
    (tmp_path / "source").mkdir()
    shutil.copytree(balancer, tmp_path / "source" / "run")
    shape = SMALL | settings_of(kind, tmp_path / "source", tmp_path / "source" / "run")
    folder = train(
        "bc",
        "cart_pole",
        run_dir=str(tmp_path / "run"),
        total_steps=2 * ITERATION,
        eval_episodes=0,
        **shape,
    ).folder
    shutil.rmtree(tmp_path / "source")
    policy = gpurl.load(folder, num_envs=3)
    assert (
        policy.act(torch.zeros(3, 4)).shape
        == policy.act(torch.zeros(3, 4), deterministic=False).shape
        == (3,)
    )
    assert np.isnan(policy.value(np.zeros(4, np.float32)))
    with pytest.raises((UsageError, CheckpointError), match="source"):
        resume(folder, total_steps=3 * ITERATION)


@pytest.mark.parametrize("kind", ["dataset", "teacher", "dagger"])
def test_graphs_do_what_the_loop_does(tmp_path: Path, balancer: Path, kind: str) -> None:
    settings = settings_of(kind, tmp_path, balancer)
    with no_host_syncs():
        expected = results(make_trainer(**settings))
        for level in ("full", "policy"):
            trainer = make_trainer(level=level, **settings)
            got = results(trainer)
            assert graph_level(trainer.engine) == level, trainer.engine.notes
            assert_equal(got, expected)


@pytest.mark.parametrize("env", ["chasing", "cart_pole"])
@pytest.mark.parametrize("dagger", [False, True])
def test_with_a_teacher_nothing_looks_at_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str, dagger: bool
) -> None:
    made = make_env(env, 1, "cpu", 0)
    settings = make_settings("ppo", env, network={"hidden": [8], "memory": "gru"})

    def load(path: str, device: str, num_envs: int) -> Loaded:
        # a checkpoint holds numbers, which these tensors have not
        spaces = made.single_observation_space, made.single_action_space
        teacher = make_algorithm("ppo", settings.algorithm_config, *spaces, num_envs, device)
        return Loaded(teacher, {}, 0, {}, 0)

    monkeypatch.setattr("gpurl.run.load.load_algorithm", load)
    with FakeTensorMode(), no_host_syncs():
        trainer = make_trainer(env, teacher=str(tmp_path), dagger=dagger)
        for _ in range(2):
            assert trainer.iterate()


# ---- what is refused ----


def test_a_teacher_of_another_environment(tmp_path: Path, balancer: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"the teacher .* is of another environment: its observation_space is Box.*\(4,\).*, "
        r"this one's Box",
    ):
        make_trainer("pendulum", teacher=str(balancer))
    algorithm = make_algorithm(
        "bc",
        build(BCConfig, {"teacher": str(balancer)}),
        gpurl.load(balancer).algorithm.observation_space,
        Discrete(3),
        4,
    )
    with pytest.raises(
        UsageError, match=r"its action_space is Discrete\(2\), this one's Discrete\(3\)"
    ):
        algorithm.set_teachers([gpurl.load(balancer).algorithm])
    with pytest.raises(UsageError, match="nowhere"):
        make_trainer(teacher=str(tmp_path / "nowhere"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--num-envs", "4", "--total-steps", "8", "--eval-episodes", "0", "--device", "cpu"]
    assert main(["train", "bc", "pendulum", "--run-dir", str(tmp_path / "none"), *small]) == 2
    assert (
        "bc needs either a dataset or a teacher; got dataset None and teacher None"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "none").exists()
    path = some_demonstrations(tmp_path, make_env("pendulum", 1, "cpu", 0))
    assert (
        main(
            [
                "train",
                "bc",
                "pendulum",
                "--dataset",
                path,
                "--run-dir",
                str(tmp_path / "run"),
                *small,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "train",
                "bc",
                "pendulum",
                "--teacher",
                str(tmp_path / "run"),
                "--dagger",
                f"--root={tmp_path}",
                *small,
            ]
        )
        == 0
    )
