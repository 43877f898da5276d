"""The engine of off-policy algorithms on a CPU: C computes the gradients of their updates in place
of autograd, in the memory of the algorithm's weights and optimisers.

It serves DQN, SAC, DDPG and the algorithms that differ from them in settings only, with plain MLPs
and critics of one number. `cpu_off_policy_obstacle` says why it does not serve an algorithm.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.algorithms.ddpg import DDPG
from gpurl.algorithms.dqn import DQN
from gpurl.algorithms.off_policy import Batch, OffPolicy
from gpurl.algorithms.sac import SAC
from gpurl.engine.eager import Eager
from gpurl.engine.obstacles import machine_obstacle, overridden
from gpurl.envs.vec_env import VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels.squash import squashed_backward_c, squashed_sample_c
from gpurl.kernels.stack_batch_cpu import StackBatch
from gpurl.kernels.stack_cpu import ACTIVATIONS, MAX_LAYERS, Layer
from gpurl.kernels.td_gradient import q_target, td_gradient
from gpurl.losses import row_share, weighted_mean
from gpurl.nn.mlp import Dense, Sequential

SERVED: tuple[type[OffPolicy], ...] = (DQN, SAC, DDPG)


def cpu_off_policy_obstacle(algorithm: Algorithm) -> str:
    """Why C cannot stand in for the autograd of `algorithm`'s updates; "" if it can."""
    kind = next((kind for kind in SERVED if isinstance(algorithm, kind)), None)
    if kind is None:
        return f"it is for DQN, SAC and DDPG, not for {type(algorithm).__name__}"
    assert isinstance(algorithm, OffPolicy)
    if obstacle := overridden(algorithm, kind) or machine_obstacle(algorithm):
        return obstacle
    # one number per critic and action, and no loss but that of the TD error
    for name in ("atoms", "quantiles", "fit_returns", "rescale_values"):
        if value := getattr(algorithm.config, name, 0):
            return f"it knows critics of one number and their TD loss only, {name} is {value}"
    for name, network in networks_of(algorithm).items():
        if obstacle := _obstacle_in_network(network):
            return f"{name} {obstacle}"
    return ""


def networks_of(algorithm: OffPolicy) -> dict[str, Sequential]:
    """The networks that learn."""
    if isinstance(algorithm, DQN):
        return {"network": algorithm.network}
    assert isinstance(algorithm, OffPolicyActorCritic)
    return {"actor": algorithm.actor, "critic": algorithm.critic}


def _obstacle_in_network(network: Sequential) -> str:
    """Why C does not compute `network`, or ""."""
    layers = _flattened(network)
    for layer in layers:
        if type(layer) is not Dense:
            return f"has a layer {type(layer).__name__}, wanted plain dense layers"
        if layer.norm is not None:
            return "has layer_norm, wanted plain dense layers"
        if layer.activation not in ACTIVATIONS:
            return f"has activation {layer.activation}, wanted {', '.join(ACTIVATIONS[:-1])}"
        if layer.dtype is not None:
            return f"computes in {layer.dtype}, wanted float32"
    if len(layers) > MAX_LAYERS:
        return f"has {len(layers)} layers, wanted at most {MAX_LAYERS}"
    return ""


