"""A direct environment as in Isaac Lab 3, and a manager-based one as in 2: both write into their
buffers, and set both flags at once.
"""

import math
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector.utils import batch_space
from torch import Tensor

from tests.torch_walks import LENGTH, Walks

living: list["WalksEnv"] = []


def make_config(**more: Any) -> SimpleNamespace:
    scene, sim = (
        SimpleNamespace(num_envs=64),
        SimpleNamespace(dt=0.02, device="cuda:0", gravity=(0.0, 0.0, -9.81)),
    )
    rewards = {"forward": SimpleNamespace(weight=1.0)}
    shared = {
        "seed": None,
        "decimation": 2,
        "episode_length_s": LENGTH * 0.04,
        "is_finite_horizon": False,
    }
    return SimpleNamespace(scene=scene, sim=sim, rewards=rewards, **shared, **more)


class WalksEnv(gymnasium.Env):
    metadata: dict[str, Any] = {"render_modes": [None]}

    def __init__(self, cfg: Any, render_mode: str | None = None, **kwargs: Any) -> None:
        if living:
            raise RuntimeError("Simulation context already exists. Cannot create a new one.")
        living.append(self)
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, cfg.sim.device
        self.walks = Walks(self.num_envs)
        self.scene = SimpleNamespace(write_data_to_sim=lambda: None)
        self.sim = SimpleNamespace(forward=lambda: None)
        self.extras: dict[str, Any] = {}
        self.episode_length_buf = self.walks.clock
        self.reset_terminated, self.reset_time_outs = torch.zeros(
            2, self.num_envs, dtype=torch.bool
        )
        self.reward_buf = torch.zeros(self.num_envs)
        self.obs_buf = self.observe()
        self.single_observation_space = self.space()
        self.single_action_space = Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def max_episode_length(self) -> int:
        return math.ceil(self.cfg.episode_length_s / (self.cfg.sim.dt * self.cfg.decimation))

    def observe(self) -> dict[str, Any]:
        raise NotImplementedError

    def space(self) -> Dict:
        raise NotImplementedError

    def seed(self, seed: int = -1) -> int:
        self.walks.seed, self.walks.episode[:] = seed, 0
        return seed

    def _reset_idx(self, env_ids: Tensor) -> None:
        self.extras["log"] = {
            "Episode_Reward/forward": self.walks.place[env_ids.long()].mean(),
            "Episode_Termination/fell": 2,
            "note": "text",
        }
        self.walks.restart(env_ids)

    def _get_observations(self) -> dict[str, Any]:
        """Into the tensors that were returned before."""
        torch.utils._pytree.tree_map(
            lambda place, value: place.copy_(value), self.obs_buf, self.observe()
        )
        return self.obs_buf

    def step(self, action: Tensor) -> Any:
        reward, self.reset_terminated[:], self.reset_time_outs[:] = self.walks.advance(
            action.clamp_(-1.0, 1.0)
        )
        self.reward_buf.copy_(reward)
        ended = (self.reset_terminated | self.reset_time_outs).nonzero().squeeze(-1)
        if len(ended):
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self.observe()
            self._reset_idx(ended)
        return (
            self._get_observations(),
            self.reward_buf,
            self.reset_terminated,
            self.reset_time_outs,
            self.extras,
        )

    def close(self) -> None:
        if self in living:
            living.remove(self)


class DirectRLEnv(WalksEnv):
    def observe(self) -> dict[str, Any]:
        return {"policy": self.walks.obs(), "critic": self.walks.state()}

    def space(self) -> Dict:
        return Dict({"policy": Box(-np.inf, np.inf, (2,)), "critic": Box(-np.inf, np.inf, (1,))})

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.seed(seed)
        self._reset_idx(torch.arange(self.num_envs))
        return self._get_observations(), self.extras


class ManagerBasedRLEnv(WalksEnv):
    observation_manager = None

    def observe(self) -> dict[str, Any]:
        place, time = self.walks.obs().split(1, dim=1)
        return {"policy": {"place": place.clone(), "time": time.clone()}}

    def space(self) -> Dict:
        return Dict(
            {
                "policy": Dict(
                    {"place": Box(-np.inf, np.inf, (1,)), "time": Box(-np.inf, np.inf, (1,))}
                )
            }
        )

    def reset(
        self,
        seed: int | None = None,
        env_ids: Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        if seed is not None:
            self.seed(seed)
        self._reset_idx(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self._get_observations(), self.extras
