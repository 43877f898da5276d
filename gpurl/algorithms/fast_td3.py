"""FastTD3 (Seo et al. 2025): TD3 over thousands of environments, with large batches, few updates a
step and distributional critics.
"""

from dataclasses import dataclass, field

from gpurl.algorithms.ddpg import DDPG
from gpurl.algorithms.td3 import TD3Config
from gpurl.nn.encoders import EncoderConfig


@dataclass(frozen=True)
class FastTD3Config(TD3Config):
    """Settings of FastTD3, those of its authors' code.

    Those of PQL (Li et al. 2023): updates 8, n_step 3, tau 0.05, noise ladder, target_noise 0.8
    clipped at 0.2.

    Different from that code: actions are random until learning starts, all layers are initialised
    as torch's are (the actor's last one near 0 there), and the replay buffer has 1 million
    transitions in all (10,000 to 50,000 per environment there). That code sets per task: v_min and
    v_max (10 to 10,000), gamma (0.97 or 0.99), n_step and updates.
    """

    updates: int = 2
    batch_size: int = 32_768
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
    target_noise: float = 0.001
    actor_network: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(hidden=(512, 256, 128))
    )
    critic_network: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(hidden=(1024, 512, 256))
    )


class FastTD3(DDPG):
    """TD3 under FastTD3Config."""

    config: FastTD3Config
