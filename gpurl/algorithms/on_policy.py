"""The base of on-policy algorithms: collect `horizon` steps, learn from them for some epochs of
shuffled minibatches, discard them.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpurl.algorithms.base import Algorithm, AlgorithmConfig, Decision, episode_ends
from gpurl.buffers.minibatches import Minibatches
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.ranks import Alone


@dataclass(frozen=True)
class OnPolicyConfig(AlgorithmConfig):
    """Settings of all on-policy algorithms."""

    choices: ClassVar[Choices] = {"storage": ("float32", "bfloat16")}

    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches in each epoch."""
    storage: str = "float32"
    """Type of observations and values in a rollout: float32, or bfloat16 at half the memory (2
    digits).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"epochs": 1, "minibatches": 1})


class OnPolicy(Algorithm):
    """One flat Adam, a rollout buffer, minibatches in a new random order each epoch."""

    config: OnPolicyConfig
    values_final_obs = True
    is_recurrent = False  # minibatches then hold whole environments
    normalizes_minibatches = False  # normalise the advantage in each minibatch

    def make_training(self) -> None:
        (self.optimizer,) = self.optimizers.values()
        self.action_random = CounterRandom(self.seed * 2 + 1, self.num_envs, self.device)
        order_random = CounterRandom(self.seed * 2 + 2, 1, self.device)
        self.minibatches = Minibatches(
            self.config.minibatches, self.normalizes_minibatches, order_random
        )
        self.random_streams = {"action": self.action_random, "order": order_random}

    def join(self, ranks: Alone) -> None:
        super().join(ranks)
        self.minibatches.ranks = ranks

    # ---- recording ----

    def make_buffer(self) -> RolloutBuffer:
        config = self.config
        unit = "num_envs" if self.is_recurrent else "num_envs * horizon"
        rows = self.num_envs if self.is_recurrent else self.num_envs * config.horizon
        if rows % config.minibatches:
            raise UsageError(
                f"{self.label} splits {unit} = {rows} rows into minibatches = "
                f"{config.minibatches}, which leaves {rows % config.minibatches} over (num_envs "
                f"{self.num_envs}, horizon {config.horizon})"
            )
        return RolloutBuffer(config.horizon, self.device, config.storage)

    def record_step(
        self,
        buffer: RolloutBuffer,
        obs: Tensor,
        decision: Decision,
        timestep: Timestep,
        final_value: Tensor | None = None,
    ) -> None:
        # the policy state is known now only; a second rollout of images would double the memory
        if final_value is None and (self.is_recurrent or self.reads_bytes):
            final_value = self.value(timestep.info["final_obs"], decision.policy_state)
        if self.is_recurrent:
            columns = decision.columns | {"ended": episode_ends(timestep)}
            decision = decision._replace(columns=columns)
        super().record_step(buffer, obs, decision, timestep, final_value)

    def final_values(self, buffer: RolloutBuffer) -> Tensor:
        """[T, N] values of final_obs, as recorded or computed now."""
        if "final_value" in buffer.columns:
            return buffer["final_value"]
        return self.value(buffer["final_obs"].flatten(0, 1)).view_as(buffer["value"])

    # ---- learning ----

    def max_batch_rows(self) -> int:
        return max(self.num_envs, self.num_envs * self.config.horizon // self.config.minibatches)
