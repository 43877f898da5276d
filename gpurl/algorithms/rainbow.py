"""Rainbow (Hessel et al. 2018): DQN with all of double, dueling, noisy, distributional, n-step and
prioritised at once.
"""

from dataclasses import dataclass, field

from gpurl.algorithms.dqn import DQN, DQNConfig
from gpurl.nn.q_networks import QNetworkConfig


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Settings of Rainbow; exponents and decay as in its paper, table 1."""

    n_step: int = 3
    prioritized: bool = True
    atoms: int = 51
    network: QNetworkConfig = field(
        default_factory=lambda: QNetworkConfig(dueling=True, noisy=True)
    )


class Rainbow(DQN):
    """DQN under RainbowConfig."""

    config: RainbowConfig
