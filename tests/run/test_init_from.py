"""`init_from`: a run begins with the parts of another one that fit, and names those that do not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor

import gpurl
from gpurl.algorithms.sac import SAC
from gpurl.api import resume, train
from gpurl.cli.main import main
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError
from gpurl.nn.encoders import Encoder, EncoderConfig
from gpurl.nn.parts import describe
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer as trainer_of
from gpurl.run.trainer import Trainer
from tests.small_runs import assert_same, small_run, small_settings, some_demonstrations

CPU = torch.device("cpu")
FORM: dict[str, Any] = {"hidden": [8, 8], "activation": "tanh"}
SHAPE = {"normalize_obs": True, "actor_network": FORM, "critic_network": FORM}


def small_ppo(folder: Path, env: str = "pendulum", **changes: Any) -> Path:
    settings = {"network": FORM, "eval_episodes": 0} | changes
    return small_run(folder, 3, env=env, **settings).folder


def small_off_policy(name: str, folder: Path, env: str = "pendulum", **changes: Any) -> Path:
    settings: dict[str, Any] = small_settings(name) | {"normalize_obs": True, "num_envs": 4}
    settings |= {"actor_network": FORM, "total_steps": 64, "eval_episodes": 0}
    settings |= {"device": "cpu", "quiet": True, "threads": 1, "run_dir": str(folder)}
    if name == "bc":
        settings["dataset"] = some_demonstrations(folder.parent, make_env(env, 1, "cpu", 0))
    else:
        settings["critic_network"] = FORM
    return train(name, env, **(settings | changes)).folder


def successor(name: str, folder: Path, env: str = "pendulum", **changes: Any) -> Trainer:
    """A new run from `folder`, started."""
    settings = small_settings(name) | {"num_envs": 4, "threads": 1, "init_from": str(folder)}
    own: dict[str, Any] = SHAPE
    if name in ("ppo", "dqn"):
        own = {"network": FORM} if name == "ppo" else {}
        own |= {"horizon": 8}
    trainer = trainer_of(make_settings(name, env, **(settings | own | changes)), CPU)
    trainer.start()
    return trainer


def weights_of(algorithm: Any, name: str) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in getattr(algorithm, name).state_dict().items()}


def some_obs(env: str = "pendulum") -> Tensor:
    made = make_env(env, 64, "cpu", 3)
    return made.reset(seed=3)[0] * 3.0


def greedy(algorithm: Any, env: str = "pendulum") -> Tensor:
    obs = some_obs(env)
    return algorithm.act(obs, algorithm.initial_policy_state(len(obs)), explore=False).action


def notes_of(trainer: Trainer) -> str:
    return "\n".join(trainer.engine.notes)


# ---- what fits ----


@pytest.mark.parametrize("name", ["ppo", "sac", "td3", "mod_sac", "flash_sac", "redq"])
def test_the_same_algorithm_begins_where_the_other_run_ended(tmp_path: Path, name: str) -> None:
    if name == "ppo":
        folder, form = small_ppo(tmp_path / "first"), {}
    else:
        form = {} if name != "flash_sac" else {"actor_network": {}, "critic_network": {}}
        folder = small_off_policy(name, tmp_path / "first", **form)
    expected: Any = gpurl.load(folder).algorithm
    trainer = successor(name, folder, seed=5, **form)
    learner: Any = trainer.algorithm
    learnt = ("network", "head", "actor.", "critic.", "normalizer", "value_", "temperature")
    for key, value in expected.state_dict().items():
        if key.startswith(learnt):
            assert torch.equal(learner.state_dict()[key], value), key
    assert "not taken" not in notes_of(trainer)
    # only the weights: a new optimiser, new episodes
    assert all(int(each.state.step) == 0 for each in learner.optimizers.values())
    assert trainer.steps == 0
    trainer.iterate()


def test_values_of_a_few_actions_go_on_too(tmp_path: Path) -> None:
    small = small_settings("dqn") | {"num_envs": 4, "device": "cpu", "quiet": True}
    small |= {"total_steps": 64, "eval_episodes": 0, "run_dir": str(tmp_path / "first")}
    first = train("dqn", "cart_pole", **small).folder

    def begun(**changes: Any) -> Trainer:
        settings = small | {"seed": 3, "init_from": str(first)} | changes
        trainer = trainer_of(make_settings("dqn", "cart_pole", **settings), CPU)
        trainer.start()
        return trainer

    learner: Any = begun().algorithm
    expected = gpurl.load(first).algorithm
    assert_same(weights_of(learner, "network"), weights_of(expected, "network"))
    assert_same(weights_of(learner, "target"), weights_of(expected, "network"))
    # 11 numbers an action that are a distribution there, and quantiles here
    with pytest.raises(UsageError, match=r"network not taken: there atoms 0 .*; here atoms 11 "):
        begun(atoms=11)


def test_targets_begin_equal_to_what_they_follow(tmp_path: Path) -> None:
    folder = small_off_policy("td3", tmp_path / "first")
    learner: Any = successor("td3", folder, seed=5).algorithm
    for name in ("actor", "critic"):
        assert_same(weights_of(learner, f"target_{name}"), weights_of(learner, name))


def test_an_actor_of_ppo_plays_in_sac_and_back(tmp_path: Path) -> None:
    first = small_ppo(tmp_path / "first", squash=True, initial_std=0.3)
    expected: Any = gpurl.load(first).algorithm
    trainer = successor("sac", first)
    learner: Any = trainer.algorithm
    torch.testing.assert_close(greedy(learner), greedy(expected))
    # its standard deviation is that of ppo, for all observations
    output = learner.actor(learner.inputs(some_obs()))[0]
    std = expected.head.log_std.detach().expand(64, 1)
    torch.testing.assert_close(output[:, 1:].detach(), std)
    assert "critic not taken: there reads observations" in notes_of(trainer)
    assert "here 2 critics of actions" in notes_of(trainer)
    # and back: a deviation that depends on observations is not ppo's
    second = small_off_policy("sac", tmp_path / "second", init_from=str(first))
    trainer = successor("ppo", second, squash=True, initial_std=0.25)
    torch.testing.assert_close(greedy(trainer.algorithm), greedy(gpurl.load(second).algorithm))
    back: Any = trainer.algorithm
    assert float(back.head.log_std.detach().exp()) == pytest.approx(0.25)
    assert "standard deviation not taken" in notes_of(trainer)


def test_actions_that_are_clipped_here_and_squashed_there_are_named(tmp_path: Path) -> None:
    trainer = successor("sac", small_ppo(tmp_path / "first"))
    assert "actions of that run are clipped, these are squashed" in notes_of(trainer)


@pytest.mark.parametrize(
    "network",
    [{}, {"shared": True}, {"memory": "lstm"}],
    ids=["two encoders", "one encoder", "an encoder before a memory"],
)
def test_encoders_of_images_go_on(tmp_path: Path, network: dict[str, Any]) -> None:
    """Of the actor; the critic's own ones too."""
    network = {"hidden": [8], **network}
    run = small_ppo(tmp_path, "catch", network=network)
    old = weights_of(gpurl.load(run).algorithm, "network")
    begun = weights_of(successor("ppo", run, "catch", network=network).algorithm, "network")
    assert begun.keys() == old.keys()
    for name, weight in begun.items():
        assert torch.equal(weight, old[name]), name


