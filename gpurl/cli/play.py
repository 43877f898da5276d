"""Plays a trained policy: a picture of its first episode (observations, actions, rewards over
time), or a video of several.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from gpurl.algorithms.base import episode_ends
from gpurl.api import film, make_env_for, task_to_play
from gpurl.cli.episode_plot import Episode, plot_episode, signals_of
from gpurl.errors import UsageError
from gpurl.policy import load
from gpurl.run.display import counted
from gpurl.run.plot import check_picture_path, place_hint
from gpurl.run.run_folder import EPISODE, run_of
from gpurl.run.setup import choose_device
from gpurl.run.terminal import ProgressLine
from gpurl.video.files import check_video_path, max_fps, write_video

MAX_STEPS = 20_000  # of an episode, on average: an environment may have no time limit


def play_run(
    path: str | Path,
    episodes: int = 3,
    device: str = "auto",
    seed: int = 0,
    best: bool = True,
    env: str | None = None,
    env_options: Mapping[str, object] | None = None,
    member: int | str | None = None,
    out: Path | None = None,
) -> Path:
    """Play `episodes` greedy episodes one after the other and print each; returns the picture of
    the first, `out`, by default in the run's folder. EnvError for names of the task that do not fit
    its spaces. best, env, env_options, member: as `gpurl.evaluate_run`.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    if out:
        check_picture_path(out)
    # the policy, and one environment as in its training
    chosen = choose_device(device)
    policy = load(path, str(chosen), best=best, member=member)
    # before the environment can change the directory
    picture = out.absolute() if out else run_of(Path(path)) / EPISODE
    name, options = task_to_play(policy, env, env_options)
    made = make_env_for(policy, name, chosen, seed, options)
    signals = signals_of(made)
    agents = made.num_agents
    obs, _ = made.reset(seed=seed)

    # play, and keep of each step of the first episode: observation [G, D] before and, in the end,
    # after it, action [G, A], reward [G]
    observed = [obs[0].reshape(agents, -1).cpu()]
    acted, rewarded = list[torch.Tensor](), list[torch.Tensor]()
    end = ""
    num_played = 0
    for _ in range(MAX_STEPS * episodes):
        action = policy.act(obs)
        timestep = made.step(action)
        if num_played == 0:
            observed.append(timestep.info["final_obs"][0].reshape(agents, -1).cpu())
            acted.append(action[0].reshape(agents, -1).float().cpu())
            rewarded.append(timestep.reward[0].reshape(agents).cpu())
        obs = timestep.obs
        # the hidden state also restarts where a late reset, which ends no episode, happened
        if bool(episode_ends(timestep)[0]):
            policy.reset()
        is_terminated = bool(timestep.terminated[0])
        if is_terminated or bool(timestep.truncated[0]):
            num_played += 1
            episode = timestep.info["episode"]
            reason = "terminated" if is_terminated else "time limit"
            end = end or reason
            length = counted(int(episode["l"][0]), "step")
            print(f"episode {num_played}: return {float(episode['r'][0]):.3f}, {length}, {reason}")
            if num_played == episodes:
                break
    made.close()

    obs_steps, actions, rewards = (
        torch.stack(column).numpy() for column in (observed, acted, rewarded)
    )
    first = Episode(obs_steps, actions, rewards, end)
    title = f"{policy.settings['algorithm']} on {name}"
    with place_hint():
        return plot_episode(picture, title, first, signals)


def film_run(
    path: str | Path,
    video: Path,
    episodes: int | None = None,
    device: str = "auto",
    seed: int = 0,
    height: int | None = None,
    speed: float = 1.0,
    best: bool = True,
    env: str | None = None,
    env_options: Mapping[str, object] | None = None,
    member: int | str | None = None,
) -> Path:
    """Write `video`, .mp4 or .gif, of greedy episodes side by side, and print each; see
    `gpurl.film`.
    """
    check_video_path(video)
    target = video.absolute()
    fps = max_fps(video)
    pictures = film(
        path, episodes, device, seed, height, speed, fps, best, env, env_options, member
    )
    try:
        with ProgressLine() as line:
            write_video(target, pictures.watched(line.show), pictures.fps)
    finally:
        pictures.env.close()
    for episode in sorted(pictures.episodes, key=lambda each: each.number):
        print(
            f"episode {episode.number + 1}: return {episode.episode_return:.3f}, "
            f"{counted(episode.length, 'step')}, {episode.end}"
        )
    return video
