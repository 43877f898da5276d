"""Messages for beginners: about runs that cannot learn, clones, small machines."""

import json
from pathlib import Path

import pytest

from gpurl.algorithms.off_policy import OffPolicyConfig
from gpurl.api import resume, train
from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run.display import Display
from gpurl.run.presets.find import preset
from gpurl.run.reporter import FEW_UPDATES
from gpurl.run.settings import make_settings
from tests.small_runs import OFF_POLICY, small_settings

SMALL = {"num_envs": 8, "device": "cpu", "eval_episodes": 0, "threads": 1, "log_every": 0.0}


def test_a_run_too_short_to_learn_gets_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SMALL | small_settings("sac") | {"learning_starts": 100}
    train(
        "sac", "pendulum", run_dir=str(tmp_path / "short"), total_steps=90, quiet=True, **settings
    )  # 96 in whole iterations
    message = (
        "warning: nothing will be learned: the replay buffer holds 0 transitions and 96 will "
        "follow, learning_starts is 100"
    )
    assert message in capsys.readouterr().err
    train(
        "sac", "pendulum", run_dir=str(tmp_path / "long"), total_steps=97, quiet=True, **settings
    )  # 104: learns at the end
    assert "nothing will be learned" not in capsys.readouterr().err
    assert "train/critic_loss" in (tmp_path / "long" / "metrics.jsonl").read_text()


def test_where_a_run_logs_is_said_before_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user gave no folder: as it is given to other commands, relative to this one."""
    monkeypatch.chdir(tmp_path)
    settings = SMALL | small_settings("ppo") | {"total_steps": 32}
    run = train("ppo", "cart_pole", **settings)
    lines = capsys.readouterr().out.splitlines()
    assert run.folder.parent == Path("runs/cart_pole/ppo")
    where = lines.index(f"logs to {run.folder}")
    assert where < min(number for number, line in enumerate(lines) if "steps, 100.0 %" in line)
    resume(run.folder, total_steps=64)
    train("ppo", "cart_pole", run_dir="mine", **settings)
    assert "logs to" not in capsys.readouterr().out


@pytest.mark.parametrize("saved", [True, False])
def test_a_resume_reports_that_its_replay_buffer_is_filled_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    settings = SMALL | small_settings("sac") | {"learning_starts": 24, "save_replay": saved}
    train("sac", "pendulum", run_dir=str(tmp_path), total_steps=64, **settings)
    assert "the replay buffer was not saved" not in capsys.readouterr().out
    resume(tmp_path, total_steps=128)
    message = (
        "the replay buffer was not saved (save_replay would save it): learning continues after 24 "
        "new transitions"
    )
    assert (message in capsys.readouterr().out) is not saved


@pytest.mark.parametrize(
    ("num_envs", "horizon", "learning_starts"), [(4, 1, 16), (4, 1, 18), (8, 2, 5), (2, 3, 50)]
)
def test_the_number_of_updates_is_said_at_the_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_envs: int,
    horizon: int,
    learning_starts: int,
) -> None:
    sizes = {"num_envs": num_envs, "horizon": horizon, "learning_starts": learning_starts}
    settings = SMALL | small_settings("sac") | {"updates": 3, "batch_size": 4} | sizes
    finished = train("sac", "pendulum", run_dir=str(tmp_path), total_steps=97, **settings)
    # what was said is what was done
    *_, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    done = int(json.loads(last)["train/n_updates"])
    output = capsys.readouterr()
    ratio = f"{3 / (num_envs * horizon):.2g}"
    said = f"{done} updates on batches of 4, {ratio} for each step of an environment"
    assert finished.outcome.steps >= 97
    assert said in output.out
    assert f"{done} updates are few to learn from" in output.out


def test_a_preset_for_more_environments_has_enough_updates() -> None:
    settings = make_settings("sac", "pendulum", num_envs=1024)
    config = settings.algorithm_config
    assert isinstance(config, OffPolicyConfig)
    steps = settings.train.total_steps - config.learning_starts
    assert steps // (config.horizon * 1024) * config.updates > FEW_UPDATES


def test_on_policy_algorithms_get_no_such_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        "ppo", "pendulum", run_dir=str(tmp_path), total_steps=8, horizon=4, minibatches=1, **SMALL
    )
    output = capsys.readouterr()
    assert "learned" not in output.out
    assert "updates on batches" not in output.out
    assert "updates are few" not in output.out


def test_the_screen_shows_how_well_a_clone_does(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("bc", 100) as display:
        display.update(50, {"train/actor_loss": -1.25})
    assert "actor loss -1.25" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*OFF_POLICY, "bc", "ppo", "a2c", "pqn"])
def test_no_algorithm_makes_thousands_of_gymnasiums_environments(name: str) -> None:
    assert preset(name, "gymnasium_cpu:Pendulum-v1")["num_envs"] <= 64


@pytest.mark.parametrize(("name", "env"), [("sac", "pendulum"), ("dqn", "cart_pole")])
def test_targets_that_never_follow_are_refused(tmp_path: Path, name: str, env: str) -> None:
    with pytest.raises(UsageError, match=r"tau must be above 0, got 0\.0"):
        train(name, env, run_dir=str(tmp_path), tau=0.0, quiet=True)


def test_doctor_lists_datasets_and_envs_shows_tasks_without_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    assert "minari: " in capsys.readouterr().out
    assert main(["envs"]) == 0
    text = capsys.readouterr().out
    assert "MultiDiscrete([2 2])  no limit" in text


def test_what_is_cloned_by_default_fits_those_that_go_on_from_it() -> None:
    for name in ("ddpg", "td3", "sac", "mod_sac", "redq"):
        assert (
            preset("bc", "pendulum")["actor_network"] == preset(name, "pendulum")["actor_network"]
        )