def test_encoders_of_other_groups_have_another_form() -> None:
    def form(*names: str, members: int = 1) -> tuple[str, ...]:
        images = {name: Box(0, 255, (8, 8, 3), np.uint8) for name in names}
        return describe(Encoder(members, GroupedBox.of(images), EncoderConfig()))

    left = form("left", "right")
    assert left[0] == "groups left, right"
    assert any(each.startswith("convolution 32x3x3x3, stride ") for each in left)
    assert form("front", "left") != left
    assert form("left", "right", members=2) == left


@pytest.mark.parametrize(("reset", "expected"), [(False, 0.5), (True, 0.1)])
def test_the_standard_deviation_goes_on_or_begins_anew(
    tmp_path: Path, reset: bool, expected: float
) -> None:
    first = small_ppo(tmp_path / "first", initial_std=0.5, learning_rate=1e-12, schedule="constant")
    trainer = successor("ppo", first, initial_std=0.1, reset_std=reset)
    learner: Any = trainer.algorithm
    assert float(learner.head.log_std.detach().exp()) == pytest.approx(expected, rel=1e-4)
    assert ("reset to initial_std" in notes_of(trainer)) == reset


STATE_DEPENDENT = {"state_dependent_std": True}


def deviation(algorithm: Any) -> Tensor:
    """[64, 1] standard deviation of ppo's or sac's actions before the squashing."""
    if isinstance(algorithm, SAC):
        return algorithm.actor(algorithm.inputs(some_obs()))[0][:, 1:].clamp(-5.0, 2.0).exp()
    output = algorithm.network(algorithm.inputs(some_obs()))[0]
    return algorithm.head.mean_and_log_std(output)[1].exp().expand(64, 1)


