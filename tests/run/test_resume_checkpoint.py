"""An earlier checkpoint is continued in a new run folder, and its own run stays as it is."""

from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.checkpoints.folders import best_checkpoint, list_checkpoints, load_checkpoint
from gpurl.cli.main import main
from gpurl.run.ranks import folder_to_resume
from tests.small_runs import assert_same, small_run, small_settings, state_of


def first_run(folder: Path, name: str, **changes: Any) -> Path:
    """Five iterations, with a checkpoint and an evaluation after each."""
    shape = {"num_envs": 8, "horizon": 4, "threads": 1, "eval_episodes": 2, "eval_every": 32}
    often = {"save_every": "1i", "keep_checkpoints": 9, "total_steps": 160}
    settings = small_settings(name) | shape | often | {"device": "cpu", "quiet": True} | changes
    return gpurl.train(name, "pendulum", run_dir=str(folder), **settings).folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "changes"), [("ppo", {}), ("sac", {"save_replay": True}), ("ppo", {"population": 2})]
)
def test_an_earlier_checkpoint_goes_on_bit_for_bit(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    old = first_run(tmp_path / "old", name, **changes)
    before, checkpoint = content_of(old), list_checkpoints(old)[1]
    assert checkpoint.name == "step_000000000064"
    run = gpurl.resume(checkpoint, run_dir=str(tmp_path / "new"))
    assert run.folder == tmp_path / "new"
    assert content_of(old) == before
    new, expected = state_of(run.folder), state_of(old)
    for state in (new, expected):
        state.pop("best", None)  # of a population
    assert_same(new, expected)
    # its own best, of the evaluations that it has played
    assert int(best_checkpoint(run.folder).name[5:]) > 64  # type: ignore[union-attr]
    again = gpurl.resume(run.folder, total_steps=192)
    assert (again.outcome.steps, again.outcome.new_steps) == (192, 32)


def test_what_has_nothing_left_to_do_is_saved_in_the_new_folder(tmp_path: Path) -> None:
    old = first_run(tmp_path / "old", "ppo")
    run = gpurl.resume(list_checkpoints(old)[-1], run_dir=str(tmp_path / "new"))
    assert run.outcome.new_steps == 0
    assert_same(state_of(run.folder), state_of(old))


def test_the_command_names_both_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first_run(tmp_path / "old", "ppo")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--resume", "old/checkpoints/step_000000000032"]
    changes = ["--learning-rate", "1e-5", "--no-quiet"]
    assert main([*words, *changes]) == 2
    error = capsys.readouterr().err
    assert "is a checkpoint, which a new run continues: name its folder with --run-dir" in error
    assert main([*words, *changes, "--run-dir", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "a new run from old/checkpoints/step_000000000032\n" in out
    assert "continues at step 32 of 160\n" in out
    settings = load_checkpoint(tmp_path / "new")[0]["meta"]["settings"]
    assert settings["learning_rate"] == 1e-5
    assert (tmp_path / "new" / "command.txt").read_text().count("\n") == 1
    # neither over another run, nor a run in another folder
    assert main([*words, "--run-dir", "new"]) == 2
    assert "new already holds files" in capsys.readouterr().err
    assert main(["train", "--resume", "old", "--run-dir", "other"]) == 2
    assert "or resume one of its checkpoints, checkpoints/step_*, there" in capsys.readouterr().err


def test_processes_that_start_again_go_on_with_the_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, new = Path("old/checkpoints/step_000000000032"), tmp_path / "new"
    monkeypatch.setattr("gpurl.run.ranks.attempt", lambda: 1)
    assert folder_to_resume(checkpoint, str(new)) == checkpoint
    small_run(new, 1, eval_episodes=0)
    assert folder_to_resume(checkpoint, str(new)) == new
    assert folder_to_resume(Path("run"), None) == Path("run")
