"""The vector environment that ManiSkill makes of a task, with its records of episodes."""

from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode


class ManiSkillVectorEnv(gymnasium.vector.VectorEnv):
    """`final_observation` and `final_info` in steps with an ending."""

    def __init__(
        self,
        env: Any,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
        record_metrics: bool = False,
    ) -> None:
        self.env, self.auto_reset = env, auto_reset
        self.ignore_terminations, self.record_metrics = ignore_terminations, record_metrics
        self.num_envs, self.spec = env.unwrapped.num_envs, env.spec
        self.single_observation_space = env.unwrapped.single_observation_space
        self.single_action_space = env.unwrapped.single_action_space
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.success_once = torch.zeros(self.num_envs, dtype=torch.bool)
        self.returns = torch.zeros(self.num_envs)

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        mask = torch.ones(self.num_envs, dtype=torch.bool)
        if options is not None and "env_idx" in options:
            mask = torch.zeros(self.num_envs, dtype=torch.bool)
            mask[options["env_idx"]] = True
        self.success_once[mask] = False
        self.returns[mask] = 0.0
        return result

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        if self.ignore_terminations:
            terminated[:] = False
        if self.record_metrics:
            self.returns += reward
            self.success_once |= info["success"]
            info["episode"] = {
                "success_once": self.success_once.clone(),
                "return": self.returns.clone(),
                "episode_len": self.env.unwrapped.elapsed_steps.clone(),
            }
        done = terminated | truncated
        if self.auto_reset and bool(done.any()):
            final, final_info = obs, info
            obs, info = self.reset(options={"env_idx": done.nonzero().flatten()})
            info |= {
                "final_observation": final,
                "final_info": final_info,
                "_final_info": done,
                "_final_observation": done,
            }
        return obs, reward, terminated, truncated, info
