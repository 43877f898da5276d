"""Messages for beginners: about runs that cannot learn, clones, small machines."""

from pathlib import Path

import pytest

from gpurl.api import resume, train
from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run.display import Display
from gpurl.run.presets import preset
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


def test_on_policy_algorithms_get_no_such_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        "ppo", "pendulum", run_dir=str(tmp_path), total_steps=8, horizon=4, minibatches=1, **SMALL
    )
    assert "learned" not in capsys.readouterr().out


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
    assert "MultiDiscrete([2 2]), no time limit" in text
    assert "None steps" not in text


def test_what_is_cloned_by_default_fits_those_that_go_on_from_it() -> None:
    for name in ("ddpg", "td3", "sac", "mod_sac", "redq"):
        assert (
            preset("bc", "pendulum")["actor_network"] == preset(name, "pendulum")["actor_network"]
        )
