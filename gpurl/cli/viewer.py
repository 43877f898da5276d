"""Shows a policy in the browser, in the time of the task: MuJoCo tasks, by mjviser and viser."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpurl.algorithms.base import episode_ends
from gpurl.api import make_env_for, task_to_play
from gpurl.envs.registry import picture_options, resolve_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError, install_extra
from gpurl.guards.contract import reset_env, step_env
from gpurl.policy import load
from gpurl.video.film import FPS

HOST = "127.0.0.1"  # this machine only
PORT = 8080
SPEEDS = (0.1, 4.0)  # of the slider
# red, green, blue
BACKGROUND = (96, 110, 128)
GROUND = {"plane_color": (60, 72, 88), "plane_opacity": 1.0, "shadow_opacity": 0.5}
LINES = {"cell_color": (84, 97, 115), "section_color": (110, 124, 143)}


def view_run(
    path: str | Path,
    episodes: int | None = None,
    seed: int = 0,
    speed: float = 1.0,
    port: int = PORT,
    say: Callable[[str], object] = print,
    best: bool = True,
    env: str | None = None,
    env_options: Mapping[str, object] | None = None,
    member: int | str | None = None,
) -> None:
    """Play greedy episodes of a run in the browser until Ctrl-C, or `episodes` of them.

    port: of the page, the next free one if it is taken. best, env, env_options, member: as
    `gpurl.evaluate_run`. UsageError for a task without a MuJoCo model, and without mjviser.
    """
    if episodes is not None and episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise UsageError(f"speed must be from {SPEEDS[0]} to {SPEEDS[1]}, got {speed}")
    if not 1024 <= port <= 65535:
        raise UsageError(f"port must be from 1024 to 65535, got {port}")
    # the policy, and one environment as in its training, on the CPU
    policy = load(path, "cpu", best=best, member=member)
    name, options = task_to_play(policy, env, env_options)
    env_class, _ = resolve_env(name)
    if not hasattr(env_class, "mujoco_data"):
        raise UsageError(f"--viewer shows MuJoCo tasks, {name} is none: --video FILE.mp4 films it")
    try:
        import viser
        from mjviser import ViserMujocoScene
    except ImportError as error:
        raise UsageError(f"--viewer needs mjviser: {install_extra('viewer')} ({error})") from error
    made = make_env_for(policy, name, policy.device, seed, picture_options(name, options))
    obs = reset_env(made, seed)
    server = viser.ViserServer(HOST, port, label="gpurl", verbose=False)
    try:
        # the page; no client may ask viser's servers for an address of it on the internet
        server.gui.configure_theme(show_share_button=False)
        server.request_share_url = lambda verbose=True: None  # type: ignore[method-assign]
        darken(server.scene)
        scene = ViserMujocoScene(server, made.model, num_envs=1)  # type: ignore[attr-defined]
        note = server.gui.add_markdown("")
        is_paused = server.gui.add_checkbox("pause", False)
        rate = server.gui.add_slider("speed", *SPEEDS, step=0.1, initial_value=speed)
        scene.create_visualization_gui(camera_distance=_distance(made))
        say(f"http://{HOST}:{server.get_port()} shows {name}; Ctrl-C ends it")
        # play
        num_played = 0
        next_step = time.monotonic()
        while episodes is None or num_played < episodes:
            scene.update_from_mjdata(made.mujoco_data(0))  # type: ignore[attr-defined]
            # in the time of the task; a step that took longer is not caught up with
            seconds = 1.0 / (float(made.render_fps or FPS) * rate.value)
            next_step = max(next_step + seconds, time.monotonic())
            time.sleep(max(next_step - time.monotonic(), 0.0))
            if is_paused.value:
                continue
            timestep = step_env(made, policy.act(obs))
            obs = timestep.obs
            if bool(episode_ends(timestep)[0]):
                policy.reset()
            if bool((timestep.terminated | timestep.truncated)[0]):
                num_played += 1
                episode_return = float(timestep.info["episode"]["r"][0])
                text = f"episode {num_played}: return {episode_return:.3f}"
                note.content = text
                say(text)
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
        made.close()


def darken(scene: Any) -> None:
    """Give viser's scene a dark background, and planes that it gets from now on a dark ground:
    both are white else, as many models are.
    """
    scene.set_background_image(np.full((1, 1, 3), BACKGROUND, np.uint8))
    add_grid = scene.add_grid  # which mjviser calls for planes
    scene.add_grid = lambda name, **options: add_grid(name, **options | GROUND | LINES)


def _distance(env: VecEnv) -> float:
    """Metres from which the bodies, but not the floor, fill a good part of the page."""
    model, data = env.model, env.mujoco_data(0)  # type: ignore[attr-defined]
    bodies = data.xpos[1:]
    radius = np.linalg.norm(bodies - bodies.mean(axis=0), axis=1).max()
    # planes have no radius
    largest = model.geom_rbound[model.geom_bodyid > 0].max(initial=0.0)
    return float(3.0 * (radius + largest))
