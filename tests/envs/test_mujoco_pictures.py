"""Pictures of MuJoCo tasks: the body is where it is, the camera is the chosen one, and a machine
without a renderer gets one sentence.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.envs.mujoco import _model, _pictures
from gpurl.envs.mujoco._pictures import Camera, Pictures
from gpurl.envs.mujoco._worlds import Fields
from gpurl.envs.mujoco.base import MujocoEnv
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from tests.small_runs import small_run

mujoco = pytest.importorskip("mujoco")
NAMES = [
    *("ant", "half_cheetah", "hopper", "humanoid", "humanoid_standup", "inverted_double_pendulum"),
    *("inverted_pendulum", "pusher", "reacher", "swimmer", "walker2d"),
]
SLIDER = """<mujoco><worldbody>
  <light pos="0 -2 3"/><camera name="side" pos="0 -4 0" xyaxes="1 0 0 0 0 1"/>
  <body name="ball"><joint name="x" type="slide" axis="1 0 0"/>
    <geom size="0.2" rgba="1 0 0 1"/></body>
</worldbody><actuator><motor joint="x" ctrlrange="-1 1" gear="9"/></actuator></mujoco>"""


class Slider(MujocoEnv):
    """A red ball on a line."""

    model_file = SLIDER
    camera = "side"
    max_episode_steps = 5

    def observe(self, data: Fields) -> Tensor:
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        return data.qpos[:, 0]


@pytest.fixture(scope="module", autouse=True)
def _renderer() -> None:
    """Skip where no backend of OpenGL works."""
    env = Slider(1)
    env.reset(seed=0)
    try:
        env.picture(0, 32)
    except UsageError as error:
        pytest.skip(f"MuJoCo cannot draw here: {error}")
    finally:
        env.close()


def red(picture: np.ndarray) -> np.ndarray:
    """Mean (row, column) of what is red."""
    red, green, blue = picture.astype(int).transpose(2, 0, 1)
    rows, columns = np.nonzero((red > 60) & (red > 3 * green) & (red > 3 * blue))
    assert len(rows)
    return np.array((rows.mean(), columns.mean()))


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_drawn(name: str) -> None:
    env = make_env(name, 1)
    env.reset(seed=0)
    picture = env.picture(0, 48)
    assert picture.shape == (48, 64, 3)
    assert picture.std() > 5  # not one colour
    assert picture.mean() > 20  # not a black void
    env.close()


def test_a_world_is_drawn_in_its_own_state() -> None:
    env = Slider(3)
    env.reset(seed=0)
    env.data.qpos.copy_(torch.tensor([[-1.0], [0.0], [1.0]]))
    columns = [red(env.picture(index, 96))[1] for index in range(3)]
    # 4 m away, the picture is 2 x 4 tan(45 / 2 degrees) m high
    scale = 96 / (8 * np.tan(np.pi / 8))
    assert columns == pytest.approx([63.5 - scale, 63.5, 63.5 + scale], abs=2)
    # and no picture changes a world
    assert env.data.qpos.flatten().tolist() == [-1.0, 0.0, 1.0]
    env.close()


def test_a_watcher_sees_the_last_state() -> None:
    env = Slider(1)
    env.reset(seed=0)
    seen: list[float] = []
    env.watch_ends(lambda index: seen.append(float(env.data.qpos[index, 0])))
    for _ in range(5):
        result = env.step(torch.ones(1, 1))
    assert seen == [pytest.approx(float(result.info["final_obs"][0, 0]))]
    assert float(env.data.qpos[0, 0]) == 0.0
    env.close()


class Followed(Slider):
    camera = Camera(distance=2.0, azimuth=90.0, elevation=0.0, body="ball")


def test_a_camera_of_its_own_follows_a_body() -> None:
    env = Followed(1)
    env.reset(seed=0)
    for place in (0.0, 5.0):
        env.data.qpos.fill_(place)
        assert red(env.picture(0, 96))[1] == pytest.approx(63.5, abs=1.5)
    env.close()


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ("sied", "the model has no camera 'sied', did you mean side"),
        (Camera(body="bal"), "the model has no body 'bal', did you mean ball"),
    ],
)
def test_a_wrong_camera_is_named(camera: Any, message: str) -> None:
    env = type("Wrong", (Slider,), {"camera": camera})(1)
    env.reset(seed=0)
    with pytest.raises(UsageError, match=rf"Wrong.camera: {message}"):
        env.picture(0, 32)
    env.close()


def test_without_a_renderer_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*arguments: object) -> None:
        raise ImportError("libEGL.so: cannot open shared object file")

    monkeypatch.setattr(_pictures, "_choose_backend", none_here)
    model = mujoco.MjModel.from_xml_string(SLIDER)
    with pytest.raises(
        UsageError,
        match=r"MuJoCo has no renderer here \(.*libEGL.*\): set MUJOCO_GL=egl and install libegl1",
    ):
        Pictures("Slider", mujoco, model, 32, None)


def test_a_renderer_that_mujoco_cannot_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr(_model.importlib, "import_module", broken)
    with pytest.raises(
        UsageError,
        match=r"cannot be imported with MUJOCO_GL=osmesa \(.*glGetError'\): install .*or unset",
    ):
        _model.load_mujoco()


def test_a_run_on_a_model_of_ones_own_is_filmed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1, env=Slider, eval_episodes=0)
    film = gpurl.film(run.folder, height=48)
    shots = list(film)
    # steps of 2 ms: a video shows every ninth of 500 a second
    assert (film.every, film.fps) == (9, pytest.approx(500 / 9))
    assert len(shots) == 1 + round(500 / 9)
    assert shots[0].shape == (48, 64, 3)
    assert film.episodes[0].length == 5
    film.env.close()
