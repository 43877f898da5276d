"""What DDPG, TD3, SAC and REDQ share: an actor, an ensemble of critics as one network, and target
networks.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.algorithms.base import Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch, CriticConfig, OffPolicy
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.categorical_projection import categorical_projection
from gpurl.kernels.gae import gae
from gpurl.losses import categorical_td_loss, min_mean_pmf, td_loss
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.batch_norm import BatchNorm
from gpurl.nn.encoders import (
    RELU_GAIN,
    EncodedCritics,
    EncoderConfig,
    make_encoded_network,
    make_encoders,
    reads_images,
)
from gpurl.nn.mlp import Dense, Layer, Sequential, make_network, set_dtype
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.parts import Part, dense_actor_part, describe, state_tensors
from gpurl.nn.q_networks import who_takes
from gpurl.nn.ranks import Alone


@dataclass(frozen=True)
class ActorCriticConfig(CriticConfig):
    """Settings of every off-policy actor-critic."""

    choices: ClassVar[Choices] = {
        "target_aggregate": ("min", "mean"),
        "actor_aggregate": ("min", "mean", "first"),
    }
    fixed: ClassVar[tuple[str, ...]] = (
        *CriticConfig.fixed,
        "actor_network",
        "critic_network",
        "asymmetric",
        "critic_warmup",
    )

    actor_learning_rate: float | None = None
    """Learning rate of the actor; by default learning_rate."""
    policy_delay: int = 1
    """Updates of the critics per update of the actor."""
    num_critics: int = 2
    target_subset: int | None = None
    """Target critics, drawn anew for each update, that make its target; by default all."""
    target_aggregate: str = "min"
    """How the values of the target critics are aggregated: min or mean."""
    actor_aggregate: str = "min"
    """Which value the actor maximises: min or mean over the critics, or that of the first."""
    fit_returns: float = 0.0
    """Weight of the squared difference to the return up to the end of the rollout and the value
    there (ElegantRL's lambda_fit_cum_r).
    """
    actor_network: EncoderConfig = field(default_factory=EncoderConfig)
    """Shape of the actor."""
    critic_warmup: int = 0
    """Iterations, of those that learn, in which at first only the critics do; for init_from, where
    new critics would degrade the actor. A learned temperature stays as it is, too. New critics need
    several times 1 / (tau (1 - gamma)) updates to know the returns.
    """
    critic_network: EncoderConfig = field(default_factory=EncoderConfig)
    """Shape of each critic; an encoder of images is one for all critics."""
    asymmetric: bool = True
    """The critics read the environment's privileged observations, if it has any, in place of the
    actor's.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        minimums = {"policy_delay": 1, "target_subset": 1, "fit_returns": 0, "critic_warmup": 0}
        check_numbers(self, minimums, ("actor_learning_rate",))
        if self.updates % self.policy_delay:
            delay, updates = self.policy_delay, math.lcm(self.updates, self.policy_delay)
            horizon = self.horizon * updates // self.updates
            raise UsageError(
                f"the actor is updated every policy_delay {delay} updates, but updates "
                f"{self.updates} is not a multiple of it: with horizon {horizon} and updates "
                f"{updates} there are as many for each step"
            )
        if self.target_subset is not None and self.target_subset > self.num_critics:
            raise UsageError(
                f"target_subset {self.target_subset} is more than num_critics {self.num_critics}"
            )
        if self.fit_returns and (self.horizon < 2 or self.atoms):
            raise UsageError(
                "fit_returns needs a rollout to sum over, horizon 2 or more, and critics of one "
                "number, atoms 0"
            )


class OffPolicyActorCritic(OffPolicy):
    """Continuous actions in [-1, 1]. A subclass defines the actor's outputs and its loss."""

    config: ActorCriticConfig
    support: Tensor  # [Z] the values of a distribution's atoms
    target_networks: ClassVar[dict[str, str]] = {"critic": "target_critic", "actor": "target_actor"}
    has_target_actor = False
    actor_actions = "squashed"  # see `gpurl.nn.parts.ActorPart`
    # whether the target critics are updated with the actor only, else with the critics
    delays_target = False

    def reads_state(self) -> bool:
        return self.config.asymmetric

    def encoder_config(self) -> EncoderConfig | None:
        """That of the actor; UsageError if the critics read images in another form."""
        actor, critic = self.config.actor_network, self.config.critic_network
        space = self.observation_space
        assert isinstance(space, Box)
        if reads_images(space, actor) != reads_images(space, critic):
            raise UsageError(
                f"actor_network.encoder {actor.encoder} and critic_network.encoder "
                f"{critic.encoder}: actor and critic read the same observations, as images or as "
                f"rows of numbers; give both an encoder or both none"
            )
        return actor

    def make_networks(self) -> None:
        space, config = self.action_space, self.config
        if not isinstance(space, Box):
            raise UsageError(
                f"{self.label} needs a Box action space, this one is {space}{who_takes(space)}"
            )
        if not space.low.size:
            raise UsageError(f"{self.label} needs a Box with at least one number, got {space}")
        self.box = ActionScaler(space)
        self.box.require_bounds(self.label)
        self.num_actions = space.low.size
        self.actor = self.make_actor()
        self.critic = self.make_critics(config.num_critics)
        self.target_critic = self.make_critics(config.num_critics)
        self.target_actor = self.make_actor() if self.has_target_actor else None
        self.register_buffer("support", config.make_support(), persistent=False)

    def action_scaler(self) -> ActionScaler | None:
        return self.box if isinstance(self.action_space, Box) else None

    def make_actor(self) -> Sequential:
        """A network [B, D] -> [1, B, actor_outputs]."""
        space, config = self.observation_space, self.config.actor_network
        self.refuse_encoders_beside_state(config)
        return make_encoded_network(self.num_inputs, self.actor_outputs(), space, config)

    def make_critics(self, count: int) -> Sequential:
        """Networks from what `critic_inputs` gives to [count, B, 1 or atoms]."""
        return self.make_encoded_critics(count, self.num_actions, max(self.config.atoms, 1))

    def make_encoded_critics(self, count: int, num_actions: int, num_outputs: int) -> Sequential:
        """Networks [B, F + num_actions] -> [count, B, num_outputs], with their encoder where
        observations need one; see `critic_inputs`.
        """
        space, config = self.observation_space, self.config.critic_network
        self.refuse_encoders_beside_state(config)
        encoders = make_encoders(1, space, config, RELU_GAIN)
        num_features = encoders[0].width if encoders else self.num_critic_obs
        layers = make_network(count, num_features + num_actions, num_outputs, config)
        return EncodedCritics(encoders[0], layers) if encoders else layers

    def make_training(self) -> None:
        super().make_training()
        count = self.config.target_subset or self.config.num_critics
        # holds the drawn target critics; torch does not register modules in a tuple, so no
        # checkpoint contains it
        self._drawn_critics: tuple[Sequential, ...] = ()
        if count != self.config.num_critics:
            with torch.device(self.device):
                drawn = self.make_critics(count)
                if type(drawn) is not type(self.critic):
                    raise UsageError(
                        f"{self.label}.critic is a {type(self.critic).__name__}, and target_subset "
                        f"draws among what make_critics makes, a {type(drawn).__name__}: make your "
                        f"critics there, or set target_subset to num_critics"
                    )
                if isinstance(drawn, EncodedCritics):  # it reads what the targets' encoder gives
                    drawn = Sequential(cast(Iterable[Layer], drawn.layers))
                self._drawn_critics = (drawn.eval(),)

    def join(self, ranks: Alone) -> None:
        super().join(ranks)
        for network in self._drawn_critics:
            for module in network.modules():
                if isinstance(module, BatchNorm):
                    module.ranks = ranks

    def set_precision(self, precision: str) -> None:
        super().set_precision(precision)
        if precision == "bf16":
            for network in self._drawn_critics:
                set_dtype(network, torch.bfloat16)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        tau, actor_rate = self.config.tau, self.config.actor_learning_rate
        return {
            "critic": self.make_adam(self.critic, "critic_loss", self.target_critic, tau),
            "actor": self.make_adam(self.actor, "actor_loss", self.target_actor, tau, actor_rate),
        }

    def parts(self) -> dict[str, Part]:
        parts = super().parts()
        # what the critics' numbers mean
        config = self.config
        critic = parts["critic"]
        atoms = f", atoms from {config.v_min} to {config.v_max}" if config.atoms else ""
        reads = " and privileged observations" if self.num_state else ""
        values = f"{config.num_critics} critics of actions{reads}{atoms}"
        parts["critic"] = Part((values, self.reward_form(), *critic.form), critic.tensors)
        if "temperature" in parts:  # what entropy is worth in rewards
            parts["temperature"] = Part((self.reward_form(),), parts["temperature"].tensors)
        # of the actor the last layer is apart
        layers = list(self.actor.layers) if isinstance(self.actor, Sequential) else [self.actor]
        if type(last := layers[-1]) is Dense:
            body = describe(*layers[:-1]), state_tensors(*layers[:-1])
            parts["actor"] = dense_actor_part(body, last, self.num_actions, self.actor_actions)
        return parts

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        if self.actor_is_transferred:
            # it acts from the start: the critics must learn what its actions are worth
            self.is_random = False

    def stored_shape(self) -> tuple[int, ...]:
        if not self.num_state:
            return super().stored_shape()
        return (self.num_inputs + self.num_state,)

    def action_shape(self) -> tuple[int, ...]:
        return (self.num_actions,)

    def random_action(self) -> Tensor:
        return self.action_random.uniform(-1.0, 1.0, (self.num_actions,))

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    # ---- what a subclass defines ----

    @abstractmethod
    def actor_outputs(self) -> int:
        """The number of the actor's outputs."""

    @abstractmethod
    def next_action(self, next_obs: Tensor) -> tuple[Tensor, Tensor | None]:
        """(action [B, A] for the target at rows next_obs, see `actor_output`; temperature times
        its log-probability [B], which the target subtracts from its value, or None).
        """

    @abstractmethod
    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss 0-d, metrics) of the actor; see `actor_value`."""

    # ---- rows of observations ----

    @property
    def num_critic_obs(self) -> int:
        """Numbers of an observation that the critics read."""
        return self.num_state or self.num_inputs

    def actor_obs(self, obs: Tensor) -> Tensor:
        """[B, D] what the actor reads of normalised rows [B, D], or [B, D + S] with S privileged
        numbers.
        """
        return obs[:, : self.num_inputs] if self.num_state else obs

    def critic_obs(self, obs: Tensor) -> Tensor:
        """[B, num_critic_obs] what the critics read of them."""
        return obs[:, self.num_inputs :] if self.num_state else obs

    def actor_output(self, obs: Tensor, network: Sequential | None = None) -> Tensor:
        """[B, actor_outputs] of the actor, or of a `network` like it, at normalised rows of
        observations.
        """
        network = network or self.actor
        shape = 1, len(obs), self.actor_outputs()
        output = self.check_output("actor", network, network(self.actor_obs(obs)), shape)
        return output.squeeze(0)

    # ---- values ----

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(obs)
            return self._expected(self.q_outputs(inputs, self.greedy(inputs))).mean(0)

    def q_outputs(self, obs: Tensor, action: Tensor) -> Tensor:
        """[E, B, 1 or atoms] of the critics."""
        output = self.critic(self.critic_inputs(self.critic, obs, action))
        shape = self.config.num_critics, len(obs), max(self.config.atoms, 1)
        return self.check_output("critic", self.critic, output, shape)

    def critic_inputs(
        self, critic: Sequential, obs: Tensor, action: Tensor | None = None
    ) -> Tensor:
        """What `critic` reads of rows of observations and action [B, A]: [B, num_critic_obs + A],
        or [B, F + A] with F features of its encoder.
        """
        obs = self.critic_obs(obs)
        if isinstance(critic, EncodedCritics):
            obs = critic.encoder(obs)[0]
        return obs if action is None else torch.cat((obs, action), 1)

    def _expected(self, output: Tensor) -> Tensor:
        """[E, B, 1 or atoms] -> [E, B] expected returns."""
        return output.softmax(-1) @ self.support if self.config.atoms else output.squeeze(2)

    @staticmethod
    def _aggregate(values: Tensor, how: str) -> Tensor:
        """[E, ...] -> [...]."""
        if how == "mean":
            return values.mean(0)
        return values.min(0).values if how == "min" else values.unbind(0)[0]

    def actor_value(self, obs: Tensor, action: Tensor) -> Tensor:
        """[B] the value that the actor maximises, differentiable by the action but not by the
        critics' weights.
        """
        with self.optimizers["critic"].frozen():
            values = self._expected(self.q_outputs(obs, action))
        return self._aggregate(values, self.config.actor_aggregate)

    def target_outputs(self, inputs: Tensor) -> Tensor:
        """[E, B, 1 or atoms] of the target critics, or of a subset drawn for this update, for
        inputs as `critic_inputs` gives them.
        """
        if not self._drawn_critics:
            return self.target_critic(inputs)
        (drawn,) = self._drawn_critics
        order = self.choice_random.uniform(shape=(self.config.num_critics,))[0].argsort()
        member = order[: self.config.target_subset]
        for name, weight in drawn.named_parameters():
            torch.index_select(self.target_critic.get_parameter(name), 0, member, out=weight)
        for name, copied in drawn.named_buffers():
            buffer = self.target_critic.get_buffer(name)
            # all critics share a buffer without an axis of members
            has_members = copied.shape != buffer.shape
            copied.copy_(buffer.index_select(0, member) if has_members else buffer)
        return drawn(inputs)

    @torch.no_grad()
    def critic_target(self, batch: Batch) -> Tensor:
        """The targets of the critics: [B], or of distributions [B, atoms]."""
        action, entropy_cost = self.next_action(batch["next_obs"])
        # not kept in a variable: rows of inputs are the largest tensor here
        output = self.target_outputs(
            self.critic_inputs(self.target_critic, batch["next_obs"], action)
        )
        return self.bellman_target(batch, output, entropy_cost)

    def bellman_target(self, batch: Batch, output: Tensor, entropy_cost: Tensor | None) -> Tensor:
        """[B], or of distributions [B, atoms]: reward + discount (next value - entropy_cost) of
        the target critics' output [E, B, 1 or atoms] for the next actions; entropy_cost: as
        `next_action` gives it.
        """
        config = self.config
        reward, discount = batch["reward"], batch["discount"]
        if not config.atoms:
            value = self._aggregate(output.squeeze(2), config.target_aggregate)
            value = value if entropy_cost is None else value - entropy_cost
            return torch.addcmul(reward, discount, value)
        pmf = output.softmax(-1)
        if config.target_aggregate == "mean":
            pmf = pmf.mean(0)
        else:
            pmf = min_mean_pmf(pmf, pmf @ self.support)
        shift = None if entropy_cost is None else -entropy_cost
        return categorical_projection(pmf, reward, discount, config.v_min, config.v_max, shift)

    # ---- learning ----

    def update_step(self, batch: Batch, number: int) -> Metrics:
        is_actors_turn = (number + 1) % self.config.policy_delay == 0
        moves_target = is_actors_turn or not self.delays_target
        metrics = self.critic_step(batch, moves_target)
        if is_actors_turn and not self.warms_critic:
            metrics |= self.actor_step(batch)
        return metrics

    def critic_step(self, batch: Batch, move_target: bool) -> Metrics:
        """One optimiser step of the critics."""
        optimizer = self.optimizers["critic"]
        loss, metrics = optimizer.evaluate(self.critic_loss, batch)
        norm = optimizer.step(loss, move_target=move_target, of=self.critic_loss)
        return metrics | {"critic_grad_norm": norm}

    def actor_step(self, batch: Batch) -> Metrics:
        """One optimiser step of the actor."""
        loss, metrics = self.optimizers["actor"].evaluate(self.actor_loss, batch)
        return metrics | {"actor_grad_norm": self.actor_optimizer_step(loss)}

    def actor_optimizer_step(self, loss: Tensor) -> Tensor:
        """Step along the gradient of `loss`; returns its norm."""
        return self.optimizers["actor"].step(loss, of=self.actor_loss)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss 0-d of all critics; metrics, "td_error" [B] among them)."""
        target = self.critic_target(batch)
        return self.loss_of(self.q_outputs(batch["obs"], batch["action"]), target, batch)

    def loss_of(self, output: Tensor, target: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss, metrics) as `critic_loss` returns them, of the critics' output [E, B, 1 or atoms]
        and their target [B] or [B, atoms].
        """
        values, weight = self._expected(output), batch["weight"]
        if self.config.atoms:
            loss, error = categorical_td_loss(output, target, weight)
        else:
            loss, error = td_loss(values, target, weight, None)
        metrics = {"critic_loss": loss.detach(), "qf_values": values.detach(), "td_error": error}
        if self.config.fit_returns:
            fit_loss, _ = td_loss(values, batch["fit_return"], weight, None)
            loss = loss + self.config.fit_returns * fit_loss
        return loss, metrics

    # ---- returns of a rollout ----

    def extra_columns(self) -> dict[str, tuple[int, ...]]:
        return {"fit_return": ()} if self.config.fit_returns else {}

    def compute_extra_columns(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        if not self.config.fit_returns:
            return {}
        final_value = self.value(buffer["final_obs"].flatten(0, 1)).view_as(buffer["reward"])
        # with lambda 1 the values cancel out, except at the end of the rollout
        value = torch.cat((torch.zeros_like(final_value[:1]), final_value))
        reward = buffer["reward"] * self.config.reward_scale
        ends = buffer["terminated"], buffer["truncated"]
        valid = buffer.columns.get("valid")
        _, returns, _ = gae(reward, value, final_value, *ends, self.config.gamma, 1.0, valid)
        return {"fit_return": returns}
