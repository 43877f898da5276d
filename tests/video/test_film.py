"""A film plays one episode in each environment: numbers, pace, ends, and what prevents it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.algorithms.base import PolicyState
from gpurl.cli.main import main
from gpurl.envs.canvas import Canvas
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EnvError, UsageError
from gpurl.run.evaluator import Stopped
from gpurl.video.film import Episode, Film
from tests.small_runs import small_run
from tests.tiny_envs import RandomWalk

ffmpeg = pytest.importorskip("imageio_ffmpeg")


class Drawn(RandomWalk):
    """Draws its state's first number as a grey value."""

    render_fps = 25.0

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        canvas.view(0.0, 0.0, 1.0, 1.0, "#808080")
        canvas.circle((0.5, 0.5), 0.2, "ink" if action is None else "white")


class Wrong(RandomWalk):
    """Has a mistake in its drawing."""

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        canvas.view(0.0, 0.0, 1.0, 1.0)
        canvas.circle(state["nothing"], 1.0)


class Changing(RandomWalk):
    """Its picture becomes wider."""

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        return np.zeros((height, height + int(self.episode_length_buf[index]), 3), np.uint8)


def still(env: VecEnv):
    """A policy that always takes the same action."""

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        shape = (env.num_envs, *(env.single_action_space.shape or ()))
        return torch.zeros(shape, dtype=torch.float32), policy_state

    return act


def film_of(env: VecEnv, **options: object) -> Film:
    return Film(env, still(env), height=128, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pendulum_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return small_run(root / "run", 1).folder


def test_every_environment_plays_one_episode_to_its_end() -> None:
    env = Drawn(5, seed=3)
    film = film_of(env)
    shots = list(film)
    assert sorted(each.number for each in film.episodes) == list(range(5))
    # the same episodes, played here
    env = Drawn(5, seed=3)
    env.reset(seed=0)
    truth: dict[int, Episode] = {}
    for _ in range(7):
        result = env.step(torch.zeros(5, 2))
        for index in result.info["_episode"].nonzero().flatten().tolist():
            end = "terminated" if result.terminated[index] else "time limit"
            episode = result.info["episode"]
            truth.setdefault(
                index, Episode(index, float(episode["r"][index]), int(episode["l"][index]), end)
            )
    assert {each.number: each for each in film.episodes} == truth
    # a picture before every step of the longest, and a second of the last
    assert len(shots) == max(each.length for each in truth.values()) + 25
    assert all(shot.shape == shots[0].shape for shot in shots)
    # the last picture is of the last state, which has no action: a dark disc, paler
    assert (shots[0][80, 64] == 255).all()
    assert (shots[-1][80, 64] < 150).all()


@pytest.mark.parametrize(
    ("rate", "options", "every", "fps"),
    [
        (25.0, {}, 1, 25.0),
        (None, {}, 1, 30.0),
        (100.0, {}, 2, 50.0),
        (125.0, {}, 3, 125 / 3),
        (50.0, {"max_fps": 100 / 3}, 2, 25.0),
        (20.0, {"speed": 4.0}, 2, 40.0),
        (30.0, {"max_fps": 30.0, "speed": 0.5}, 1, 15.0),
    ],
)
def test_the_pace_is_that_of_the_task(
    rate: float | None, options: dict[str, float], every: int, fps: float
) -> None:
    env = Drawn(1)
    env.render_fps = rate
    film = film_of(env, **options)
    assert (film.every, film.fps) == (every, pytest.approx(fps))


def test_tasks_know_their_time() -> None:
    rates = {"cart_pole": 50, "pendulum": 20, "chasing": 100, "acrobot": 15, "mountain_car": None}
    for name, rate in rates.items():
        found = make_env(name, 1).render_fps
        assert found == (rate if rate is None else pytest.approx(rate)), name
    assert make_env("CartPole-v1", 1).render_fps == 50


def test_a_task_without_draw_says_what_to_do() -> None:
    sentence = r"^RandomWalk has no draw\(canvas, state, action\), .*: docs/environments.md shows"
    with pytest.raises(UsageError, match=sentence):
        next(iter(film_of(RandomWalk(1))))
    with pytest.raises(UsageError, match=r"VecEnv draws no pictures, .*docs/environments.md"):
        VecEnv.picture(VecEnv.__new__(VecEnv), 0, 64)


def test_mistakes_in_drawing_are_named_with_their_line() -> None:
    with pytest.raises(EnvError, match=r"Wrong.picture .* KeyError: 'nothing' \(.*test_film.py"):
        list(film_of(Wrong(1)))
    with pytest.raises(
        EnvError, match=r"Changing.picture: wanted an array \(128, 128, 3\).*129, 3"
    ):
        list(film_of(Changing(1)))


def test_a_film_stops_when_asked() -> None:
    answers = iter([False, False, True])
    film = film_of(Drawn(1), should_stop=lambda: next(answers))
    with pytest.raises(Stopped):
        list(film)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 31}, "height must be an even number"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"max_fps": 0.0}, "max_fps must be above 0"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, float], message: str) -> None:
    env = Drawn(1)
    with pytest.raises(UsageError, match=message):
        Film(env, still(env), **options)  # type: ignore[arg-type]


