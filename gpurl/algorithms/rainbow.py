"""Rainbow (Hessel et al. 2018): DQN with all of double, dueling, noisy, distributional, n-step and
prioritised at once.
"""

from dataclasses import dataclass, field

from gpurl.algorithms.dqn import DQN, DQNConfig
from gpurl.nn.q_networks import QNetworkConfig


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Settings of Rainbow; exponents, steps and atoms as in its paper, table 1.

    Different from the paper: the learning rate is 1e-3 (6.25e-5 there), Adam's epsilon 1e-8 (1.5e-4
    there), the target network moves by tau with every update (a copy every 32,000 frames there),
    and the largest priority decays (it stays there).
    """

    n_step: int = 3
    prioritized: bool = True
    atoms: int = 51
    network: QNetworkConfig = field(
        default_factory=lambda: QNetworkConfig(dueling=True, noisy=True)
    )


class Rainbow(DQN):
    """DQN under RainbowConfig."""

    config: RainbowConfig
