"""What interrupts a run, wherever it is: a signal or a kill, in an evaluation, in worker processes,
in somebody's sweep of runs.
"""

import errno
import functools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.algorithms.base import Metrics
from gpurl.api import evaluate_run, resume, train
from gpurl.checkpoints import folders
from gpurl.checkpoints.folders import (
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gpurl.cli.main import main
from gpurl.cli.play import play_run
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.vec_env import Timestep
from gpurl.errors import CheckpointError, DivergedError, EnvError, NonFiniteError
from gpurl.guards.finite import FiniteGuard
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.evaluator import Player, Stopped, evaluate
from tests.numpy_envs import Tour
from tests.small_runs import ITERATION, SMALL, small_run, start
from tests.tiny_envs import Endless, RandomWalk

HANGS = 300.0  # seconds after which a test gives up; no test measures time


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Until the condition holds, or the process has ended."""
    deadline = time.monotonic() + HANGS
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.05)


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
    wait_until(lambda: latest_checkpoint(folder / "checkpoints"), process)
    return process


def test_a_signal_saves_and_exits_with_its_code(tmp_path: Path) -> None:
    process = train_forever(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 143
    assert errors.startswith(
        "stopping: the iteration ends and is saved first; another signal ends at once\n"
    )
    saved = load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"]
    resumed = resume(tmp_path / "run", total_steps=saved + 2 * ITERATION)
    assert resumed.outcome.steps == saved + 2 * ITERATION


def test_a_second_run_is_refused_and_kill_9_loses_one_interval_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = train_forever(tmp_path / "run")
    try:
        assert main(["train", "--resume", str(tmp_path / "run")]) == 2
        assert (
            f"{tmp_path / 'run'} is in use by process {process.pid} on " in capsys.readouterr().err
        )
        assert main(["train", "ppo", "pendulum", "device=cpu", f"run_dir={tmp_path / 'run'}"]) == 2
        saved = latest_checkpoint(tmp_path / "run")
        wait_until(lambda: latest_checkpoint(tmp_path / "run") != saved, process)
        assert process.poll() is None  # it trains and saves as before
    finally:
        process.kill()
        process.communicate()
    saved = load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"]
    assert saved >= 3 * ITERATION
    assert (
        resume(tmp_path / "run", total_steps=saved + ITERATION).outcome.steps == saved + ITERATION
    )


@pytest.mark.parametrize(
    ("number", "code", "episodes", "to"),
    [
        (signal.SIGINT, 130, 2, "group"),
        (signal.SIGTERM, 143, 0, "group"),
        (signal.SIGTERM, 143, 2, "group"),
        (signal.SIGTERM, 143, 0, "one"),
    ],
)
def test_a_signal_with_workers_saves_and_exits_with_its_code(
    tmp_path: Path, number: int, code: int, episodes: int, to: str
) -> None:
    """A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole process group, others to the
    trainer alone; no worker is left.
    """
    folder = tmp_path / "run"
    flags = [
        "num_envs=2",
        "horizon=64",
        "total_steps=1e9",
        f"eval_episodes={episodes}",
        "save_every=1000000s",
        "device=cpu",
    ]
    flags.append(f"run_dir={folder}")
    words = [
        "train",
        "ppo",
        "gymnasium_cpu:CartPole-v1",
        "--env.vectorization",
        "async",
        "--log-every",
        "0",
        *flags,
    ]
    process = start(words, start_new_session=True)
    wait_until(lambda: steps_logged(folder) >= 3 * ITERATION, process)
    assert latest_checkpoint(folder) is None
    (os.killpg if to == "group" else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert members_of(process.pid) == []
    assert load_checkpoint(folder)[0]["trainer"]["steps"] >= 3 * ITERATION


def members_of(group: int) -> list[str]:
    """Processes of a group that are still there, zombies too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ends meanwhile
            text = stat.read_text()
            if int(text.rpartition(")")[2].split()[2]) == group:
                found.append(text)
    return found


@pytest.mark.parametrize("end", ["two signals", "kill"])
def test_workers_that_hang_hold_no_end_up_and_die_with_their_trainer(
    tmp_path: Path, end: str
) -> None:
    """The first signal waits for the iteration, which never ends; the second, or a kill, does
    not.
    """
    folder = tmp_path / "run"
    flags = [
        "num_envs=3",
        "horizon=4",
        "minibatches=1",
        "total_steps=1e9",
        "eval_episodes=0",
        "device=cpu",
        "log_every=0",
        f"run_dir={folder}",
    ]
    process = start(
        ["train", "ppo", "tests.run.test_interruptions:HangingTour", *flags], start_new_session=True
    )
    wait_until(lambda: steps_logged(folder) >= 12, process)
    assert len(members_of(process.pid)) == 4
    time.sleep(0.2)  # into the step that hangs
    if end == "kill":
        process.kill()
    else:
        process.terminate()
        assert process.stderr is not None
        assert "stopping: the iteration ends" in process.stderr.readline()
        process.terminate()
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == (-signal.SIGKILL if end == "kill" else 143), errors
    deadline = time.monotonic() + HANGS
    while members_of(process.pid):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.05)


