"""What interrupts a run, wherever it is: a signal or a kill, in an evaluation, in worker processes, in somebody's sweep of runs."""

import json
import math
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.api import evaluate_run, resume, train
from gpurl.checkpoint import latest_checkpoint, load_checkpoint
from gpurl.cli import main
from gpurl.errors import DivergedError, NonFiniteError
from gpurl.evaluator import Stopped, evaluate
from gpurl.finite_guard import FiniteGuard
from gpurl.play import play_run
from tests.small_runs import ITERATION, SMALL, small_run, start
from tests.tiny_envs import Endless, RandomWalk


def train_forever(folder: Path) -> "subprocess.Popen[str]":
    flags = [
        "num_envs=16",
        "horizon=8",
        "total_steps=1e9",
        "eval_episodes=0",
        "save_every=3i",
        "device=cpu",
        f"run_dir={folder}",
        "network.hidden=16,16",
    ]
    process = start(["train", "ppo", "pendulum", *flags])
    deadline = time.monotonic() + 60
    while latest_checkpoint(folder / "checkpoints") is None and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    return process


def test_a_signal_saves_and_exits_with_its_code(tmp_path: Path) -> None:
    process = train_forever(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    assert errors.startswith("stopping: the iteration ends and is saved first; another signal ends at once\n")
    assert time.monotonic() - began < 10
    saved = load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"]
    resumed = resume(tmp_path / "run", total_steps=saved + 2 * ITERATION)
    assert resumed.outcome.steps == saved + 2 * ITERATION


def test_a_second_run_is_refused_and_kill_9_loses_one_interval_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = train_forever(tmp_path / "run")
    try:
        assert main(["train", "--resume", str(tmp_path / "run")]) == 5
        assert str(tmp_path / "run") in capsys.readouterr().err
        time.sleep(0.7)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    saved = load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"]
    assert saved >= 3 * ITERATION
    assert resume(tmp_path / "run", total_steps=saved + ITERATION).outcome.steps == saved + ITERATION


@pytest.mark.parametrize(("number", "code", "episodes"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 0), (signal.SIGTERM, 143, 2)])
def test_a_signal_to_the_workers_too_saves_and_exits_with_its_code(tmp_path: Path, number: int, code: int, episodes: int) -> None:
    """A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole process group."""
    folder = tmp_path / "run"
    flags = ["num_envs=2", "horizon=64", "total_steps=1e9", f"eval_episodes={episodes}", "save_every=1000000s", "device=cpu"]
    flags.append(f"run_dir={folder}")
    words = ["train", "ppo", "gymnasium_cpu:CartPole-v1", "--env.vectorization", "async", "--log-every", "0", *flags]
    process = start(words, start_new_session=True)
    deadline = time.monotonic() + 60
    while steps_logged(folder) < 3 * ITERATION and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    assert latest_checkpoint(folder) is None
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert load_checkpoint(folder)[0]["trainer"]["steps"] >= 3 * ITERATION


def steps_logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()[:-1] if file.is_file() else []  # the last one may be half written
    return max((int(json.loads(line)["step"]) for line in lines), default=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_called_train_too(tmp_path: Path, number: int) -> None:
    class Terminated(Exception):
        pass

    def on_terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, on_terminate)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
            train("ppo", "pendulum", **{**SMALL, "run_dir": str(tmp_path / "run"), "total_steps": 10**9})
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] > 0


def test_an_evaluation_ends_as_soon_as_it_is_told_to() -> None:
    asked: list[bool] = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) == 4

    with pytest.raises(Stopped):
        evaluate(lambda obs, carry: (torch.zeros(4, 2), carry), Endless(4), 4, should_stop=should_stop)
    assert len(asked) == 4


@pytest.mark.parametrize("total", [1, 10**6])
def test_a_signal_in_an_evaluation_ends_the_run(tmp_path: Path, total: int) -> None:
    """Its episodes never end, so only the signal can: in the evaluations between updates, and in the last one."""
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "run", total, env="tests.tiny_envs:Endless", eval_every=ITERATION)
    finally:
        timer.cancel()
    assert time.monotonic() - began < 10
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] >= ITERATION


def test_an_error_in_the_last_evaluation_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"eval/mean_reward": math.nan, "eval/std_reward": math.nan, "eval/episodes": 0.0, "eval/non_finite_episodes": 4.0}
    monkeypatch.setattr("gpurl.api.evaluate", lambda *_, **__: nothing)  # the scripted policy's
    assert small_run(tmp_path / "chasing", 1, env="chasing").baseline == {}
    monkeypatch.setattr("gpurl.trainer.evaluate", lambda *_, **__: nothing)
    with pytest.raises(NonFiniteError, match=r"4 evaluation episodes of environment 'pendulum' gave NaN .*--nan reset-envs"):
        small_run(tmp_path / "run", 2, eval_every=10**9)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 2 * ITERATION
    skipping = small_run(tmp_path / "skip", 2, eval_every=ITERATION, nan="reset-envs")
    assert (skipping.outcome.steps, skipping.outcome.evaluation) == (2 * ITERATION, {})


def test_a_policy_that_diverged_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_if_bad, count = FiniteGuard.stop_if_bad, iter(range(100))

    def diverging(guard: FiniteGuard, *args: Any) -> None:
        if next(count) == 2:
            raise DivergedError("the policy gave NaN")
        stop_if_bad(guard, *args)

    monkeypatch.setattr(FiniteGuard, "stop_if_bad", diverging)
    with pytest.raises(DivergedError):
        small_run(tmp_path / "run", 5, save_every="1i", eval_episodes=0)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 2 * ITERATION
    assert resume(tmp_path / "run", learning_rate=1e-5).outcome.steps == 5 * ITERATION


def test_playing_a_checkpoint_leaves_it_as_it_is(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    before = sorted(checkpoint.iterdir())
    assert play_run(checkpoint, episodes=1, device="cpu") == folder / "episode.png"
    assert sorted(checkpoint.iterdir()) == before
    assert evaluate_run(checkpoint, episodes=2, device="cpu")["eval/episodes"] == 2


def test_an_evaluation_makes_no_more_environments_than_the_run_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "run", 1, env="tests.tiny_envs:RandomWalk", num_envs=4)
    made: list[int] = []
    init = RandomWalk.__init__

    def counted(env: RandomWalk, num_envs: int, *args: Any, **named: Any) -> None:
        made.append(num_envs)
        init(env, num_envs, *args, **named)

    monkeypatch.setattr(RandomWalk, "__init__", counted)
    assert evaluate_run(run.folder, episodes=10, device="cpu")["eval/episodes"] == 12
    assert made == [4]
