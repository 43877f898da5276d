"""Proximal policy optimisation (Schulman et al. 2017) over thousands of environments, with or
without memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gpurl.algorithms.base import Decision, Metrics, PolicyState
from gpurl.algorithms.on_policy import OnPolicy, OnPolicyConfig
from gpurl.algorithms.symmetry import Mirror, Symmetry
from gpurl.buffers.minibatches import Minibatch
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.vec_env import describe
from gpurl.errors import UsageError
from gpurl.kernels.gae import gae
from gpurl.kernels.moments import pooled_moments
from gpurl.kernels.pack_rows import Column, Standardized, scaled
from gpurl.kernels.ppo_loss import METRICS
from gpurl.kernels.vtrace import vtrace
from gpurl.losses import explained_variance, weighted_mean
from gpurl.nn.acting import Actor, OneOutput
from gpurl.nn.actor_critic import ActorCritic, AsymmetricActorCritic, NetworkConfig
from gpurl.nn.distributions import Gaussian, TanhGaussian, make_head
from gpurl.nn.encoders import EncoderConfig
from gpurl.nn.mlp import Dense, standalone
from gpurl.nn.normalizer import ValueNormalizer
from gpurl.nn.optimizer import FlatAdam, FrozenWeights, stack_metrics
from gpurl.nn.own_network import OwnTrunks
from gpurl.nn.parts import ActorPart, Deviation, Part, dense_actor_part, state_tensors

KL_SCHEDULES = ("kl", "kl_minibatch")
LEARNING_RATE_LIMITS = (1e-5, 1e-2)  # of the KL-adaptive rate, as in rsl_rl
# metrics of the loss that are logged with the opposite sign, under another name
NEGATED = {"surrogate": "policy_gradient_loss", "entropy": "entropy_loss"}
# metrics that PPO logs beside those of its loss
LOGGED = {
    *("loss", "grad_norm", "explained_variance", "learning_rate", "clip_range", "n_updates"),
    *("std", "asymmetry", *NEGATED.values()),
}


@dataclass(frozen=True)
class PPOConfig(OnPolicyConfig):
    """Settings of PPO; the defaults suit thousands of environments."""

    fixed = (
        *OnPolicyConfig.fixed,
        "network",
        "squash",
        "distribution",
        "std_type",
        "state_dependent_std",
        "normalize_value",
        "initial_std",
        "reset_std",
        "asymmetric",
        "critic_warmup",
    )
    choices: ClassVar[Choices] = {
        "schedule": ("kl", "kl_minibatch", "linear", "constant"),
        "normalize_advantage": ("batch", "minibatch", "none"),
        "distribution": ("normal", "beta"),
        "std_type": ("log", "scalar"),
    }
    changeable: ClassVar[tuple[str, ...]] = (
        *OnPolicyConfig.changeable,
        *("gae_lambda", "clip_range", "entropy_coef", "target_kl", "epochs"),
    )
    explored: ClassVar[dict[str, tuple[float, float]]] = {
        **OnPolicyConfig.explored,
        "entropy_coef": (1e-5, 0.1),
        "clip_range": (0.05, 0.4),
    }

    schedule: str = "kl"
    """Learning rate over time: kl (keeps the policy's change near target_kl), kl_minibatch (looks
    after each minibatch, as rsl_rl and rl_games do, and not once an iteration), linear (to 0) or
    constant.
    """
    target_kl: float = 0.01
    """KL divergence from the acting policy in the last epoch, for the kl schedule."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation."""
    clip_range: float = 0.2
    """Clip range of the probability ratio around 1."""
    clip_range_value: float | None = None
    """Clip range of the value around the old one, in units of the normalised return; None: no
    clipping.
    """
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 1.0
    """Weight of the squared value error."""
    bounds_coef: float = 0.0
    """Weight of the squared excess of mean actions beyond 1.1 times their bounds, which keeps the
    mean of a clipped action where it still has an effect.
    """
    max_grad_norm: float | None = 1.0
    normalize_advantage: str = "batch"
    """batch, minibatch or none."""
    normalize_obs: bool = True
    normalize_value: bool = True
    """The critic predicts normalised returns."""
    squash: bool = False
    """Squash continuous actions by tanh instead of clipping them."""
    distribution: str = "normal"
    """Of continuous actions: normal, or beta, which stays inside the bounds of a Box by itself and
    whose deviation depends on the state (Chou et al. 2017).
    """
    std_type: str = "log"
    """What is learned of the standard deviation: log, its logarithm, or scalar, itself."""
    state_dependent_std: bool = False
    """The network gives the standard deviation too, beside the mean."""
    initial_std: float = 1.0
    """Standard deviation of continuous actions at the start; it stays between 0.0067 and 7.4 (e^-5
    and e^2). distribution beta begins at 0.48 whatever this is.
    """
    reset_std: bool = False
    """With init_from: begin with initial_std in place of the standard deviation of that run."""
    critic_warmup: int = 0
    """Iterations at the start in which only the critic learns; for init_from, where a new critic
    would degrade the actor. The actor and its normaliser stay as they are, and a schedule that
    follows the KL divergence leaves the learning rate as it is.
    """
    asymmetric: bool = True
    """The critic reads the environment's privileged observations, if it has any, in place of the
    actor's.
    """
    symmetry: str = ""
    """Function that mirrors the task, MODULE:FUNCTION as my_task:mirror, or task for the method
    mirror of the environment: (obs, action) -> (obs, action), for batches [B, ...], action may be
    None. The policy's asymmetry is logged.
    """
    symmetry_augment: bool = True
    """Learn from a mirrored copy of each step too, if there is a symmetry."""
    symmetry_coef: float = 0.0
    """Weight of the mean squared difference of mean actions at mirrored states to mirrored mean
    actions.
    """
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Shape of the networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero = ("target_kl", "clip_range", "clip_range_value", "initial_std")
        check_numbers(
            self,
            {
                "entropy_coef": 0,
                "value_coef": 0,
                "bounds_coef": 0,
                "symmetry_coef": 0,
                "critic_warmup": 0,
            },
            above_zero,
            zero_to_one=("gae_lambda",),
        )
        if self.symmetry_coef and not self.symmetry:
            raise UsageError(
                f"symmetry_coef {self.symmetry_coef} needs the mirror of the task: --symmetry "
                f"my_task:mirror"
            )
        if self.schedule in KL_SCHEDULES and self.epochs * self.minibatches == 1:
            raise UsageError(
                f"schedule {self.schedule} needs a second step on each rollout to measure the KL "
                f"divergence of the first: with epochs 1 and minibatches 1 take schedule linear or "
                f"constant"
            )


