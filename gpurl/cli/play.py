"""Plays a trained policy: a picture of its first episode (observations, actions, rewards over
time), or a video of several.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpurl.algorithms.base import episode_ends
from gpurl.api import film
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.policy import load
from gpurl.run.display import counted
from gpurl.run.plot import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    STYLE,
    finish_axes,
    new_figure,
    save_figure,
)
from gpurl.run.run_folder import run_of
from gpurl.run.setup import choose_device
from gpurl.video.files import check_video_path, max_fps, write_video

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_STEPS = 20_000  # of an episode, on average: an environment may have no time limit
MAX_LINES = 12  # more lines in one panel cannot be told apart
MORE_COLORS = "#c0392b #12a5b5 #8c564b #d65db1 #8a8f00 #7f7f7f #1b2a6b #f09a90"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, *MORE_COLORS.split())


def play_run(path: str | Path, episodes: int = 3, device: str = "auto", seed: int = 0) -> Path:
    """Play `episodes` greedy episodes one after the other and print each; returns the picture of
    the first, in the run's folder. Rewards of several agents are drawn as their mean.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    # the policy, and one environment as in its training
    chosen = choose_device(device)
    policy = load(path, str(chosen))
    settings = policy.settings
    env = make_env(settings["env"], 1, chosen, seed, **settings["env_options"])
    obs, _ = env.reset(seed=seed)

    # play, and keep of each step of the first episode: observation [D], action [A],
    # reward []
    frames: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    num_played = 0
    for _ in range(MAX_STEPS * episodes):
        action = policy.act(obs)
        timestep = env.step(action)
        if num_played == 0:
            observation = obs[0].flatten().cpu()
            reward = timestep.reward[0].mean().cpu()
            frames.append((observation, action[0].flatten().float().cpu(), reward))
        obs = timestep.obs
        # the hidden state also restarts where a late reset, which ends no episode, happened
        if bool(episode_ends(timestep)[0]):
            policy.reset()
        is_terminated = bool(timestep.terminated[0])
        if is_terminated or bool(timestep.truncated[0]):
            num_played += 1
            episode = timestep.info["episode"]
            length = counted(int(episode["l"][0]), "step")
            print(
                f"episode {num_played}: return {float(episode['r'][0]):.3f}, {length}, "
                f"{'terminated' if is_terminated else 'time limit'}"
            )
            if num_played == episodes:
                break
    env.close()

    picture = run_of(Path(path)) / "episode.png"
    columns = [torch.stack(column).numpy() for column in zip(*frames)]
    return plot_episode(picture, f"{settings['algorithm']} on {settings['env']}", *columns)


def film_run(
    path: str | Path,
    video: Path,
    episodes: int | None = None,
    device: str = "auto",
    seed: int = 0,
    height: int | None = None,
    speed: float = 1.0,
) -> Path:
    """Write `video`, .mp4 or .gif, of greedy episodes side by side, and print each; see
    `gpurl.film`.
    """
    check_video_path(video)
    pictures = film(path, episodes, device, seed, height, speed, max_fps(video))
    try:
        write_video(video, pictures, pictures.fps)
    finally:
        pictures.env.close()
    for episode in sorted(pictures.episodes, key=lambda each: each.number):
        print(
            f"episode {episode.number + 1}: return {episode.episode_return:.3f}, "
            f"{counted(episode.length, 'step')}, {episode.end}"
        )
    return video


def plot_episode(
    path: Path, title: str, obs: np.ndarray, action: np.ndarray, reward: np.ndarray
) -> Path:
    """Draw the picture `path` of one episode; obs: [T, D], action: [T, A], reward: [T]. Of D and A
    at most the first 12 are drawn.
    """
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    # choices are whole numbers from 0
    is_discrete = bool((np.mod(action, 1) == 0).all() and (action >= 0).all())
    with mpl.rc_context(STYLE):
        length = counted(len(reward), "step")
        figure = new_figure(8.0, f"{title} · {length} · return {reward.sum():.6g}")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=[2.4, 1.6, 1, 1])
        _draw_lines(panels[0], obs, "observation")
        _draw_lines(panels[1], action, "action", is_discrete=is_discrete)
        _draw_lines(panels[2], reward[:, None], "reward", GREEN)
        _draw_lines(panels[3], reward.cumsum()[:, None], "return so far", INK)
        for axes in panels:
            finish_axes(axes, "step" if axes is panels[-1] else "")
        panels[0].set_xlim(0, max(len(reward) - 1, 1))
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # the panels share the axis
        figure.align_ylabels(panels)
        return save_figure(figure, path)


def _draw_lines(
    axes: "Axes", values: np.ndarray, name: str, color: str = BLUE, is_discrete: bool = False
) -> None:
    """Draw the columns of values [T, D] over time; a legend for several, steps for discrete."""
    from matplotlib.ticker import MaxNLocator

    num_steps, width = values.shape
    for column in range(min(width, MAX_LINES)):
        axes.plot(
            values[:, column],
            color=color if width == 1 else COLORS[column],
            linewidth=1.3,
            drawstyle="steps-post" if is_discrete else "default",
            marker="o" if num_steps < 3 else None,
            markersize=4,
            label=str(column),
        )
    axes.set_ylabel(name if width <= MAX_LINES else f"{name}\n(first {MAX_LINES} of {width})")
    if is_discrete:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if width > 1:
        axes.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
            ncols=1 if width <= 7 else 2,
        )
