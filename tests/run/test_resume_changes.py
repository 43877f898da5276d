"""A resumed run follows the settings that were changed, or refuses them by name."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

import gpurl
from gpurl import api
from gpurl.api import resume, run, saved_settings
from gpurl.checkpoints import folders
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.torch_env import State
from gpurl.errors import CheckpointError, UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.resume import _restore
from gpurl.run.run_folder import LOCK_SECONDS, create_run_folder, lock_run
from gpurl.run.settings import TrainConfig, make_settings, merge
from tests.small_runs import small_settings

SHORT = {"max_episode_steps": 8}


class SeesTemperature(Callback):
    """Notes the temperature before the first iteration, and the steps of its optimiser."""

    def on_start(self, run: RunView) -> None:
        temperature: Any = run.algorithm.temperature
        self.value = float(temperature.value().detach())
        optimizer = run.algorithm.optimizers.get("temperature")
        self.steps = None if optimizer is None else int(optimizer.state.step)


def first_run(folder: Path, name: str, env: str, **changes: Any) -> Path:
    shape = {
        "num_envs": 4,
        "horizon": 2,
        "total_steps": 80,
        "eval_episodes": 0,
        "device": "cpu",
        "threads": 1,
        "quiet": True,
        "run_dir": folder,
    }
    return gpurl.train(name, env, **(small_settings(name) | shape | changes)).folder


def resumed(folder: Path, total_steps: int, **changes: Any) -> SeesTemperature:
    seen = SeesTemperature()
    resume(folder, callbacks=[seen], total_steps=total_steps, **changes)
    return seen


@pytest.mark.parametrize(
    ("name", "env"),
    [("sac", "pendulum"), ("mod_sac", "pendulum"), ("discrete_sac", "cart_pole")],
)
def test_a_temperature_is_fixed_changed_and_learned_again(
    name: str, env: str, tmp_path: Path
) -> None:
    folder = first_run(tmp_path / "run", name, env, learning_rate=0.01)
    model = load_checkpoint(folder)[0]["model"]
    learned = float(model["temperature.log"].exp())
    assert learned != 1.0
    # the same settings: it continues
    seen = resumed(folder, 88)
    assert seen.value == pytest.approx(learned, rel=1e-6)
    assert seen.steps
    # learned -> fixed, fixed -> another value
    for total_steps, value in ((96, 0.5), (104, 0.25)):
        seen = resumed(folder, total_steps, temperature=value)
        assert (seen.value, seen.steps) == (pytest.approx(value, rel=1e-6), None)
        parts = load_checkpoint(folder)[0]
        assert float(parts["model"]["temperature.log"]) == pytest.approx(math.log(value))
    # fixed -> learned: from the value that was fixed, with a new optimiser
    seen = resumed(folder, 112, temperature=None)
    assert (seen.value, seen.steps) == (pytest.approx(0.25, rel=1e-6), 0)
    parts = load_checkpoint(folder)[0]
    assert parts["training"]["optimizers"]["temperature"]["step"] > 0
    assert float(parts["model"]["temperature.log"]) != pytest.approx(math.log(0.25), rel=1e-6)


def test_a_lost_optimiser_is_no_change_of_settings(tmp_path: Path) -> None:
    """Only a temperature that was fixed may lack its optimiser."""
    folder = first_run(tmp_path / "run", "sac", "pendulum")
    parts = load_checkpoint(folder)[0]
    del parts["training"]["optimizers"]["temperature"]
    save_checkpoint(folder / "checkpoints", 80, parts, overwrite=True)
    with pytest.raises(CheckpointError, match="has no 'temperature'"):
        resume(folder, total_steps=88)


@pytest.mark.parametrize(
    ("algorithm", "env", "changes"),
    [
        ("sac", "pendulum", {"initial_temperature": 0.5}),
        ("ddpg", "pendulum", {"noise": "ornstein_uhlenbeck"}),
        ("td3", "pendulum", {"noise": "episode"}),
        ("dqn", "cart_pole", {"per_alpha": 0.7}),
    ],
    ids=str,
)
def test_what_cannot_change_is_refused_by_name(
    algorithm: str, env: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = first_run(tmp_path / "run", algorithm, env)
    ((name, value),) = changes.items()
    with pytest.raises(UsageError, match=rf"has {name} .*, this run {value}; .* keeps it"):
        resume(folder, total_steps=88, **changes)
    assert resume(folder, total_steps=88).outcome.steps == 88


def test_a_checkpoint_may_be_older_than_a_setting(tmp_path: Path) -> None:
    folder = first_run(tmp_path / "run", "ppo", "pendulum")
    parts = load_checkpoint(folder)[0]
    settings = parts["meta"]["settings"]
    for values, names in ((settings, ("distribution",)), (settings["network"], ("encoder",))):
        for name in names:
            del values[name]
    save_checkpoint(folder / "checkpoints", 80, parts, overwrite=True)
    assert resume(folder, total_steps=88).outcome.steps == 88
    with pytest.raises(UsageError, match=r"has network.activation tanh, this run relu"):
        resume(folder, total_steps=96, network={"activation": "relu"})


# ---- the best checkpoint, of one task only ----


def best_of(folder: Path) -> tuple[int, float]:
    """(step, mean return) of the checkpoint that eval, load and play take."""
    policy = gpurl.load(folder)
    parts, _ = load_checkpoint(folder, best=True)
    return policy.step, float(parts["trainer"]["best_return"])


@pytest.mark.parametrize(
    "changes",
    [{"env_options": {"max_episode_steps": 400}}, {"env": "tests.run.test_resume_changes:Poor"}],
    ids=["options", "env"],
)
def test_a_changed_task_begins_a_new_best(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old task's best return is out of reach in the new one: BEST must not stay with it."""
    folder = first_run(
        tmp_path / "run", "ppo", "pendulum", eval_episodes=4, env_options={"max_episode_steps": 20}
    )
    old_step, old_return = best_of(folder)
    assert old_step == 80
    # the same task: the best stays that of all evaluations
    resume(folder, total_steps=88, learning_rate=1e-9, schedule="constant")
    assert best_of(folder)[1] >= old_return
    best = best_of(folder)
    # another one, whose returns are lower
    _, env, saved = saved_settings(folder)
    changed = merge(saved, {"total_steps": 96, "quiet": False, "env": env} | changes)
    run(make_settings("ppo", **changed), folder)  # type: ignore[arg-type]
    assert "another task" in "".join(capsys.readouterr())
    step, value = best_of(folder)
    assert step == 96
    assert value < best[1] - 1.0
    assert gpurl.load(folder).settings["env_options"] == changes.get(
        "env_options", {"max_episode_steps": 20}
    )
    # from here on the new task is the task
    capsys.readouterr()
    resume(folder, total_steps=104, quiet=False)
    assert "another task" not in "".join(capsys.readouterr())


