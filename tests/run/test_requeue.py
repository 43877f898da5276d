"""The same command again: with `--requeue` it begins its run, continues it after a kill, and has
nothing to do in the end.
"""

import signal
from pathlib import Path

import pytest

import gpurl
from gpurl.checkpoints.folders import latest_checkpoint
from gpurl.cli.main import main
from gpurl.errors import CheckpointError, UsageError
from gpurl.run.settings import make_settings
from gpurl.seeds import run_seeds
from tests.forked_runs import Forks
from tests.run.test_ranks import ITERATION, PPO, run_ranks, said
from tests.small_runs import assert_same, small_run, state_of

WORDS = [
    *("train", "ppo", "pendulum", "--num-envs", "8", "--horizon", "8", "--minibatches", "1"),
    *("--network.hidden", "8", "--save-every", "1i", "--eval-episodes", "0", "--total-steps"),
    *(str(5 * ITERATION), "--device", "cpu", "--threads", "1", "--run-dir"),
]


def steps_of(run: Path) -> int:
    latest = latest_checkpoint(run)
    return int(latest.name[5:]) if latest else 0


def test_the_same_command_continues_what_was_killed(tmp_path: Path) -> None:
    run, whole, output = tmp_path / "run", tmp_path / "whole", tmp_path / "output"
    words = [*WORDS, str(run), "--requeue"]
    with Forks() as forks:
        # before its first checkpoint, and after some
        for iterations, saved in ((1, 0), (3, 2)):
            killed = {"stop_after": iterations, "stop_signal": signal.SIGKILL}
            assert forks.run(output, words=words, **killed) == -signal.SIGKILL
            assert steps_of(run) == saved * ITERATION
        assert "continues at" not in output.read_text()
        assert forks.run(output, words=words) == 0
        assert f"continues at step {2 * ITERATION} of {5 * ITERATION}" in output.read_text()
        assert forks.run(output, words=[*WORDS, str(whole)]) == 0
        assert_same(state_of(run), state_of(whole))
        # it has ended
        assert forks.run(output, words=words) == 0
        assert f"nothing to do: it has {5 * ITERATION} steps already" in output.read_text()
    assert (run / "command.txt").read_text().count("--requeue\n") == 3


def test_the_settings_are_those_of_the_command_and_the_run_may_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for iterations, rate in ((1, 0.01), (2, 0.02)):
        run = small_run(folder, iterations, learning_rate=rate, requeue=True, eval_episodes=0)
        assert run.outcome.new_steps == run.outcome.steps // iterations
        assert f"learning_rate: {rate}\n" in (folder / "config.yaml").read_text()
    assert "requeue" not in (folder / "config.yaml").read_text()
    assert gpurl.resume(folder, total_steps=3 * 128).outcome.new_steps == 128


def test_what_cannot_go_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "ppo", "pendulum", "--requeue"]) == 2
    assert "--requeue needs --run-dir FOLDER" in capsys.readouterr().err
    # files of the user's own
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="mine already holds files"):
        small_run(tmp_path / "mine", 1, requeue=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    # a run of something else, a part of a run, and a damaged one
    folder = small_run(tmp_path / "run", 1, eval_episodes=0).folder
    with pytest.raises(UsageError, match="has algorithm ppo, this run a2c; a resumed run keeps it"):
        small_run(folder, 2, algorithm="a2c", requeue=True)
    with pytest.raises(UsageError, match="is of pendulum, this run of cart_pole: the"):
        small_run(folder, 2, env="cart_pole", requeue=True)
    with pytest.raises(UsageError, match="checkpoints already holds files"):
        small_run(folder / "checkpoints", 2, requeue=True)
    for file in folder.glob("checkpoints/step_*/state.json"):
        file.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json has 1 bytes"):
        small_run(folder, 2, requeue=True)


def test_an_earlier_checkpoint_begins_a_run_that_then_goes_on(tmp_path: Path) -> None:
    old = small_run(tmp_path / "old", 1, eval_episodes=0).folder
    source = latest_checkpoint(old)
    assert source is not None
    for iterations in (2, 3):
        changes = {"run_dir": str(tmp_path / "new"), "total_steps": iterations * 128}
        assert gpurl.resume(source, requeue=True, **changes).outcome.new_steps == 128


@pytest.mark.parametrize("jobs", [None, 1, 2])
def test_of_several_seeds_each_goes_on(jobs: int | None, tmp_path: Path) -> None:
    for iterations in (1, 2):
        values = PPO | {"total_steps": iterations * ITERATION, "requeue": True}
        runs, failed = run_seeds(
            make_settings(**values, run_dir=str(tmp_path / "runs")), range(2), jobs=jobs
        )
        assert not failed
        assert [one.outcome.new_steps for one in runs] == [ITERATION] * 2


def test_several_processes_go_on_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Forks() as forks:
        for iterations in (2, 4):
            values = PPO | {"total_steps": iterations * ITERATION, "quiet": False}
            arguments = values | {"run_dir": str(run), "requeue": True}
            assert run_ranks(forks, tmp_path / "said", 2, **arguments) == [0, 0]
            assert steps_of(run) == iterations * ITERATION
    assert f"continues at step {2 * ITERATION} of {4 * ITERATION}" in said(tmp_path / "said")
