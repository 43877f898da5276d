"""What every environment in tensors counts: the clock, the return and the length of the episodes
that are running.
"""

from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.kernels.backend import host_sync_is_free


def select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Rows of `yes` where mask [N], else of `no`; both [N, ...]."""
    return torch.where(mask.view(-1, *(1,) * (no.dim() - 1)), yes, no)


class CountingEnv(VecEnv):
    """A VecEnv that keeps its episodes' clocks and returns on the device; `step` calls `_count`,
    `_episode_info`, `_restart_clocks`.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, device)
        self._episode_return = torch.zeros(num_envs, device=self.device)
        self._episode_start = torch.zeros(
            num_envs, dtype=torch.int64, device=self.device
        )  # clock at which the episode really began

    def stagger(self, clocks: Tensor) -> None:
        self.episode_length_buf.copy_(clocks)
        self._episode_start.copy_(clocks)

    def _checked_action(self, actions: Any) -> Tensor:
        """Tensor [N, *action], float32 or int64, of what was given: Gymnasium's own
        action_space.sample() is an array.
        """
        action, name, space = (
            torch.as_tensor(actions, device=self.device),
            f"{type(self).__name__}.step",
            self.single_action_space,
        )
        shape, dtype = (
            (self.num_envs, *(space.shape or ())),
            torch.float32 if isinstance(space, Box) else torch.int64,
        )
        if action.shape != shape:
            raise UsageError(f"{name}: wanted actions of shape {shape}, got {tuple(action.shape)}")
        if action.is_floating_point() != dtype.is_floating_point:
            raise UsageError(f"{name}: wanted actions of {space}, got {action.dtype}")
        if isinstance(space, Discrete) and host_sync_is_free(self.device):
            low, high = int(space.start), int(space.start + space.n - 1)
            if not low <= int(action.min()) <= int(action.max()) <= high:
                raise UsageError(
                    f"{name}: wanted actions from {low} to {high}, got {int(action.min())} to "
                    f"{int(action.max())}"
                )
        if isinstance(space, MultiDiscrete) and host_sync_is_free(self.device):
            choice = action - torch.as_tensor(space.start)
            if bool(((choice < 0) | (choice >= torch.as_tensor(space.nvec))).any()):
                raise UsageError(
                    f"{name}: wanted actions of {space}, got {int(action.min())} to "
                    f"{int(action.max())}"
                )
        return action.to(dtype)

    def _count(self, reward: Tensor, valid: Tensor | None = None) -> None:
        """Take a step's reward [N] or [N, A] in; where valid [N] is False there was no step."""
        reward = reward if self.num_agents == 1 else reward.mean(1)
        if valid is None:
            self.episode_length_buf += 1
            self._episode_return += reward
        else:
            self.episode_length_buf += valid
            self._episode_return += torch.where(valid, reward, 0.0)

    def _episode_info(self, done: Tensor, truncated: Tensor) -> dict[str, Any]:
        """What a step's info says of episodes; done, truncated: [N] bool."""
        length = self.episode_length_buf - self._episode_start
        episode = {"r": self._episode_return.clone(), "l": length}
        return {
            "time_outs": truncated,
            "_final_obs": done,
            "episode": episode,
            "_episode": done & (self._episode_start == 0),
        }

    def _restart_clocks(self, mask: Tensor | None = None) -> None:
        """Everywhere, or where mask [N] bool."""
        for counter in (self.episode_length_buf, self._episode_start, self._episode_return):
            if mask is None:
                counter.zero_()
            else:
                counter.masked_fill_(mask, 0)

    def _clocks(self) -> dict[str, Tensor]:
        """What `_load_clocks` continues from."""
        return {
            "length": self.episode_length_buf,
            "start": self._episode_start,
            "return": self._episode_return,
        }

    def _load_clocks(self, clocks: dict[str, Tensor]) -> None:
        for name, counter in self._clocks().items():
            counter.copy_(clocks[name])
