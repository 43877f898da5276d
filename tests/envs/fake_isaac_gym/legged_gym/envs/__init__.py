"""Its robots: they restart in the step that ends the episode, return five values, and renew
time_outs only when one restarts.
"""

from typing import Any, Tuple

import torch
from simulated_walkers import NUM_OBS, Walkers

from legged_gym.utils import task_registry


class WalkerCfg:
    seed = 1

    class env:
        num_envs = 4096
        episode_length = 8.0
        num_privileged_obs = NUM_OBS + 1
        send_timeouts = True
        fault = ""

    class normalization:
        clip_observations = 100.0
        clip_actions = 100.0


class LeggedRobot:
    def __init__(self, cfg: Any, sim_device: str) -> None:
        self.cfg, self.device = cfg, sim_device
        self.num_envs, self.num_obs, self.num_actions = cfg.env.num_envs, NUM_OBS, 1
        self.num_privileged_obs = cfg.env.num_privileged_obs
        self.max_episode_length = cfg.env.episode_length
        self.walkers = Walkers(self.num_envs, sim_device, cfg.env.fault, 1)
        self.rew_buf = torch.zeros(self.num_envs, device=sim_device)
        self.reset_buf = torch.ones(self.num_envs, device=sim_device, dtype=torch.long)
        self.episode_length_buf = torch.zeros(self.num_envs, device=sim_device, dtype=torch.long)
        self.time_out_buf = torch.zeros(self.num_envs, device=sim_device, dtype=torch.bool)
        self.extras: Any = {}

    def reset(self) -> Tuple[Any, Any]:
        self.reset_idx(torch.arange(self.num_envs, device=self.device))
        obs, privileged_obs, _, _, _ = self.step(
            torch.zeros(self.num_envs, self.num_actions, device=self.device)
        )
        return obs, privileged_obs

    def reset_idx(self, env_ids: Any) -> None:
        if len(env_ids) == 0:
            return
        self.walkers.restart(env_ids)
        self.episode_length_buf[env_ids] = 0
        self.reset_buf[env_ids] = 1
        if self.cfg.env.send_timeouts:
            self.extras["time_outs"] = self.time_out_buf

    def step(self, actions: Any) -> Tuple[Any, Any, Any, Any, Any]:
        self.walkers.advance(
            torch.clamp(
                actions, -self.cfg.normalization.clip_actions, self.cfg.normalization.clip_actions
            )
        )
        self.episode_length_buf += 1
        self.time_out_buf = self.episode_length_buf > self.max_episode_length
        self.reset_buf = self.walkers.has_fallen() | self.time_out_buf
        self.rew_buf[:] = self.walkers.reward()
        self.reset_idx(self.reset_buf.nonzero().flatten())
        obs = self.walkers.obs()
        privileged = (
            None if self.num_privileged_obs is None else torch.cat((obs, 2.0 * obs[:, :1]), dim=1)
        )
        return obs, privileged, self.rew_buf, self.reset_buf, self.extras


task_registry.register("walker_rough", LeggedRobot, WalkerCfg())
