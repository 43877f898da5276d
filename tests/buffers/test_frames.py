"""A replay of single frames gives the batches of one that stores whole stacks."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.buffers.prioritized import PrioritizedReplay
from gpurl.buffers.replay import Replay
from gpurl.envs.frame_stack import FrameStack
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import Timestep, VecEnv

ENVS, GAMMA, COLUMNS = 3, 0.9, {"reward": (), "action": ()}
CPU = torch.device("cpu")


class Numbers(gymnasium.Env):
    """Every frame is another number; episodes have 1 to 6 steps and end in both ways."""

    observation_space = Box(0.0, 1e9, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, first: int) -> None:
        self.count = first
        self.random = np.random.default_rng(first)

    def _frame(self) -> np.ndarray:
        self.count += 1
        return np.array([self.count, -self.count], np.float32)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.left = int(self.random.integers(1, 7))
        return self._frame(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        terminated = not self.left and bool(self.random.random() < 0.5)
        return self._frame(), float(self.count), terminated, not self.left and not terminated, {}


def numbers_env(mode: str, frames: int) -> FrameStack:
    inner = gymnasium.vector.SyncVectorEnv(
        [lambda n=n: Numbers(100_000 * n) for n in range(ENVS)],
        autoreset_mode=gymnasium.vector.AutoresetMode(mode),
    )
    return FrameStack(ENVS, frames=frames, env=GymnasiumCpu(ENVS, env=inner))


def play(env: VecEnv, obs: torch.Tensor, count: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """(the current observation, the columns of `count` steps)."""
    rows = []
    for _ in range(count):
        action = torch.zeros(ENVS, dtype=torch.int64)
        step: Timestep = env.step(action)
        row = {"obs": obs, "final_obs": step.info["final_obs"], "reward": step.reward}
        row |= {"action": action.float(), "terminated": step.terminated}
        row |= {"truncated": step.truncated}
        if "valid" in step.info:
            row["valid"] = step.info["valid"]
        rows.append(row)
        obs = step.obs
    return obs, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def replays(kind: type[Replay], frames: int, rows: int) -> tuple[Replay, Replay]:
    shape = (frames, 2)
    whole, single = (
        kind(rows * ENVS, ENVS, shape, COLUMNS, CPU, 7, final_obs_fraction=1.0, frames=count)
        for count in (1, frames)
    )
    return whole, single


@pytest.mark.parametrize("kind", [Replay, PrioritizedReplay])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("frames", [2, 4])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_batches_are_those_of_whole_stacks(
    mode: str, frames: int, num_steps: int, kind: type[Replay]
) -> None:
    env = numbers_env(mode, frames)
    whole, single = replays(kind, frames, 40)
    assert single.ring.obs.numel() * frames == whole.ring.obs.numel()
    obs, _ = env.reset(seed=0)
    num_lost = []
    for block in range(12):  # the ring is overwritten twice
        obs, columns = play(env, obs, 8)
        whole.add(columns)
        single.add(columns)
        if block == 7:  # an iteration that was abandoned: the environments are ahead
            obs, _ = play(env, obs, 5)
            for replay in (whole, single):
                replay.mark_episode_break(torch.ones(ENVS, dtype=torch.bool))
        expected, batch = (replay.sample(400, GAMMA, num_steps) for replay in (whole, single))
        assert torch.equal(batch["index"], expected["index"])
        is_lost = (batch["weight"] == 0) & (expected["weight"] > 0)
        assert not bool(((batch["weight"] > 0) & (expected["weight"] == 0)).any())
        kept = batch["weight"] > 0
        for name in ("obs", "next_obs", "reward", "discount", "action"):
            assert torch.equal(batch[name][kept], expected[name][kept]), name
        # lost are the first rows of the ring and those after a break only, not those of episodes
        row = batch["index"][is_lost] // ENVS
        written, newest = int(single.ring.counts[0]), int(single.ring.counts[2])
        oldest = (newest + 1) % 40 if written > 40 else 0
        age = (row - oldest) % 40
        after_break = ((written - 40 + age if written > 40 else age) - 64) % 1000 < frames
        assert bool(((age < frames - 1) | after_break).all())
        num_lost.append(int(is_lost.sum()))
        assert int(kept.sum()) > 100
    assert num_lost[0] > 0


@pytest.mark.parametrize("frames", [2, 4])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_frames_of_a_skipped_row_are_lost(mode: str, frames: int) -> None:
    """`--nan skip` marks rows in the middle of an episode, which goes on."""
    env = numbers_env(mode, frames)
    whole, single = replays(Replay, frames, 40)
    generator = torch.Generator().manual_seed(0)
    obs, num_lost = env.reset(seed=0)[0], 0
    for _ in range(12):
        obs, columns = play(env, obs, 8)
        skipped = torch.rand(8, ENVS, generator=generator) < 0.2
        columns["valid"] = columns.get("valid", torch.ones(8, ENVS, dtype=torch.bool)) & ~skipped
        columns["obs"][skipped] = 0.0
        whole.add(columns)
        single.add(columns)
        expected, batch = (replay.sample(400, GAMMA) for replay in (whole, single))
        kept = batch["weight"] > 0
        for name in ("obs", "next_obs", "reward", "discount"):
            assert torch.equal(batch[name][kept], expected[name][kept]), name
        num_lost += int(((batch["weight"] == 0) & (expected["weight"] > 0)).sum())
        assert int(kept.sum()) > 50
    assert num_lost > 100


def test_a_saved_ring_of_frames_continues() -> None:
    env = numbers_env("SameStep", 4)
    _, single = replays(Replay, 4, 40)
    _, other = replays(Replay, 4, 40)
    single.add(play(env, env.reset(seed=0)[0], 11)[1])
    other.load_state_dict(single.state_dict())
    one, two = single.sample(50, GAMMA), other.sample(50, GAMMA)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("prioritized", [False, True])
def test_dqn_stores_pictures_once(prioritized: bool) -> None:
    env = make_env("frame_stack:catch", 4, frames=3, task_options={"size": 6})
    config = config_class(resolve_algorithm("dqn"))(
        horizon=2, replay_size=400, batch_size=8, prioritized=prioritized
    )
    spaces = env.single_observation_space, env.single_action_space
    algorithm: Any = make_algorithm("dqn", config, *spaces, 4)
    algorithm.make_buffer()
    assert algorithm.replay.ring.obs.shape == (100, 4, 36)
    assert algorithm.replay.frames == 3
