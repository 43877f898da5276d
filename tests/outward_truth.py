"""What environments give by themselves for the actions of another trainer: what that trainer must
have stored.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv

LIMITS = {"chasing": 5, "cart_pole": 12}  # the one is cut off; of the other some fall before


def env_of(name: str) -> VecEnv:
    return make_env(name, 4, "cpu", 3, max_episode_steps=LIMITS[name])


def truth(name: str, actions: Any) -> dict[str, Tensor]:
    """What the environments themselves give, [T, N, ...], for actions [T, N, *action]."""
    env = env_of(name)
    obs, _ = env.reset()
    columns = []
    for action in actions:
        before = obs
        obs, reward, terminated, truncated, info = env.step(
            torch.as_tensor(action).reshape(env.action_space.shape)
        )
        column = {"obs": before, "next_obs": obs, "final_obs": info["final_obs"], "reward": reward}
        column |= {
            "terminated": terminated,
            "truncated": truncated,
            "return": info["episode"]["r"],
            "length": info["episode"]["l"],
        }
        columns.append(column)
    return {key: torch.stack([column[key] for column in columns]) for key in columns[0]}


def assert_same(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).reshape(expected.shape).to(expected.dtype),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
