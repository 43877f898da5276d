"""The units of continuous actions: [-1, 1] of a policy spans a limited dimension of a Box; others
keep the environment's units.
"""

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.errors import UsageError

MAX_WIDTH = (
    1e6  # of action limits that mean something: those of float32 stand where a task has none
)


class ActionScaler(nn.Module):
    """Dimensions wider than MAX_WIDTH count as not limited."""

    # [4, A]: least, greatest, half width and centre of the policy's actions in the environment's
    units: Tensor

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.space, self.shape = space, space.shape
        low, high = space.low.flatten().astype(np.float64), space.high.flatten().astype(np.float64)
        with np.errstate(over="ignore"):
            scaled = high - low <= MAX_WIDTH
        self.bounded = bool(scaled.all())
        self.is_clipped = bool((scaled | np.isfinite(low) | np.isfinite(high)).any())
        self.is_scaled = bool((scaled & ((low != -1) | (high != 1))).any())
        limits = np.where(scaled, -1.0, low), np.where(scaled, 1.0, high)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # of limits that are infinite, or become so in float32
            units = np.stack(
                (
                    *limits,
                    np.where(scaled, (high - low) / 2, 1.0),
                    np.where(scaled, (low + high) / 2, 0.0),
                )
            ).astype(np.float32)
            self.register_buffer("units", torch.tensor(units.tolist()), persistent=False)

    def require_bounds(self, name: str) -> None:
        """UsageError that begins with `name`, unless all dimensions are limited."""
        if not self.bounded:
            raise UsageError(
                f"{name} needs a bounded Box action space, at most {MAX_WIDTH:g} wide, this one is "
                f"{self.space}"
            )

    def to_env(self, action: Tensor) -> Tensor:
        """[..., A] in the policy's units -> [..., *shape] as the environment takes it, within its
        limits.
        """
        low, high, half_width, centre = self.units.unbind(0)
        if self.bounded:
            action = action.clamp(-1.0, 1.0)
        elif self.is_clipped:
            action = action.clamp(low, high)
        if self.is_scaled:
            action = action * half_width + centre
        return self.shaped(action)

    def from_env(self, action: Tensor) -> Tensor:
        """[N, *shape] as the environment takes it -> [N, A] in the policy's units, which those
        beyond the limits leave.
        """
        rows = action.reshape(len(action), -1)
        tiny = torch.finfo(
            rows.dtype
        ).tiny  # in place of the width of a dimension that has one action only
        return (rows - self.units[3]) / self.units[2].clamp(min=tiny) if self.is_scaled else rows

    def shaped(self, action: Tensor) -> Tensor:
        """[..., A] -> [..., *shape]."""
        return action.reshape(*action.shape[:-1], *self.shape) if len(self.shape) != 1 else action
