"""Rollouts by one kernel: PPO's small networks and a task with Triton functions, for T steps in one
launch.
"""

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.policy import PolicyTensors
from gpurl.kernels.rollout import PolicyShape, RolloutTensors, rollout_obstacle, rollout_triton
from gpurl.nn.distributions import Categorical, Gaussian
from gpurl.nn.networks import ActorCritic


def make_persistent(algorithm: Algorithm, env: VecEnv) -> "PersistentRollout | str":
    """The kernel that plays `env` by this policy, or why there is none. Call it after the first
    reset.
    """
    if not isinstance(env, TorchEnv) or (in_triton := env.in_triton()) is None:
        return (
            f"{type(env).__name__} has no Triton functions, or Triton does not run on {env.device}"
        )
    if not isinstance(algorithm, PPO):
        return f"it plays policies of PPO, not of {type(algorithm).__name__}"
    for name in ("act", "record", "record_step"):
        if getattr(type(algorithm), name) is not getattr(PPO, name):
            return f"{algorithm.label} has {name} of its own"
    if type(algorithm.network) is not ActorCritic:
        return f"it does not know the network {type(algorithm.network).__name__}"
    if algorithm.is_recurrent:
        return "it plays policies without a memory"
    if algorithm.precision == "bf16":
        return "it acts in more precision than bf16, which the update would take for another policy"
    if type(algorithm.head) not in (Gaussian, Categorical):
        return f"it does not know {type(algorithm.head).__name__} actions"
    return rollout_obstacle(in_triton, policy_shape(algorithm)) or PersistentRollout(algorithm, env)


def policy_shape(algorithm: PPO) -> PolicyShape:
    """The constants of its network."""
    network, head, normalizer = algorithm.config.network, algorithm.head, algorithm.normalizer
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


class PersistentRollout:
    """Fills a rollout buffer as `Trainer.collect` would step by step."""

    def __init__(self, algorithm: PPO, env: TorchEnv) -> None:
        self.algorithm, self.env = algorithm, env
        self.shape = policy_shape(algorithm)
        self.zero, self.one = torch.zeros(1, device=env.device), torch.ones(1, device=env.device)

    def play(self, buffer: RolloutBuffer, obs: Tensor, statistics: EpisodeStatistics) -> None:
        """Play all steps of the buffer from obs [N, D], which becomes the observations after
        them.
        """
        if not buffer.columns:
            buffer.hold(self._columns(buffer.horizon)._asdict())
        in_triton, random = self.env.in_triton(), self.algorithm.action_random
        assert in_triton is not None, "make_persistent is asked first"
        rollout = RolloutTensors(**{name: buffer[name] for name in RolloutTensors._fields})
        streams = RandomStreams(random.key, random.gamma, random.step)
        statistics.sums += rollout_triton(
            in_triton, streams, self._tensors(), self.shape, rollout, obs
        )
        random.advance(by=buffer.horizon)
        self.env.skip_random(buffer.horizon)
        buffer.size = buffer.horizon

    def _columns(self, horizon: int) -> RolloutTensors:
        num_envs, width = self.env.num_envs, self.env.single_observation_space.shape[0]  # type: ignore[index]
        outputs = self.algorithm.head.num_outputs

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(horizon, num_envs, *shape, dtype=dtype, device=self.env.device)

        action = empty(dtype=torch.int64) if self.shape.discrete else empty(outputs)
        flags = empty(dtype=torch.bool), empty(dtype=torch.bool)
        return RolloutTensors(empty(width), action, empty(), empty(), empty(), empty(), *flags)

    def _tensors(self) -> PolicyTensors:
        """Views of the weights, and what is made anew for each rollout."""
        network, head = self.algorithm.network, self.algorithm.head
        of_obs, of_value = self.algorithm.normalizer, self.algorithm.value_normalizer
        obs = (self.zero, self.one) if of_obs is None else (of_obs.shift, of_obs.inv_std)
        value = (self.zero, self.one) if of_value is None else (of_value.shift, of_value.inv_std)
        own = (
            (head.bounded_log_std().detach(), head.box.units)
            if isinstance(head, Gaussian)
            else (self.zero, self.zero)
        )
        layers = tuple(network.towers.weights), tuple(network.towers.biases)
        ends = network.actor.weight, network.actor.bias, network.critic.weight, network.critic.bias
        return PolicyTensors(*layers, *ends, *obs, *value, *own)
