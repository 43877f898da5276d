"""`gpurl play RUN --viewer`: a page on this machine alone that shows the policy's episodes, and
sentences for what cannot be shown.
"""

import inspect
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from gpurl.cli.main import main
from gpurl.cli.viewer import HOST, darken, view_run
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from tests.small_runs import small_run

mujoco = pytest.importorskip("mujoco")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "run"
    options = {"max_episode_steps": 40}
    small_run(folder, 1, env="inverted_pendulum", env_options=options, eval_episodes=0)
    return folder


def test_a_page_on_this_machine_shows_the_episodes(run: Path) -> None:
    pytest.importorskip("mjviser")
    words = [sys.executable, "-m", "gpurl", "play", str(run), "--viewer", "--port", "18080"]
    # unbuffered: the address is said while it plays
    process = subprocess.Popen(
        [*words, "--episodes", "2", "--speed", "0.5"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            if match := re.match(r"(http://\S+) shows inverted_pendulum", line):
                address = match[1]
                break
        assert address is not None
        assert address.startswith(f"http://{HOST}:")
        with urllib.request.urlopen(address, timeout=20) as page:
            assert "<html" in page.read().decode().lower()
        assert listening(int(address.rpartition(":")[2])) == {"127.0.0.1"}
        rest = process.stdout.read()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert re.findall(r"episode (\d): return [\d.]+", rest) == ["1", "2"]


def test_the_ground_and_what_is_behind_are_darker_than_models() -> None:
    class Scene:
        """What a page was asked to show."""

        def set_background_image(self, image: np.ndarray) -> None:
            self.background = image

        def add_grid(self, name: str, **options: object) -> None:
            self.grid = {"name": name, **options}

    scene = Scene()
    darken(scene)
    assert scene.background.dtype == np.uint8
    assert scene.background.max() < 160
    scene.add_grid("/floor", plane_opacity=0.4, position=(1.0, 2.0, 3.0))
    assert scene.grid["plane_opacity"] == 1.0  # ours, and the rest as it was asked for
    assert scene.grid["position"] == (1.0, 2.0, 3.0)
    assert max(scene.grid["plane_color"]) < 100
    viser = pytest.importorskip("viser")
    known = inspect.signature(viser.SceneApi.add_grid).parameters
    assert scene.grid.keys() <= known.keys()


def test_no_client_shares_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """viser answers such a message of any client with `server.request_share_url`."""
    viser = pytest.importorskip("viser")
    pytest.importorskip("mjviser")
    servers, shared = [], []

    class Server(viser.ViserServer):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            servers.append(self)

        def request_share_url(self, verbose: bool = True) -> None:
            shared.append(self)

    monkeypatch.setattr(viser, "ViserServer", Server)
    view_run(run, 1, speed=4.0, port=18090, say=lambda text: servers[0].request_share_url())
    assert servers
    assert not shared


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on `port`."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, number = local.split(":")
            if int(number, 16) == port and state == "0A":
                is_ours = address == "0100007F"
                found.add("127.0.0.1" if is_ours else address)
    return found


def test_the_state_is_the_state_of_the_world() -> None:
    env = make_env("hopper", 3, "cpu", 5)
    env.reset(seed=5)
    for _ in range(4):
        env.step(torch.full((3, 3), 0.5))
    for index in (0, 2):
        data = env.mujoco_data(index)  # type: ignore[attr-defined]
        fields = env.data  # type: ignore[attr-defined]
        assert data.qpos == pytest.approx(fields.qpos[index].numpy())
        assert data.qvel == pytest.approx(fields.qvel[index].numpy())
        # what only mj_forward computes
        assert data.xpos[1:] == pytest.approx(fields.xpos[index, 1:].numpy(), abs=0.05)
    env.close()


def test_what_cannot_be_shown_is_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--viewer", "--video", "x.mp4"], "--video and --height are of a video"),
        (["--viewer", "--device", "cuda"], "--viewer plays on the CPU: leave out --device cuda"),
        (["--port", "8081"], "--port is of the viewer"),
        (["--viewer", "--port", "80"], "port must be from 1024 to 65535, got 80"),
        (["--viewer", "--speed", "9"], "speed must be from 0.1 to 4.0, got 9.0"),
        (["--viewer", "--episodes", "0"], "episodes must be at least 1, got 0"),
    ):
        assert main(["play", str(run), *words]) == 2
        assert message in capsys.readouterr().err
    small_run(tmp_path / "run", 1, eval_episodes=0)
    with pytest.raises(UsageError, match="shows MuJoCo tasks, pendulum is none: --video"):
        view_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "mjviser", None)
    with pytest.raises(UsageError, match="--viewer needs mjviser"):
        view_run(run)
