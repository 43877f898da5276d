"""Proximal policy optimisation (Schulman et al. 2017) over thousands of environments, with or
without memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.algorithms.base import Decision
from gpurl.algorithms.on_policy import OnPolicy, OnPolicyConfig, flat
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.backend import host_may_look, use_triton
from gpurl.kernels.gae import gae
from gpurl.kernels.ppo_loss import PARTS, PpoOptions, PpoRows, PpoScalars
from gpurl.losses import PpoTerms, explained_variance, ppo_loss
from gpurl.nn.arrays import Array, as_tensor, joined
from gpurl.nn.distributions import Gaussian, make_head
from gpurl.nn.host_network import FEW_ROWS, HostNetwork, ppo_steps_of
from gpurl.nn.networks import ActorCritic, AsymmetricActorCritic, Carry, NetworkConfig
from gpurl.nn.normalizer import ValueNormalizer
from gpurl.nn.optimizer import FlatAdam

LEARNING_RATE_LIMITS = (1e-5, 1e-2)  # of the KL-adaptive rate, as in rsl_rl


@dataclass(frozen=True)
class PPOConfig(OnPolicyConfig):
    """Settings of PPO; the defaults suit thousands of environments."""

    fixed = (
        *OnPolicyConfig.fixed,
        "network",
        "squash",
        "normalize_value",
        "initial_std",
        "asymmetric",
    )
    schedules = ("kl", "linear", "constant")

    schedule: str = "kl"
    """Learning rate over time: kl (keeps the policy's change near target_kl), linear (to 0) or
    constant.
    """
    target_kl: float = 0.01
    """KL divergence from the acting policy, in the last epoch, that the kl schedule aims at."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation."""
    clip_range: float = 0.2
    """How far the probability ratio may leave 1."""
    clip_range_value: float | None = None
    """How far a value may leave the old one, in units of the normalised return; None does not
    clip.
    """
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 1.0
    """Weight of the squared value error."""
    max_grad_norm: float | None = 1.0
    normalize_advantage: str = "batch"
    """batch, minibatch or none."""
    normalize_obs: bool = True
    normalize_value: bool = True
    """The critic predicts normalised returns."""
    squash: bool = False
    """Squash continuous actions by tanh instead of clipping them."""
    initial_std: float = 1.0
    """Standard deviation of continuous actions at the start; it stays between 0.0067 and 7.4 (e^-5
    and e^2).
    """
    asymmetric: bool = True
    """The critic reads what an environment shows to critics only, where there is such a thing, and
    not the observations.
    """
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Shape of the networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"normalize_advantage": ("batch", "minibatch", "none")})
        above_zero = ("target_kl", "clip_range", "clip_range_value", "initial_std")
        check_numbers(
            self, {"entropy_coef": 0, "value_coef": 0}, above_zero, zero_to_one=("gae_lambda",)
        )
        if self.schedule == "kl" and self.epochs * self.minibatches == 1:
            raise UsageError(
                "schedule kl needs a second step on each rollout, to see how far the first one "
                "went: with epochs 1 and minibatches 1 "
                "take schedule linear or constant"
            )


