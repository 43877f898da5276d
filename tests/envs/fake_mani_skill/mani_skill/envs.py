"""One task: walks in batches, which report success where they arrive."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from mani_skill.utils.registration import register
from tests.torch_walks import ANY, LENGTH, Walks


class Pick(gymnasium.Env):
    """Nested observations, a partial reset by `env_idx`, the clock inside."""

    def __init__(self, num_envs: int = 1, obs_mode: str = "dict") -> None:
        self.num_envs, self.obs_mode = num_envs, obs_mode
        self.walks = Walks(num_envs)
        self.device = self.walks.clock.device
        self.elapsed_steps = self.walks.clock
        one = Box(shape=(1,), **ANY)
        nested = Dict({"agent": Dict({"place": one}), "extra": Dict({"time": one})})
        self.single_observation_space: Any = (
            nested if obs_mode == "dict" else Box(shape=(2,), **ANY)
        )
        self.observation_space = self.single_observation_space
        self.action_space = self.single_action_space = Box(-1.0, 1.0, (1,), np.float32)

    def observe(self) -> Any:
        place, time = self.walks.obs().split(1, dim=1)
        if self.obs_mode != "dict":
            return self.walks.obs()
        return {"agent": {"place": place}, "extra": {"time": time}}

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.walks.restart((options or {}).get("env_idx"), seed)
        return self.observe(), {"reconfigure": False}

    def step(self, action: Any) -> Any:
        reward, terminated, truncated = self.walks.advance(action)
        info = {"success": terminated.clone(), "elapsed_steps": self.elapsed_steps}
        return self.observe(), reward, terminated, truncated, info


register("Pick-v1", Pick, LENGTH)
