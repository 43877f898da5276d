"""The engine of PPO on a CPU: one call of C acts, one learns an epoch of minibatch steps, on the
memory of the algorithm's own weights and optimiser.

It serves unchanged PPO only. `cpu_ppo_obstacle` says why it does not serve an algorithm: what a
subclass overrides must run.
"""

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState
from gpurl.algorithms.ppo import PPO
from gpurl.engine.eager import Eager
from gpurl.envs.vec_env import VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import (
    MAX_LAYERS,
    ActInputs,
    ActorCriticCpu,
    GaussianPolicy,
    PpoSteps,
    Scale,
)
from gpurl.kernels.backend import host_sync_is_free, use_c
from gpurl.nn.actor_critic import ActorCritic
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.nn.mlp import weights_and_biases
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.optimizer import FlatAdam


def cpu_ppo_obstacle(algorithm: Algorithm) -> str:
    """Why the C kernel cannot stand in for `algorithm`'s own act, value and learn; "" if it can."""
    if not isinstance(algorithm, PPO):
        return f"it learns as PPO does, not as {type(algorithm).__name__}"
    if changed := overridden(algorithm, PPO):
        return f"{algorithm.label} has {changed} of its own"
    return machine_obstacle(algorithm) or _unknown_component(algorithm)


def overridden(algorithm: Algorithm, base: type[Algorithm]) -> str:
    """The first method of its class `base` that a subclass or the object itself replaces, or ""."""
    classes = type(algorithm).__mro__
    for owner in (*classes[: classes.index(base)], algorithm):
        for name in vars(owner):
            if not name.startswith("__") and callable(getattr(base, name, None)):
                return name
    return ""


def machine_obstacle(algorithm: Algorithm) -> str:
    """Why C cannot compute on the algorithm's device or step its optimisers, or ""."""
    if not host_sync_is_free(algorithm.device):
        return f"it computes on a CPU, not on {algorithm.device}"
    optimizers = algorithm.all_optimizers().values()
    if not all(use_c(optimizer.flat) for optimizer in optimizers):
        return f"it could not be built: {c_library.load().why}"
    for optimizer in optimizers:
        if type(optimizer) is not FlatAdam or optimizer.reduce is not FlatAdam.reduce:
            return "it steps by FlatAdam without a hook"
        if not all(parameter.requires_grad for parameter in optimizer.module.parameters()):
            return "some weights are frozen"
    return ""


def _unknown_component(algorithm: PPO) -> str:
    """What the kernel does not know of network or head, or ""."""
    network = algorithm.network
    head = algorithm.head
    if type(network) is not ActorCritic:
        return f"it does not know the network {type(network).__name__}"
    if network.memory is not None:
        return "it computes networks without a memory"
    if not network.config.is_plain:
        return "it knows no layer norms and residual blocks"
    if type(head) not in (Gaussian, Categorical):
        return f"it does not know {type(head).__name__} actions"
    if algorithm.precision == "bf16":
        return "it computes in float32, not in bf16"
    layers = len(network.config.hidden) * (1 if network.config.shared else 2)
    if layers > MAX_LAYERS:
        return f"it computes up to {MAX_LAYERS} hidden layers, here are {layers}"
    return ""


class PpoInC:
    """`act`, `value` and `learn` of a PPO for which `cpu_ppo_obstacle` finds nothing: the same
    numbers to rounding.
    """

    def __init__(self, algorithm: PPO) -> None:
        obstacle = cpu_ppo_obstacle(algorithm)
        assert not obstacle, obstacle
        config, optimizer = algorithm.config, algorithm.optimizer
        self.algorithm = algorithm
        self.kernel = kernel_of(algorithm.network)
        gaussian = gaussian_of(algorithm.head)
        self.inputs = ActInputs(
            self.kernel,
            algorithm.action_random,
            gaussian,
            scale_of(algorithm.normalizer),
            scale_of(algorithm.value_normalizer),
        )
        self.steps = PpoSteps(
            self.kernel,
            gaussian,
            config.value_coef,
            config.clip_range_value,
            algorithm.normalizes_minibatches,
            (optimizer.state, optimizer.gradient, optimizer.learning_rate, optimizer.options),
        )

    def act(self, obs: Tensor) -> Decision:
        """obs: [N, *obs], as `PPO.act` while exploring."""
        acted = self.kernel.act(rows_of(obs), self.inputs)
        self.algorithm.action_random.advance()
        columns = {"action": acted.action, "log_prob": acted.log_prob, "value": acted.value}
        head = self.algorithm.head
        env_action = acted.env_action
        if isinstance(head, Gaussian):
            env_action = head.box.shaped(env_action)
        return Decision(env_action, (), columns)

    def value(self, obs: Tensor) -> Tensor:
        """obs: [N, *obs] -> [N], as `PPO.value`."""
        return self.kernel.value(rows_of(obs), self.inputs)

    @torch.no_grad()
    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `PPO.learn`, on what `PPO.prepare` gave."""
        algorithm, packed = self.algorithm, data["packed"]
        config, minibatches = algorithm.config, algorithm.minibatches
        clip_range, entropy_coef = float(algorithm.clip_range), float(algorithm.entropy_coef)
        has_valid = "valid" in minibatches.rows.places
        steps_before = algorithm.steps_before()
        for _ in range(config.epochs):
            order = minibatches.order(packed.shape[0])
            parts = self.kernel.ppo_steps(
                self.steps, packed, has_valid, order, config.minibatches, clip_range, entropy_coef
            )
        means = {name: part.mean().float() for name, part in parts.items()}
        means["loss"] = (
            config.value_coef * means["value_loss"]
            - means["surrogate"]
            - entropy_coef * means["entropy"]
        )
        return algorithm.after_epochs(means, steps_before, data)


def rows_of(obs: Tensor) -> Tensor:
    """[N, *obs] -> [N, D] float32, contiguous."""
    return obs.detach().reshape(obs.shape[0], -1).float().contiguous()


def kernel_of(network: ActorCritic) -> ActorCriticCpu:
    """The kernel on the network's weights and gradients, which stay in their CPU memory for good,
    where FlatAdam put them.
    """
    hidden = weights_and_biases(network.trunk)
    actor = network.actor.weight, network.actor.bias
    critic = network.critic.weight, network.critic.bias
    return ActorCriticCpu(hidden, actor, critic, network.config.activation)


def scale_of(normalizer: Normalizer | None) -> Scale | None:
    """A normaliser as the kernel takes it."""
    if normalizer is None:
        return None
    return Scale(normalizer.shift, normalizer.inv_std, normalizer.clip)


def gaussian_of(head: Head) -> GaussianPolicy | None:
    """A Gaussian head as the kernel takes it; None: categorical."""
    if not isinstance(head, Gaussian):
        return None
    return GaussianPolicy(head.log_std, head.min_log_std, head.max_log_std, head.box.units)


class CpuPpo(Eager):
    """Acts, values and learns in C; the rest is as in `Eager`."""

    name = "C"
    algorithm: PPO

    def __init__(self, algorithm: PPO, env: VecEnv, guards: Guards) -> None:
        super().__init__(algorithm, env, guards)
        self.in_c = PpoInC(algorithm)

    def act(self) -> Decision:
        """The algorithm's decision at the present observations."""
        return self.in_c.act(self.obs)

    def value(self, obs: Tensor, policy_state: PolicyState) -> Tensor:
        """[N] expected return from obs [N, *obs]."""
        return self.in_c.value(obs)

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """The algorithm's steps on what `prepare` gave; returns its metrics."""
        return self.in_c.learn(data)
