"""Deep Q-learning (Mnih et al. 2015) and its family by flags: double, dueling, noisy,
distributional, n-step, prioritised, ensembles.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.exploration import linear_schedule
from gpurl.algorithms.off_policy import Batch, OffPolicy, OffPolicyConfig
from gpurl.checks import check_atoms, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.categorical_projection import categorical_projection
from gpurl.kernels.random import CounterRandom
from gpurl.nn.mlp import Sequential
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.q_networks import QNetworkConfig, make_q_network, num_choices
from gpurl.value_losses import (
    categorical_td_loss,
    min_mean_pmf,
    quantile_td_loss,
    rescale,
    taken,
    td_loss,
    unrescale,
)

LADDER_BASE, LADDER_POWER = (
    0.4,
    7.0,
)  # of Ape-X (Horgan et al. 2018, section 4): epsilon_i = 0.4 ** (1 + 7 i / (N - 1))


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    fixed: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed,
        "network",
        "num_critics",
        "atoms",
        "quantiles",
        "v_min",
        "v_max",
    )

    learning_rate: float = 1e-3
    max_grad_norm: float | None = 10.0
    double: bool = True
    """The network itself chooses the next action, its target values it (van Hasselt et al. 2016);
    else the target does both.
    """
    target_interval: int = 1
    """Updates between moves of the target network."""
    tau: float = 0.01
    """Share of the difference by which it moves; 1 copies."""
    huber: bool = True
    """Errors above 1 count linearly; else the square of all."""
    num_critics: int = 1
    """Networks with starts of their own; the target is the least of their answers (ElegantRL's
    double DQN has 2).
    """
    atoms: int = 0
    """A distribution over so many values between v_min and v_max (C51, Bellemare et al. 2017); 0:
    none.
    """
    v_min: float = -10.0
    """Least value, of scaled rewards."""
    v_max: float = 10.0
    """Greatest value."""
    quantiles: int = 0
    """So many quantiles of the return (QR-DQN, Dabney et al. 2018); 0: none."""
    rescale_values: bool = False
    """Learn h of values, a signed root, so that rewards of any size need no clipping (Pohlen et al.
    2018); not of C51.
    """
    epsilon_start: float = 1.0
    """Share of random actions at the start."""
    epsilon_end: float = 0.05
    """Share of random actions from epsilon_fraction of the training on."""
    epsilon_fraction: float = 0.2
    """Share of the training over which it falls, linearly."""
    epsilon_ladder: bool = False
    """Every environment keeps a share of its own, from 0.4 down to 0.4^8 (Ape-X), in place of the
    three above.
    """
    network: QNetworkConfig = field(default_factory=QNetworkConfig)
    """Shape of the networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"target_interval": 1, "num_critics": 1, "atoms": 0, "quantiles": 0}
        check_numbers(
            self,
            least,
            ("tau",),
            zero_to_one=("tau", "epsilon_start", "epsilon_end", "epsilon_fraction"),
        )
        check_atoms(self.atoms, self.v_min, self.v_max)
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
        if self.network.heads > 1 and self.num_critics > 1:
            raise UsageError(
                f"network.heads {self.network.heads} and num_critics {self.num_critics} are two "
                f"kinds of ensemble: take one"
            )