class PPO(OnPolicy):
    """Actor and critic with their normalisers, one flat Adam, a rollout buffer.

    A subclass adds a term to the loss by overriding `loss`, and uses its own network by setting
    `self.network` in `make_networks`: any module from observations [B, D] to (outputs for the
    action head [B, head.num_outputs], value [B]).
    """

    config: PPOConfig

    def reads_state(self) -> bool:
        return self.config.asymmetric

    def encoder_config(self) -> EncoderConfig | None:
        return self.config.network

    def takes_groups(self) -> bool:
        if isinstance(self.network, OwnTrunks):
            return self.reads_bytes or isinstance(self.observation_space, GroupedBox)
        return isinstance(self.network, ActorCritic) and super().takes_groups()

    def make_networks(self) -> None:
        config = self.config
        self.is_recurrent = config.network.memory != "none"
        self.head = make_head(
            self.action_space,
            config.squash,
            config.initial_std,
            self.label,
            config.distribution,
            config.std_type,
            config.state_dependent_std,
        )
        if config.bounds_coef:
            self.head.excess(torch.zeros(1, self.head.num_outputs))  # or an error
        self.network = self._make_network(self.head.num_outputs)
        self.value_normalizer = ValueNormalizer() if config.normalize_value else None

    def _make_network(self, outputs: int) -> ActorCritic:
        """From observations [B, D] to (outputs for the action head [B, outputs], value [B])."""
        config = self.config.network
        if config.trunk:
            if self.num_state:
                raise UsageError(
                    f"network {config.trunk} reads observations only: take --asymmetric False"
                )
            own = OwnTrunks(config, self.observation_space, outputs)
            return cast(ActorCritic, own)  # the same interface
        if self.num_state:
            self.refuse_encoders_beside_state(config)
            return AsymmetricActorCritic(config, self.num_inputs, self.num_state, outputs)
        return ActorCritic(config, self.num_inputs, outputs, self.observation_space)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        config = self.config
        adam = FlatAdam(
            self,
            config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            losses=METRICS,
        )
        return {"policy": adam}

    def parts(self) -> dict[str, Part]:
        """An actor and a critic, unless the network is a module of somebody's own."""
        network = self.network
        if not isinstance(network, ActorCritic | OwnTrunks):
            return super().parts()
        form, tensors = network.critic_part()
        reads = "privileged observations" if self.num_state else "observations"
        units = "as they are" if self.value_normalizer is None else "normalised"
        return {
            "actor": self._actor_part(network.actor_part(), network.actor),
            "critic": Part(
                (f"reads {reads}", f"gives returns {units}", *form),
                (*tensors, *state_tensors(self.value_normalizer)),
                needs_actor=network.critic_reads_actor,
            ),
        }

    def _actor_part(
        self, body: tuple[tuple[str, ...], tuple[Tensor, ...]], last: Dense
    ) -> ActorPart:
        """body: (layers, weights) of the actor without its last layer."""
        head = self.head
        if not isinstance(head, Gaussian):
            return dense_actor_part(body, last, head.num_outputs, head.actions)
        is_log, initial = head.std_type == "log", head.initial_std
        offset = math.log(initial) if is_log else initial
        part = dense_actor_part(body, last, head.num_actions, head.actions, is_log, offset)
        if head.state_dependent_std:
            return part
        values = head.log_std if is_log else head.std
        return dataclasses.replace(part, std=Deviation(values.detach(), is_log))

    def make_training(self) -> None:
        config = self.config
        self.normalizes_minibatches = config.normalize_advantage == "minibatch"
        super().make_training()
        self.clip_range = torch.tensor(config.clip_range, device=self.device)
        self.entropy_coef = torch.tensor(config.entropy_coef, device=self.device)
        self._actor_freezer: FrozenWeights | None = None
        if config.critic_warmup:
            if not isinstance(self.network, ActorCritic | OwnTrunks):
                raise UsageError(
                    f"critic_warmup {config.critic_warmup} needs to know which weights are the "
                    f"critic's, which the network {type(self.network).__name__} does not say: "
                    f"leave it out"
                )
            critic = self.network.critic_part()[1]
            self._actor_freezer = FrozenWeights(self.optimizer, critic)

    def end_learning(self) -> None:
        was_warming = self.warms_critic
        super().end_learning()
        if was_warming and not self.warms_critic and self._actor_freezer is not None:
            # the moments of frozen weights are 0, but Adam has counted those steps: it would take
            # the first true gradients for rare ones, and steps of several times the learning rate
            self.optimizer.forget_moments()

    def set_symmetry(self, mirror: Mirror, name: str) -> None:
        self.refuse_mirrored_images(name)
        if self.is_recurrent:
            raise UsageError(
                f"symmetry {name} needs a policy without memory: a mirrored step has no hidden "
                f"state; take --network.memory none or leave out symmetry"
            )
        scaler = getattr(self.head, "box", None)
        if self.config.symmetry_coef and scaler is None:
            raise UsageError(
                f"symmetry_coef compares mean actions of a Box, this action space is "
                f"{self.action_space}: leave it out, symmetry_augment works"
            )
        self.symmetry = Symmetry(
            mirror,
            name,
            (self.observation_space, self.action_space, self.state_space),
            scaler,
            self.device,
            is_squashed=isinstance(self.head, TanhGaussian),
        )

    @property
    def learns_symmetry(self) -> bool:
        """Whether updates use mirrored steps; else a symmetry is only measured."""
        has_use = self.config.symmetry_augment or self.config.symmetry_coef > 0
        return self.symmetry is not None and has_use

    def change_setting(self, name: str, value: float) -> None:
        super().change_setting(name, value)
        # which kernels read
        self.clip_range.fill_(self.config.clip_range)
        self.entropy_coef.fill_(self.config.entropy_coef)

    # ---- acting ----

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        if not self.is_recurrent:
            return ()
        assert self.network.memory is not None
        return (torch.zeros(num_envs, self.network.memory.state_size, device=self.device),)

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        features, next_policy_state = self._features(
            obs if explore else self.without_state(obs), policy_state
        )
        output, value = self._forward(features)
        if not explore:
            return Decision(self.head.to_env(self.head.mode(output)), next_policy_state, {})
        # sample, and keep what the loss needs
        action, log_prob, env_action = self.head.decide(output, self.action_random)
        self.action_random.advance()
        columns = {"action": action, "log_prob": log_prob, "value": self._denormalized(value)}
        if self.is_recurrent:
            columns["policy_state"] = policy_state[0]
        return Decision(env_action, next_policy_state, columns)

    def actor_modules(self) -> Actor:
        choice = self.head.to_torch()
        network: nn.Module = self.network
        if type(network) not in (ActorCritic, AsymmetricActorCritic, OwnTrunks):
            own = standalone(network, f"the network {type(network).__name__}")
            return Actor(OneOutput(own), choice)
        actor = self.network.actor_to_torch()
        if not self.is_recurrent:
            return Actor(actor, choice)
        assert self.network.memory is not None
        memory = self.network.memory_to_torch()
        return Actor(actor, choice, memory, self.network.memory.state_size)

    @torch.no_grad()
    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        features, _ = self._features(obs, policy_state)
        return self._denormalized(self._forward(features)[1])

    def _features(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """obs: [N, *obs] -> (inputs of the network [N, F], next policy state)."""
        inputs = self.inputs(obs)
        if not self.is_recurrent:
            return inputs, ()
        features, state = self.network.remember(inputs, policy_state[0])
        return features, (state,)

    def _forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features [B, F] -> (outputs for the action head [B, A], value [B])."""
        returned = self.network(features)
        if not torch.jit.is_tracing():  # which would keep this number of rows
            self._check_returned(returned, len(features))
        output, value = returned
        return output, value

    def _check_returned(self, returned: Any, rows: int) -> None:
        """UsageError if a network of somebody's own has returned anything else than `_forward`."""
        each = returned if isinstance(returned, tuple | list) else (returned,)
        wanted = [(rows, self.head.num_outputs), (rows,)]
        if [getattr(value, "shape", None) for value in each] != wanted:
            raise UsageError(
                f"{self.label} needs an output for its action head and one value a row, of shapes "
                f"{wanted[0]} and {wanted[1]}; {type(self.network).__name__} returned "
                f"{', '.join(map(describe, each))}"
            )

    def _denormalized(self, value: Tensor) -> Tensor:
        return value if self.value_normalizer is None else self.value_normalizer.denormalized(value)

    # ---- recording ----

    def make_buffer(self) -> RolloutBuffer:
        buffer = super().make_buffer()
        config = self.config
        rows = self.num_envs * config.horizon * self.ranks.count
        # parts of a rollout that are normalised by themselves
        parts = {"batch": 1, "minibatch": config.minibatches, "none": 0}[config.normalize_advantage]
        if rows == parts:
            raise UsageError(
                f"{self.label} normalises advantages over each {config.normalize_advantage}, and "
                f"one of a single row has an advantage of 0: the policy would learn nothing. "
                f"num_envs {self.num_envs} * horizon {config.horizon} has a row for each of "
                f"minibatches = {config.minibatches}: take a longer horizon, more environments, "
                f"fewer minibatches or normalize_advantage none"
            )
        return buffer

    # ---- learning ----

    @torch.no_grad()
    def catch_up(self, buffer: RolloutBuffer) -> None:
        """For a rollout that an earlier policy played, before `prepare`: its values become those of
        the critic as it is now, and a column "log_ratio" [T, N] is added, the log-probability of
        each action now minus that when it was taken. Without memory only.
        """
        shape = buffer["value"].shape
        output, value = self._forward(self.inputs(buffer["obs"].flatten(0, 1)))
        log_prob = self.head.log_prob(output, buffer["action"].flatten(0, 1))
        buffer.columns["value"].copy_(self._denormalized(value).view(shape))
        buffer.columns["log_ratio"] = log_prob.view(shape) - buffer["log_prob"]

    def targets(self, buffer: RolloutBuffer) -> tuple[Tensor, Tensor, Tensor]:
        """(advantage [T, N], returns [T, N], moments of the advantage [3]): by GAE, after
        `catch_up` by V-trace. The loss then clips the ratio to the policy that acted.
        """
        config = self.config
        # truncated episodes bootstrap from their final observation
        final_value = self.final_values(buffer)
        steps = (
            buffer["reward"],
            torch.cat((buffer["value"], final_value[-1:])),
            final_value,
            buffer["terminated"],
            buffer["truncated"],
        )
        numbers = config.gamma, config.gae_lambda, buffer.columns.get("valid")
        if "log_ratio" in buffer.columns:
            return vtrace(*steps, buffer["log_ratio"], *numbers)
        return gae(*steps, *numbers)

    @torch.no_grad()
    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """{"packed": one row a sample}, or columns [T, N, ...] with memory; and the explained
        variance.
        """
        config = self.config
        valid = buffer.columns.get("valid")

        # advantages and returns
        advantage, returns, moments = self.targets(buffer)
        metrics = {"explained_variance": explained_variance(buffer["value"], returns, valid)}
        if self.value_normalizer is not None:
            self.value_normalizer.update(returns.unsqueeze(-1), valid)

        # what minibatches are made of: values in the critic's own units, observations as normalised
        # while acting
        mirrored = self._mirrored(buffer["obs"], buffer["action"])
        columns: dict[str, Column] = {
            **mirrored,
            "obs": self.inputs_to_pack(buffer["obs"]),
            "action": buffer["action"],
            "log_prob": buffer["log_prob"],
            "value": buffer["value"],
            "advantage": advantage,
            "returns": returns,
        }
        if config.normalize_advantage == "batch":
            columns["advantage"] = Standardized(advantage, self._moments_of_ranks(moments))
        if self.value_normalizer is not None:
            columns["value"] = self.value_normalizer.scaled(buffer["value"])
            columns["returns"] = self.value_normalizer.scaled(returns)
        # mirrored before they are normalised: the running mean is not symmetric
        if mirrored:
            columns["mirror_obs"] = self.inputs_to_pack(mirrored["mirror_obs"])
        self.update_normalizer(buffer["obs"], valid)  # for the next rollout
        if valid is not None:
            columns["valid"] = valid
        return metrics | self._rows(columns, buffer)

    def _moments_of_ranks(self, moments: Tensor) -> Tensor:
        """[3] mean, population variance and count over all ranks, of those over this one."""
        if self.ranks.count == 1:
            return moments
        means, variances, counts = self.ranks.stack(moments).unbind(1)
        count, mean, variance = pooled_moments(counts, means, variances)
        return torch.stack((mean, variance, count))

    def _mirrored(self, obs: Tensor, action: Tensor) -> dict[str, Tensor]:
        """The columns [T, N, ...] of mirrored steps that updates need; also measures the symmetry
        of the policy at the last step. obs: [T, N, *obs], not normalised.
        """
        if self.config.symmetry and self.symmetry is None:
            raise UsageError(f"symmetry {self.config.symmetry} is not loaded: call set_symmetry()")
        if self.symmetry is None:
            return {}
        obs = obs.reshape(*obs.shape[:2], -1).float()
        self.symmetry.measure(lambda rows: self.act(rows, explore=False).action, obs[-1])
        if not self.learns_symmetry:
            return {}
        steps = obs.shape[:2]
        rows, mirrored = self.symmetry.rows(obs.flatten(0, 1), action.flatten(0, 1))
        assert mirrored is not None
        columns = {"mirror_obs": rows.unflatten(0, steps)}
        if self.config.symmetry_augment:
            columns["mirror_action"] = mirrored.unflatten(0, steps)
        return columns

    def _rows(self, columns: dict[str, Column], buffer: RolloutBuffer) -> dict[str, Tensor]:
        """{"packed": one row a sample}, or with memory the columns and where policies start."""
        if not self.is_recurrent:
            return {"packed": self.minibatches.pack(columns)}
        ended = buffer["ended"]
        starts = torch.cat((torch.zeros_like(ended[:1]), ended[:-1]))
        return {name: scaled(column) for name, column in columns.items()} | {
            "policy_state": buffer["policy_state"][:1],
            "episode_starts": starts,
        }

    @torch.no_grad()
    def learn(self, data: dict[str, Tensor]) -> Metrics:
        steps_before = self.steps_before()
        number = itertools.count()
        for _ in range(self.config.epochs):
            steps = []
            for batch in self.batches(data):
                names, row, norm = self._minibatch_step(batch)
                steps.append((names, row, norm))
                if self.adapts_to_minibatches:
                    self.after_minibatch(next(number), dict(zip(names, row.unbind())))

        # means over the last epoch
        names, rows, norms = zip(*steps)
        means = dict(zip(names[0], torch.stack(rows).mean(0).unbind()))
        means["grad_norm"] = torch.stack(norms).mean()
        return self.after_epochs(means, steps_before, data)

    def steps_before(self) -> Tensor | None:
        """The optimiser's step count before the first epoch, for schedule kl."""
        return self.optimizer.state.step.clone() if self.config.schedule == "kl" else None

    @property
    def adapts_to_minibatches(self) -> bool:
        """Whether `after_minibatch` is to be called: schedule kl_minibatch."""
        return self.config.schedule == "kl_minibatch" and not self.warms_critic

    def after_minibatch(self, number: int, metrics: Metrics) -> None:
        """Adapt the learning rate to the KL divergence that minibatch step `number` of this
        iteration, from 0, has measured before it moved the policy; the first sees none.
        """
        kl = self._measured_kl(metrics)
        if number:
            self._adapt_learning_rate(kl, kl.isfinite())

    def _measured_kl(self, metrics: Metrics) -> Tensor:
        """0-d, for a schedule that follows it."""
        if "approx_kl" not in metrics:
            raise UsageError(
                f"schedule {self.config.schedule} needs a metric approx_kl of {self.label}.loss"
            )
        return metrics["approx_kl"]

    def batches(self, data: dict[str, Tensor]) -> Iterator[Minibatch]:
        """The minibatches of one epoch, from the data of `prepare`."""
        if self.is_recurrent:
            columns = {name: column for name, column in data.items() if column.dim()}
            return (Minibatch(**batch) for batch in self.minibatches.of_envs(columns))
        minibatches = (Minibatch(**batch) for batch in self.minibatches.of_steps(data["packed"]))
        if self.learns_symmetry and self.config.symmetry_augment:
            return map(Symmetry.augment, minibatches)
        return minibatches

    def outputs(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """(outputs for the action head [B, A], value [B]); with memory [T, B, A] and [T, B]."""
        if not self.is_recurrent:
            return self._forward(batch.obs)
        assert batch.policy_state is not None
        assert batch.episode_starts is not None
        features = self.network.unroll(batch.obs, batch.policy_state[0], batch.episode_starts)
        output, value = self._forward(features.flatten(0, 1))
        shape = features.shape[:2]
        return output.unflatten(0, shape), value.unflatten(0, shape)

    def loss(self, batch: Minibatch) -> tuple[Tensor, Metrics]:
        """(the loss, 0-d and differentiable; metrics, 0-d, logged as train/NAME).

        To add a term: `loss, metrics = super().loss(batch)` and
        `return loss + term, metrics | {"my_term": term}`.
        """
        config = self.config
        output, value = self.outputs(batch)
        loss, metrics = self.head.ppo_loss(
            output,
            value,
            batch,
            self.clip_range,
            self.entropy_coef,
            config.value_coef,
            config.clip_range_value,
        )
        if config.bounds_coef:
            bounds_loss = weighted_mean(self.head.excess(output), batch.weight)
            loss = loss + config.bounds_coef * bounds_loss
            metrics["bounds_loss"] = bounds_loss.detach()
        if config.symmetry_coef:
            mirror_loss = self._mirror_loss(batch, output)
            loss = loss + config.symmetry_coef * mirror_loss
            metrics["mirror_loss"] = mirror_loss.detach()
        if (std := self.head.state_std(output.detach())) is not None:
            metrics["state_std"] = std.mean()
        return loss, metrics

    def _mirror_loss(self, batch: Minibatch, output: Tensor) -> Tensor:
        """0-d mean over states s and actions of (pi(mirror(s)) - mirror(pi(s)))^2 for mean actions
        pi in the policy's units; the second has no gradient (Mittal et al. 2024, equation 8, as in
        rsl_rl). output: of the network for `batch.obs`.
        """
        assert self.symmetry is not None
        assert batch.mirror_obs is not None
        count, weight = len(batch.mirror_obs), batch.weight
        if batch.originals is None:
            at_mirrored, _ = self._forward(batch.mirror_obs)
        else:
            at_mirrored = output[count:]
            weight = None if weight is None else 2.0 * weight[:count]
        wanted = self.symmetry.action(self.head.mode(output[:count]).detach())
        difference = self.head.mode(at_mirrored) - wanted
        return weighted_mean(difference.square().mean(-1), weight)

    def _minibatch_step(self, batch: Minibatch) -> tuple[tuple[str, ...], Tensor, Tensor]:
        """One optimiser step; it is skipped if the loss or a part of it is not finite. Returns the
        names of the metrics, the metrics [M] and the gradient's norm, 0-d.
        """
        with torch.enable_grad():
            loss, metrics = self.optimizer.evaluate(self.loss, batch)
        if not LOGGED.isdisjoint(metrics):
            names = ", ".join(sorted(LOGGED.intersection(metrics)))
            raise UsageError(f"{self.label}.loss: PPO logs {names} itself, rename your metric")
        # first the loss and its terms, which must be finite
        terms = {name: metrics[name] for name in METRICS if name in metrics} | {"loss": loss}
        metrics = terms | metrics
        row = stack_metrics(metrics, self.loss)
        self.optimizer.losses = tuple(terms)
        if self.warms_critic and self._actor_freezer is not None:
            norm = self._actor_freezer.step(loss, row[: len(terms)], of=self.loss)
        else:
            norm = self.optimizer.step(loss, row[: len(terms)], of=self.loss)
        return tuple(metrics), row, norm

    def after_epochs(
        self, means: Metrics, steps_before: Tensor | None, data: dict[str, Tensor]
    ) -> Metrics:
        """Adapt the learning rate and clamp the standard deviation. means: the metrics' means over
        the last epoch. Returns what is logged.
        """
        # a frozen actor does not move, whatever the learning rate is
        if steps_before is not None and not self.warms_critic:
            kl = self.ranks.average(self._measured_kl(means))
            self._adapt_learning_rate(kl, self.optimizer.state.step > steps_before)
        if isinstance(self.head, Gaussian):
            self.head.clamp_log_std_()
        self.num_updates += 1
        self.end_learning()

        # log
        std = means.pop("state_std", None)
        if std is None and isinstance(self.head, Gaussian) and not self.head.state_dependent_std:
            std = self.head.bounded_log_std().exp().mean()
        metrics = {f"train/{name}": means[name] for name in means if name not in NEGATED}
        metrics |= {f"train/{NEGATED[name]}": -means[name] for name in means if name in NEGATED}
        metrics["train/explained_variance"] = data["explained_variance"]
        metrics["train/learning_rate"] = self.optimizer.learning_rate.clone()
        metrics["train/clip_range"] = self.clip_range.clone()
        metrics["train/n_updates"] = self.num_updates.clone()
        if std is not None:
            metrics["train/std"] = std
        if self.symmetry is not None:
            metrics["train/asymmetry"] = self.symmetry.asymmetry.clone()
        return metrics

    def _adapt_learning_rate(self, kl: Tensor, has_moved: Tensor) -> None:
        """Divide the rate by 1.5 if the KL divergence is above twice target_kl, multiply it by 1.5
        if below half, as rsl_rl and rl_games do; unchanged unless has_moved. A rate beyond the
        limits may come back to them and gets no further away. kl: 0-d, of the last epoch or of a
        minibatch; has_moved: 0-d bool.
        """
        rate = self.optimizer.learning_rate
        target = self.config.target_kl
        change = 0.5 * (kl < 0.5 * target).float() - (kl > 2.0 * target).float() / 3.0
        lowest, highest = LEARNING_RATE_LIMITS
        limits = rate.clamp(max=lowest), rate.clamp(min=highest)
        rate.mul_(1.0 + change * has_moved).clamp_(*limits)