@pytest.mark.parametrize(
    ("before", "name", "after"),
    [
        ({}, "ppo", {"std_type": "scalar"}),
        ({"std_type": "scalar"}, "ppo", {}),
        ({"std_type": "scalar"}, "ppo", {"std_type": "scalar"} | STATE_DEPENDENT),
        ({}, "ppo", STATE_DEPENDENT),
        (STATE_DEPENDENT, "ppo", STATE_DEPENDENT),
        (STATE_DEPENDENT, "sac", {}),
    ],
    ids=str,
)
def test_a_deviation_goes_on_whatever_it_is_kept_as(
    tmp_path: Path, before: dict[str, Any], name: str, after: dict[str, Any]
) -> None:
    """It begins at 0.3 in the first run, at 0.1 in the second if it is not taken."""
    folder = small_ppo(tmp_path / "first", initial_std=0.3, squash=True, **before)
    if name == "ppo":
        after = after | {"initial_std": 0.1, "squash": True}
    trainer = successor(name, folder, **after)
    expected = gpurl.load(folder).algorithm
    with torch.no_grad():
        torch.testing.assert_close(deviation(trainer.algorithm), deviation(expected))
    torch.testing.assert_close(greedy(trainer.algorithm), greedy(expected))
    assert "standard deviation" not in notes_of(trainer)


def test_deviations_of_other_kinds_are_named(tmp_path: Path) -> None:
    scalar = small_ppo(tmp_path / "scalar", std_type="scalar", **STATE_DEPENDENT)
    trainer = successor("ppo", scalar, **STATE_DEPENDENT)
    assert "gives its logarithm in only one of the runs" in notes_of(trainer)
    trainer = successor("ppo", scalar, std_type="scalar", reset_std=True, **STATE_DEPENDENT)
    assert "standard deviation reset to initial_std" in notes_of(trainer)
    torch.testing.assert_close(greedy(trainer.algorithm), greedy(gpurl.load(scalar).algorithm))


def test_a_beta_goes_on_as_a_beta_only(tmp_path: Path) -> None:
    folder = small_ppo(tmp_path / "beta", distribution="beta")
    trainer = successor("ppo", folder, distribution="beta")
    assert torch.equal(greedy(trainer.algorithm), greedy(gpurl.load(folder).algorithm))
    # the critic fits, an actor of means does not: it has as many numbers with a deviation
    trainer = successor("ppo", folder, **STATE_DEPENDENT)
    assert "actor not taken: its last layer gives beta, wanted clipped" in notes_of(trainer)


@pytest.mark.parametrize(
    ("head", "to", "changes"),
    [
        ("squashed", "sac", {}),
        ("squashed", "ppo", {"squash": True}),
        ("deterministic", "td3", {}),
        ("deterministic", "ppo", {"squash": True}),
        ("gaussian", "ppo", {}),
    ],
)
def test_a_student_goes_on(tmp_path: Path, head: str, to: str, changes: dict[str, Any]) -> None:
    folder = small_off_policy("bc", tmp_path / "bc", head=head)
    trainer = successor(to, folder, **changes)
    torch.testing.assert_close(greedy(trainer.algorithm), greedy(gpurl.load(folder).algorithm))
    assert "actions of that run" not in notes_of(trainer)
    trainer.iterate()


def test_choices_go_from_a_student_to_ppo_and_discrete_sac(tmp_path: Path) -> None:
    folder = small_off_policy("bc", tmp_path / "bc", "cart_pole")
    for name in ("ppo", "sac"):
        learner = successor(name, folder, "cart_pole").algorithm
        expected = gpurl.load(folder).algorithm
        assert torch.equal(greedy(learner, "cart_pole"), greedy(expected, "cart_pole"))


def test_another_task_of_the_same_shape(tmp_path: Path) -> None:
    folder = small_ppo(tmp_path / "first", "tests.tiny_envs:RandomWalk")
    trainer = successor("ppo", folder, "tests.tiny_envs:Endless")
    assert_same(
        dict(trainer.algorithm.state_dict()), dict(gpurl.load(folder).algorithm.state_dict())
    )