class DQN(OffPolicy):
    """Action values of a Discrete space. A subclass may have several agents and mix their values:
    see `mix`.
    """

    config: DQNConfig
    num_agents = 1
    support: Tensor  # [Z] the values of a distribution's atoms
    epsilon: Tensor  # share of random actions, 0-d or [N]

    def make_networks(self) -> None:
        config = self.config
        self.num_actions = self.read_space()
        self.width = max(config.atoms, config.quantiles, 1)  # numbers an action
        sizes = config.num_critics, self.num_inputs // self.num_agents, self.num_actions, self.width
        self.network, self.target = (make_q_network(*sizes, config.network) for _ in range(2))
        self.register_buffer(
            "support",
            torch.linspace(config.v_min, config.v_max, max(config.atoms, 1)),
            persistent=False,
        )
        self.register_buffer(
            "epsilon",
            self._ladder() if config.epsilon_ladder else torch.tensor(config.epsilon_end),
            persistent=False,
        )

    def read_space(self) -> int:
        """The number of actions; UsageError for a space that has none."""
        return num_choices(self.action_space, self.label, "ddpg, td3 and sac take a Box")

    def _ladder(self) -> Tensor:
        """[N]"""
        return LADDER_BASE ** (1.0 + LADDER_POWER * torch.linspace(0.0, 1.0, self.num_envs))

    def make_optimizers(self) -> dict[str, FlatAdam]:
        config = self.config
        optimizer = FlatAdam(
            self.network,
            config.learning_rate,
            1e-8,
            config.weight_decay,
            config.max_grad_norm,
            self.target,
            config.tau,
            ("loss",),
        )
        return {"network": optimizer}

    # ---- acting ----

    def decide(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        if self.config.network.noisy:
            return self.greedy(obs, self.action_random), policy_state
        best, chance = self.greedy(obs), self.random_action()
        explores = self.action_random.uniform(shape=best.shape[1:]) < self.epsilon.view(
            -1, *[1] * (best.dim() - 1)
        )
        return torch.where(explores, chance, best), policy_state

    def greedy(self, obs: Tensor, noise: CounterRandom | None = None) -> Tensor:
        values = self.means(self.outputs(self.network, obs, noise))
        return values.mean(0).argmax(-1).squeeze(-1)

    def random_action(self) -> Tensor:
        return self.action_random.integers(
            0, self.num_actions, () if self.num_agents == 1 else (self.num_agents,)
        )

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        with torch.no_grad():
            values = self.means(self.outputs(self.network, self.inputs(obs)))
            value = self.mix(values.mean(0).amax(-1))
            return unrescale(value) if self.config.rescale_values else value

    # ---- values ----

    def outputs(
        self, network: Sequential, obs: Tensor, noise: CounterRandom | None = None
    ) -> Tensor:
        """obs: [B, D] -> [E, B, G, A, Z] numbers of every agent's every action."""
        rows = obs.reshape(obs.shape[0] * self.num_agents, -1)
        return network(rows, noise).view(
            -1, len(obs), self.num_agents, self.num_actions, self.width
        )

    def means(self, outputs: Tensor) -> Tensor:
        """[..., Z] -> [...] expected returns."""
        if self.config.atoms:
            return outputs.softmax(-1) @ self.support
        return outputs.mean(-1) if self.config.quantiles else outputs.squeeze(-1)

    def mix(self, values: Tensor) -> Tensor:
        """Of the agents' values [..., G] the team's [...]."""
        return values.squeeze(-1)

    # ---- learning ----

    def update_step(self, batch: Batch, number: int) -> tuple[Metrics, Tensor]:
        loss, metrics, error = self.loss(batch)
        moves_target = self.config.target_interval == 1
        norm = self.optimizers["network"].step(loss, move_target=moves_target, of=self.loss)
        self.move_target_at_intervals(norm)
        return metrics | {"grad_norm": norm}, error

    def move_target_at_intervals(self, norm: Tensor) -> None:
        """Polyak averaging after every `target_interval`-th step that was taken, where that is not
        every one; norm: 0-d, of the last step, not finite where it was skipped.
        """
        interval = self.config.target_interval
        if interval == 1:
            return
        optimizer = self.optimizers["network"]
        assert optimizer.target is not None
        # decided on the device: a CUDA graph of some updates is replayed for all
        is_due = (optimizer.state.step % interval == 0) & norm.isfinite()
        optimizer.target.lerp_(optimizer.flat, is_due * self.config.tau)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        """(loss 0-d of all networks, metrics, error [B] of each transition)."""
        noise = self.update_random if self.config.network.noisy else None  # each pass draws its own
        outputs = self.outputs(self.network, batch["obs"], noise)
        action = batch["action"].view(-1, self.num_agents)
        of_action = taken(outputs, action)  # [E, B, G, Z]
        target, weight = self.target_values(batch, noise), batch["weight"]
        if self.config.quantiles:
            loss, error = quantile_td_loss(of_action.squeeze(2), target, weight)
        elif self.config.atoms:
            loss, error = categorical_td_loss(of_action.squeeze(2), target, weight)
        else:
            values = self.mix(of_action.squeeze(3))
            loss, error = td_loss(values, target, weight, 1.0 if self.config.huber else None)
        metrics = {"loss": loss.detach(), "q_values": self.means(of_action.detach())}
        return loss, metrics, error

    @torch.no_grad()
    def target_values(self, batch: Batch, noise: CounterRandom | None) -> Tensor:
        """What the next state is worth: [B], or of a distribution [B, Z]."""
        outputs = self.outputs(self.target, batch["next_obs"], noise)  # [E, B, G, A, Z]
        values = self.means(outputs)
        if self.config.double:
            chooser = self.means(self.outputs(self.network, batch["next_obs"], noise)).mean(0)
        else:
            chooser = values.amin(0)
        best = chooser.argmax(-1, keepdim=True)  # [B, G, 1]
        if self.width == 1:
            of_best = values.gather(3, best.expand(len(values), -1, -1, -1)).squeeze(3)
            value = self.mix(of_best).amin(0)
            return self._bellman_target(batch["reward"], batch["discount"], value)
        place = best.unsqueeze(-1).expand(len(outputs), -1, -1, -1, self.width)
        chosen = outputs.gather(3, place)[:, :, 0, 0]  # [E, B, Z]
        if self.config.quantiles:
            least = chosen[0] if len(chosen) == 1 else min_mean_pmf(chosen, chosen.mean(-1))
            return self._bellman_target(
                batch["reward"].unsqueeze(1), batch["discount"].unsqueeze(1), least
            )
        pmf = chosen.softmax(-1)
        pmf = pmf[0] if len(pmf) == 1 else min_mean_pmf(pmf, pmf @ self.support)
        return categorical_projection(
            pmf, batch["reward"], batch["discount"], self.config.v_min, self.config.v_max
        )

    def _bellman_target(self, reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
        """What is learnt of reward + discount * value, of h values h of that."""
        if not self.config.rescale_values:
            return torch.addcmul(reward, discount, value)
        return rescale(reward + discount * unrescale(value))

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        config = self.config
        if not config.epsilon_ladder:
            self.epsilon.fill_(
                linear_schedule(
                    config.epsilon_start, config.epsilon_end, config.epsilon_fraction, progress
                )
            )
