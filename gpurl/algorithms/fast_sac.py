"""FastSAC (Seo et al. 2025): SAC over thousands of environments, with large batches, few updates a
step and distributional critics.
"""

from dataclasses import dataclass, field

from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.nn.encoders import EncoderConfig


@dataclass(frozen=True)
class FastSACConfig(SACConfig):
    """Settings of FastSAC, those of holosoma's code for robots that follow a velocity command (Seo
    et al. 2025b).

    Different from that code: gamma is 0.99 (0.97 there, 0.99 for motion imitation: it depends on
    the task), the standard deviation may reach exp(2) (1 there), the temperature is updated with
    the actor (with every critic step there), relu in place of SiLU, Adam's second beta is 0.999
    (0.95 there), and both critics learn the mean of the two target distributions (each its own
    there). The loss of the temperature is linear in its logarithm (in itself there), and symmetry
    is off (on by default there).
    target_entropy is that of actions in [-1, 1]; there it is that of actions scaled to each
    joint's range, so its 0 is less noise where ranges are wider. There the output layers begin at
    zero, so the standard deviation begins at exp(-2.5) for all observations, here at about 1.
    """

    updates: int = 8
    batch_size: int = 8192
    learning_starts: int = 40_000
    tau: float = 0.125
    policy_delay: int = 4
    weight_decay: float = 0.001
    normalize_obs: bool = True
    atoms: int = 101
    v_min: float = -20.0
    v_max: float = 20.0
    target_aggregate: str = "mean"
    actor_aggregate: str = "mean"
    initial_temperature: float = 0.001
    target_entropy: float | None = 0.0
    actor_network: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(hidden=(512, 256, 128), layer_norm=True)
    )
    critic_network: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(hidden=(768, 384, 192), layer_norm=True)
    )


class FastSAC(SAC):
    """SAC under FastSACConfig."""

    config: FastSACConfig
