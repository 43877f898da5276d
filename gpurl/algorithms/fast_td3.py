"""FastTD3 (Seo et al. 2025): TD3 over thousands of environments, with large batches, few updates a step and distributional critics."""

from dataclasses import dataclass, field

from gpurl.algorithms.ddpg import DDPG
from gpurl.algorithms.td3 import TD3Config
from gpurl.ensemble import BodyConfig


@dataclass(frozen=True)
class FastTD3Config(TD3Config):
    """Settings of FastTD3. PQL's (Li et al. 2023): updates 8, n_step 3, tau 0.05, noise ladder, target_noise 0.8 clipped at 0.2."""

    updates: int = 2
    """Optimiser steps after each horizon, each on a batch of its own."""
    batch_size: int = 8192
    """Transitions of a batch."""
    learning_starts: int = 40_000
    """Transitions before the first update; until then actions are random."""
    tau: float = 0.1
    """Share of the difference by which target networks follow, an update."""
    weight_decay: float = 0.1
    """Decoupled weight decay (AdamW)."""
    normalize_obs: bool = True
    """Running normalisation of observations, inside the policy; the replay keeps them as they were."""
    atoms: int = 101
    """Critics give a distribution over so many values (C51) instead of one number; 0: one number."""
    actor_aggregate: str = "min"
    """What the actor climbs: min or mean of all critics, or the first one."""
    noise: str = "episode"
    """Noise on actions: gaussian, ladder (over environments), episode (a width for each) or ornstein_uhlenbeck."""
    noise_std_range: tuple[float, ...] = (0.001, 0.4)
    """Least and greatest standard deviation of ladder and episode."""
    target_actor: bool = False
    """The target's actions are those of a target actor; else of the actor itself."""
    delay_targets: bool = False
    """Target networks follow when the actor moves (TD3), else the critics' do at every update."""
    actor_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(512, 256, 128), layer_norm=True))
    """Shape of the actor."""
    critic_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(1024, 512, 256), layer_norm=True))
    """Shape of each critic."""


class FastTD3(DDPG):
    """TD3 under FastTD3Config."""

    config: FastTD3Config
