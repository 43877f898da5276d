"""Registers tasks as ManiSkill does: with a vector entry point that Gymnasium 1 refuses, and a time
limit of its own in place of Gymnasium's.
"""

import sys
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import WrapperSpec

REGISTERED_ENVS: dict[str, Any] = {}


class TimeLimitWrapper(gymnasium.Wrapper):
    """Truncates by the task's own clock; takes the place of gymnasium.wrappers.TimeLimit."""

    def __init__(self, env: gymnasium.Env, max_episode_steps: int) -> None:
        super().__init__(env)
        assert isinstance(env, gymnasium.wrappers.TimeLimit), "made without a time limit"
        self.env = env.env
        given = sys._getframe(1).f_locals.get("max_episode_steps")
        self.limit = given or max_episode_steps

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = self.env.step(action)
        truncated = self.env.unwrapped.elapsed_steps >= self.limit  # type: ignore[attr-defined]
        return obs, reward, terminated, truncated, info


def make_vec(env_id: str, **options: Any) -> Any:
    raise AssertionError("gymnasium.make_vec is not for these tasks")


def register(uid: str, task: Any, max_episode_steps: int) -> None:
    REGISTERED_ENVS[uid] = task
    gymnasium.register(
        uid,
        entry_point=task,
        vector_entry_point=partial(make_vec, env_id=uid),
        max_episode_steps=max_episode_steps,
        disable_env_checker=True,
        additional_wrappers=(
            WrapperSpec(
                "MSTimeLimit",
                entry_point="mani_skill.utils.registration:TimeLimitWrapper",
                kwargs={"max_episode_steps": max_episode_steps},
            ),
        ),
    )