class HangingTour(GymnasiumCpu):
    """Three workers, of which the second hangs from its tenth step on."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed, vectorization="async", env=Hanging)


class Hanging(Tour):
    steps_of_all = 0

    def step(self, action: Any) -> Any:
        self.steps_of_all += 1
        if self.steps_of_all == 10:
            time.sleep(1000.0)
        return super().step(action)


def steps_logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = (
        file.read_text().splitlines()[:-1] if file.is_file() else []
    )  # the last one may be half written
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
            train(
                "ppo",
                "pendulum",
                **{**SMALL, "run_dir": str(tmp_path / "run"), "total_steps": 10**9},
            )
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
        evaluate(
            lambda obs, policy_state: (torch.zeros(4, 2), policy_state),
            Endless(4),
            4,
            should_stop=should_stop,
        )
    assert len(asked) == 4


@pytest.mark.parametrize("total", [1, 10**6])
def test_a_signal_in_an_evaluation_ends_the_run(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its episodes never end, so only the signal can: in the evaluations between updates, and in
    the last one.
    """
    step, steps_of_evaluation = Endless.step, []

    def step_and_signal(env: Endless, action: Tensor) -> Timestep:
        if env.num_envs != SMALL["num_envs"]:  # those of the evaluation
            steps_of_evaluation.append(1)
            if len(steps_of_evaluation) == 20:
                os.kill(os.getpid(), signal.SIGINT)
        return step(env, action)

    monkeypatch.setattr(Endless, "step", step_and_signal)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "run", total, env="tests.tiny_envs:Endless", eval_every=ITERATION)
    assert len(steps_of_evaluation) >= 20
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] >= ITERATION


def test_an_evaluation_that_a_signal_interrupted_is_played_after_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"env": "cart_pole", "eval_every": ITERATION, "eval_episodes": 2}
    small_run(tmp_path / "whole", 4, **changes)
    begin, begun = Player._begin, []

    def begin_and_signal(player: Player, seed: int) -> None:
        begun.append(seed)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        begin(player, seed)

    monkeypatch.setattr(Player, "_begin", begin_and_signal)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "parts", 4, **changes)
    resume(tmp_path / "parts")
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")
    assert [step for step, _ in evaluations(tmp_path / "parts")] == [
        n * ITERATION for n in (1, 2, 3, 4)
    ]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        (line["step"], line["eval/mean_reward"]) for line in lines if "eval/mean_reward" in line
    ]


def evaluate_as(monkeypatch: pytest.MonkeyPatch, *returns: float) -> None:
    """Evaluations give these returns, one after the other."""
    means = iter(returns)

    def play_each(*_: object, **__: object) -> list[dict[str, float]]:
        mean = next(means)
        return [{"eval/mean_reward": mean, "eval/std_reward": 0.0, "eval/episodes": 1.0}]

    monkeypatch.setattr("gpurl.run.evaluator.Player.play_each", play_each)


