"""`gpurl tune`: its words, its table and pictures, and what it says without Optuna."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gpurl.cli.main import main
from gpurl.cli.settings import parse_tune
from gpurl.cli.tune import trial_table
from gpurl.errors import UsageError
from gpurl.tuning.picture import plot_tuning
from gpurl.tuning.study import TrialRow
from tests.small_runs import ITERATION, exit_code

WORDS = [
    *("ppo", "pendulum", "num_envs=16", "horizon=8", "minibatches=2", "eval_episodes=4"),
    *("device=cpu", "network.hidden=8", f"total_steps={2 * ITERATION}", f"eval_every={ITERATION}"),
    *("env.max_episode_steps=8", "log_every=0"),
]
ROWS = [
    TrialRow(3, "finished", -12.3456, -10.0, 61.5, "trial_0003", None, "", {"gamma": 0.987654}),
    TrialRow(1, "finished", -20.0, -20.0, 7.0, "trial_0001", None, "", {"gamma": 0.9}),
    TrialRow(0, "pruned", -80.0, -75.0, 3.25, "trial_0000", None, "worse", {"gamma": 0.95}),
    TrialRow(2, "failed", None, None, None, "trial_0002", None, "died", {"hidden": "[8]\x1b[2J"}),
]


def needs_optuna() -> None:
    pytest.importorskip("optuna", reason="gpurl tune needs Optuna: pip install -e '.[tune]'")


@pytest.fixture
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_optuna()
    from tests.tuning.near_processes import ThreadProcess

    monkeypatch.setattr("gpurl.run.child.Popen", ThreadProcess)
    monkeypatch.setattr("gpurl.run.records.versions", dict)


# ---- words ----


def test_options_and_settings_are_told_apart() -> None:
    words = ["--trials", "7", "--jobs=2", "--no-prune", "--sampler", "random", "--storage", "x.db"]
    settings, options = parse_tune([*WORDS, *words, "--gamma", "0.5"])
    assert settings is not None
    assert (options.trials, options.jobs, options.prune) == (7, 2, False)
    assert (options.sampler, options.storage) == ("random", Path("x.db"))
    assert settings.to_dict()["gamma"] == 0.5
    assert settings.env_options == {"max_episode_steps": 8}
    assert parse_tune(["--show", "x.db"]) == (None, parse_tune(["--show", "x.db"])[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "x.db", "ppo"], "--show prints a storage and takes no settings, got ppo"),
        ([*WORDS, "--sampler", "cmaes"], "sampler is 'cmaes'; it must be one of tpe, random"),
        ([*WORDS, "--trials", "0"], "--trials must be at least 1, got 0"),
        ([*WORDS, "--storage", "x.txt"], "its ending must be"),
        ([*WORDS, "--space", "none.yaml"], "there is no config file none.yaml"),
        (["ppo"], "an algorithm and an environment are needed"),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needs_optuna()
    monkeypatch.chdir(tmp_path)
    assert exit_code(["tune", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_the_options_of_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["tune", "ppo", "pendulum", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: gpurl tune ppo pendulum [settings]")
    for flag in ("--trials INT", "--space PATH", "--[no-]prune", "--sampler {tpe,random}"):
        assert flag in page


def test_without_optuna_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.chdir(tmp_path)
    for words in (WORDS, ["--show", "x.db"]):
        assert main(["tune", *words]) == UsageError.exit_code
        error = capsys.readouterr().err
        assert "gpurl tune needs Optuna, which is missing: pip install -e" in error
        assert "[tune]" in error
    assert not list(tmp_path.iterdir())


# ---- the whole ----


@pytest.mark.usefixtures("_in_threads")
def test_the_command_tunes_shows_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *WORDS, "--trials", "2"]) == 0
    out = capsys.readouterr().out
    storage = Path("runs/pendulum/ppo/tuning.journal")
    assert f"{storage}: 0 of 2 trials have begun" in out
    assert "2 trials: 2 finished" in out
    assert "gpurl train --config runs/pendulum/ppo/tuning/best.yaml" in out
    assert (tmp_path / "runs/pendulum/ppo/tuning/tuning.png").read_bytes()[:4] == b"\x89PNG"
    # a run of it is a run for all commands
    assert main(["runs", "runs/pendulum/ppo"]) == 0
    assert "tuning/trial_0001  pendulum  ppo" in capsys.readouterr().out
    # the rest, quietly; then all of it
    assert main(["tune", *WORDS, "--trials", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "runs/pendulum/ppo/tuning/tuning.png").unlink()
    assert main(["tune", "--show", str(storage)]) == 0
    out = capsys.readouterr().out
    assert "3 trials: 3 finished" in out
    assert (tmp_path / "runs/pendulum/ppo/tuning/tuning.png").exists()


@pytest.mark.usefixtures("_in_threads")
def test_a_signal_ends_it_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpurl.tuning.tuner import Tuner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tuner, "run", lambda self: 2)
    assert main(["tune", *WORDS]) == 130
    assert "the same command goes on" in capsys.readouterr().err


# ---- the table and the picture ----


def test_the_table() -> None:
    lines = trial_table(ROWS).splitlines()
    assert lines[0].split() == ["trial", "state", "return", "best", "seconds", "gamma", "hidden"]
    assert lines[1].split() == ["3", "finished", "-12.35", "-10", "61.5", "0.988", "-"]
    assert lines[4].split() == ["2", "failed", "-", "-", "-", "-", r"[8]\x1b[2J"]
    assert lines[5] == "4 trials: 2 finished, 1 pruned, 1 failed"
    short = trial_table(ROWS, 2).splitlines()
    assert [line.split()[0] for line in short[1:3]] == ["3", "1"]
    assert short[3] == "4 trials: 2 finished, 1 pruned, 1 failed; 2 are shown, --show has all"
    assert "0 trials: none" in trial_table([])


def test_the_picture_has_every_trial_and_every_importance(tmp_path: Path) -> None:
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gpurl.tuning.picture.save_figure",
            lambda figure, path: drawn.append(figure) or path,
        )
        plot_tuning(ROWS, {"gamma": 0.75, "hidden": 0.25}, "title", tmp_path / "a.png")
        plot_tuning(ROWS[3:], {}, "title", tmp_path / "b.png")
        plot_tuning([], {}, "title", tmp_path / "c.png")
    history, bars = drawn[0].axes
    points = {
        line.get_label(): list(zip(*(map(float, axis) for axis in line.get_data())))
        for line in history.get_lines()
    }
    assert points["finished"] == [(1.0, -20.0), (3.0, -12.3456)]
    assert points["best so far"] == [(1.0, -20.0), (3.0, -12.3456), (3.0, -12.3456)]
    assert points["pruned: return where it ended"] == [(0.0, -80.0)]
    assert [x for x, _ in points["failed"]] == [2.0]
    assert [bar.get_width() for bar in bars.patches] == [0.25, 0.75]
    assert [text.get_text() for text in bars.get_yticklabels()] == ["hidden", "gamma"]
    assert len(drawn[1].axes) == len(drawn[2].axes) == 1
    assert drawn[2].axes[0].texts[0].get_text() == "0 trials, none has ended"
