"""FastTD3 (Seo et al. 2025): TD3 over thousands of environments, with large batches, few updates a step and distributional critics."""

from dataclasses import dataclass, field

from gpurl.algorithms.ddpg import DDPG
from gpurl.algorithms.td3 import TD3Config
from gpurl.ensemble import BodyConfig


@dataclass(frozen=True)
class FastTD3Config(TD3Config):
    """Settings of FastTD3. PQL's (Li et al. 2023): updates 8, n_step 3, tau 0.05, noise ladder, target_noise 0.8 clipped at 0.2."""

    updates: int = 2
    batch_size: int = 8192
    learning_starts: int = 40_000
    tau: float = 0.1
    weight_decay: float = 0.1
    normalize_obs: bool = True
    atoms: int = 101
    actor_aggregate: str = "min"
    noise: str = "episode"
    noise_std_range: tuple[float, ...] = (0.001, 0.4)
    target_actor: bool = False
    delay_targets: bool = False
    actor_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(512, 256, 128), layer_norm=True))
    critic_network: BodyConfig = field(default_factory=lambda: BodyConfig(hidden=(1024, 512, 256), layer_norm=True))


class FastTD3(DDPG):
    """TD3 under FastTD3Config."""

    config: FastTD3Config
