"""Plays a trained policy and draws its first episode: what it saw, did and got (several agents: in
the mean), over time.
"""

from pathlib import Path

import torch

from gpurl.algorithms.base import episode_ends
from gpurl.cli.plot_episode import plot_episode
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.policy import load
from gpurl.run.run_folder import run_of
from gpurl.run.setup import choose_device


def play_run(
    path: str | Path,
    episodes: int = 3,
    device: str = "auto",
    seed: int = 0,
    max_steps: int = 20_000,
) -> Path:
    """Play `episodes` greedy episodes one after the other, print each; returns the picture of the
    first, in the run's folder.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    chosen = choose_device(device)
    policy = load(path, str(chosen))
    env = make_env(policy.settings["env"], 1, chosen, seed, **policy.settings["env_options"])
    obs, _ = env.reset(seed=seed)
    frames: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    played, picture = 0, run_of(Path(path)) / "episode.png"
    for _ in range(max_steps * episodes):
        action = policy.act(obs)
        timestep = env.step(action)
        if played == 0:
            frames.append(
                (
                    obs[0].flatten().cpu(),
                    action[0].flatten().float().cpu(),
                    timestep.reward[0].mean().cpu(),
                )
            )
        obs = timestep.obs
        if bool(episode_ends(timestep)[0]):
            policy.reset()
        if bool(timestep.terminated[0] | timestep.truncated[0]):
            played += 1
            end = "terminated" if bool(timestep.terminated[0]) else "cut off by time"
            episode = timestep.info["episode"]
            print(
                f"episode {played}: return {float(episode['r'][0]):.3f}, {int(episode['l'][0])} "
                f"steps, {end}"
            )
            if played == episodes:
                break
    env.close()
    columns = [torch.stack(column).numpy() for column in zip(*frames)]
    return plot_episode(
        picture, f"{policy.settings['algorithm']} on {policy.settings['env']}", *columns
    )
