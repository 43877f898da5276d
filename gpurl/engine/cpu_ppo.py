"""The engine of PPO on a CPU: one call of C acts, one learns an epoch of minibatch steps, on the
memory of the algorithm's own weights and optimiser.

It serves unchanged PPO only: a method that a subclass overrides must run. `cpu_ppo_obstacle` says
why it does not serve an algorithm.
"""

import itertools

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState
from gpurl.algorithms.ppo import PPO
from gpurl.engine.eager import Eager
from gpurl.engine.obstacles import loss_obstacle, machine_obstacle, overridden, policy_obstacle
from gpurl.envs.vec_env import VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels.actor_critic_cpu import (
    MAX_LAYERS,
    ActInputs,
    ActorCriticCpu,
    GaussianPolicy,
    PpoSteps,
    Scale,
)
from gpurl.nn.actor_critic import ActorCritic
from gpurl.nn.distributions import Gaussian, Head
from gpurl.nn.mlp import weights_and_biases
from gpurl.nn.normalizer import Normalizer


def cpu_ppo_obstacle(algorithm: Algorithm) -> str:
    """Why the C kernel cannot stand in for `algorithm`'s own act, value and learn; "" if it can."""
    if not isinstance(algorithm, PPO):
        return f"it is for PPO, not for {type(algorithm).__name__}"
    obstacle = (
        overridden(algorithm, PPO)
        or machine_obstacle(algorithm)
        or policy_obstacle(algorithm)
        or loss_obstacle(algorithm)
    )
    if obstacle:
        return obstacle
    network = algorithm.network.config
    layers = len(network.hidden) * (1 if network.shared else 2)
    if layers > MAX_LAYERS:
        return f"it computes up to {MAX_LAYERS} hidden layers, this network has {layers}"
    return ""


class PpoInC:
    """`act`, `value` and `learn` of a PPO for which `cpu_ppo_obstacle` finds nothing: the same
    numbers to rounding.
    """

    def __init__(self, algorithm: PPO) -> None:
        obstacle = cpu_ppo_obstacle(algorithm)
        assert not obstacle, obstacle
        self.algorithm = algorithm
        self._bind()

    def _bind(self) -> None:
        """Give C the addresses of what it reads and writes."""
        algorithm = self.algorithm
        config, optimizer = algorithm.config, algorithm.optimizer
        self._places = self._places_now()
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

    def _places_now(self) -> list[int]:
        """Where the weights, their gradients and the normalisers' buffers are."""
        algorithm = self.algorithm
        normalizers = algorithm.normalizer, algorithm.value_normalizer
        tensors = [algorithm.optimizer.flat, algorithm.optimizer.gradient]
        tensors += [each.shift for each in normalizers if each is not None]
        return [tensor.data_ptr() for tensor in tensors]

    def _follow_memory(self) -> None:
        """Bind again if they have moved, as `share_memory()` of the policy moves them."""
        if self._places != self._places_now():
            self._bind()

    def act(self, obs: Tensor) -> Decision:
        """obs: [N, *obs], as `PPO.act` while exploring."""
        self._follow_memory()
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
        self._follow_memory()
        return self.kernel.value(rows_of(obs), self.inputs)

    @torch.no_grad()
    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `PPO.learn`, on what `PPO.prepare` gave."""
        if self.algorithm.warms_critic:  # the kernel moves all weights
            return self.algorithm.learn(data)
        self._follow_memory()
        algorithm, packed = self.algorithm, data["packed"]
        config, minibatches = algorithm.config, algorithm.minibatches
        clip_range, entropy_coef = float(algorithm.clip_range), float(algorithm.entropy_coef)
        has_valid = "valid" in minibatches.rows.places
        steps_before = algorithm.steps_before()
        adapts, number = algorithm.adapts_to_minibatches, itertools.count()
        for _ in range(config.epochs):
            # an epoch is one call of C, or one for each minibatch if the rate changes between them
            order = minibatches.order(packed.shape[0])
            count = 1 if adapts else config.minibatches
            calls = []
            for rows in order.chunk(config.minibatches // count):
                calls.append(
                    self.kernel.ppo_steps(
                        self.steps, packed, has_valid, rows, count, clip_range, entropy_coef
                    )
                )
                if adapts:
                    one = {name: part.squeeze(0).float() for name, part in calls[-1].items()}
                    algorithm.after_minibatch(next(number), one)
        parts = calls[0]
        if len(calls) > 1:
            parts = {name: torch.cat([each[name] for each in calls]) for name in parts}
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
    """The kernel on the network's weights and gradients, in the memory where FlatAdam put them."""
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

    def obstacle(self) -> str:
        return cpu_ppo_obstacle(self.algorithm)

    def act(self) -> Decision:
        """The algorithm's decision at the present observations."""
        return self.in_c.act(self.obs)

    def value(self, obs: Tensor, policy_state: PolicyState) -> Tensor:
        """[N] expected return from obs [N, *obs]."""
        return self.in_c.value(obs)

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """The algorithm's steps on what `prepare` gave; returns its metrics."""
        return self.in_c.learn(data)