def test_a_film_says_how_far_it_is() -> None:
    """Of the pictures of whole episodes: an end before the limit is no error."""
    env = make_env("tests.video.test_film:Drawn", 2)
    assert env.max_episode_steps == 7
    texts: list[str] = []
    film = film_of(env)
    pictures = list(film.watched(texts.append))
    assert film.max_pictures == 7 + 25
    assert len(texts) == len(pictures) <= film.max_pictures
    assert texts[0].startswith("video: frame 1 of at most 32, 3.1 %, ETA ")
    assert [int(text.split()[2]) for text in texts] == list(range(1, len(texts) + 1))
    faster = film_of(env, speed=10.0)  # 250 steps a second: every fifth is shown
    assert faster.max_pictures == 2 + 50
    env.max_episode_steps = None
    assert film_of(env).max_pictures == 5000 + 25


# ---- of a run ----


def test_a_run_becomes_a_video(
    pendulum_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "out.mp4"
    words = [str(pendulum_run), "--video", str(video), "--episodes", "2", "--height", "64"]
    assert main(["play", *words, "--device", "cpu"]) == 0
    assert f"video: {video}" in capsys.readouterr().out
    # 200 steps of 0.05 s, and a second more
    assert ffmpeg.count_frames_and_secs(str(video)) == (220, pytest.approx(11.0, abs=0.1))
    meta = next(ffmpeg.read_frames(str(video)))
    assert (meta["fps"], meta["size"]) == (20.0, (2 * 64 + 4, 64))


def test_from_python_a_film_is_an_iterable_of_pictures(pendulum_run: Path) -> None:
    film = gpurl.film(pendulum_run, height=64)
    first = next(iter(film))
    assert first.shape == (2 * 64 + 4, 2 * 64 + 4, 3)  # four of a tensor task
    assert first.dtype == np.uint8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--video", "out.avi"], "a video is a file .mp4 or .gif, got 'out.avi'"),
        (["--video", "no/where.mp4"], "cannot write no/where.mp4: there is no folder no"),
        (["--video", "out.mp4", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--height", "100"], "--height and --speed are of a video: add --video FILE.mp4"),
    ],
)
def test_wrong_use_ends_in_one_sentence(
    pendulum_run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(pendulum_run), *words]) == 2
    assert capsys.readouterr().err == f"gpurl: {message}\n"


def test_a_gymnasium_task_draws_itself(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    run = small_run(tmp_path / "run", 1, env="CartPole-v1", eval_episodes=0)
    film = gpurl.film(run.folder, episodes=2, height=100)
    shots = list(film)
    # white, with a dark cart; Gymnasium's picture is 600 by 400
    assert shots[0].shape == (2 * 100 + 4, 150, 3)
    assert (shots[0][60:90, 60:90] < 60).any()
    assert len(film.episodes) == 2
    film.env.close()


def test_stacked_frames_do_not_change_the_film(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    tasks = ("CartPole-v1", "frame_stack:gymnasium_cpu:CartPole-v1")
    for number, task in enumerate(tasks):
        small_run(tmp_path / str(number), 1, env=task, eval_episodes=0)
    first, stacked = (
        next(iter(gpurl.film(tmp_path / str(number), episodes=1, height=100)))
        for number in range(len(tasks))
    )
    np.testing.assert_array_equal(stacked, first)


def test_a_gymnasium_task_made_without_a_renderer_says_so() -> None:
    env = make_env("CartPole-v1", 1)
    env.reset(seed=0)
    with pytest.raises(UsageError, match=r"must be made with render_mode='rgb_array', .* None"):
        env.picture(0, 64)
    env.close()
    env = make_env("CartPole-v1", 1, vectorization="vector")
    env.reset(seed=0)
    with pytest.raises(UsageError, match="only single environments do: vectorization sync"):
        env.picture(0, 64)
    env.close()
