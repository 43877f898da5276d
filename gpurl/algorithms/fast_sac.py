"""FastSAC (Seo et al. 2025): SAC over thousands of environments, with large batches, few updates a step and distributional critics."""

from dataclasses import dataclass, field

from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.ensemble import BodyConfig


@dataclass(frozen=True)
class FastSACConfig(SACConfig):
    """Settings of FastSAC."""

    updates: int = 2
    """Optimiser steps after each horizon, each on a batch of its own."""
    batch_size: int = 8192
    """Transitions of a batch."""
    learning_starts: int = 40_000
    """Transitions before the first update; until then actions are random."""
    tau: float = 0.1
    """Share of the difference by which target networks follow, an update."""
    policy_delay: int = 2
    """Updates of the critics to one of the actor."""
    weight_decay: float = 0.001
    """Decoupled weight decay (AdamW)."""
    normalize_obs: bool = True
    """Running normalisation of observations, inside the policy; the replay keeps them as they were."""
    atoms: int = 101
    """Critics give a distribution over so many values (C51) instead of one number; 0: one number."""
    target_aggregate: str = "mean"
    """How their answers are joined into the target: min or mean."""
    actor_aggregate: str = "mean"
    """What the actor climbs: min or mean of all critics, or the first one."""
    initial_temperature: float = 0.001
    """Where a learned one starts."""
    actor_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(512, 256, 128), layer_norm=True))
    """Shape of the actor."""
    critic_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(768, 384, 192), layer_norm=True))
    """Shape of each critic."""


class FastSAC(SAC):
    """SAC under FastSACConfig."""

    config: FastSACConfig
