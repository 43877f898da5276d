"""What all off-policy algorithms share: steps go into a replay buffer, and every few steps some
batches of it are learnt from.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, AlgorithmConfig, Decision, Metrics, PolicyState
from gpurl.buffers.prioritized import PrioritizedReplay
from gpurl.buffers.replay import Replay
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.optimizer import FlatAdam

RANDOM = ("action_random", "update_random", "choice_random")
Batch = dict[str, Tensor]  # as `Replay.sample`, observations normalised and rewards scaled


@dataclass(frozen=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of every off-policy algorithm."""

    horizon: int = 1
    updates: int = 8
    """Optimiser steps after each horizon, each on a batch of its own."""
    batch_size: int = 256
    """Transitions of a batch."""
    replay_size: int = 1_000_000
    """Transitions that are kept, the newest."""
    learning_starts: int = 5_000
    """Transitions before the first update; until then actions are random."""
    n_step: int = 1
    """Rewards that a target sums before it trusts the critic; never past the end of an episode."""
    learning_rate: float = 3e-4
    reward_scale: float = 1.0
    """Rewards are multiplied by this before they are learnt from."""
    prioritized: bool = False
    """Draw transitions by their last error (Schaul et al. 2016) instead of uniformly."""
    per_alpha: float = 0.5
    """How much the error counts when drawing: 0 not at all."""
    per_beta: float = 0.4
    """How much of the bias of such draws is taken back at the start of training; all of it at the
    end.
    """
    priority_decay: float = 0.999
    """How fast the greatest error seen, which new transitions get, is forgotten: its share left
    after an update.
    """
    storage: str = "float32"
    """How the replay keeps observations: float32, or bfloat16 at half the memory (2 digits); images
    stay uint8.
    """
    final_obs_fraction: float = 1.0 / 16.0
    """Final observations the replay keeps, as a share of its transitions; more for episodes that
    time cuts off before 16 steps.
    """
    save_replay: bool = False
    """Write the replay into every checkpoint, so that a resumed run goes on with it; else it is
    filled anew.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"storage": ("float32", "bfloat16")})
        least = dict.fromkeys(
            ("updates", "batch_size", "replay_size", "learning_starts", "n_step"), 1
        )
        one = ("per_alpha", "per_beta", "priority_decay", "final_obs_fraction")
        check_numbers(self, least, ("reward_scale", "final_obs_fraction"), zero_to_one=one)
        for name in ("learning_starts", "replay_size"):
            if self.batch_size > getattr(self, name):
                raise UsageError(
                    f"a batch of batch_size {self.batch_size} is more than {name} "
                    f"{getattr(self, name)} transitions hold"
                )


class OffPolicy(Algorithm):
    """Collects `horizon` steps into a rollout, moves them into the replay in `prepare`, and takes
    `updates` steps in `learn`.
    """

    config: OffPolicyConfig
    replay: Replay  # there when a buffer was made: a policy by itself needs none

    def make_training(self) -> None:
        self.learning_starts = self.config.learning_starts
        self.optimizers = self.make_optimizers()
        self.action_random = CounterRandom(self.seed * 4 + 1, self.num_envs, self.device)
        self.update_random = CounterRandom(
            self.seed * 4 + 2, self.config.batch_size, self.device
        )  # a stream a row of the batch
        self.choice_random = CounterRandom(self.seed * 4 + 3, 1, self.device)  # for all of it
        self.is_random = False  # actions, before learning starts: `schedule` says

    # ---- what an algorithm is ----

    @abstractmethod
    def make_optimizers(self) -> dict[str, FlatAdam]:
        """name -> an optimiser of some of the modules, each with its target network if it has
        one.
        """

    @abstractmethod
    def decide(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """(action with exploration as it is stored [N, ...], next policy state) at normalised
        obs [N, D].
        """

    @abstractmethod
    def greedy(self, obs: Tensor) -> Tensor:
        """[N, ...] the best action at normalised obs [N, D], as it is stored."""

    @abstractmethod
    def random_action(self) -> Tensor:
        """[N, ...] uniform over all actions, as it is stored."""

    @abstractmethod
    def to_env(self, action: Tensor) -> Tensor:
        """[N, *action] what the environment receives."""

    @abstractmethod
    def update_step(self, batch: Batch, number: int) -> tuple[Metrics, Tensor]:
        """One optimiser step of each network whose turn it is, at update `number` of this
        iteration; returns (metrics, error [B] of each transition).
        """

    def action_shape(self) -> tuple[int, ...]:
        """Of a stored action."""
        return ()

    def extra_columns(self) -> dict[str, tuple[int, ...]]:
        """What else a step stores beside reward and action, name -> shape, () or (n,)."""
        return {}

    def more_columns(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """These columns [T, N, ...] of a rollout."""
        return {}

    # ---- acting ----

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        inputs = self.inputs(obs)
        if not explore:
            return Decision(self.to_env(self.greedy(inputs)), policy_state, {})
        if self.is_random:
            action = self.random_action()
        else:
            action, policy_state = self.decide(inputs, policy_state)
        self.action_random.advance()
        return Decision(self.to_env(action), policy_state, {"action": action})

    # ---- recording ----

    def make_buffer(self) -> RolloutBuffer:
        """The rollout of one iteration, and behind it the replay."""
        config, space = self.config, self.observation_space
        columns = {"reward": (), "action": self.action_shape()} | self.extra_columns()
        kind = torch.uint8 if space.dtype == np.uint8 else torch.float32
        size = max(config.replay_size, config.horizon * self.num_envs)
        if config.n_step > size // self.num_envs:
            steps = f"{size // self.num_envs} steps of {self.num_envs} environments"
            raise UsageError(
                f"n_step {config.n_step} is more than replay_size {config.replay_size} holds, "
                f"{steps}"
            )
        arguments = (
            size,
            self.num_envs,
            tuple(space.shape or ()),
            columns,
            self.device,
            self.seed * 4 + 4,
            kind,
        )
        if config.prioritized:
            self.replay = PrioritizedReplay(
                *arguments,
                config.storage,
                config.final_obs_fraction,
                alpha=config.per_alpha,
                beta=config.per_beta,
                decay=config.priority_decay,
            )
        else:
            self.replay = Replay(*arguments, config.storage, config.final_obs_fraction)
        return RolloutBuffer(config.horizon, self.num_envs, self.device)

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        self.replay.mark_episode_break(
            torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
            if mask is None
            else mask
        )

    # ---- learning ----

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """Move the rollout into the replay."""
        self.replay.add(buffer.columns | self.more_columns(buffer))
        if self.normalizer is not None:
            rows = buffer["obs"].reshape(buffer.horizon, self.num_envs, -1).float()
            self.normalizer.update(rows, buffer.columns.get("valid"))
        return {}

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        return self.run_updates(self.update_step)

    def run_updates(self, update_step: Callable[[Batch, int], tuple[Metrics, Tensor]]) -> Metrics:
        """`updates` calls of `update_step`, each on its own batch; returns the last one's metrics,
        averaged to 0-d. An engine passes a faster form of the method.
        """
        metrics = Metrics()
        for number in range(self.config.updates):
            batch = self.sample_batch()
            metrics, error = update_step(batch, number)
            self.update_random.advance()
            self.choice_random.advance()
            if isinstance(self.replay, PrioritizedReplay):
                self.replay.update_priorities(batch["index"], error)
        self.num_updates += self.config.updates
        rate = next(iter(self.optimizers.values())).learning_rate
        metrics = {
            f"train/{name}": value.mean() if value.dim() else value
            for name, value in metrics.items()
        }
        return metrics | {
            "train/n_updates": self.num_updates.clone(),
            "train/learning_rate": rate.clone(),
        }

    def sample_batch(self) -> Batch:
        """batch_size transitions of the replay, as the losses take them."""
        config = self.config
        batch = self.replay.sample(config.batch_size, config.gamma, config.n_step, reuse=True)
        for name in ("obs", "next_obs"):
            batch[name] = self.inputs(batch[name])
        if config.reward_scale != 1.0:
            batch["reward"] = batch["reward"] * config.reward_scale
        return batch

    def all_optimizers(self) -> dict[str, FlatAdam]:
        return self.optimizers

    def max_batch_rows(self) -> int:
        return max(self.num_envs, self.config.batch_size)

    def schedule(self, progress: float, steps: int) -> None:
        self.is_random = steps < self.config.learning_starts
        if isinstance(self.replay, PrioritizedReplay):
            self.replay.set_progress(progress)
        if self.config.schedule == "linear":
            for name, optimizer in self.optimizers.items():
                optimizer.learning_rate.fill_(self.rate_of(name) * max(1.0 - progress, 0.0))

    def rate_of(self, optimizer: str) -> float:
        """The learning rate that an optimiser starts with."""
        return self.config.learning_rate

    # ---- states ----

    def extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            name: optimizer.state_dict() for name, optimizer in self.optimizers.items()
        }
        state |= {name: getattr(self, name).state_dict() for name in RANDOM}
        rates = {"schedule": self.config.schedule} | {
            name: self.rate_of(name) for name in self.optimizers
        }
        return state | {"num_updates": self.num_updates, "set_rates": rates}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
            saved = state["set_rates"]
            if (saved["schedule"], saved[name]) != (
                self.config.schedule,
                self.rate_of(name),
            ):  # the user has changed it since
                optimizer.learning_rate.fill_(self.rate_of(name))
        for name in RANDOM:
            getattr(self, name).load_state_dict(state[name])
        self.num_updates.copy_(state["num_updates"])

    def replay_state(self) -> dict[str, Any]:
        return self.replay.state_dict() if self.config.save_replay else {}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        if not state:
            return 0
        self.replay.load_state_dict(state)
        return (
            int(self.replay.ring.counts[0]) * self.num_envs
        )  # overwritten ones too: learning_starts may be more than replay_size
