"""Soft actor-critic over a few actions (Christodoulou 2019): expectations over all actions in place
of draws. `sac` takes it by itself.
"""

import math

import torch
from torch import Tensor

from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.errors import UsageError
from gpurl.nn.distributions import Categorical
from gpurl.nn.ensemble import Stack, Tape, make_network
from gpurl.nn.networks import Carry
from gpurl.nn.q_networks import num_choices
from gpurl.value_losses import td_loss

# of the greatest entropy, that a learned temperature aims at, as in CleanRL; the paper's 0.98
# leaves it near uniform
ENTROPY_SHARE = 0.89


class DiscreteSAC(SAC):
    """SAC whose critics value every action of a Discrete space."""

    config: SACConfig

    def make_networks(self) -> None:
        config = self.config
        self.num_actions = num_choices(self.action_space, self.label, "sac takes a Box")
        if config.atoms or config.fit_returns:
            raise UsageError(
                f"{self.label} has critics of one number an action: leave out atoms {config.atoms} "
                f"and fit_returns {config.fit_returns}"
            )
        self.head = Categorical(self.num_actions)
        self.actor = make_network(1, self.num_inputs, self.num_actions, config.actor_network)
        self.critic, self.target_critic = (self.make_critics(config.num_critics) for _ in range(2))
        self.target_actor = None
        self.make_temperature()

    def make_critics(self, count: int) -> Stack:
        return make_network(count, self.num_inputs, self.num_actions, self.config.critic_network)

    def usual_entropy(self) -> float:
        return ENTROPY_SHARE * math.log(self.num_actions)

    def action_shape(self) -> tuple[int, ...]:
        return ()

    def random_action(self) -> Tensor:
        return self.action_random.integers(0, self.num_actions)

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def decide(self, obs: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return self.head.sample(self.actor.forward(obs)[0], self.action_random)[0], carry

    def greedy(self, obs: Tensor) -> Tensor:
        return self.actor.forward(obs)[0].argmax(-1)

    def value(self, obs: Tensor, carry: Carry = ()) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(obs)
            return (
                self.actor.forward(inputs)[0].softmax(-1) * self.critic.forward(inputs).mean(0)
            ).sum(-1)

    def critic_step(
        self, batch: dict[str, Tensor], move_target: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        log_prob = self.actor.forward(batch["next_obs"])[0].log_softmax(-1)
        next_value = self._joined(
            self.target_answers(batch["next_obs"]), self.config.target_aggregate
        )
        soft_value = (log_prob.exp() * (next_value - self.temperature.value() * log_prob)).sum(-1)
        tape, action = (
            Tape(),
            batch["action"].long().view(1, -1, 1).expand(self.config.num_critics, -1, -1),
        )
        answers = self.critic.forward(batch["obs"], tape)
        values = answers.gather(2, action)
        gradient, loss, error = td_loss(
            values.squeeze(2),
            batch["reward"] + batch["discount"] * soft_value,
            batch["weight"],
            None,
        )
        self.critic.backward(
            torch.zeros_like(answers).scatter_(2, action, gradient.unsqueeze(2)),
            tape,
            needs_input=False,
        )
        norm = self.optimizers["critic"].step_along_gradient(move_target, losses=loss)
        return {"critic_loss": loss, "qf_values": values.mean(), "critic_grad_norm": norm}, error

    def actor_step(self, obs: Tensor, wants_parts: bool) -> dict[str, Tensor]:
        tape, temperature = Tape(), self.temperature.value()
        log_prob = self.actor.forward(obs, tape)[0].log_softmax(-1)
        prob, value = (
            log_prob.exp(),
            self._joined(self.critic.forward(obs), self.config.actor_aggregate),
        )
        cost = (
            temperature * log_prob - value
        )  # of each action; the loss is its mean under the policy, summed over actions
        mean = (prob * cost).sum(-1, keepdim=True)
        self.actor.backward((prob * (cost - mean) / len(obs)).unsqueeze(0), tape, needs_input=False)
        norm = self.optimizers["actor"].step_along_gradient()
        entropy = -(prob * log_prob).sum(-1).mean()
        parts = (
            {"actor_loss": mean.mean(), "actor_grad_norm": norm, "entropy": entropy}
            if wants_parts
            else {}
        )
        return parts | self.temperature_step(entropy, wants_parts)
