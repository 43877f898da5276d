"""FastSAC (Seo et al. 2025): SAC over thousands of environments, with large batches, few updates a step and distributional critics."""

from dataclasses import dataclass, field

from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.ensemble import BodyConfig


@dataclass(frozen=True)
class FastSACConfig(SACConfig):
    """Settings of FastSAC."""

    updates: int = 2
    batch_size: int = 8192
    learning_starts: int = 40_000
    tau: float = 0.1
    policy_delay: int = 2
    weight_decay: float = 0.001
    normalize_obs: bool = True
    atoms: int = 101
    target_aggregate: str = "mean"
    actor_aggregate: str = "mean"
    initial_temperature: float = 0.001
    actor_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(512, 256, 128), layer_norm=True))
    critic_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(768, 384, 192), layer_norm=True))


class FastSAC(SAC):
    """SAC under FastSACConfig."""

    config: FastSACConfig
