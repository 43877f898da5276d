"""An environment that is none of Gymnasium's, with spaces of its own, which must be reset by hand
where `auto_reset` is false.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.torch_walks import LENGTH, Walks


@dataclass
class Space:
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: float = -math.inf
    high: float = math.inf


@dataclass
class Spaces:
    spaces: dict[str, Space] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


class ManagerBasedRlEnv:
    metadata: dict[str, Any] = {"render_modes": [None]}
    max_episode_length = LENGTH

    def __init__(self, cfg: Any, device: str, render_mode: str | None = None) -> None:
        self.cfg, self.device, self.num_envs = cfg, device, cfg.scene.num_envs
        self.walks, self.extras = Walks(self.num_envs), dict[str, Any]()
        self.episode_length_buf = self.walks.clock
        self.pending = torch.zeros(self.num_envs, dtype=torch.bool)
        self.terminated, self.time_outs = torch.zeros(2, self.num_envs, dtype=torch.bool)
        self.single_observation_space = Spaces({"actor": Space((2,)), "critic": Space((1,))})
        if cfg.has_camera:
            self.single_observation_space.spaces["camera"] = Space((1, 2, 2))
        self.single_action_space = Space((1,))

    @property
    def unwrapped(self) -> "ManagerBasedRlEnv":
        return self

    def observe(self) -> dict[str, Tensor]:
        groups = {"actor": self.walks.obs(), "critic": self.walks.state()}
        if self.cfg.has_camera:
            groups["camera"] = self.walks.place.repeat_interleave(4).view(-1, 1, 2, 2)
        return groups

    def _reset_idx(self, env_ids: Tensor) -> None:
        self.extras["log"]["Metrics/place"] = self.walks.place[env_ids].mean()
        self.walks.restart(env_ids)
        self.pending[env_ids] = False

    def reset(
        self, *, seed: int | None = None, env_ids: Tensor | None = None, options: Any = None
    ) -> Any:
        if seed is not None:
            self.walks.seed, self.walks.episode[:] = seed, 0
        self.extras["log"] = {}
        self._reset_idx(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self.observe(), self.extras

    def step(self, action: Tensor) -> Any:
        if bool(self.pending.any()):
            raise RuntimeError(
                "environments must be reset via reset(env_ids=...) before calling step() again "
                "when auto_reset=False"
            )
        self.extras["log"] = {}
        reward, self.terminated[:], self.time_outs[:] = self.walks.advance(action)
        done = self.terminated | self.time_outs
        if self.cfg.auto_reset and bool(done.any()):
            self._reset_idx(done.nonzero().squeeze(-1))
        else:
            self.pending |= done
        return self.observe(), reward, self.terminated, self.time_outs, self.extras

    def close(self) -> None:
        pass