class PPO(OnPolicy):
    """Actor and critic with their normalisers; one flat Adam; a rollout buffer of `horizon`
    steps.
    """

    config: PPOConfig

    def reads_state(self) -> bool:
        return self.config.asymmetric

    def make_networks(self) -> None:
        config = self.config
        self.is_recurrent = config.network.memory != "none"
        self.head = make_head(self.action_space, config.squash, config.initial_std, self.label)
        outputs = self.head.num_outputs
        self.network = (
            AsymmetricActorCritic(config.network, self.num_inputs, self.num_state, outputs)
            if self.num_state
            else ActorCritic(config.network, self.num_inputs, outputs)
        )
        self.value_normalizer = ValueNormalizer() if config.normalize_value else None
        self.precision = "float32"

    def make_optimizer(self) -> FlatAdam:
        config = self.config
        return FlatAdam(
            self,
            config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            losses=PARTS,
        )

    def make_training(self) -> None:
        config = self.config
        self.normalizes_minibatches = config.normalize_advantage == "minibatch"
        super().make_training()
        self.host_network: HostNetwork | None = None
        if host_may_look(self.device) and HostNetwork.serves(self.network):
            options = config.value_coef, config.clip_range_value, self.normalizes_minibatches
            self.host_network = HostNetwork(
                self.network, ppo_steps_of(self.head, self.optimizer, *options)
            )
            self.head.share_with_numpy()
        # in one kernel where there is one; elsewhere the head and the loss apart take less than its
        # reference
        self.fuses_loss = (
            self.head.has_kernels and use_triton(self.optimizer.flat) and not self.is_recurrent
        )
        self.clip_range = torch.tensor(config.clip_range, device=self.device)
        self.entropy_coef = torch.tensor(config.entropy_coef, device=self.device)
        self.host_scalars = (
            (self.clip_range.numpy(), self.entropy_coef.numpy())
            if self.host_network is not None
            else ()
        )

    def set_precision(self, precision: str) -> None:
        if precision == "bf16":
            self.network.set_dtype(torch.bfloat16)
            self.host_network = None  # it computes in float32
        self.precision = precision

    # ---- acting ----

    def initial_carry(self, num_envs: int) -> Carry:
        return self.network.initial_carry(num_envs, self.device)

    def act(self, obs: Tensor, carry: Carry = (), explore: bool = True) -> Decision:
        if self.num_state and not explore:  # without the state, which the actor does not read
            obs = torch.nn.functional.pad(obs.flatten(1)[:, : self.num_inputs], (0, self.num_state))
        rows = self._rows(obs)
        if isinstance(rows, np.ndarray):
            return self._act(rows, (), explore)
        with torch.no_grad():
            return self._act(rows, carry, explore)

    def _act(self, rows: Array, carry: Carry, explore: bool) -> Decision:
        """rows: [N, D] observations."""
        inputs, next_carry = self.network.remember(self._normalized(rows), carry)
        output, value = self._outputs(inputs)
        if not explore:
            return Decision(as_tensor(self.head.to_env(self.head.mode(output))), next_carry, {})
        action, log_prob, env_action = self.head.decide(output, self.action_random)
        self.action_random.advance()
        columns = {
            "action": as_tensor(action),
            "log_prob": as_tensor(log_prob),
            "value": as_tensor(self._true_value(value)),
        }
        if self.is_recurrent:
            columns["carry"] = carry[0]
        return Decision(as_tensor(env_action), next_carry, columns)

    @torch.no_grad()
    def value(self, obs: Tensor, carry: Carry = ()) -> Tensor:
        inputs, _ = self.network.remember(self._normalized(self._rows(obs)), carry)
        value = (
            self.network.value(inputs) if self.host_network is None else self._outputs(inputs)[1]
        )
        return as_tensor(self._true_value(value))

    def _rows(self, obs: Tensor) -> Array:
        """obs [N, *obs] -> [N, D] float32, as an array where numpy is quicker; [N, D + S] where the
        critic reads a state.
        """
        if self.host_network is not None and obs.shape[0] <= FEW_ROWS:
            return obs.detach().numpy().reshape(obs.shape[0], -1).astype(np.float32, copy=False)
        return obs.reshape(obs.shape[0], -1).float()

    def _outputs(self, x: Array) -> tuple[Array, Array]:
        """(the head's numbers [N, A], value [N]) for x [N, F]."""
        output, value, _ = (self.host_network or self.network)(x)
        return output, value

    def _normalized(self, rows: Array) -> Array:
        """[..., D] float32."""
        return rows if self.normalizer is None else self.normalizer(rows)

    def _true_value(self, value: Array) -> Array:
        return value if self.value_normalizer is None else self.value_normalizer.denormalized(value)

    # ---- learning ----

    # gradients are written out, so autograd is off where no memory needs it; inference mode spares
    # a small CPU update a seventh

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """{"packed": a row a sample}, with a memory columns [T, N, ...] instead; and the explained
        variance.
        """
        with torch.no_grad() if self.is_recurrent else torch.inference_mode():
            data, advantage_moments = self._targets(buffer)
            metrics = {
                "explained_variance": explained_variance(buffer["value"], data.pop("true_returns"))
            }
            if self.config.normalize_advantage == "batch":
                mean, variance, _ = advantage_moments.unbind()
                data["advantage"] = (data["advantage"] - mean) / (variance.sqrt() + 1e-8)
            if (
                self.normalizer is not None
            ):  # after this rollout's observations were normalised as they were when acted on
                self.normalizer.update(flat(buffer["obs"]), buffer.columns.get("valid"))
            if self.is_recurrent:
                return data | metrics
            return {"packed": self.minibatches.pack(data)} | metrics

    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad() if self.is_recurrent else torch.inference_mode():
            taken = self.optimizer.state.step.clone() if self.config.schedule == "kl" else None
            in_c = self.host_network is not None and self.host_network.steps is not None
            parts = self._learn_in_c(data["packed"]) if in_c else self._learn(data)
            if taken is not None:
                self._adapt_learning_rate(parts["approx_kl"], self.optimizer.state.step > taken)
            if isinstance(self.head, Gaussian):
                self.head.stay_inside()
            self.num_updates += 1
            return {"train/explained_variance": data["explained_variance"]} | self._named(parts)

    def _learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """All epochs; returns the 0-d means of the last one's steps."""
        for _ in range(self.config.epochs):
            losses, norms = zip(
                *(self._minibatch_step(minibatch) for minibatch in self._minibatches(data))
            )
        return dict(zip(PARTS, torch.stack(losses).mean(0).unbind())) | {
            "grad_norm": torch.stack(norms).mean()
        }

    def _learn_in_c(self, packed: Tensor) -> dict[str, Tensor]:
        """The same on a CPU, an epoch a call."""
        assert self.host_network is not None
        scalars, has_valid = (
            (float(self.clip_range), float(self.entropy_coef)),
            "valid" in self.minibatches.rows.places,
        )
        for _ in range(self.config.epochs):
            order = self.minibatches.order(packed.shape[0])
            parts = self.host_network.learn(
                packed, has_valid, order, self.config.minibatches, *scalars
            )
        return {name: part.mean().float() for name, part in parts.items()}

    def _targets(self, buffer: RolloutBuffer) -> tuple[dict[str, Tensor], Tensor]:
        """Columns [T, N, ...] for the minibatches, and the advantage's moments [3]."""
        valid, final_value = buffer.columns.get("valid"), self.final_values(buffer)
        advantage, returns, moments = gae(
            buffer["reward"],
            torch.cat((buffer["value"], final_value[-1:])),
            final_value,
            buffer["terminated"],
            buffer["truncated"],
            self.config.gamma,
            self.config.gae_lambda,
            valid,
        )
        old_value, target = buffer["value"], returns
        if self.value_normalizer is not None:
            self.value_normalizer.update(returns.unsqueeze(-1), valid)
            old_value, target = (
                self.value_normalizer.normalized(old_value),
                self.value_normalizer.normalized(target),
            )
        obs = self._normalized(flat(buffer["obs"]))
        data = {
            "obs": obs,
            "action": buffer["action"],
            "log_prob": buffer["log_prob"],
            "value": old_value,
            "advantage": advantage,
        }
        data |= {"returns": target, "true_returns": returns}
        data |= {
            name: buffer[name] for name in ("valid", "carry", "ended") if name in buffer.columns
        }
        return data, moments

    def _minibatches(self, data: dict[str, Tensor]) -> Iterator[dict[str, Array]]:
        """One pass, in the form that `_minibatch_step` takes."""
        if self.is_recurrent:
            return self.minibatches.of_envs(
                {name: column for name, column in data.items() if column.dim()}
            )
        if self.fuses_loss:
            return self.minibatches.in_place(data["packed"])
        return self.minibatches.of_steps(
            data["packed"], few=FEW_ROWS if self.host_network is not None else 0
        )

    def _minibatch_step(self, minibatch: dict[str, Array]) -> tuple[Tensor, Tensor]:
        """One optimiser step; returns the parts of the loss [PARTS], which it is left out for too,
        and the gradient's norm, 0-d.
        """
        config, memory, inputs = self.config, self.network.memory, minibatch["obs"]
        network: Any = self.host_network or self.network
        if memory is not None:
            inputs, sequence = self.network.unroll(
                minibatch["obs"], minibatch["carry"][0], minibatch["ended"]
            )
            minibatch = {name: column.flatten(0, 1) for name, column in minibatch.items()}
        scalars = (
            (self.clip_range, self.entropy_coef)
            if isinstance(inputs, Tensor)
            else self.host_scalars
        )
        old_log_prob, advantage, returns, old_value = (
            minibatch[name] for name in ("log_prob", "advantage", "returns", "value")
        )
        output, value, outputs = network(inputs)
        if self.fuses_loss:
            rows = PpoRows(
                minibatch["action"],
                old_log_prob,
                advantage,
                returns,
                old_value,
                minibatch.get("valid"),
            )
            options = PpoOptions(config.value_coef, config.clip_range_value)
            numbers = PpoScalars(
                self.clip_range, self.entropy_coef, num_valid=minibatch.get("num_valid")
            )
            found = self.head.ppo_loss(output, value, rows, numbers, options)
            of_output, of_value, losses = found
        else:
            terms = PpoTerms(
                old_log_prob, advantage, returns, old_value, minibatch.get("weight"), *scalars
            )
            log_prob, entropy, head_backward = self.head.evaluate(output, minibatch["action"])
            slopes, parts = ppo_loss(
                log_prob, value, entropy, terms, config.value_coef, config.clip_range_value
            )
            losses = joined(list(parts.values()))
            of_output, of_value = head_backward(slopes.log_prob, slopes.entropy), slopes.value
        gradient = network.backward(of_output, of_value, outputs)
        if memory is not None and gradient is not None:
            memory.backward(sequence, gradient.view_as(sequence))
        return losses, self.optimizer.step_along_gradient(losses=losses)

    def _adapt_learning_rate(self, kl: Tensor, has_moved: Tensor) -> None:
        """Slower when the last epoch found the policy over twice target_kl away, faster when under
        half; as it was if no step was taken.

        The rule of rsl_rl and rl_games, which look after every minibatch; here once an iteration.
        kl, has_moved: 0-d.
        """
        rate, target = self.optimizer.learning_rate, self.config.target_kl
        change = 0.5 * (kl < 0.5 * target).float() - (kl > 2.0 * target).float() / 3.0
        rate.mul_(1.0 + change * has_moved).clamp_(*LEARNING_RATE_LIMITS)

    def _named(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the last epoch, as they are logged."""
        policy_loss, value_loss, entropy = (
            -parts["surrogate"],
            parts["value_loss"],
            parts["entropy"],
        )
        metrics = {
            f"train/{name}": parts[name]
            for name in ("value_loss", "approx_kl", "clip_fraction", "grad_norm")
        }
        metrics |= {"train/policy_gradient_loss": policy_loss, "train/entropy_loss": -entropy}
        metrics["train/loss"] = (
            policy_loss + self.config.value_coef * value_loss - self.entropy_coef * entropy
        )
        metrics |= {
            "train/learning_rate": self.optimizer.learning_rate.clone(),
            "train/clip_range": self.clip_range.clone(),
        }
        metrics["train/n_updates"] = self.num_updates.clone()
        if isinstance(self.head, Gaussian):
            metrics["train/std"] = self.head.bounded_log_std().exp().mean()
        return metrics
