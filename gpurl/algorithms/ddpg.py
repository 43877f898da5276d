"""Deep deterministic policy gradient (Lillicrap et al. 2016); with other settings TD3 (Fujimoto et
al. 2018).
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gpurl.algorithms.actor_critic import ActorCriticConfig, OffPolicyActorCritic
from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.exploration import KINDS, ActionNoise
from gpurl.algorithms.off_policy import Batch
from gpurl.checks import Choices, check_numbers
from gpurl.errors import UsageError
from gpurl.losses import row_share
from gpurl.nn.acting import Actor, chain
from gpurl.nn.mlp import to_torch
from gpurl.nn.ranks import Alone


@dataclass(frozen=True)
class DDPGConfig(ActorCriticConfig):
    """Settings of DDPG.

    Different from the paper (Lillicrap et al. 2016, section 7): both learning rates are 3e-4 (1e-4
    of the actor and 1e-3 of the critic there), tau is 0.005 (0.001), a batch has 256 transitions
    (64), the noise is gaussian (Ornstein-Uhlenbeck), hidden layers have 256 units (400 and 300),
    the critic reads actions in its first layer (in its second), and there is no weight decay (0.01
    of the critic) and no batch norm.
    """

    choices: ClassVar[Choices] = {"noise": KINDS}
    fixed: ClassVar[tuple[str, ...]] = (*ActorCriticConfig.fixed, "target_actor", "noise")

    num_critics: int = 1
    actor_aggregate: str = "first"
    noise: str = "gaussian"
    """Noise on actions: gaussian, ladder (a standard deviation per environment), episode (one per
    episode) or ornstein_uhlenbeck.
    """
    noise_std: float = 0.1
    """Standard deviation of gaussian noise on actions in [-1, 1]; sigma of ornstein_uhlenbeck."""
    noise_std_range: tuple[float, ...] = (0.05, 0.8)
    """Smallest and largest standard deviation of ladder and episode."""
    target_noise: float = 0.0
    """Standard deviation of the noise on the target's actions (TD3)."""
    target_noise_clip: float = 0.5
    """Limit of that noise."""
    delay_targets: bool = True
    """Update target networks with the actor (TD3), else those of the critics with every update."""
    target_actor: bool = True
    """Targets use the actions of a target actor, else those of the actor itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"noise_std": 0, "target_noise": 0, "target_noise_clip": 0})
        std_range = self.noise_std_range
        if len(std_range) != 2 or not 0 < std_range[0] <= std_range[1]:
            raise UsageError(
                f"noise_std_range must be two numbers above 0, the smaller first, got {std_range}"
            )


class DDPG(OffPolicyActorCritic):
    """A deterministic actor."""

    config: DDPGConfig

    def make_networks(self) -> None:
        config = self.config
        self.has_target_actor = config.target_actor
        self.delays_target = config.delay_targets
        super().make_networks()
        smallest, largest = config.noise_std_range
        self.noise = ActionNoise(
            config.noise,
            config.noise_std,
            (smallest, largest),
            self.num_envs,
            self.num_actions,
            self.device,
        )

    def join(self, ranks: Alone) -> None:
        super().join(ranks)
        self.noise.join(ranks)

    def actor_outputs(self) -> int:
        return self.num_actions

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return self.noise.initial_policy_state(num_envs)

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return self.noise.add(self.greedy(obs), policy_state, self.action_random)

    def greedy(self, obs: Tensor) -> Tensor:
        return self.actor_output(obs).tanh()

    def actor_modules(self) -> Actor:
        return Actor(chain(to_torch(self.actor), nn.Tanh()), copy.deepcopy(self.box))

    def next_action(self, next_obs: Tensor) -> tuple[Tensor, Tensor | None]:
        config = self.config
        action = self.actor_output(next_obs, self.target_actor).tanh()
        if config.target_noise:  # equation 14 of Fujimoto et al.
            limit = config.target_noise_clip
            noise = self.update_random.normal((self.num_actions,)).mul_(config.target_noise)
            action = (action + noise.clamp_(-limit, limit)).clamp_(-1.0, 1.0)
        return action, None

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        obs = batch["obs"]
        loss = -self.actor_value(obs, self.greedy(obs)).dot(row_share(batch["weight"]))
        return loss, {"actor_loss": loss.detach()}