def test_a_best_policy_that_no_disk_took_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns of 10, 50, 30, 20, of which the second could not be saved."""
    evaluate_as(monkeypatch, 10.0, 50.0, 30.0, 20.0)

    def save(folder: Path, step: int, *arguments: Any, **keywords: Any) -> Path:
        if step == 2 * ITERATION:
            raise CheckpointError("cannot save: No space left on device")
        return save_checkpoint(folder, step, *arguments, **keywords)

    monkeypatch.setattr("gpurl.run.trainer.save_checkpoint", save)
    small_run(tmp_path, 4, eval_every=ITERATION, save_every="1i")
    best, _ = load_checkpoint(tmp_path, best=True)
    latest, _ = load_checkpoint(tmp_path)
    assert best["trainer"]["steps"] == 3 * ITERATION
    assert best["trainer"]["best_return"] == latest["trainer"]["best_return"] == 30.0


def test_a_disk_that_is_full_behind_the_name_of_the_best_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns of 10, 50, 30, 20; LATEST could not be written for the second."""
    evaluate_as(monkeypatch, 10.0, 50.0, 30.0, 20.0)
    write_pointer = folders._write_pointer

    def write(pointer: Path, name: str) -> None:
        if pointer.name == "LATEST" and name == folders.step_name(2 * ITERATION):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_pointer(pointer, name)

    monkeypatch.setattr(folders, "_write_pointer", write)
    small_run(tmp_path, 4, eval_every=ITERATION)
    best, _ = load_checkpoint(tmp_path, best=True)
    latest, _ = load_checkpoint(tmp_path)
    assert best["trainer"]["steps"] == 2 * ITERATION
    assert best["trainer"]["best_return"] == latest["trainer"]["best_return"] == 50.0


def test_an_error_in_the_last_evaluation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {
        "eval/mean_reward": math.nan,
        "eval/std_reward": math.nan,
        "eval/episodes": 0.0,
        "eval/non_finite_episodes": 4.0,
    }
    monkeypatch.setattr("gpurl.api.evaluate", lambda *_, **__: nothing)  # the scripted policy's
    assert small_run(tmp_path / "chasing", 1, env="chasing").baseline == {}
    monkeypatch.setattr("gpurl.run.evaluator.Player.play_each", lambda *_, **__: [nothing])
    with pytest.raises(
        NonFiniteError,
        match=r"4 evaluation episodes of environment 'pendulum' gave NaN .*--nan reset-envs",
    ):
        small_run(tmp_path / "run", 2, eval_every=10**9)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 2 * ITERATION
    skipping = small_run(tmp_path / "skip", 2, eval_every=ITERATION, nan="reset-envs")
    assert (skipping.outcome.steps, skipping.outcome.evaluation) == (2 * ITERATION, {})


def test_a_policy_that_diverged_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_if_bad, count = FiniteGuard.stop_if_bad, iter(range(100))

    def diverging(guard: FiniteGuard, *args: Any) -> None:
        if next(count) == 2:
            raise DivergedError("the policy gave NaN")
        stop_if_bad(guard, *args)

    monkeypatch.setattr(FiniteGuard, "stop_if_bad", diverging)
    with pytest.raises(
        DivergedError,
        match=r"gave NaN\. To continue from the last checkpoint .*: gpurl train --resume \S+/run "
        r"--learning-rate",
    ):
        small_run(tmp_path / "run", 5, save_every="1i", eval_episodes=0)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 2 * ITERATION
    assert resume(tmp_path / "run", learning_rate=1e-5).outcome.steps == 5 * ITERATION


class StopsAtTwo(Callback):
    """Ends the run after its second iteration."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.iteration == 2:
            run.stop("enough")


class StopsAfterEvaluation(Callback):
    """Ends the run after its first evaluation."""

    def after_evaluation(self, run: RunView, values: dict[str, float]) -> None:
        run.stop("good enough")


class SignalsAtTwo(Callback):
    """A signal arrives in the second iteration."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)


