"""Stacked frames: the newest last, none of an earlier episode, and a state that continues."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from gpurl.cli.check_env import check_env
from gpurl.envs.deployment import deployment
from gpurl.envs.frame_stack import FrameStack
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import Info
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom


class Clock(TorchEnv):
    """Shows 10 times the number of the episode plus the step in it, as one pixel."""

    single_observation_space = Box(0, 255, (1, 1), np.uint8)
    single_action_space = Discrete(2)
    max_episode_steps = 3

    def initial_state(self, rng: CounterRandom) -> State:
        return {"step": torch.zeros(rng.num_envs, dtype=torch.int64)}

    def transition(
        self, state: State, action: torch.Tensor, rng: CounterRandom
    ) -> tuple[State, torch.Tensor, torch.Tensor]:
        step = state["step"] + 1
        return {"step": step}, torch.zeros(len(step)), torch.zeros(len(step), dtype=torch.bool)

    def observe(self, state: State) -> torch.Tensor:
        return (100 + state["step"]).to(torch.uint8).view(-1, 1, 1)


ACTION = torch.zeros(2, dtype=torch.int64)


def shown(obs: torch.Tensor) -> list[int]:
    """The frames of the first environment."""
    return obs[0].flatten().tolist()


def test_an_episode_begins_with_its_first_frame_in_all() -> None:
    env = FrameStack(2, frames=3, env=Clock(2))
    assert env.single_observation_space == Box(0, 255, (3, 1, 1), np.uint8)
    obs, _ = env.reset()
    assert shown(obs) == [100, 100, 100]
    seen, finals = [], []
    for _ in range(4):
        step = env.step(ACTION)
        seen.append(shown(step.obs))
        finals.append(shown(step.info["final_obs"]))
    assert finals == [[100, 100, 101], [100, 101, 102], [101, 102, 103], [100, 100, 101]]
    assert seen == [[100, 100, 101], [100, 101, 102], [100, 100, 100], [100, 100, 101]]
    assert shown(obs) == [100, 100, 100]  # earlier observations stay as they are
    # a reset of the second environment alone
    obs, _ = env.reset(options={"reset_mask": torch.tensor([False, True])})
    assert obs[:, :, 0, 0].tolist() == [[100, 100, 101], [100, 100, 100]]


class Counter(gymnasium.Env):
    """As Clock, in numpy."""

    observation_space = Box(0, 255, (1, 1), np.uint8)
    action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.count = 0
        return np.full((1, 1), 100, np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.full((1, 1), 100 + self.count, np.uint8), 0.0, self.count == 3, False, {}


def test_an_environment_that_resets_in_the_next_step() -> None:
    inner = gymnasium.vector.SyncVectorEnv(
        [Counter] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP
    )
    env = FrameStack(2, frames=2, env=GymnasiumCpu(2, env=inner))
    env.reset()
    seen = [shown(env.step(ACTION).obs) for _ in range(5)]
    assert seen == [[100, 101], [101, 102], [102, 103], [100, 100], [100, 101]]


def test_a_saved_state_continues() -> None:
    env, other = (make_env("frame_stack:catch", 3, seed=seed) for seed in (1, 2))
    action = torch.tensor([0, 1, 2])
    env.reset()
    for _ in range(5):
        env.step(action)
    other.reset()
    other.load_state_dict(env.state_dict())
    for _ in range(9):
        one, two = env.step(action), other.step(action)
        assert torch.equal(one.obs, two.obs)
        assert torch.equal(one.info["final_obs"], two.info["final_obs"])


class Told(Clock):
    """Knows what a controller needs, and has a curriculum."""

    control_step = 0.25
    single_instance = True
    level = 1

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        return ["pixel"], ["stay", "go"]

    def robot(self) -> Info:
        return {"joint_names": ["knee"]}

    def curriculum_state(self) -> Info:
        return {"level": self.level}

    def load_curriculum_state(self, state: Info) -> None:
        self.level = state["level"]


def test_it_tells_and_keeps_what_the_environment_does() -> None:
    env = FrameStack(2, frames=3, env=Told(2))
    told = deployment(env)
    assert told["control_step"] == 0.25
    assert told["action_names"] == ["stay", "go"]
    assert told["robot"] == {"joint_names": ["knee"]}
    assert env.single_instance
    env.load_curriculum_state({"level": 3})
    assert env.curriculum_state() == {"level": 3}
    named = FrameStack(2, frames=3, env=make_env("cart_pole", 2))
    assert deployment(named)["action_names"] == ["left", "right"]


def test_it_keeps_the_contract() -> None:
    assert check_env("frame_stack:catch") == []
    env = make_env("frame_stack:catch", 4, frames=2, task_options={"size": 6})
    assert env.single_observation_space.shape == (2, 1, 6, 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FrameStack(2), "needs either a task"),
        (lambda: make_env("frame_stack:two_step_game", 2), "one Box without names and agents"),
        (lambda: make_env("frame_stack:tests.picture_envs:Seen", 2), "without names"),
        (lambda: make_env("frame_stack:catch", 2, frames=0), "frames must be at least 1"),
    ],
)
def test_what_it_cannot_stack(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_what_exists_once_exists_once_stacked() -> None:
    assert FrameStack.exists_once({"task": "isaac_lab:Isaac-Cartpole-Direct"})
    assert FrameStack.exists_once({"task": "frame_stack:isaac_lab:Isaac-Cartpole-Direct"})
    assert not FrameStack.exists_once({"task": "catch"})
