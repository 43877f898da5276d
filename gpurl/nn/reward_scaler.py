"""Scales rewards by the spread of discounted returns, kept inside the policy, so that every
checkpoint holds it.

    G_t = r_t + gamma G_(t-1), from 0 in each episode
    scaled r = r min(1 / sqrt(Var G + 1e-8), bound / max |G|)

Of FlashSAC (Kim et al. 2026), after the reward scaling of PPO's implementations (Engstrom et al.
2020, section 3). No return so far is larger than `bound` in scaled rewards.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpurl.nn.normalizer import Normalizer


class RewardScaler(Normalizer):
    """Running variance and largest absolute value of the discounted returns of N environments;
    only `record` changes them, once a rollout.
    """

    largest: Tensor  # 0-d: of |G|
    returned: Tensor  # [N]: G after the last step, 0 where an episode ended

    def __init__(self, num_envs: int, gamma: float, bound: float) -> None:
        super().__init__(1, clip=float("inf"))
        self.gamma = gamma
        self.bound = bound
        self.register_buffer("largest", torch.zeros(()))
        # part of the episodes, not of the policy: see `FlashSAC.extra_state`
        self.register_buffer("returned", torch.zeros(num_envs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [...] rewards -> scaled."""
        # before the first return 1 / 0 is no limit
        return x * torch.minimum(self.inv_std, self.bound / self.largest)

    @torch.no_grad()
    def record(self, reward: Tensor, ended: Tensor, valid: Tensor | None = None) -> None:
        """Add a rollout. reward: [T, N] float32; ended: [T, N] bool, the next step belongs to
        another episode; valid: [T, N] bool, whether the step is a real transition.
        """
        returns = []
        for step in range(len(reward)):
            self.returned.mul_(self.gamma).add_(reward[step])
            returns.append(self.returned.clone())
            over = ended[step] if valid is None else ended[step] | ~valid[step]
            self.returned.masked_fill_(over, 0.0)
        rows = torch.stack(returns)
        self.update(rows.unsqueeze(-1), valid)
        size = rows.abs()
        size = size if valid is None else size.masked_fill(~valid, 0.0)
        largest = size.max()
        if self.ranks.count > 1:
            largest = self.ranks.stack(largest).amax(0)
        torch.maximum(self.largest, largest, out=self.largest)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        super().merge(states)
        self.largest.copy_(torch.stack([state["largest"] for state in states]).max())

    def begin_episodes(self, mask: Tensor | None = None) -> None:
        """The episodes of the environments of mask [N], or of all, were cut off from outside."""
        if mask is None:
            self.returned.zero_()
        else:
            self.returned.masked_fill_(mask, 0.0)
