"""Rollouts by one kernel: T steps of PPO's small network and of a task with Triton functions in one
launch.
"""

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.engine.eager import Eager
from gpurl.engine.obstacles import overridden, policy_obstacle, triton_obstacle
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.rollout import PolicyShape, RolloutTensors, rollout_obstacle, rollout_triton
from gpurl.kernels.rollout_policy import PolicyTensors
from gpurl.nn.distributions import Categorical, Gaussian
from gpurl.nn.mlp import weights_and_biases

# methods of PPO that do not act: the kernel collects for a subclass that overrides these alone
LEARNING = {
    "make_networks",
    "make_optimizers",
    "make_training",
    "prepare",
    "learn",
    "steps_before",
    "batches",
    "outputs",
    "loss",
    "after_epochs",
    "after_minibatch",
    "schedule",
}


def persistent_obstacle(algorithm: Algorithm, env: VecEnv) -> str:
    """Why the kernel cannot play `env` with this policy, or "". May reset `env`."""
    if obstacle := triton_obstacle(algorithm):
        return obstacle
    if not isinstance(env, TorchEnv):
        return f"{type(env).__name__} has no Triton functions"
    if env.triton_obstacle:
        return env.triton_obstacle
    if not isinstance(algorithm, PPO):
        return f"it is for PPO, not for {type(algorithm).__name__}"
    if obstacle := _obstacle_in_policy(algorithm):
        return obstacle
    env.reset(seed=0)  # the sizes of its state are known after a reset
    in_triton = env.in_triton()
    if in_triton is None:
        return f"{type(env).__name__} is not stepped by Triton"
    return rollout_obstacle(in_triton, policy_shape(algorithm))


def _obstacle_in_policy(algorithm: PPO) -> str:
    if algorithm.config.storage != "float32":
        return f"it stores rollouts in float32, not in {algorithm.config.storage}"
    return overridden(algorithm, PPO, LEARNING) or policy_obstacle(algorithm)


def policy_shape(algorithm: PPO) -> PolicyShape:
    """The compile-time constants of its network."""
    network, head, normalizer = algorithm.network.config, algorithm.head, algorithm.normalizer
    limit = None if normalizer is None else normalizer.clip
    products = "tf32x3" if algorithm.precision == "float32" else "tf32"
    return PolicyShape(
        network.hidden,
        network.activation,
        head.num_outputs,
        isinstance(head, Categorical),
        network.shared,
        limit,
        products,
    )


class PersistentRollout(Eager):
    """Fills the rollout buffer in one launch; the rest is as in `Eager`."""

    name = "persistent rollout"
    algorithm: PPO
    env: TorchEnv

    def __init__(self, algorithm: PPO, env: TorchEnv, guards: Guards) -> None:
        super().__init__(algorithm, env, guards)
        self.shape = policy_shape(algorithm)
        self.zero = torch.zeros(1, device=env.device)
        self.one = torch.ones(1, device=env.device)

    def obstacle(self) -> str:
        return _obstacle_in_policy(self.algorithm)

    def collect(self) -> None:
        """Play all steps of the buffer from `self.obs` [N, D], which is updated in place."""
        buffer = self.buffer
        # columns that the kernel writes
        if not buffer.columns:
            buffer.set_columns(self._columns(buffer.horizon)._asdict())
        self.obs = self.obs.contiguous()  # the kernel reads and writes rows
        # play, and keep the newest finished episodes
        in_triton = self.env.in_triton()
        random = self.algorithm.action_random
        assert in_triton is not None, "persistent_obstacle has checked this"
        rollout = RolloutTensors(**{name: buffer[name] for name in RolloutTensors._fields})
        streams = RandomStreams(random.key, random.gamma, random.step)
        newest = self.statistics.newest
        rollout_triton(in_triton, streams, self._tensors(), self.shape, rollout, self.obs, newest)
        # both random streams are `horizon` steps further
        random.advance(by=buffer.horizon)
        self.env.skip_random(buffer.horizon)
        buffer.size = buffer.horizon

    def _columns(self, horizon: int) -> RolloutTensors:
        num_envs = self.env.num_envs
        (width,) = self.env.single_observation_space.shape or ()
        num_outputs = self.algorithm.head.num_outputs

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(horizon, num_envs, *shape, dtype=dtype, device=self.env.device)

        return RolloutTensors(
            obs=empty(width),
            action=empty(dtype=torch.int64) if self.shape.discrete else empty(num_outputs),
            log_prob=empty(),
            value=empty(),
            reward=empty(),
            final_value=empty(),
            terminated=empty(dtype=torch.bool),
            truncated=empty(dtype=torch.bool),
        )

    def _tensors(self) -> PolicyTensors:
        """Views of the weights, and the scales of this rollout."""
        network = self.algorithm.network
        head = self.algorithm.head
        of_obs = self.algorithm.normalizer
        of_value = self.algorithm.value_normalizer
        obs = (self.zero, self.one) if of_obs is None else (of_obs.shift, of_obs.inv_std)
        value = (self.zero, self.one) if of_value is None else (of_value.shift, of_value.inv_std)
        own = (
            (head.bounded_log_std().detach(), head.box.units)
            if isinstance(head, Gaussian)
            else (self.zero, self.zero)
        )
        hidden = weights_and_biases(network.trunk)
        layers = tuple(weight for weight, _ in hidden), tuple(bias for _, bias in hidden)
        ends = network.actor.weight, network.actor.bias, network.critic.weight, network.critic.bias
        return PolicyTensors(*layers, *ends, *obs, *value, *own)
