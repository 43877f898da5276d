"""Episodes of a policy as pictures, one episode in each environment, side by side."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpurl.algorithms.base import PolicyState, episode_ends, restart_policy_state
from gpurl.envs.registry import make_env, picture_options, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import Timestep, VecEnv, no_pictures
from gpurl.errors import EnvError, GpurlError, UsageError, raised_at
from gpurl.guards.contract import reset_env, step_env
from gpurl.run.evaluator import Act, Stopped
from gpurl.run.progress import Progress, clock
from gpurl.video.pictures import arrange, caption, fade

FPS = 30.0  # steps a second of a task that does not know its own
MAX_FPS = 60.0  # of a video; faster tasks show every other step, or fewer
MAX_STEPS = 5000  # of an episode: an environment may have no time limit
HOLD = 1.0  # seconds for which the last picture stays
LARGE, SMALL = 400, 240  # pixels, height of one picture and of each of several


@dataclass
class Episode:
    """How an episode of a film went."""

    number: int  # of its environment
    episode_return: float  # with several agents the mean over them
    length: int
    end: str  # "terminated", "time limit" or "cut"


class Film:
    """An iterable of pictures [H, W, 3] uint8, `fps` of them a second; H, W are even. Reading it
    plays one episode in each environment of `env`, on the CPU; then `episodes` has the results.

    An episode that has ended stays as it was, paler, until all have; the last picture stays for a
    second. Raises UsageError if the task has no pictures, EnvError if it misbehaves, Stopped once
    `should_stop()` is true.
    """

    def __init__(
        self,
        env: VecEnv,
        act: Act,
        policy_state: PolicyState = (),
        seed: int = 0,
        height: int | None = None,
        speed: float = 1.0,
        max_fps: float = MAX_FPS,
        should_stop: Callable[[], object] = bool,
    ) -> None:
        """height: pixels of one environment's picture, by default 400, and 240 of each of several.
        speed: of the video; 1 is the time of the task where it knows it, else 30 steps a second.
        """
        if env.device.type != "cpu":
            raise UsageError(f"a film is played on the CPU, its environments are on {env.device}")
        self.height = height or (LARGE if env.num_envs == 1 else SMALL)
        if self.height < 16 or self.height % 2:
            raise UsageError(f"height must be an even number of at least 16, got {height}")
        for name, value in (("speed", speed), ("max_fps", max_fps)):
            if not 0.0 < value < math.inf:
                raise UsageError(f"{name} must be above 0, got {value}")
        self.env = env
        self.act = act
        self.seed = seed
        self.should_stop = should_stop
        self.episodes: list[Episode] = []
        steps_a_second = (env.render_fps or FPS) * speed
        self.every = max(1, math.ceil(steps_a_second / max_fps - 1e-6))  # steps between pictures
        self.fps = steps_a_second / self.every
        self._first_policy_state = policy_state
        self._is_running = [True] * env.num_envs
        # of each environment: its picture without and with its caption, and its last state's
        self._plain: list[np.ndarray] = [np.empty(0)] * env.num_envs
        self._shown: list[np.ndarray] = [np.empty(0)] * env.num_envs
        self._last: dict[int, np.ndarray] = {}

    @property
    def max_pictures(self) -> int:
        """How many there are if an episode lasts until its limit."""
        steps = min(self.env.max_episode_steps or MAX_STEPS, MAX_STEPS)
        return math.ceil(steps / self.every) + self._held

    @property
    def _held(self) -> int:
        """Pictures for which the last one stays: time to read how it ended."""
        return max(1, round(HOLD * self.fps))

    def watched(self, show: Callable[[str], object]) -> Iterator[np.ndarray]:
        """The pictures; `show` gets how far the film is after each that was taken."""
        most = self.max_pictures
        progress = Progress(most)
        for count, picture in enumerate(self, 1):
            yield picture
            progress.update(count)
            left = progress.seconds_left(0.0)
            show(
                f"video: frame {count:,} of at most {most:,}, {100 * count / most:.1f} %, "
                f"ETA {'-' if left is None else clock(left)}"
            )

    @torch.no_grad()
    def __iter__(self) -> Iterator[np.ndarray]:
        env = self.env
        env.watch_ends(self._keep_last)
        self.episodes = []
        self._is_running = [True] * env.num_envs
        policy_state = self._first_policy_state
        obs = reset_env(env, self.seed)
        returns = [0.0] * env.num_envs
        lengths = [0] * env.num_envs
        for step in range(MAX_STEPS):
            if self.should_stop():
                raise Stopped
            action, policy_state = self.act(obs, policy_state)
            # the states before the step, with the actions that are about to be taken
            if step % self.every == 0:
                for index in self._running():
                    self._plain[index] = self._picture(index, action[index])
                    text = _score(lengths[index], returns[index])
                    self._shown[index] = caption(self._plain[index], text)
                yield arrange(self._shown)
            timestep = step_env(env, action)
            episode = timestep.info["episode"]
            returns = episode["r"].tolist()
            lengths = [int(length) for length in episode["l"].tolist()]
            self._end_episodes(timestep, returns, lengths)
            if not any(self._is_running):
                break
            obs = timestep.obs
            policy_state = restart_policy_state(policy_state, episode_ends(timestep))
        for index in self._running():
            self._end(index, returns[index], lengths[index], "cut")
        last = arrange(self._shown)
        for _ in range(self._held):
            yield last

    def _running(self) -> list[int]:
        return [index for index, runs in enumerate(self._is_running) if runs]

    def _keep_last(self, index: int) -> None:
        if self._is_running[index]:
            self._last[index] = self._picture(index, None)

    def _end_episodes(self, timestep: Timestep, returns: list[float], lengths: list[int]) -> None:
        done = timestep.info["_episode"].tolist()
        for index in self._running():
            if done[index]:
                end = "terminated" if bool(timestep.terminated[index]) else "time limit"
                self._end(index, returns[index], lengths[index], end)

    def _end(self, index: int, episode_return: float, length: int, end: str) -> None:
        self._is_running[index] = False
        self.episodes.append(Episode(index, episode_return, length, end))
        # a simulator that does not tell ends shows the state before the last step
        picture = self._last.pop(index, self._plain[index])
        text = f"{_score(length, episode_return)}  {end}"
        self._shown[index] = caption(fade(picture), text)

    def _picture(self, index: int, action: Tensor | None) -> np.ndarray:
        """Checked; what goes wrong inside is an EnvError that names the line."""
        env = self.env
        name = type(env).__name__
        try:
            picture: object = env.picture(index, self.height, action)
        except GpurlError:
            raise
        except Exception as error:
            raise EnvError(
                f"{name}.picture of environment {index} raised {type(error).__name__}: {error} "
                f"({raised_at(error, type(env))})"
            ) from error
        before = self._plain[index]
        shape = before.shape if before.size else (self.height, "W", 3)
        if (
            not isinstance(picture, np.ndarray)
            or picture.dtype != np.uint8
            or picture.ndim != 3
            or (picture.shape[0], picture.shape[2]) != (self.height, 3)
            or (before.size and picture.shape != before.shape)
        ):
            got = getattr(picture, "shape", type(picture).__name__)
            raise EnvError(
                f"{name}.picture: wanted an array {shape} of uint8, the same in every step, "
                f"got {got}"
            )
        return picture


def _score(length: int, episode_return: float) -> str:
    return f"step {length}   return {episode_return:.2f}"


def greedy_film(
    player: Callable[[int], tuple[Act, PolicyState]],
    device: torch.device,
    env: str,
    env_options: dict[str, object],
    episodes: int | None = None,
    seed: int = 0,
    height: int | None = None,
    speed: float = 1.0,
    max_fps: float = MAX_FPS,
    should_stop: Callable[[], object] = bool,
) -> Film:
    """A film of a policy in new environments of the task `env`, which the caller closes
    (`film.env.close()`).

    player: as `Policy.player`, on `device`. episodes: side by side; by default 4 of a tensor task
    and 1 of any other.
    """
    env_class, _ = resolve_env(env)
    # before a simulator starts
    if env_class.picture is VecEnv.picture:
        raise no_pictures(env_class)
    if episodes is None:
        episodes = 4 if issubclass(env_class, TorchEnv) else 1
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    options = picture_options(env, env_options)
    made = make_env(env, episodes, "cpu", seed, **options)
    policy, first = player(episodes)

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """The policy on its device; its hidden state is restarted on that of the environments."""
        on_device = tuple(each.to(device) for each in policy_state)
        action, after = policy(obs.to(device), on_device)
        return action.cpu(), tuple(each.cpu() for each in after)

    try:
        return Film(made, act, first, seed, height, speed, max_fps, should_stop)
    except UsageError:
        made.close()
        raise
