"""Soft actor-critic on a Discrete space (Christodoulou 2019): expectations over all actions in
place of samples. `sac` is this algorithm there.
"""

import math

import torch
from torch import Tensor

from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.errors import UsageError
from gpurl.losses import row_share, td_loss, values_of_actions
from gpurl.nn.acting import Actor, Best
from gpurl.nn.distributions import Categorical
from gpurl.nn.mlp import Sequential, to_torch
from gpurl.nn.q_networks import num_choices

# default target entropy as a fraction of the largest: the paper's 0.98 and CleanRL's 0.89 keep the
# policy near uniform
ENTROPY_FRACTION = 0.7


class DiscreteSAC(SAC):
    """SAC whose critics value every action of a Discrete space."""

    config: SACConfig
    actor_actions = "logits"

    def make_networks(self) -> None:
        config = self.config
        self.num_actions = num_choices(self.action_space, self.label)
        if config.atoms or config.fit_returns:
            raise UsageError(
                f"{self.label} has critics of one number an action: leave out atoms {config.atoms} "
                f"and fit_returns {config.fit_returns}"
            )
        if config.noise_span > 1:
            raise UsageError(
                f"{self.label} draws actions, without noise: leave out noise_span "
                f"{config.noise_span}"
            )
        self.head = Categorical(self.num_actions)
        self.actor = self.make_actor()
        self.critic = self.make_critics(config.num_critics)
        self.target_critic = self.make_critics(config.num_critics)
        self.target_actor = None
        self.make_temperature()

    def make_temperature(self) -> None:
        super().make_temperature()
        largest = math.log(self.num_actions)
        if self.config.temperature is None and self.target_entropy > largest:
            raise UsageError(
                f"target_entropy {self.target_entropy} is more than {largest:.3g}, the entropy of "
                f"{self.num_actions} equally likely actions"
            )

    def actor_outputs(self) -> int:
        return self.num_actions

    def make_critics(self, count: int) -> Sequential:
        return self.make_encoded_critics(count, 0, self.num_actions)

    def default_target_entropy(self) -> float:
        return ENTROPY_FRACTION * math.log(self.num_actions)

    def action_shape(self) -> tuple[int, ...]:
        return ()

    def random_action(self) -> Tensor:
        return self.action_random.integers(0, self.num_actions)

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return self.head.sample(self.actor_output(obs), self.action_random)[0], policy_state

    def greedy(self, obs: Tensor) -> Tensor:
        return self.actor_output(obs).argmax(-1)

    def actor_modules(self) -> Actor:
        return Actor(to_torch(self.actor), Best())

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(obs)
            prob = self.actor_output(inputs).softmax(-1)
            return (prob * self.values(inputs).mean(0)).sum(-1)

    def values(self, obs: Tensor) -> Tensor:
        """[E, B, A] of the critics."""
        return self.critic(self.critic_inputs(self.critic, obs))

    @torch.no_grad()
    def critic_target(self, batch: Batch) -> Tensor:
        """As in Christodoulou 2019, equation 10, but a learned temperature pays only for entropy
        above its target, as the Lagrangian of that constraint has it (Haarnoja et al. 2018, arXiv
        1812.05905, section 5). Paid for all of it, a policy stays alive for the pay, and the more
        surely the higher the temperature is: its entropy may then never reach the target, and the
        temperature grows for ever.
        """
        log_prob = self.actor_output(batch["next_obs"]).log_softmax(-1)
        inputs = self.critic_inputs(self.target_critic, batch["next_obs"])
        output = self.target_outputs(inputs)
        next_value = self._aggregate(output, self.config.target_aggregate)
        unpaid = self.target_entropy if self.config.temperature is None else 0.0
        temperature = self.temperature.value()
        value = torch.addcmul(next_value, temperature, log_prob + unpaid, value=-1.0)
        soft_value = (log_prob.exp() * value).sum(-1)
        return torch.addcmul(batch["reward"], batch["discount"], soft_value)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        target = self.critic_target(batch)
        values = values_of_actions(self.values(batch["obs"]), batch["action"])
        loss, error = td_loss(values, target, batch["weight"], None)
        metrics = {"critic_loss": loss.detach(), "qf_values": values.detach(), "td_error": error}
        return loss, metrics

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        log_prob = self.actor_output(batch["obs"]).log_softmax(-1)
        with torch.no_grad():
            value = self._aggregate(self.values(batch["obs"]), self.config.actor_aggregate)
        temperature = self.temperature.value().detach()
        prob = log_prob.exp()
        # log p needs no gradient: the mean of its gradient under p is 0
        cost = temperature * log_prob.detach() - value
        share = row_share(batch["weight"])
        loss = (prob * cost).sum(-1).dot(share)
        entropy = -(prob.detach() * log_prob.detach()).sum(-1).dot(share)
        return loss, {"actor_loss": loss.detach(), "entropy": entropy, "ent_coef": temperature}