def test_a_critic_of_privileged_observations_keeps_the_actors_normaliser(tmp_path: Path) -> None:
    first = small_ppo(tmp_path / "first", "tests.tiny_envs:ContinuousAlternating")
    trainer = successor(
        "ppo",
        small_ppo(tmp_path / "blind", "tests.tiny_envs:HiddenAlternating", asymmetric=False),
        "tests.tiny_envs:HiddenAlternating",
    )
    learner: Any = trainer.algorithm
    assert learner.num_state == 2
    assert "began with actor, normaliser of the observations" in notes_of(trainer)
    assert "critic not taken: there reads observations" in notes_of(trainer)
    # the privileged columns are still to be measured: one rollout counts as much as all before
    assert float(learner.normalizer.count) == 4 * 8
    assert learner.normalizer.mean[3:].tolist() == [0.0, 0.0]
    assert learner.normalizer.unknown_from == 3
    trainer.iterate()
    assert learner.normalizer.unknown_from is None
    with pytest.raises(UsageError, match="does not fit"):
        successor("ppo", first, "tests.tiny_envs:HiddenAlternating")


def test_the_actor_that_was_taken_acts_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAC, "random_action", lambda self: pytest.fail("a random action"))
    trainer = successor("sac", small_ppo(tmp_path / "first"), learning_starts=64)
    for _ in range(3):
        trainer.iterate()


class KnowsItsActor(Callback):
    def on_end(self, run: RunView) -> None:
        learner: Any = run.algorithm
        assert not learner.is_random


def test_an_actor_that_was_not_taken_acts_at_random(tmp_path: Path) -> None:
    first = small_off_policy("td3", tmp_path / "first")
    trainer = successor("td3", first, learning_starts=64, actor_network={"hidden": [4]})
    assert "actor not taken" in notes_of(trainer)
    trainer.iterate()
    learner: Any = trainer.algorithm
    assert learner.is_random
    # and one that was taken goes on with acting after a resume
    folder = tmp_path / "second"
    small_off_policy("td3", folder, init_from=str(first), learning_starts=64, total_steps=16)
    resume(folder, total_steps=32, callbacks=[KnowsItsActor()])


@pytest.mark.parametrize("name", ["sac", "redq", "td3", "flash_sac"])
def test_critics_of_other_rewards_are_not_taken(tmp_path: Path, name: str) -> None:
    form = {} if name != "flash_sac" else {"actor_network": {}, "critic_network": {}}
    folder = small_off_policy(name, tmp_path / "first", reward_scale=0.1, **form)
    for scale in (0.1, 1.0):
        notes = notes_of(successor(name, folder, reward_scale=scale, **form))
        assert ("critic not taken: there " in notes) == (scale == 1.0)
        if name != "td3":
            assert ("temperature not taken: there rewards times 0.1" in notes) == (scale == 1.0)
        assert "actor not taken" not in notes


@pytest.mark.parametrize("name", ["dqn", "pqn"])
def test_action_values_of_other_rewards_are_not_taken(tmp_path: Path, name: str) -> None:
    settings = small_settings(name) | {"num_envs": 4, "threads": 1}
    own = {"total_steps": 64, "eval_episodes": 0, "quiet": True, "reward_scale": 0.1}
    train(name, "cart_pole", run_dir=str(tmp_path), **(settings | own))
    settings |= {"init_from": str(tmp_path)}
    trainer_of(make_settings(name, "cart_pole", **settings, reward_scale=0.1), CPU).start()
    made = trainer_of(make_settings(name, "cart_pole", **settings, reward_scale=1.0), CPU)
    with pytest.raises(UsageError, match=r"rewards times 0\.1.*rewards as they are.* reward_scale"):
        made.start()


def test_the_best_checkpoint_is_taken_or_the_one_that_is_named(tmp_path: Path) -> None:
    folder = small_ppo(tmp_path / "first", save_every="1i")
    steps = sorted((folder / "checkpoints").glob("step_*"))
    assert len(steps) == 3
    (folder / "checkpoints" / "BEST").write_text(steps[0].name + "\n")
    for path, best in ((folder, True), (steps[0], False), (steps[1], False)):
        learner = successor("ppo", path).algorithm
        expected = gpurl.load(path, best=best).algorithm
        assert_same(dict(learner.state_dict()), dict(expected.state_dict()))