class LosesWorker(RandomWalk):
    """Its 20th step, in the third iteration, fails because a signal has ended a worker."""

    steps = 0

    def step(self, actions: Tensor) -> Timestep:
        self.steps += 1
        if self.steps == 20:
            os.kill(os.getpid(), signal.SIGINT)
            raise EnvError("a worker has died")
        return super().step(actions)


@pytest.mark.parametrize(
    ("callback", "changes", "stops_after"),
    [
        (StopsAtTwo, {}, 2),
        (StopsAtTwo, {"save_every": "1i"}, 2),
        (StopsAfterEvaluation, {"eval_every": 2 * ITERATION}, 2),
        (Callback, {"max_seconds": 1e-9}, 1),
        (Callback, {"stop_return": -1e9, "eval_every": 2 * ITERATION}, 2),
        (SignalsAtTwo, {"eval_every": 10**9}, 2),
        (SignalsAtTwo, {"eval_every": 2 * ITERATION}, 2),
        (Callback, {"env": f"{__name__}:LosesWorker"}, 2),
        (Callback, {"env": f"{__name__}:LosesWorker", "save_every": "1i"}, 2),
    ],
    ids=str,
)
def test_whatever_ends_a_run_its_last_interval_is_logged_once(
    callback: type[Callback], changes: dict[str, Any], stops_after: int, tmp_path: Path
) -> None:
    settings = {"env": "tests.tiny_envs:RandomWalk", "log_every": 1e9, "eval_every": 10**9}
    settings |= changes
    with suppress(KeyboardInterrupt):
        small_run(tmp_path / "run", 4, callbacks=[callback()], **settings)
    assert logged_episodes(tmp_path / "run").keys() == {stops_after * ITERATION}
    if "stop_return" in changes:
        best = best_checkpoint(tmp_path / "run")
        assert best is not None
        assert best.name == f"step_{stops_after * ITERATION:012d}"
    # the checkpoint no longer counts what is logged
    resume(tmp_path / "run", max_seconds=None, stop_return=None)
    episodes = logged_episodes(tmp_path / "run")
    assert episodes.keys() == {stops_after * ITERATION, 4 * ITERATION}
    if "env" not in changes:
        small_run(tmp_path / "whole", 4, **settings | {"max_seconds": None, "stop_return": None})
        whole = logged_episodes(tmp_path / "whole")
        assert whole.keys() == {4 * ITERATION}
        assert sum(episodes.values()) == sum(whole.values())


def test_a_run_that_was_stopped_within_its_first_interval_can_be_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small_run(folder, 4, log_every=1e9, max_seconds=1e-9, eval_episodes=0)
    assert main(["plot", str(folder)]) == 0
    assert (folder / "learning_curve.png").exists()


def logged_episodes(folder: Path) -> dict[int, float]:
    """env step -> finished episodes, of each log entry of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    entries = [line for line in lines if "rollout/episodes" in line]
    assert len({line["step"] for line in entries}) == len(entries)
    return {line["step"]: line["rollout/episodes"] for line in entries}


def test_playing_a_checkpoint_leaves_it_as_it_is(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    before = sorted(checkpoint.iterdir())
    assert play_run(checkpoint, episodes=1, device="cpu") == folder / "episode.png"
    assert sorted(checkpoint.iterdir()) == before
    assert evaluate_run(checkpoint, episodes=2, device="cpu")["eval/episodes"] == 2


def test_an_evaluation_makes_no_more_environments_than_the_run_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run", 1, env="tests.tiny_envs:RandomWalk", num_envs=4)
    made: list[int] = []
    init = RandomWalk.__init__

    @functools.wraps(init)
    def counted(env: RandomWalk, num_envs: int, *args: Any, **named: Any) -> None:
        made.append(num_envs)
        init(env, num_envs, *args, **named)

    monkeypatch.setattr(RandomWalk, "__init__", counted)
    assert evaluate_run(run.folder, episodes=10, device="cpu")["eval/episodes"] == 10
    assert made == [4]