def test_a_changed_task_without_evaluation_is_followed_from_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    folder = first_run(tmp_path / "run", "ppo", "pendulum", eval_episodes=2)
    resume(folder, total_steps=96, eval_episodes=0, env_options={"max_episode_steps": 30})
    assert not (folder / "checkpoints" / "BEST").exists()
    assert gpurl.load(folder).step == 96
    assert gpurl.load(folder).settings["env_options"] == {"max_episode_steps": 30}


class Poor(Pendulum):
    """Every step costs 100 more."""

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return next_state, reward - 100.0, terminated


def test_an_evaluation_after_a_resume_at_the_same_step_is_stored(tmp_path: Path) -> None:
    """Else BEST is compared with a return of before."""
    folder = first_run(tmp_path / "run", "ppo", "pendulum", env_options=SHORT)
    assert load_checkpoint(folder)[0]["trainer"]["evaluation"] == {}
    resume(folder, eval_episodes=4)  # no step is left
    trainer = load_checkpoint(folder)[0]["trainer"]
    assert trainer["evaluation"]["at_step"] == trainer["steps"] == 80
    assert trainer["best_return"] == trainer["evaluation"]["eval/mean_reward"]


def test_what_is_not_needed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of a few megabytes may have a replay buffer of many gigabytes."""
    folder = first_run(tmp_path / "run", "sac", "pendulum", save_replay=True)
    read = list[set[str]]()
    real = folders.read_state_files

    def read_and_note(*arguments: Any) -> Any:
        parts = real(*arguments)
        read.append({name for name, part in parts.items() if part})
        return parts

    hashed, sha256 = list[str](), folders._sha256
    monkeypatch.setattr(folders, "read_state_files", read_and_note)
    monkeypatch.setattr(folders, "_sha256", lambda file: hashed.append(file.stem) or sha256(file))
    gpurl.load(folder)
    assert "model" in read[0]
    assert not read[0] & {"replay", "training", "env"}
    assert set(hashed) == {"state", *read[0]}
    read.clear()
    resume(folder, total_steps=160)
    # the settings, what setting up needs, and all of it
    assert [each & {"replay", "model"} for each in read] == [set(), set(), {"replay", "model"}]


def test_ranks_read_the_settings_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = first_run(tmp_path / "run", "ppo", "pendulum")
    with ThreadPoolExecutor(1) as pool:
        with lock_run(folder):
            with pytest.raises(UsageError, match="is in use by"):
                saved_settings(folder)
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            reading = pool.submit(saved_settings, folder)
            time.sleep(2 * LOCK_SECONDS)
            assert not reading.done()
        assert reading.result(timeout=60)[:2] == ("ppo", "pendulum")


def test_trackers_find_their_run_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its root is relative to the directory of before."""
    for place in ("here", "elsewhere"):
        (tmp_path / place).mkdir()
    settings = make_settings("ppo", "pendulum", root="runs")
    monkeypatch.chdir(tmp_path / "here")
    folder = create_run_folder(Path("runs"), "pendulum", "ppo", 0).absolute()
    first = api._card(settings, folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert api._card(settings, folder).root == first.root == str(tmp_path / "here" / "runs")
    for chosen in (tmp_path / "mine", Path("/mine")):
        assert api._card(settings, chosen).root == str(tmp_path / "elsewhere" / "runs")


def test_stored_are_the_steps_of_the_member_that_has_most() -> None:
    """The last one may have been lost early."""
    members = [Mock(), Mock()]
    for member, stored in zip(members, (64, 8)):
        member.algorithm.load_replay_state.return_value = stored
    engine = Mock(members=members, ranks=Mock(count=2), iteration=3, steps=8)
    of_each: dict[str, Any] = {"0": {}, "1": {}}
    parts = dict.fromkeys(("model", "training", "replay"), of_each) | {"trainer": {}, "env": {}}
    _restore(engine, parts, TrainConfig(seed=0, stagger=True, total_steps=32))
    assert engine.stored == 128
    engine.env.training_progress.fill_.assert_called_once_with(0.25)
    # the simulator had no state: episodes begin anew
    engine.begin.assert_called_once_with(3, True)
    for member in members:
        member.algorithm.mark_episode_break.assert_called_once_with()


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_warm_up_of_critics_stays_as_it_began(tmp_path: Path, name: str) -> None:
    folder = first_run(tmp_path / "run", name, "pendulum", critic_warmup=2)
    with pytest.raises(UsageError, match="critic_warmup 2, this run 0"):
        resume(folder, total_steps=160, critic_warmup=0)
    resume(folder, total_steps=160)
