"""Rainbow (Hessel et al. 2018): DQN with all of double, dueling, noisy, distributional, n-step and prioritised at once."""

from dataclasses import dataclass, field

from gpurl.algorithms.dqn import DQN, DQNConfig
from gpurl.q_networks import QNetworkConfig


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Settings of Rainbow; exponents and decay as in its paper, table 1."""

    n_step: int = 3
    """Rewards that a target sums before it trusts the critic; never past the end of an episode."""
    prioritized: bool = True
    """Draw transitions by their last error (Schaul et al. 2016) instead of uniformly."""
    atoms: int = 51
    """A distribution over so many values between v_min and v_max (C51, Bellemare et al. 2017); 0: none."""
    network: QNetworkConfig = field(default_factory=lambda: QNetworkConfig(dueling=True, noisy=True))
    """Shape of the networks."""


class Rainbow(DQN):
    """DQN under RainbowConfig."""

    config: RainbowConfig
