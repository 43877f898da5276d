"""Scales continuous actions: [-1, 1] of the policy spans a bounded dimension of a Box; unbounded
dimensions keep the environment's units.
"""

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.errors import UsageError

MAX_WIDTH = 1e6  # wider dimensions count as unbounded: some tasks give float32's own limits


class ActionScaler(nn.Module):
    """The scale of each dimension of a Box."""

    # [4, A]: lowest and highest action of the policy; half width and centre in environment units
    units: Tensor
    bounded_dims: Tensor  # [A] 1 where a dimension is bounded, else 0

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.space = space
        self.shape = space.shape
        low = space.low.flatten().astype(np.float64)
        high = space.high.flatten().astype(np.float64)
        with np.errstate(over="ignore"):
            scaled = high - low <= MAX_WIDTH
        self.bounded = bool(scaled.all())
        self.has_bounds = bool(scaled.any())
        bounded_dims = torch.tensor(scaled.astype(np.float32).tolist())
        self.register_buffer("bounded_dims", bounded_dims, persistent=False)
        self.is_clipped = bool((scaled | np.isfinite(low) | np.isfinite(high)).any())
        self.is_scaled = bool((scaled & ((low != -1) | (high != 1))).any())
        # infinite limits, or limits that overflow in float32, must not warn
        with np.errstate(over="ignore", invalid="ignore"):
            units = np.stack(
                (
                    np.where(scaled, -1.0, low),
                    np.where(scaled, 1.0, high),
                    np.where(scaled, (high - low) / 2, 1.0),
                    np.where(scaled, (low + high) / 2, 0.0),
                )
            ).astype(np.float32)
            self.register_buffer("units", torch.tensor(units.tolist()), persistent=False)

    def require_bounds(self, name: str) -> None:
        """UsageError, with `name` as its subject, unless all dimensions are bounded."""
        if not self.bounded:
            raise UsageError(
                f"{name} needs a bounded Box action space, at most {MAX_WIDTH:g} wide, this one is "
                f"{self.space}"
            )

    def forward(self, action: Tensor) -> Tensor:
        """As `to_env`."""
        return self.to_env(action)

    def to_env(self, action: Tensor) -> Tensor:
        """[..., A] in the policy's units -> [..., *shape] of the environment, clipped."""
        low, high, half_width, centre = self.units.unbind(0)
        if self.bounded:
            action = action.clamp(-1.0, 1.0)
        elif self.is_clipped:
            action = action.clamp(low, high)
        if self.is_scaled:
            action = action * half_width + centre
        return self.shaped(action)

    def from_env(self, action: Tensor) -> Tensor:
        """[N, *shape] of the environment -> [N, A] in the policy's units, not clipped."""
        rows = action.reshape(len(action), -1)
        if not self.is_scaled:
            return rows
        # a dimension with a single action has width 0
        half_width = self.units[2].clamp(min=torch.finfo(rows.dtype).tiny)
        return (rows - self.units[3]) / half_width

    def shaped(self, action: Tensor) -> Tensor:
        """[..., A] -> [..., *shape]."""
        return action.reshape(*action.shape[:-1], *self.shape) if len(self.shape) != 1 else action
