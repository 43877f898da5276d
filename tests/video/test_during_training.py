"""Videos during training: when they are written, and that the training does not notice."""

import logging
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gpurl
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.canvas import Canvas
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.torch_env import State
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.run.callbacks import Callback, RunView
from tests.small_runs import ITERATION, SMALL, small_run

SHORT = {"max_episode_steps": 20}
ffmpeg = pytest.importorskip("imageio_ffmpeg")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder)[0]["model"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "videos").iterdir())


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_videos_do_not_change_the_training(tmp_path: Path, algorithm: str) -> None:
    settings = {**SMALL, "env": "pendulum", "total_steps": 4 * ITERATION, "threads": 1}
    settings["env_options"] = SHORT
    if algorithm == "sac":
        for name in ("horizon", "minibatches", "network"):
            settings.pop(name)
        settings |= {"learning_starts": 64, "batch_size": 32, "updates": 2}
    plain = gpurl.train(algorithm, **settings, run_dir=str(tmp_path / "plain"))
    filmed = gpurl.train(
        algorithm, **settings, run_dir=str(tmp_path / "filmed"), video_every=2 * ITERATION
    )
    steps = [f"step_{count * ITERATION:012d}.mp4" for count in (2, 4)]
    assert names(filmed.folder) == steps
    assert ffmpeg.count_frames_and_secs(str(filmed.folder / "videos" / steps[0]))[0] == 40
    assert not (plain.folder / "videos").exists()
    before, after = weights(plain.folder), weights(filmed.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert plain.outcome.evaluation == filmed.outcome.evaluation


def test_the_last_policy_is_filmed_and_a_resume_continues(tmp_path: Path) -> None:
    run = small_run(tmp_path, 3, video_every=2 * ITERATION, env_options=SHORT)
    assert names(run.folder) == [f"step_{count * ITERATION:012d}.mp4" for count in (2, 3)]
    gpurl.resume(run.folder, total_steps=4 * ITERATION, quiet=True)
    assert names(run.folder)[-1] == f"step_{4 * ITERATION:012d}.mp4"


class Watches(Callback):
    """Keeps what a video says on the screen."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_start(self, run: RunView) -> None:
        run.show_activity = self.texts.append


def test_the_screen_shows_how_far_a_video_is(tmp_path: Path) -> None:
    watches = Watches()
    small_run(
        tmp_path, 1, video_every=ITERATION, env_options=SHORT, callbacks=[watches], eval_episodes=0
    )
    assert watches.texts[0].startswith("video: frame 1 of at most 40, 2.5 %, ETA ")
    assert watches.texts[-2:] == [watches.texts[39], ""]
    assert watches.texts[39].startswith("video: frame 40 of at most 40, 100.0 %, ETA 0:00:00")


class Graded(Pendulum):
    """Notes the progress at which an episode of a film begins."""

    seen: ClassVar[list[float]] = []

    def initial_state(self, rng: CounterRandom) -> State:
        if rng.num_envs == 4:  # those of a film
            self.seen.append(float(self.training_progress))
        return super().initial_state(rng)


def test_a_video_is_of_the_task_at_the_progress_of_its_moment(tmp_path: Path) -> None:
    Graded.seen.clear()
    env = f"{__name__}:Graded"
    changes: dict[str, Any] = {"env": env, "env_options": SHORT, "eval_episodes": 0}
    small_run(tmp_path, 2, video_every=ITERATION, **changes)
    assert list(dict.fromkeys(Graded.seen)) == [0.0, 0.5, 1.0]


def test_an_error_in_rendering_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(canvas: Canvas) -> None:
        raise RuntimeError("the renderer is gone")

    monkeypatch.setattr(Canvas, "picture", broken)
    with caplog.at_level(logging.WARNING, "gpurl"):
        run = small_run(tmp_path, 3, video_every=ITERATION)
    assert run.outcome.reason == "total_steps"
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("no videos from step 0 on: Pendulum.picture of environment 0 raised")
    assert "the renderer is gone" in message


def test_a_missing_library_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    run = small_run(tmp_path, 1, video_every=ITERATION)
    assert run.outcome.reason == "total_steps"
    (message,) = [each.getMessage() for each in caplog.records]
    assert "no videos from step 0 on: videos need imageio-ffmpeg: pip install" in message


class StopAtOnce(Callback):
    """Sends a signal's request before the first iteration."""

    def on_start(self, run: RunView) -> None:
        run.should_stop = lambda: True


def test_after_a_signal_nothing_is_filmed(tmp_path: Path) -> None:
    run = small_run(tmp_path, 2, video_every=ITERATION, callbacks=[StopAtOnce()])
    assert not (run.folder / "videos").exists()


def test_the_interval_is_checked() -> None:
    with pytest.raises(UsageError, match="video_every must be at least 1, got 0"):
        gpurl.train("ppo", "pendulum", video_every=0, quiet=True)
