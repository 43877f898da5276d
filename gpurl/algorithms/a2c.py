"""Advantage actor-critic (Mnih et al. 2016): PPO with one pass over one batch, where the ratio is 1
and nothing is clipped, except of mirrored steps (`symmetry`).
"""

from dataclasses import dataclass
from typing import ClassVar

from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.errors import UsageError


@dataclass(frozen=True)
class A2CConfig(PPOConfig):
    """Settings of A2C."""

    changeable: ClassVar[tuple[str, ...]] = ("learning_rate", "gamma", "gae_lambda", "entropy_coef")
    explored: ClassVar[dict[str, tuple[float, float]]] = {
        name: PPOConfig.explored[name] for name in ("learning_rate", "entropy_coef")
    }

    horizon: int = 16
    """Steps of every environment between updates."""
    epochs: int = 1
    """Passes over each rollout: 1."""
    minibatches: int = 1
    """Minibatches a pass: 1."""
    schedule: str = "constant"
    """Learning rate over time: linear (to 0) or constant."""
    normalize_advantage: str = "none"
    """batch, minibatch or none."""

    def __post_init__(self) -> None:
        if (self.epochs, self.minibatches) != (1, 1):
            raise UsageError(
                f"a2c takes one step a rollout: epochs and minibatches must be 1, got "
                f"{self.epochs} and {self.minibatches}; ppo has them"
            )
        for name in ("clip_range", "clip_range_value", "target_kl"):
            if getattr(self, name) != getattr(PPOConfig, name):
                raise UsageError(
                    f"a2c clips nothing and aims at no KL: {name} {getattr(self, name)} would have "
                    f"no effect; ppo has it"
                )
        super().__post_init__()


class A2C(PPO):
    """PPO under A2CConfig."""

    config: A2CConfig  # type: ignore[assignment]
