"""Deep Q-learning (Mnih et al. 2015) and its family by flags: double, dueling, noisy,
distributional, n-step, prioritised, ensembles.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.exploration import EPSILONS, EpsilonGreedyConfig
from gpurl.algorithms.off_policy import Batch, CriticConfig, OffPolicy
from gpurl.checks import check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.categorical_projection import categorical_projection
from gpurl.kernels.random import CounterRandom
from gpurl.losses import (
    categorical_td_loss,
    min_mean_pmf,
    quantile_td_loss,
    rescale,
    td_loss,
    unrescale,
    values_of_actions,
)
from gpurl.nn.acting import Actor, Best, MeanOfMembers
from gpurl.nn.encoders import EncoderConfig
from gpurl.nn.mlp import Sequential, to_torch
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.parts import Part
from gpurl.nn.q_networks import QNetworkConfig, make_q_network, num_choices
from gpurl.nn.ranks import Alone

# of Ape-X (Horgan et al. 2018, section 4): epsilon_i = 0.4 ** (1 + 7 i / (N - 1))
LADDER_BASE, LADDER_POWER = 0.4, 7.0


@dataclass(frozen=True)
class DQNConfig(EpsilonGreedyConfig, CriticConfig):
    """Settings of DQN."""

    fixed: ClassVar[tuple[str, ...]] = (*CriticConfig.fixed, "network", "quantiles")

    learning_rate: float = 1e-3
    max_grad_norm: float | None = 10.0
    double: bool = True
    """Double Q-learning: the network chooses the next action, the target network values it (van
    Hasselt et al. 2016); else the target network does both.
    """
    target_interval: int = 1
    """Updates between updates of the target network."""
    tau: float = 0.01
    num_critics: int = 1
    """Networks in the ensemble, each with its own initial weights; a target is the smallest of
    their values (ElegantRL's double DQN has 2).
    """
    huber: bool = True
    """Huber's loss: errors above 1 count linearly; else the squared error."""
    quantiles: int = 0
    """Quantiles of the return (QR-DQN, Dabney et al. 2018); 0: none."""
    rescale_values: bool = False
    """Learn h(value), a signed square root, so that large rewards need no clipping (Pohlen et al.
    2018); not with atoms.
    """
    epsilon_ladder: bool = False
    """Every environment has its own epsilon, from 0.4 down to 0.4^8 (Ape-X), in place of the
    schedule.
    """
    network: QNetworkConfig = field(default_factory=QNetworkConfig)
    """Shape of the networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"target_interval": 1, "quantiles": 0}, zero_to_one=EPSILONS)
        if self.atoms and self.quantiles:
            raise UsageError(
                f"atoms {self.atoms} and quantiles {self.quantiles} are two kinds of distribution: "
                f"take one of them"
            )
        if self.rescale_values and self.atoms:
            raise UsageError(
                f"rescale_values is not for values of fixed atoms: leave it out, or atoms "
                f"{self.atoms}"
            )
        if self.epsilon_ladder and self.network.noisy:
            raise UsageError(
                "network.noisy explores by the noise of its weights, so epsilon_ladder would have "
                "no effect: leave out one of them"
            )
        if self.network.heads > 1 and self.num_critics > 1:
            raise UsageError(
                f"network.heads {self.network.heads} and num_critics {self.num_critics} are two "
                f"kinds of ensemble: take one"
            )


def ladder(num_envs: int) -> Tensor:
    """[num_envs] the epsilon of each environment under `epsilon_ladder`."""
    return LADDER_BASE ** (1.0 + LADDER_POWER * torch.linspace(0.0, 1.0, num_envs))


@functools.cache
def takes_noise(forward: Callable[..., Tensor]) -> bool:
    """Whether `forward` of a network's class takes more than rows."""
    return len(inspect.signature(forward).parameters) > 2


class DQN(OffPolicy):
    """Action values of a Discrete space. A subclass may have several agents, see `mix`."""

    config: DQNConfig
    target_networks: ClassVar[dict[str, str]] = {"network": "target"}
    num_agents = 1
    support: Tensor  # [Z] the values of a distribution's atoms
    epsilon: Tensor  # probability of a random action, 0-d or [N]

    def encoder_config(self) -> EncoderConfig | None:
        return self.config.network

    def make_networks(self) -> None:
        config = self.config
        self.num_actions = self.read_space()
        self.width = max(config.atoms, config.quantiles, 1)  # outputs per action
        sizes = config.num_critics, self.num_inputs // self.num_agents, self.num_actions, self.width
        space = self.observation_space if self.num_agents == 1 else None
        self.network = make_q_network(*sizes, config.network, space)
        self.target = make_q_network(*sizes, config.network, space)
        epsilon = torch.tensor(config.epsilon_end)
        if config.epsilon_ladder:
            epsilon = ladder(self.num_envs)
        self.register_buffer("support", config.make_support(), persistent=False)
        self.register_buffer("epsilon", epsilon, persistent=False)

    def join(self, ranks: Alone) -> None:
        super().join(ranks)
        if self.config.epsilon_ladder:
            of_all = ladder(self.num_envs * ranks.count)
            self.epsilon.copy_(of_all.chunk(ranks.count)[ranks.index])

    def read_space(self) -> int:
        """The number of actions; UsageError for a space that has none."""
        return num_choices(self.action_space, self.label)

    def parts(self) -> dict[str, Part]:
        # what the network's numbers mean
        config = self.config
        values = f"atoms {config.atoms} from {config.v_min} to {config.v_max}, quantiles "
        values += f"{config.quantiles}, rescale_values {config.rescale_values}"
        network = super().parts()["network"]
        return {"network": Part((values, self.reward_form(), *network.form), network.tensors)}

    def make_optimizers(self) -> dict[str, FlatAdam]:
        return {"network": self.make_adam(self.network, "loss", self.target, self.config.tau)}

    # ---- acting ----

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        if self.config.network.noisy:
            return self.greedy(obs, self.action_random), policy_state
        best, random = self.greedy(obs), self.random_action()
        draw = self.action_random.uniform(shape=best.shape[1:])
        epsilon = self.epsilon.view(-1, *[1] * (best.dim() - 1))
        return torch.where(draw < epsilon, random, best), policy_state

    def greedy(self, obs: Tensor, noise: CounterRandom | None = None) -> Tensor:
        values = self.expected(self.outputs(self.network, obs, noise))
        return values.mean(0).argmax(-1).squeeze(-1)

    def actor_modules(self) -> Actor:
        config = self.config
        count = max(config.network.heads, config.num_critics)
        members = [to_torch(self.network, member) for member in range(count)]
        values = MeanOfMembers(members, self.width, self.support if config.atoms else None)
        return Actor(values, Best())

    def random_action(self) -> Tensor:
        shape = () if self.num_agents == 1 else (self.num_agents,)
        return self.action_random.integers(0, self.num_actions, shape)

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        with torch.no_grad():
            values = self.expected(self.outputs(self.network, self.inputs(obs)))
            value = self.mix(values.mean(0).amax(-1))
            return unrescale(value) if self.config.rescale_values else value

    # ---- values ----

    def outputs(
        self, network: Sequential, obs: Tensor, noise: CounterRandom | None = None
    ) -> Tensor:
        """obs: [B, D] -> [E, B, G, A, Z] for G agents with A actions."""
        rows = obs.reshape(obs.shape[0] * self.num_agents, -1)
        shape = (-1, len(obs), self.num_agents, self.num_actions, self.width)
        # a network of somebody's own may take rows only
        outputs = network(rows, noise) if takes_noise(type(network).forward) else network(rows)
        count = max(self.config.network.heads, self.config.num_critics)
        width = self.num_actions * self.width
        return self.check_output("network", network, outputs, (count, len(rows), width)).view(shape)

    def expected(self, outputs: Tensor) -> Tensor:
        """[..., Z] -> [...] expected returns."""
        if self.config.atoms:
            return outputs.softmax(-1) @ self.support
        return outputs.mean(-1) if self.config.quantiles else outputs.squeeze(-1)

    def mix(self, values: Tensor) -> Tensor:
        """The team's values [...] from those of its agents [..., G]."""
        return values.squeeze(-1)

    # ---- learning ----

    def update_step(self, batch: Batch, number: int) -> Metrics:
        optimizer = self.optimizers["network"]
        loss, metrics = optimizer.evaluate(self.loss, batch)
        norm = optimizer.step(loss, move_target=self.moves_target(number), of=self.loss)
        self.move_target_at_intervals(norm)
        return metrics | {"grad_norm": norm}

    def moves_target(self, number: int) -> bool:
        """Whether the optimiser's step of update `number` of an iteration moves the target network:
        every `target_interval`-th does, where these are the same ones in all iterations.
        """
        interval = self.config.target_interval
        return self.config.updates % interval == 0 and (number + 1) % interval == 0

    def move_target_at_intervals(self, norm: Tensor) -> None:
        """Move the target network after every `target_interval`-th step where these are others from
        iteration to iteration. norm: of the last gradient, not finite if its step was skipped.
        """
        interval, optimizer = self.config.target_interval, self.optimizers["network"]
        if self.config.updates % interval == 0:
            return
        # decided on the device: a CUDA graph of one iteration is replayed for all
        norm = torch.where(optimizer.state.step % interval == 0, norm, torch.nan)
        optimizer.move_target(norm)
        for copy, buffer in optimizer.target_buffers:
            copy.copy_(torch.where(norm.isfinite(), buffer, copy))

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss 0-d of all networks; metrics, "td_error" [B] among them)."""
        config, weight = self.config, batch["weight"]
        noise = self.update_random if config.network.noisy else None  # new in each forward pass
        # predictions for the actions of the batch, and their targets
        outputs = self.outputs(self.network, batch["obs"], noise)
        action = batch["action"].view(-1, self.num_agents)
        predictions = values_of_actions(outputs, action)  # [E, B, G, Z]
        target = self.target_values(batch, noise)
        # a loss for each kind of output
        if config.quantiles:
            loss, error = quantile_td_loss(predictions.squeeze(2), target, weight)
        elif config.atoms:
            loss, error = categorical_td_loss(predictions.squeeze(2), target, weight)
        else:
            values = self.mix(predictions.squeeze(3))
            loss, error = td_loss(values, target, weight, 1.0 if config.huber else None)
        q_values = self.expected(predictions.detach())
        return loss, {"loss": loss.detach(), "q_values": q_values, "td_error": error}

    @torch.no_grad()
    def target_values(self, batch: Batch, noise: CounterRandom | None) -> Tensor:
        """The targets: [B], or of distributions [B, Z]."""
        config, next_obs = self.config, batch["next_obs"]
        reward, discount = batch["reward"], batch["discount"]
        # the best next action
        outputs = self.outputs(self.target, next_obs, noise)  # [E, B, G, A, Z]
        values = self.expected(outputs)
        if config.double:
            scores = self.expected(self.outputs(self.network, next_obs, noise)).mean(0)
        else:
            scores = values.amin(0)
        best = scores.argmax(-1, keepdim=True)  # [B, G, 1]
        # one number per action
        if self.width == 1:
            of_best = values.gather(3, best.expand(len(values), -1, -1, -1)).squeeze(3)
            return self._bellman_target(reward, discount, self.mix(of_best).amin(0))
        # a distribution per action: that of the network with the smallest mean
        index = best.unsqueeze(-1).expand(len(outputs), -1, -1, -1, self.width)
        chosen = outputs.gather(3, index)[:, :, 0, 0]  # [E, B, Z]
        if config.atoms:
            chosen = chosen.softmax(-1)
        if len(chosen) > 1:
            means = chosen @ self.support if config.atoms else chosen.mean(-1)
            smallest = min_mean_pmf(chosen, means)
        else:
            smallest = chosen[0]
        if config.atoms:
            return categorical_projection(smallest, reward, discount, config.v_min, config.v_max)
        return self._bellman_target(reward.unsqueeze(1), discount.unsqueeze(1), smallest)

    def _bellman_target(self, reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
        """reward + discount * value, on the scale of the network's outputs."""
        if not self.config.rescale_values:
            return torch.addcmul(reward, discount, value)
        return rescale(reward + discount * unrescale(value))

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        if not self.config.epsilon_ladder:
            self.epsilon.fill_(self.config.epsilon_at(progress))