def test_the_other_run_is_needed_at_the_start_only(tmp_path: Path) -> None:
    first = small_ppo(tmp_path / "first")
    run = small_run(
        tmp_path / "run",
        1,
        network=FORM,
        init_from=str(first),
        eval_episodes=0,
        learning_rate=1e-9,
        schedule="constant",
    )
    shutil.rmtree(first)
    before = gpurl.load(run.folder).algorithm.state_dict()["network.trunk.layers.0.weight"].clone()
    resume(run.folder, total_steps=2 * 128)
    after = gpurl.load(run.folder).algorithm.state_dict()["network.trunk.layers.0.weight"]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="init_from"):
        resume(run.folder, total_steps=3 * 128, init_from="another")
    with pytest.raises(UsageError, match=r"init_from .*first does not exist: give the folder"):
        successor("ppo", first)


# ---- what does not fit ----


@pytest.mark.parametrize(
    ("name", "env", "changes", "message"),
    [
        (
            "sac",
            "pendulum",
            {"actor_network": {"hidden": [9], "activation": "tanh"}},
            r"actor not taken: there dense 3-8 tanh, dense 8-8 tanh; here dense 3-9 tanh; ",
        ),
        (
            "ppo",
            "pendulum",
            {"network": FORM | {"activation": "elu"}},
            r"actor not taken: there dense 3-8 tanh.*; here dense 3-8 elu",
        ),
        ("ppo", "pendulum", {"network": FORM | {"memory": "gru"}}, r"here Gru"),
        ("ppo", "chasing", {}, r"observations of 3 numbers, this one of 8"),
        ("ppo", "tests.tiny_envs:RandomWalk", {}, r"actor not taken: it has weights of shape"),
        (
            "sac",
            "pendulum",
            {"normalize_obs": False},
            r"that run has normalize_obs True, this one False: set normalize_obs to True",
        ),
        (
            "ppo",
            "pendulum",
            {"normalize_obs": False, "network": FORM | {"activation": "elu"}},
            r"set normalize_obs to True; there dense 3-8 tanh.*; here dense 3-8 elu",
        ),
        ("dqn", "cart_pole", {}, r"network not taken: that run has none, only actor"),
    ],
    ids=str,
)
def test_nothing_that_fits_is_an_error(
    tmp_path: Path, name: str, env: str, changes: dict[str, Any], message: str
) -> None:
    folder = small_ppo(tmp_path / "first")
    if "RandomWalk" in env:  # the critic would fit, but the action has two numbers
        trainer = successor(name, folder, env, **changes)
        assert "actor not taken: it has weights of shape (1, 1, 8), wanted (1, 2, 8)" in notes_of(
            trainer
        )
        return
    with pytest.raises(UsageError, match=rf"init_from .*first, step .* does not fit: .*{message}"):
        successor(name, folder, env, **changes)


def test_bad_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist: give the folder of a run"):
        successor("ppo", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty gives no policy: no checkpoint to load"):
        successor("ppo", tmp_path / "empty")
    for command in ("eval", "play", "export"):
        assert main([command, str(tmp_path / "empty")]) == 2
    folder = small_ppo(tmp_path / "first")
    newest = max((folder / "checkpoints").glob("step_*"))
    (newest / "model.safetensors").write_bytes(b"damaged")
    for step in (folder / "checkpoints").glob("step_*"):
        (step / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        successor("ppo", folder)
    # from the command line, with its exit code
    words = ["train", "ppo", "pendulum", "--init-from", str(folder), "--num-envs", "4"]
    words += ["--total-steps", "64", "--device", "cpu", "--minibatches", "1"]
    assert main([*words, "--run-dir", str(tmp_path / "new")]) == 5
    assert "model.safetensors" in capsys.readouterr().err


def test_the_command_line_says_what_was_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_ppo(tmp_path / "first")
    words = [
        "train",
        "ppo",
        "pendulum",
        "--init-from",
        str(folder),
        "--num-envs",
        "4",
        "--reset-std",
    ]
    words += ["--total-steps", "64", "--device", "cpu", "--minibatches", "1", "--horizon", "8"]
    words += ["--network.hidden", "8", "8", "--eval-episodes", "0"]
    assert main([*words, "--run-dir", str(tmp_path / "new")]) == 0
    text = "".join(capsys.readouterr())
    assert "began with actor, critic, normaliser of" in text
    assert "standard deviation reset to initial_std" in text
