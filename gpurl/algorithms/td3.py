"""Twin delayed DDPG (Fujimoto et al. 2018): DDPG with two critics, a delayed actor and noise on the
target's actions.
"""

from dataclasses import dataclass

from gpurl.algorithms.ddpg import DDPG, DDPGConfig


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Settings of TD3."""

    num_critics: int = 2
    policy_delay: int = 2
    target_noise: float = 0.2


class TD3(DDPG):
    """DDPG under TD3Config."""

    config: TD3Config
