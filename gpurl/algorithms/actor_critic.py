"""What DDPG, TD3, SAC and REDQ share: an actor, an ensemble of critics as one network, its target,
and how their opinions are joined.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch, OffPolicy, OffPolicyConfig
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_atoms, check_choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.categorical_projection import categorical_projection
from gpurl.kernels.gae import gae
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.mlp import BodyConfig, Sequential, make_network, set_dtype
from gpurl.nn.optimizer import FlatAdam
from gpurl.value_losses import categorical_td_loss, min_mean_pmf, td_loss


@dataclass(frozen=True)
class ActorCriticConfig(OffPolicyConfig):
    """Settings of every off-policy actor-critic."""

    fixed: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed,
        *(
            "actor_network",
            "critic_network",
            "num_critics",
            "atoms",
            "v_min",
            "v_max",
            "actor_from",
        ),
    )

    actor_learning_rate: float | None = None
    """The actor's step size; by default learning_rate."""
    tau: float = 0.005
    """Share of the difference by which target networks follow, an update."""
    policy_delay: int = 1
    """Updates of the critics to one of the actor."""
    num_critics: int = 2
    """Critics, each with a start of its own."""
    target_subset: int | None = None
    """Critics, drawn anew for each update, whose target networks are asked; by default all."""
    target_aggregate: str = "min"
    """How their answers are joined into the target: min or mean."""
    actor_aggregate: str = "min"
    """What the actor climbs: min or mean of all critics, or the first one."""
    atoms: int = 0
    """Critics give a distribution over so many values (C51) instead of one number; 0: one
    number.
    """
    v_min: float = -10.0
    """Least value of such a distribution, of scaled rewards."""
    v_max: float = 10.0
    """Greatest value."""
    fit_returns: float = 0.0
    """Weight of the squared difference to the return up to the end of the rollout and the value
    there (ElegantRL's lambda_fit_cum_r).
    """
    actor_network: BodyConfig = field(default_factory=BodyConfig)
    """Shape of the actor."""
    actor_from: str | None = None
    """Start from the actor of another run of the same shape, of bc or of this family: its folder or
    that of a checkpoint. It plays before learning_starts too, in place of chance. The critics start
    from nothing, so it gets worse before it gets better. Of sac, initial_temperature should be well
    below the rewards of a step, else the actor first learns that chance is best.
    """
    critic_network: BodyConfig = field(default_factory=BodyConfig)
    """Shape of each critic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {"target_aggregate": ("min", "mean"), "actor_aggregate": ("min", "mean", "first")}
        check_choices(self, choices)
        least = {
            "policy_delay": 1,
            "num_critics": 1,
            "target_subset": 1,
            "atoms": 0,
            "fit_returns": 0,
        }
        check_numbers(self, least, ("actor_learning_rate", "tau"), zero_to_one=("tau",))
        if self.updates % self.policy_delay:
            raise UsageError(
                f"the actor moves every policy_delay {self.policy_delay} updates, updates "
                f"{self.updates} is no multiple of it"
            )
        if self.target_subset is not None and self.target_subset > self.num_critics:
            raise UsageError(
                f"target_subset {self.target_subset} is more than num_critics {self.num_critics}"
            )
        check_atoms(self.atoms, self.v_min, self.v_max)
        if self.fit_returns and (self.horizon < 2 or self.atoms):
            raise UsageError(
                "fit_returns needs a rollout to sum over, horizon 2 or more, and critics of one "
                "number, atoms 0"
            )


class OffPolicyActorCritic(OffPolicy):
    """Continuous actions in [-1, 1]. A subclass says what the actor does with its numbers."""

    config: ActorCriticConfig
    support: Tensor  # [Z] the values of a distribution's atoms
    has_target_actor = False
    delays_target = (
        False  # whether target networks follow when the actor moves, else at every update
    )

    def make_networks(self) -> None:
        space, config = self.action_space, self.config
        if not isinstance(space, Box) or not space.low.size:
            raise UsageError(
                f"{self.label} needs a Box action space, this one is {space}; dqn and its kin "
                f"choose among a few"
            )
        self.box = ActionScaler(space)
        self.box.require_bounds(self.label)
        self.num_actions = space.low.size
        self.actor = make_network(1, self.num_inputs, self.actor_outputs(), config.actor_network)
        self.critic, self.target_critic = (self.make_critics(config.num_critics) for _ in range(2))
        self.target_actor: Sequential | None = None
        if self.has_target_actor:
            self.target_actor = make_network(
                1, self.num_inputs, self.actor_outputs(), config.actor_network
            )
        self.register_buffer(
            "support",
            torch.linspace(config.v_min, config.v_max, max(config.atoms, 1)),
            persistent=False,
        )

    def make_critics(self, count: int) -> Sequential:
        """Networks of what `q_values` feeds them."""
        return make_network(
            count,
            self.num_inputs + self.num_actions,
            max(self.config.atoms, 1),
            self.config.critic_network,
        )

    def make_training(self) -> None:
        super().make_training()
        count = self.config.target_subset or self.config.num_critics
        with torch.device(self.device):  # in a tuple, for nothing of it is for a checkpoint
            self._drawn = () if count == self.config.num_critics else (self.make_critics(count),)

    def set_precision(self, precision: str) -> None:
        super().set_precision(precision)
        for network in self._drawn if precision == "bf16" else ():
            set_dtype(network, torch.bfloat16)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        config = self.config
        adam = partial(
            FlatAdam,
            epsilon=1e-8,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            tau=config.tau,
        )
        critic = adam(
            self.critic, self.rate_of("critic"), target=self.target_critic, losses=("critic_loss",)
        )
        return {
            "critic": critic,
            "actor": adam(
                self.actor, self.rate_of("actor"), target=self.target_actor, losses=("actor_loss",)
            ),
        }

    def rate_of(self, optimizer: str) -> float:
        own = self.config.actor_learning_rate if optimizer == "actor" else None
        return self.config.learning_rate if own is None else own

    def copy_actor_from(self, source: Algorithm, path: str) -> None:
        """The weights of another run's actor, and what it makes of observations before, into this
        actor and its target. UsageError where they do not fit; path: where `source` is from.
        """
        weights, theirs, ours = source.state_dict(), _form_of_actor(source), _form_of_actor(self)
        for name in ours | theirs:
            if theirs.get(name) != ours.get(name):
                raise UsageError(
                    f"actor_from {path} does not fit: its {name} is {theirs.get(name)}, wanted "
                    f"{ours.get(name)}"
                )
        self.load_state_dict(
            {name: weights[name] for name in ours if name in weights}, strict=False
        )
        optimizer = self.optimizers["actor"]
        if optimizer.target is not None:
            optimizer.target.copy_(optimizer.flat)

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        if self.config.actor_from is not None:
            # it plays from the start: the critics are to learn what its actions are worth
            self.is_random = False

    def action_shape(self) -> tuple[int, ...]:
        return (self.num_actions,)

    def random_action(self) -> Tensor:
        return self.action_random.uniform(-1.0, 1.0, (self.num_actions,))

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    # ---- what a subclass says ----

    @abstractmethod
    def actor_outputs(self) -> int:
        """Numbers that the actor gives."""

    @abstractmethod
    def next_action(self, next_obs: Tensor) -> tuple[Tensor, Tensor | None]:
        """(action [B, A] of the target at next_obs [B, D], what its value gains by its entropy [B]
        or None).
        """

    @abstractmethod
    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss 0-d, metrics) of the actor; the critics are frozen: see `actor_value`."""

    # ---- values ----

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(obs)
            return self._joined(self.q_values(inputs, self.greedy(inputs))[1], "mean")

    def q_values(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(what the critics give [E, B, 1 or atoms], their values [E, B])."""
        output = self.critic(torch.cat((obs, action), 1))
        return output, self._means(output)

    def _means(self, output: Tensor) -> Tensor:
        """[E, B, 1 or atoms] -> [E, B]."""
        return output.softmax(-1) @ self.support if self.config.atoms else output.squeeze(2)

    @staticmethod
    def _joined(values: Tensor, how: str) -> Tensor:
        """[E, ...] -> [...]."""
        if how == "mean":
            return values.mean(0)
        return values.min(0).values if how == "min" else values.unbind(0)[0]

    def actor_value(self, obs: Tensor, action: Tensor) -> Tensor:
        """[B] Q(obs, action) as the actor sees it, differentiable by the action alone."""
        with self.optimizers["critic"].frozen():
            return self._joined(self.q_values(obs, action)[1], self.config.actor_aggregate)

    def target_q(self, inputs: Tensor) -> Tensor:
        """[E, B, 1 or atoms]: what the target critics give for inputs [B, D + A], or those drawn
        for this update, which alone are asked.
        """
        if not self._drawn:
            return self.target_critic(inputs)
        (drawn,) = self._drawn
        order = self.choice_random.uniform(shape=(self.config.num_critics,))[0].argsort()
        for copied, parameter in zip(drawn.parameters(), self.target_critic.parameters()):
            torch.index_select(parameter, 0, order[: self.config.target_subset], out=copied)
        return drawn(inputs)

    @torch.no_grad()
    def critic_target(self, batch: Batch) -> Tensor:
        """[B] what the critics are to say, or of a distribution [B, atoms]."""
        config = self.config
        action, bonus = self.next_action(batch["next_obs"])
        output = self.target_q(torch.cat((batch["next_obs"], action), 1))
        if config.atoms:
            pmf = output.softmax(-1)
            if config.target_aggregate == "mean":
                pmf = pmf.mean(0)
            else:
                pmf = min_mean_pmf(pmf, pmf @ self.support)
            return categorical_projection(
                pmf, batch["reward"], batch["discount"], config.v_min, config.v_max, bonus
            )
        value = self._joined(output.squeeze(2), config.target_aggregate)
        value = value if bonus is None else value + bonus
        return torch.addcmul(batch["reward"], batch["discount"], value)

    # ---- learning ----

    def update_step(self, batch: Batch, number: int) -> tuple[Metrics, Tensor]:
        moves_actor = (number + 1) % self.config.policy_delay == 0
        metrics, error = self.critic_step(batch, move_target=moves_actor or not self.delays_target)
        if moves_actor:
            metrics |= self.actor_step(batch)
        return metrics, error

    def critic_step(self, batch: Batch, move_target: bool) -> tuple[Metrics, Tensor]:
        """One step of the critics; (metrics, error [B])."""
        loss, metrics, error = self.critic_loss(batch)
        norm = self.optimizers["critic"].step(loss, move_target=move_target, of=self.critic_loss)
        return metrics | {"critic_grad_norm": norm}, error

    def actor_step(self, batch: Batch) -> Metrics:
        """One step of the actor, and of what depends on it."""
        loss, metrics = self.actor_loss(batch)
        return metrics | {"actor_grad_norm": self.move_actor(loss)}

    def move_actor(self, loss: Tensor) -> Tensor:
        """The actor's optimiser step; returns the gradient's norm."""
        return self.optimizers["actor"].step(loss, of=self.actor_loss)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        """(loss 0-d of all critics, metrics, error [B] of each transition)."""
        target, weight = self.critic_target(batch), batch["weight"]
        output, values = self.q_values(batch["obs"], batch["action"])
        if self.config.atoms:
            loss, error = categorical_td_loss(output, target, weight)
        else:
            loss, error = td_loss(values, target, weight, None)
        metrics = {"critic_loss": loss.detach(), "qf_values": values.detach()}
        if self.config.fit_returns:
            fit, _ = td_loss(values, batch["fit_return"], weight, None)
            loss = loss + self.config.fit_returns * fit
        return loss, metrics, error

    # ---- returns of a rollout ----

    def extra_columns(self) -> dict[str, tuple[int, ...]]:
        return {"fit_return": ()} if self.config.fit_returns else {}

    def more_columns(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        if not self.config.fit_returns:
            return {}
        final_value = self.value(buffer["final_obs"].flatten(0, 1)).view_as(buffer["reward"])
        value = torch.cat(
            (torch.zeros_like(final_value[:1]), final_value)
        )  # with lambda 1 they cancel out, but at the end of the rollout
        arguments = (
            buffer["terminated"],
            buffer["truncated"],
            self.config.gamma,
            1.0,
            buffer.columns.get("valid"),
        )
        return {
            "fit_return": gae(
                buffer["reward"] * self.config.reward_scale, value, final_value, *arguments
            )[1]
        }


def _form_of_actor(algorithm: Algorithm) -> dict[str, Any]:
    """What two runs must have alike for one to go on with the actor of the other: settings, and the
    shapes of what a checkpoint holds.
    """
    tensors = {
        name: tuple(value.shape)
        for name, value in algorithm.state_dict().items()
        if name.startswith(("actor.", "normalizer."))
    }
    return {
        "actor_network": getattr(algorithm.config, "actor_network", None),
        "action shape": algorithm.action_space.shape,
    } | tensors
