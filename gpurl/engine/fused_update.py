"""PPO's minibatch steps in few launches on a GPU: three for small networks, seven a layer
and a dozen for others.
"""

import torch
from torch import Tensor, nn

from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.algorithms.ppo import PPO
from gpurl.engine.eager import Eager
from gpurl.engine.obstacles import (
    loss_obstacle,
    optimizer_obstacle,
    overridden,
    policy_obstacle,
    triton_obstacle,
)
from gpurl.engine.persistent import PersistentRollout
from gpurl.envs.vec_env import VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels.ppo_loss import METRICS, PpoOptions
from gpurl.kernels.ppo_update import (
    NORM,
    NUM_RESULTS,
    Columns,
    PpoUpdate,
    UpdateShape,
)
from gpurl.kernels.ppo_wide_update import WidePpoUpdate
from gpurl.nn.distributions import Categorical, Gaussian, TanhGaussian
from gpurl.nn.mlp import weights_and_biases

HEADS = {Gaussian: "gaussian", TanhGaussian: "squashed", Categorical: "categorical"}
# methods of PPO that take no part in a minibatch step: the kernel learns for a subclass that
# overrides these alone
AROUND = {
    "make_networks",
    "make_optimizers",
    "make_training",
    "make_buffer",
    "initial_policy_state",
    "act",
    "value",
    "record_step",
    "final_values",
    "prepare",
    "schedule",
    "steps_before",
    "after_epochs",
    "after_minibatch",
}


def fused_update_obstacle(algorithm: Algorithm) -> str:
    """Why the kernels cannot take the minibatch steps of `algorithm`, or ""."""
    if obstacle := triton_obstacle(algorithm):
        return obstacle
    if not isinstance(algorithm, PPO):
        return f"it is for PPO, not for {type(algorithm).__name__}"
    obstacle = (
        overridden(algorithm, PPO, AROUND)
        or optimizer_obstacle(algorithm)
        or policy_obstacle(algorithm, tuple(HEADS))
        or loss_obstacle(algorithm)
    )
    if obstacle:
        return obstacle
    if algorithm.normalizes_minibatches:
        return "it does not normalise the advantages of each minibatch"
    shape = update_shape(algorithm)
    return "" if not PpoUpdate.obstacle_of(shape) else WidePpoUpdate.obstacle_of(shape)


def update_shape(algorithm: PPO) -> UpdateShape:
    """The constants of its network and of its parameters in the optimiser."""
    network, head = algorithm.network, algorithm.head
    flat = algorithm.optimizer.flat

    def place(parameter: nn.Parameter) -> int:
        return int(parameter.storage_offset() - flat.storage_offset())

    hidden = weights_and_biases(network.trunk)
    ends = network.actor.weight, network.actor.bias, network.critic.weight, network.critic.bias
    actor_weight, actor_bias, critic_weight, critic_bias = map(place, ends)
    return UpdateShape(
        algorithm.num_inputs,
        network.config.hidden,
        network.config.activation,
        head.num_outputs,
        HEADS[type(head)],  # type: ignore[index]
        network.config.shared,
        tuple(place(weight) for weight, _ in hidden),
        tuple(place(bias) for _, bias in hidden),
        (actor_weight, actor_bias, critic_weight, critic_bias),
        place(head.log_std) if isinstance(head, Gaussian) else -1,
        "tf32x3" if algorithm.precision == "float32" else "tf32",
    )


class FusedUpdate(Eager):
    """Takes each minibatch step in few launches; the rest is as in `Eager`."""

    name = "fused update"
    algorithm: PPO

    def __init__(self, algorithm: PPO, env: VecEnv, guards: Guards) -> None:
        super().__init__(algorithm, env, guards)
        config, head, optimizer = algorithm.config, algorithm.head, algorithm.optimizer
        limits = (head.min_log_std, head.max_log_std) if isinstance(head, Gaussian) else (0.0, 0.0)
        shape = update_shape(algorithm)
        kind = WidePpoUpdate if PpoUpdate.obstacle_of(shape) else PpoUpdate
        self.update = kind(
            shape,
            PpoOptions(config.value_coef, config.clip_range_value, *limits),
            optimizer.state,
            optimizer.gradient,
            optimizer.learning_rate,
            optimizer.options,
        )

    def obstacle(self) -> str:
        return super().obstacle() or fused_update_obstacle(self.algorithm)

    @torch.no_grad()
    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `PPO.learn`, on what `PPO.prepare` gave."""
        if self.algorithm.warms_critic:  # the kernels move all weights
            return super().learn(data)
        algorithm, packed = self.algorithm, data["packed"]
        minibatches = algorithm.minibatches
        columns = columns_of(minibatches.rows.places)
        rows = packed.shape[0] // minibatches.count
        steps_before = algorithm.steps_before()
        results = torch.empty(minibatches.count, NUM_RESULTS, device=packed.device)
        for epoch in range(algorithm.config.epochs):
            order = minibatches.next_order()
            for index, result in enumerate(results.unbind()):
                self.update.step(
                    packed, columns, order, index * rows, rows,
                    algorithm.clip_range, algorithm.entropy_coef, result,
                )  # fmt: skip
                if algorithm.adapts_to_minibatches:
                    number = epoch * minibatches.count + index
                    algorithm.after_minibatch(number, dict(zip(METRICS, result.unbind())))
        # means over the last epoch
        numbers = results.mean(0).unbind()
        means = dict(zip((*METRICS, "loss"), numbers)) | {"grad_norm": numbers[NORM]}
        return algorithm.after_epochs(means, steps_before, data)


class PersistentFused(PersistentRollout, FusedUpdate):
    """One launch for a rollout, few for a minibatch step."""

    name = "persistent rollout, fused update"


def columns_of(places: dict[str, int | slice]) -> Columns:
    """The first column of each part of a packed row."""
    starts = {
        name: place if isinstance(place, int) else place.start for name, place in places.items()
    }
    return Columns(**{name: starts[name] for name in Columns._fields if name in starts})
