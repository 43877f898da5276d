"""Soft actor-critic (Haarnoja et al. 2018) with a fixed or a learned temperature; a Discrete space
takes its form for few actions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpurl.algorithms.actor_critic import ActorCriticConfig, OffPolicyActorCritic
from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch
from gpurl.errors import UsageError
from gpurl.kernels.squash import squashed_mode, squashed_sample
from gpurl.nn.optimizer import FlatAdam

TEMPERATURE_LIMITS = (
    -18.0,
    18.0,
    # of a learned one's logarithm: 1.5e-8 and 6.6e7; entropies that it cannot reach would drive it
    # on
)


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """Settings of SAC."""

    temperature: float | None = None
    """Weight of the entropy; by default learned."""
    initial_temperature: float = 1.0
    """Where a learned one starts; it stays between 1.5e-8 and 6.6e7, of mod_sac between 1.1e-7 and
    7.4.
    """
    temperature_learning_rate: float | None = None
    """Its step size; by default learning_rate."""
    target_entropy: float | None = None
    """Entropy in nats that a learned temperature aims at; by default minus the number of actions,
    of a Discrete space 0.89 of its most.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature", "initial_temperature", "temperature_learning_rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be above 0, got {value}")


class SAC(OffPolicyActorCritic):
    """A stochastic actor whose entropy counts as reward."""

    config: SACConfig
    discrete_form = "discrete_sac"
    temperature_limits = TEMPERATURE_LIMITS

    def make_networks(self) -> None:
        super().make_networks()
        self.make_temperature()

    def make_temperature(self) -> None:
        """Set the weight of the entropy and what it aims at."""
        least, most = (math.exp(limit) for limit in self.temperature_limits)
        if self.config.temperature is None and not least <= self.config.initial_temperature <= most:
            limits = f"from {least:.2g} to {most:.2g}, between which a learned temperature stays"
            raise UsageError(
                f"initial_temperature must be {limits}, got {self.config.initial_temperature}"
            )
        self.temperature = Temperature(self.config.temperature or self.config.initial_temperature)
        wanted = self.config.target_entropy
        self.target_entropy = self.usual_entropy() if wanted is None else wanted

    def usual_entropy(self) -> float:
        """Minus the number of actions (Haarnoja et al. 2018, appendix D)."""
        return -float(self.num_actions)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        optimizers = super().make_optimizers()
        if self.config.temperature is None:
            optimizers["temperature"] = FlatAdam(
                self.temperature,
                self.rate_of("temperature"),
                epsilon=1e-8,
                losses=("temperature_loss",),
            )
        return optimizers

    def rate_of(self, optimizer: str) -> float:
        own = self.config.temperature_learning_rate if optimizer == "temperature" else None
        return super().rate_of(optimizer) if own is None else own

    def actor_outputs(self) -> int:
        return 2 * self.num_actions

    def decide(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        noise = self.action_random.normal((self.num_actions,))
        return squashed_sample(self.actor(obs).squeeze(0), noise)[0], policy_state

    def greedy(self, obs: Tensor) -> Tensor:
        return squashed_mode(self.actor(obs).squeeze(0))

    def next_action(self, next_obs: Tensor) -> tuple[Tensor, Tensor | None]:
        output = (self.target_actor or self.actor)(next_obs).squeeze(0)
        action, log_prob = squashed_sample(output, self.update_random.normal((self.num_actions,)))
        return action, log_prob * -self.temperature.value()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.soft_loss(batch["obs"], self.actor(batch["obs"]).squeeze(0))

    def soft_loss(self, obs: Tensor, output: Tensor) -> tuple[Tensor, Metrics]:
        """(mean of temperature log p(a) - Q(obs, a), metrics), a drawn by the actor's numbers
        output [B, 2A] at obs [B, D]: Haarnoja et al. 2018, equation 12.
        """
        action, log_prob = squashed_sample(output, self.update_random.normal((self.num_actions,)))
        temperature = self.temperature.value().detach()
        loss = (temperature * log_prob - self.actor_value(obs, action)).mean()
        entropy = -log_prob.detach().mean()
        return loss, {"actor_loss": loss.detach(), "entropy": entropy, "ent_coef": temperature}

    def temperature_loss(self, entropy: Tensor) -> Tensor:
        """0-d: its slope lifts the temperature while the entropy, 0-d, is less than wanted."""
        return self.temperature.log * (entropy - self.target_entropy)

    def actor_step(self, batch: Batch) -> Metrics:
        metrics = super().actor_step(batch)
        if "temperature" in self.optimizers:
            self.optimizers["temperature"].step(self.temperature_loss(metrics["entropy"]))
            with torch.no_grad():
                self.temperature.log.clamp_(*self.temperature_limits)
        return metrics


class Temperature(nn.Module):
    """The weight of the entropy, kept as its logarithm."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(value)))

    def value(self) -> Tensor:
        """0-d."""
        return self.log.exp()
