"""However long episodes are, however they end and restart, the transitions are those of single
environments played one by one.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.torch_vector import TorchVector

Plan = list[
    tuple[int, int]
    # of each episode its length and its end: 1 terminated, 2 truncated, 3 both; then from the start
    # again
]
PLANS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)
STEPS = 12


class Counting(gymnasium.Env):
    """obs is (environment, episode, step); the reward tells all of them and the action."""

    observation_space, action_space = (
        Box(0.0, 1e6, (3,), np.float32),
        Box(-1.0, 1.0, (1,), np.float32),
    )

    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.plan, self.episode, self.clock = number, plan, -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.clock], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.episode, self.clock = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(100 * self.number + 10 * self.episode + self.clock + 0.5 * action[0])
        self.clock += 1
        length, end = self.plan[self.episode % len(self.plan)]
        is_over = self.clock == length
        return self._obs(), reward, is_over and bool(end & 1), is_over and bool(end & 2), {}


class Careless(SyncVectorEnv):
    """Tells anything of a step that only resets, as vector environments that are not Gymnasium's
    may.
    """

    def step(self, actions: Any) -> Any:
        is_reset = self._autoreset_envs.copy()
        obs, *columns, info = super().step(actions)
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            columns = [np.where(is_reset, 1, column).astype(column.dtype) for column in columns]
        return obs, *columns, info


class InTorch(gymnasium.vector.VectorEnv):
    """A vector environment of numpy with tensors in and out."""

    def __init__(self, env: SyncVectorEnv) -> None:
        self.env, self.metadata, self.num_envs = env, env.metadata, env.num_envs
        self.single_observation_space, self.single_action_space = (
            env.single_observation_space,
            env.single_action_space,
        )

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        options = None if options is None else {"reset_mask": options["reset_mask"].numpy()}
        return torch.from_numpy(self.env.reset(options=options)[0].copy()), {}

    def step(self, actions: Any) -> Any:
        obs, *columns, info = self.env.step(actions.numpy())
        given: dict[str, Any] = {}
        if "final_obs" in info:
            given["final_obs"] = torch.stack(
                [
                    torch.zeros(3) if final is None else torch.from_numpy(final)
                    for final in info["final_obs"]
                ]
            )
        return torch.from_numpy(obs.copy()), *map(torch.from_numpy, columns), given


def act(obs: np.ndarray) -> np.ndarray:
    """[N, 1] of obs [N, 3], so that a step that does not count shifts nothing."""
    return np.sin(obs.sum(-1, keepdims=True)).astype(np.float32)


def step_single_envs(number: int, plan: Plan, steps: int) -> list[tuple[Any, ...]]:
    """(obs, action, reward, next obs, terminated, truncated) flat."""
    env, rows = Counting(number, plan), []
    obs, _ = env.reset()
    for _ in range(steps):
        action = act(obs)
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append(
            (*obs, *action, np.float32(reward), *after, terminated, truncated and not terminated)
        )
        obs = env.reset()[0] if terminated or truncated else after
    return rows


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("adapter", [GymnasiumCpu, TorchVector])
@given(plans=PLANS)
def test_the_transitions_are_those_of_single_environments(
    adapter: type, mode: AutoresetMode, plans: list[Plan]
) -> None:
    inner = Careless(
        [lambda pair=pair: Counting(*pair) for pair in enumerate(plans)], autoreset_mode=mode
    )  # type: ignore[misc]
    env = adapter(len(plans), env=inner if adapter is GymnasiumCpu else InTorch(inner))
    rows: list[list[tuple[Any, ...]]] = [[] for _ in plans]
    obs, _ = env.reset()
    ended = torch.zeros(len(plans), dtype=torch.bool)
    for _ in range(STEPS):
        action = torch.from_numpy(act(obs.numpy()))
        before, step = obs.clone(), env.step(action)
        valid = step.info.get("valid", torch.ones_like(ended))
        assert torch.equal(valid, ~ended) if mode == AutoresetMode.NEXT_STEP else bool(valid.all())
        columns = (
            before,
            action,
            step.reward[:, None],
            step.info["final_obs"],
            step.terminated[:, None],
            step.truncated[:, None],
        )
        table = torch.cat([column.float() for column in columns], 1).tolist()
        assert not any(
            bool(column[~valid].any()) for column in (step.reward, step.terminated, step.truncated)
        )
        for number in range(len(plans)):
            if valid[number]:
                rows[number].append(tuple(table[number]))
        obs, ended = step.obs, step.terminated | step.truncated
    for number, (plan, found) in enumerate(zip(plans, rows)):
        assert found == [
            tuple(map(float, row)) for row in step_single_envs(number, plan, len(found))
        ]
        assert len(found) >= STEPS / 2
