"""Students of privileged teachers: what they reach, with and without a memory; who labels what."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import gpurl
from gpurl.algorithms import make_algorithm
from gpurl.algorithms.bc import BC, BCConfig, reads_of
from gpurl.algorithms.ppo import PPOConfig
from gpurl.api import evaluate_run, resume, train
from gpurl.envs.cart_pole import CartPole
from gpurl.errors import CheckpointError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.settings import build, make_settings
from gpurl.run.setup import make_trainer as trainer_of
from gpurl.run.trainer import Trainer
from tests.engine.test_graphs import assert_equal, running_state
from tests.engines import graph_level
from tests.fake_graphs import FakeGraphs
from tests.small_runs import assert_same, small_run, small_settings

CPU, ENVS, HORIZON = torch.device("cpu"), 6, 4
HIDDEN = "tests.hidden_velocity"
GRU: dict[str, Any] = {"hidden": [64], "activation": "tanh", "memory": "gru", "memory_size": 32}
STUDENT: dict[str, Any] = {
    **{"dagger": True, "num_envs": 32, "horizon": 32, "updates": 8, "batch_size": 256},
    **{"learning_rate": 3e-3, "schedule": "linear", "learning_starts": 512},
    **{"device": "cpu", "quiet": True, "threads": 1, "eval_episodes": 32, "eval_every": 10**9},
}


# ---- what they reach ----


def test_a_student_needs_a_memory_for_what_it_does_not_see(tmp_path: Path, balancer: Path) -> None:
    """The teacher's 500 steps within 5 %; positions alone do not tell which way the pole falls.
    Then ppo goes on from the student, and never does worse while its new critic learns.
    """
    settings = STUDENT | {"teacher": str(balancer), "total_steps": 32 * 32 * 40}
    student = train("bc", HIDDEN, run_dir=tmp_path / "gru", actor_network=GRU, **settings)
    assert student.outcome.evaluation["eval/mean_reward"] >= 475
    forgetful = train("bc", HIDDEN, run_dir=tmp_path / "mlp", **settings)
    assert forgetful.outcome.evaluation["eval/mean_reward"] < 250
    small = {"num_envs": 32, "horizon": 32, "minibatches": 2, "network": GRU, "quiet": True}
    small |= {"device": "cpu", "threads": 1, "eval_episodes": 32, "total_steps": 5 * 32 * 32}
    tuned = train(
        *("ppo", HIDDEN),
        run_dir=tmp_path / "ppo",
        init_from=student.folder,
        critic_warmup=3,
        normalize_obs=False,
        **small,
    )
    assert tuned.outcome.evaluation["eval/mean_reward"] >= 475


# ---- who labels what ----


def make_student(teacher: Any, env: str = HIDDEN, level: str = "off", **changes: Any) -> Trainer:
    settings: dict[str, Any] = small_settings("bc") | {
        **{"teacher": teacher, "num_envs": ENVS, "horizon": HORIZON, "threads": 1},
        **{"graph": level, "dagger": True},
    }
    backend = None if level == "off" else FakeGraphs()
    chosen = make_settings("bc", env, **(settings | changes))
    trainer = trainer_of(chosen, CPU, backend=backend)
    trainer.start()
    return trainer


MEMORY: dict[str, Any] = {"hidden": [8], "memory": "gru", "memory_size": 5}


class ThreeActions(CartPole):
    """CartPole with one action more."""

    single_action_space = Discrete(3)


def test_a_teacher_reads_the_state_and_the_student_does_not(balancer: Path) -> None:
    trainer, teacher = make_student(str(balancer), normalize_obs=True), gpurl.load(balancer)
    algorithm: Any = trainer.algorithm
    assert algorithm.num_state == 4
    assert trainer.engine.obs.shape == (ENVS, 6)
    decision = algorithm.act(trainer.engine.obs)
    assert torch.equal(decision.columns["action"], teacher.act(trainer.engine.obs[:, 2:]))
    # the student's network, its normaliser and its replay buffer know two numbers
    for _ in range(3):
        trainer.iterate()
    assert algorithm.normalizer.mean.shape == (2,)
    assert algorithm.sample_batch()["obs"].shape == (8, 2)
    other = trainer.engine.obs.clone()
    other[:, 2:] += 1.0
    assert torch.equal(algorithm.inputs(other), algorithm.inputs(trainer.engine.obs))


def test_a_teacher_of_the_same_observations_needs_no_state(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "t", 1, env=HIDDEN, asymmetric=True).folder
    trainer = make_student(str(folder))
    assert trainer.algorithm.num_state == 0
    expected = gpurl.load(folder).act(trainer.engine.obs)
    assert torch.equal(trainer.algorithm.act(trainer.engine.obs).columns["action"], expected)


def test_a_teacher_may_read_either_or_both() -> None:
    box, state = Box(-1.0, 1.0, (2,), np.float32), Box(-5.0, 5.0, (3,), np.float32)
    both = Box(
        np.repeat(np.float32([-1.0, -5.0]), [2, 3]), np.repeat(np.float32([1.0, 5.0]), [2, 3])
    )
    student = make_algorithm(
        "bc", build(BCConfig, {"teacher": "x"}), box, Discrete(2), 64, state_space=state
    )
    assert isinstance(student, BC)
    rows = torch.randn(64, 5)
    for space, expected, columns in (
        (box, "observations", slice(0, 2)),
        (state, "privileged observations", slice(2, 5)),
        (both, "both", slice(0, 5)),
    ):
        teacher = make_algorithm("ppo", PPOConfig(), space, Discrete(2), 64)
        assert reads_of(teacher, "x", Discrete(2), box, state) == expected
        student.set_teachers([teacher])
        label = student.act(rows).columns["action"]
        assert torch.equal(label, teacher.act(rows[:, columns], explore=False).action)


def test_teachers_share_the_environments(tmp_path: Path, balancer: Path) -> None:
    """Each labels its own, and keeps its own memory."""
    network = {"hidden": [8], "memory": "gru", "memory_size": 3}
    small = {"env": "cart_pole", "normalize_obs": False}
    first = small_run(tmp_path / "a", 1, network=network, **small).folder
    second = small_run(tmp_path / "b", 1, network=network | {"memory_size": 7}, **small).folder
    names = [str(first), str(balancer), str(second)]
    trainer = make_student(names, "cart_pole", actor_network=MEMORY, num_envs=8)
    algorithm: Any = trainer.algorithm
    assert [each.shape for each in algorithm.initial_policy_state(8)] == [(8, 5), (8, 3), (8, 7)]
    teachers = [gpurl.load(name, num_envs=8).algorithm for name in names]
    states = [teacher.initial_policy_state(8) for teacher in teachers]
    obs, policy_state = trainer.engine.obs, trainer.engine.policy_state
    for _ in range(3):
        decision = algorithm.act(obs, policy_state)
        answers = [
            teacher.act(obs, state, explore=False) for teacher, state in zip(teachers, states)
        ]
        labels = [answer.action for answer in answers]
        expected = torch.cat((labels[0][:2], labels[1][2:5], labels[2][5:]))
        assert torch.equal(decision.columns["action"], expected)
        states = [answer.policy_state for answer in answers]
        policy_state = decision.policy_state
        torch.testing.assert_close(policy_state[1][:2], states[0][0][:2])
        torch.testing.assert_close(policy_state[2][5:], states[2][0][5:])
        obs = trainer.env.step(decision.action).obs
    with pytest.raises(UsageError, match="3 teachers share the environments, num_envs is 2"):
        make_student(names, "cart_pole", num_envs=2)


# ---- sequences ----


@pytest.mark.parametrize("memory_kind", MEMORIES)
def test_a_student_with_a_memory_learns_from_what_it_remembered(
    balancer: Path, memory_kind: str
) -> None:
    """The unrolled outputs are those it acted with, over ends of episodes too."""
    network = MEMORY | {"memory": memory_kind}
    trainer = make_student(str(balancer), actor_network=network, updates=1, learning_rate=1e-12)
    algorithm, engine = trainer.algorithm, trainer.engine
    assert isinstance(algorithm, BC)
    acted, act = [], algorithm.act
    saw_end = False

    def watched(obs: Any, policy_state: Any = (), explore: bool = True) -> Any:
        acted.append(algorithm._outputs(algorithm.inputs(obs), policy_state[:1])[0])
        return act(obs, policy_state, explore)

    algorithm.act = watched  # type: ignore[method-assign]
    for _ in range(20):
        acted.clear()
        engine.collect()
        data, _ = engine.prepare()
        memory = data["policy_state"][0]
        features = algorithm.actor.unroll(data["obs"], memory, data["episode_starts"])  # type: ignore[operator]
        output = algorithm.actor(features.flatten(0, 1))[0]
        torch.testing.assert_close(output, torch.cat(acted))
        saw_end |= bool(data["episode_starts"].any())
        engine.learn(data)
        engine.buffer.clear()
    assert saw_end
    assert algorithm.sample_batch()["obs"].shape == (HORIZON, 2, 2)  # batch_size 8


@pytest.mark.parametrize("level", ["full", "policy"])
def test_graphs_do_what_the_loop_does(balancer: Path, level: str) -> None:
    settings: dict[str, Any] = {"actor_network": MEMORY, "normalize_obs": True}
    with no_host_syncs():
        expected = make_student(str(balancer), **settings)
        trainer = make_student(str(balancer), level=level, **settings)
        for _ in range(8):
            metrics = [each.iterate() for each in (trainer, expected)]
            assert_equal(*metrics)
        assert graph_level(trainer.engine) == level, trainer.engine.notes
        assert_equal(*(running_state(each.engine) for each in (trainer, expected)))


@pytest.mark.parametrize(("memory_kind", "state_size"), [("gru", 5), ("lstm", 10), ("mingru", 5)])
def test_a_student_acts_and_goes_on_without_its_teacher_at_hand(
    tmp_path: Path, balancer: Path, memory_kind: str, state_size: int
) -> None:
    settings = small_settings("bc") | {"teacher": str(balancer), "dagger": True, "num_envs": ENVS}
    settings |= {"horizon": HORIZON, "threads": 1, "device": "cpu", "quiet": True}
    network = MEMORY | {"memory": memory_kind}
    settings |= {"actor_network": network, "eval_episodes": 2, "normalize_obs": True}
    run = train("bc", HIDDEN, run_dir=tmp_path / "run", total_steps=120, **settings)
    policy = gpurl.load(run.folder, num_envs=3)
    obs = np.ones((3, 2), np.float32)
    first = policy.act(obs)
    assert first.shape == policy.act(obs, deterministic=False).shape == (3,)
    assert evaluate_run(run.folder, 2, "cpu")["eval/episodes"] >= 2
    # a plain module with the memory inside
    module: Any = policy.module()
    memory = torch.zeros(3, state_size)
    actions = []
    policy.reset()
    for _ in range(4):
        action, memory = module(torch.as_tensor(obs), memory)
        actions.append(bool((action == torch.as_tensor(policy.act(obs))).all()))
    assert all(actions)
    # half a run and the other half are the whole
    half = train("bc", HIDDEN, run_dir=tmp_path / "half", total_steps=72, **settings)
    resume(half.folder, total_steps=120)
    weights = [
        dict(gpurl.load(each.folder, best=False).algorithm.state_dict()) for each in (run, half)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert_same(*({key: value.shape for key, value in each.items()} for each in weights))


# ---- what is refused ----


def test_what_cannot_teach(tmp_path: Path, balancer: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"the teacher .* its observation_space is Box.*\(4,\).*, this one's Box.*\(3,\)",
    ):
        make_student(str(balancer), "pendulum")
    with pytest.raises(
        UsageError,
        match=r"the teacher .* its action_space is Discrete\(2\), this one's Discrete\(3\)",
    ):
        make_student(str(balancer), "tests.algorithms.test_students:ThreeActions")
    other = small_run(tmp_path / "other", 1, env="tests.tiny_envs:RandomWalk").folder
    with pytest.raises(UsageError, match=r"\(2,\).*, its privileged observations Box.*\(4,\)"):
        make_student([str(balancer), str(other)])
    with pytest.raises(UsageError, match=r"teacher .*nowhere does not exist: give the folder"):
        make_student([str(balancer), str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"teacher .*empty gives no policy: no checkpoint to"):
        make_student(str(tmp_path / "empty"))
    damaged = small_run(tmp_path / "damaged", 1, env="cart_pole").folder
    for step in (damaged / "checkpoints").glob("step_*"):
        (step / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        make_student(str(damaged))


def test_a_dataset_has_no_sequences(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", obs=np.zeros((9, 4), np.float32), action=np.zeros(9, np.int64))
    with pytest.raises(UsageError, match=r"memory gru needs a teacher: .* no sequences"):
        make_student(
            (), "cart_pole", dataset=str(tmp_path / "some.npz"), dagger=False, actor_network=MEMORY
        )