def _flattened(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of networks in networks as one list."""
    if type(network) is not Sequential:
        return [network]
    return [layer for child in network.layers for layer in _flattened(child)]


def layers_of(network: Sequential) -> list[Layer]:
    """The layers of a network without obstacle, as `StackCpu` takes them."""
    layers = list[Layer]()
    for layer in _flattened(network):
        assert isinstance(layer, Dense)
        layers.append((layer.weight, layer.bias, layer.activation))
    return layers


class DqnUpdates:
    """`DQN.update_step` by C."""

    def __init__(self, algorithm: DQN) -> None:
        self.algorithm = algorithm
        self.rows = algorithm.config.batch_size
        layers = layers_of(algorithm.network)
        # obs, then next_obs: one call for both if the network chooses the next action
        self.x = torch.zeros(2 * self.rows, layers[0][0].shape[2])
        rows = 2 * self.rows if algorithm.config.double else self.rows
        self.network = StackBatch(layers, self.x[:rows])
        self.target = StackBatch(layers_of(algorithm.target), self.x[self.rows :])

    def update_step(self, batch: Batch, number: int) -> Metrics:
        """As `DQN.update_step`."""
        algorithm = self.algorithm
        config = algorithm.config
        # values of both observations
        torch.cat((batch["obs"], batch["next_obs"]), out=self.x)
        output, next_output = self.network.run(), self.target.run()
        # the next state's value
        chooser = output[:, self.rows :] if config.double else None
        target = q_target(next_output, chooser, batch["reward"], batch["discount"])
        # TD loss and its gradient; next_obs has none
        td = td_gradient(
            output[:, : self.rows],
            batch["action"],
            target,
            batch["weight"],
            config.huber,
            self.network.gradient[:, : self.rows],
        )
        self.network.differentiate(by_weights=True)
        norm = algorithm.optimizers["network"].step_along_gradient(
            move_target=algorithm.moves_target(number), losses=td.loss
        )
        algorithm.move_target_at_intervals(norm)
        metrics = {"loss": td.loss, "q_values": td.value, "td_error": td.error}
        return metrics | {"grad_norm": norm}


class ActorCriticUpdates(ABC):
    """`OffPolicyActorCritic.update_step` by C. A subclass has the actor's loss."""

    def __init__(self, algorithm: OffPolicyActorCritic) -> None:
        self.algorithm = algorithm
        rows = algorithm.config.batch_size
        self.num_critic_obs = algorithm.num_critic_obs
        actor, critic = layers_of(algorithm.actor), layers_of(algorithm.critic)
        self.actor = StackBatch(actor, torch.zeros(rows, actor[0][0].shape[2]))
        self.critic = StackBatch(critic, torch.zeros(rows, critic[0][0].shape[2]))

    def update_step(self, batch: Batch, number: int) -> Metrics:
        """As `OffPolicyActorCritic.update_step`."""
        algorithm = self.algorithm
        is_actors_turn = (number + 1) % algorithm.config.policy_delay == 0
        metrics = self.critic_step(batch, is_actors_turn or not algorithm.delays_target)
        if is_actors_turn and not algorithm.warms_critic:
            metrics |= self.actor_step(batch)
        return metrics

    def critic_step(self, batch: Batch, move_target: bool) -> Metrics:
        """As `OffPolicyActorCritic.critic_step`."""
        algorithm, critic = self.algorithm, self.critic
        target = algorithm.critic_target(batch)
        obs = algorithm.critic_obs(batch["obs"])
        torch.cat((obs, batch["action"]), 1, out=critic.x)
        td = td_gradient(critic.run(), None, target, batch["weight"], False, critic.gradient)
        critic.differentiate(by_weights=True)
        norm = algorithm.optimizers["critic"].step_along_gradient(move_target, losses=td.loss)
        metrics = {"critic_loss": td.loss, "qf_values": td.value, "td_error": td.error}
        return metrics | {"critic_grad_norm": norm}

    def share_of(self, batch: Batch) -> Tensor | None:
        """`row_share` [B], None where all rows count."""
        weight = batch["weight"]
        return None if bool((weight > 0.0).all()) else row_share(weight)

    @abstractmethod
    def actor_step(self, batch: Batch) -> Metrics:
        """As `OffPolicyActorCritic.actor_step`, after `critic_step` of the same batch."""

    def actor_output(self, obs: Tensor) -> Tensor:
        """[B, actor_outputs] at normalised rows of observations."""
        self.actor.x.copy_(self.algorithm.actor_obs(obs))
        return self.actor.run()[0]

    def action_gradient(self, action: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
        """(mean of `OffPolicyActorCritic.actor_value` 0-d, the gradient of its negative by the
        action [B, A]) at the observations of the last `critic_step`; share: of `share_of`.
        """
        critic = self.critic
        # the observations are still in place
        critic.x[:, self.num_critic_obs :].copy_(action)
        values, gradient = critic.run().squeeze(2), critic.gradient.squeeze(2)
        members, rows = values.shape
        aggregate = self.algorithm.config.actor_aggregate
        if aggregate == "min":
            value, member = values.min(0, keepdim=True)
            gradient.zero_().scatter_(0, member, -1.0 / rows)
        elif aggregate == "mean":
            value = values
            gradient.fill_(-1.0 / (rows * members))
        else:
            value = values[0]
            gradient.zero_()[0].fill_(-1.0 / rows)
        if share is not None:
            gradient.mul_(share * rows)
            value = value * share * rows
        critic.differentiate(by_input=True)
        return value.mean(), critic.input_gradient.sum(0)[:, self.num_critic_obs :]

    def actor_optimizer_step(self, gradient: Tensor, loss: Tensor) -> Tensor:
        """The actor's optimiser step along `gradient` [B, actor_outputs] by its output; returns the
        norm.
        """
        self.actor.gradient[0] = gradient
        self.actor.differentiate(by_weights=True)
        return self.algorithm.optimizers["actor"].step_along_gradient(losses=loss)


class DdpgUpdates(ActorCriticUpdates):
    """Of DDPG and TD3."""

    def actor_step(self, batch: Batch) -> Metrics:
        action = self.actor_output(batch["obs"]).tanh()
        value, by_action = self.action_gradient(action, self.share_of(batch))
        loss = -value
        norm = self.actor_optimizer_step(by_action * (1.0 - action * action), loss)
        return {"actor_loss": loss, "actor_grad_norm": norm}


class SacUpdates(ActorCriticUpdates):
    """Of SAC and REDQ."""

    algorithm: SAC

    def actor_step(self, batch: Batch) -> Metrics:
        algorithm = self.algorithm
        noise = algorithm.update_random.normal((algorithm.num_actions,))
        limits = algorithm.log_std_limits
        drawn = squashed_sample_c(self.actor_output(batch["obs"]), noise, limits)
        share = self.share_of(batch)
        value, by_action = self.action_gradient(drawn.action, share)
        temperature = algorithm.temperature.value()
        if share is None:
            by_log_prob = (temperature / len(noise)).expand(len(noise))
        else:
            by_log_prob = temperature * share
        entropy = -weighted_mean(drawn.log_prob, share)
        loss = -temperature * entropy - value
        norm = self.actor_optimizer_step(squashed_backward_c(drawn, by_action, by_log_prob), loss)
        metrics = {"actor_loss": loss, "entropy": entropy, "ent_coef": temperature}
        if "temperature" in algorithm.optimizers:
            self.temperature_step(entropy)
        return metrics | {"actor_grad_norm": norm}

    def temperature_step(self, entropy: Tensor) -> None:
        """A step along the gradient of `SAC.temperature_loss` at this entropy, 0-d."""
        log = self.algorithm.temperature.log
        assert log.grad is not None
        torch.sub(entropy, self.algorithm.target_entropy, out=log.grad)
        loss = log * log.grad
        self.algorithm.optimizers["temperature"].step_along_gradient(losses=loss)
        log.clamp_(*self.algorithm.log_temperature_limits)


class CpuOffPolicy(Eager):
    """Learns with gradients by C; the rest is as in `Eager`."""

    name = "C"
    algorithm: OffPolicy

    def __init__(self, algorithm: OffPolicy, env: VecEnv, guards: Guards) -> None:
        super().__init__(algorithm, env, guards)
        obstacle = cpu_off_policy_obstacle(algorithm)
        assert not obstacle, obstacle
        self.updates: DqnUpdates | ActorCriticUpdates
        if isinstance(algorithm, DQN):
            self.updates = DqnUpdates(algorithm)
        elif isinstance(algorithm, SAC):
            self.updates = SacUpdates(algorithm)
        else:
            assert isinstance(algorithm, DDPG)
            self.updates = DdpgUpdates(algorithm)

    def obstacle(self) -> str:
        return cpu_off_policy_obstacle(self.algorithm)

    @torch.no_grad()
    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """The algorithm's updates on batches of its replay buffer; returns its metrics."""
        return self.algorithm.run_updates(self.updates.update_step)
