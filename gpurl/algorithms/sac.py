"""Soft actor-critic (Haarnoja et al. 2018) with a fixed or a learned temperature; on a Discrete
space `sac` is discrete_sac.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpurl.algorithms.actor_critic import ActorCriticConfig, OffPolicyActorCritic
from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.exploration import RepeatedNoise
from gpurl.algorithms.off_policy import Batch
from gpurl.checks import check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.squash import LOG_STD_LIMITS, squashed_mode, squashed_sample
from gpurl.losses import row_share
from gpurl.nn.acting import Actor, FirstHalf, chain
from gpurl.nn.mlp import to_torch
from gpurl.nn.optimizer import FlatAdam

# limits of the log temperature, 1.5e-8 and 6.6e7: with a target entropy that cannot be reached it
# would grow or fall forever
LOG_TEMPERATURE_LIMITS = (-18.0, 18.0)


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """Settings of SAC."""

    fixed: ClassVar[tuple[str, ...]] = (*ActorCriticConfig.fixed, "initial_temperature")

    temperature: float | None = None
    """Weight of the entropy; by default learned."""
    initial_temperature: float = 1.0
    """Initial value of a learned temperature, which stays between 1.5e-8 and 6.6e7; between 1.1e-7
    and 7.4 in mod_sac.
    """
    temperature_learning_rate: float | None = None
    """Learning rate of the temperature; by default learning_rate."""
    target_entropy: float | None = None
    """Entropy in nats that a learned temperature aims at; by default minus the number of actions,
    on a Discrete space 0.7 of the largest entropy.
    """

    noise_span: int = 1
    """Most steps that the noise of an action lasts, for tasks that reward only long pushes; 1: new
    noise in every step.
    """
    noise_exponent: float = 2.0
    """Noise lasts n steps with a probability in proportion to n to the power of minus this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero = ("temperature", "initial_temperature", "temperature_learning_rate")
        check_numbers(self, {"noise_span": 1, "noise_exponent": 0}, above_zero)
        if self.noise_span == 1 and self.noise_exponent != SACConfig.noise_exponent:
            raise UsageError(
                f"noise_exponent {self.noise_exponent} says how long noise lasts, up to noise_span "
                f"steps, which is 1: give noise_span too"
            )


class SAC(OffPolicyActorCritic):
    """A stochastic actor, rewarded for its entropy too."""

    config: SACConfig
    noise: RepeatedNoise | None = None  # None: new noise in every step
    discrete_form = "discrete_sac"
    log_temperature_limits = LOG_TEMPERATURE_LIMITS
    log_std_limits = LOG_STD_LIMITS

    def make_networks(self) -> None:
        super().make_networks()
        self.make_temperature()
        config = self.config
        if config.noise_span > 1:
            numbers = config.noise_span, config.noise_exponent
            self.noise = RepeatedNoise(*numbers, self.num_actions, self.device)

    def make_temperature(self) -> None:
        """Set the temperature and the target entropy."""
        config = self.config
        lowest, highest = (math.exp(limit) for limit in self.log_temperature_limits)
        if config.temperature is None and not lowest <= config.initial_temperature <= highest:
            raise UsageError(
                f"initial_temperature must be from {lowest:.2g} to {highest:.2g}, between which a "
                f"learned temperature stays, got {config.initial_temperature}"
            )
        self.temperature = Temperature(config.temperature or config.initial_temperature)
        target = config.target_entropy
        self.target_entropy = self.default_target_entropy() if target is None else target

    def default_target_entropy(self) -> float:
        """Minus the number of actions (Haarnoja et al. 2018, appendix D)."""
        return -float(self.num_actions)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        optimizers = super().make_optimizers()
        if self.config.temperature is None:
            rate = self.config.temperature_learning_rate or self.config.learning_rate
            optimizers["temperature"] = FlatAdam(
                self.temperature, rate, epsilon=1e-8, losses=("temperature_loss",)
            )
        return optimizers

    def actor_outputs(self) -> int:
        return 2 * self.num_actions

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return () if self.noise is None else self.noise.initial_policy_state(num_envs)

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        if self.noise is None:
            noise = self.action_random.normal((self.num_actions,))
        else:
            noise, policy_state = self.noise.draw(policy_state, self.action_random)
        return self.sample_action(self.actor_output(obs), noise)[0], policy_state

    def sample_action(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """(action [B, A], its log-probability [B]) of the actor's output [B, 2A] and standard
        normal noise [B, A].
        """
        return squashed_sample(output, noise, self.log_std_limits)

    def greedy(self, obs: Tensor) -> Tensor:
        return squashed_mode(self.actor_output(obs))

    def actor_modules(self) -> Actor:
        mean = chain(to_torch(self.actor), FirstHalf(), nn.Tanh())
        return Actor(mean, copy.deepcopy(self.box))

    def next_action(self, next_obs: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self.actor_output(next_obs, self.target_actor)
        noise = self.update_random.normal((self.num_actions,))
        action, log_prob = self.sample_action(output, noise)
        return action, log_prob * self.temperature.value()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        output = self.actor_output(batch["obs"])
        return self.soft_actor_loss(batch["obs"], output, row_share(batch["weight"]))

    def soft_actor_loss(self, obs: Tensor, output: Tensor, share: Tensor) -> tuple[Tensor, Metrics]:
        """(mean of temperature log p(a) - Q(obs, a), metrics), a sampled from the actor's output
        [B, 2A] at rows obs: Haarnoja et al. 2018, equation 12. share: see `row_share`.
        """
        noise = self.update_random.normal((self.num_actions,))
        action, log_prob = self.sample_action(output, noise)
        temperature = self.temperature.value().detach()
        cost = temperature * log_prob - self.actor_value(obs, action)
        loss = cost.dot(share)
        entropy = -log_prob.detach().dot(share)
        return loss, {"actor_loss": loss.detach(), "entropy": entropy, "ent_coef": temperature}

    def temperature_loss(self, entropy: Tensor) -> Tensor:
        """0-d: its gradient raises the temperature while the entropy, 0-d, is below the target."""
        return self.temperature.log * (entropy - self.target_entropy)

    def actor_step(self, batch: Batch) -> Metrics:
        metrics = super().actor_step(batch)
        if "temperature" in self.optimizers:
            optimizer = self.optimizers["temperature"]
            loss, _ = optimizer.evaluate(
                lambda entropy: (self.temperature_loss(entropy), {}), metrics["entropy"]
            )
            optimizer.step(loss)
            with torch.no_grad():
                self.temperature.log.clamp_(*self.log_temperature_limits)
        return metrics

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from `extra_state()`; a fixed temperature is the config's. One that the run had
        fixed and now learns starts at its value, with a new optimiser.
        """
        if self.config.temperature is not None:
            self.temperature.set(self.config.temperature)
        elif "temperature" not in state["rate_settings"]:
            new = self.extra_state()
            state = state | {
                name: new[name] | state[name] for name in ("optimizers", "rate_settings")
            }
        super().load_extra_state(state)


class Temperature(nn.Module):
    """The weight of the entropy, parametrised by its logarithm."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(value)))

    def value(self) -> Tensor:
        """0-d."""
        return self.log.exp()

    @torch.no_grad()
    def set(self, value: float) -> None:
        """Change the value in place."""
        self.log.fill_(math.log(value))
