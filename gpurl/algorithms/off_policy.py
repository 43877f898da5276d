"""What all off-policy algorithms share: steps go into a replay buffer, and after every `horizon`
steps the networks are updated on batches of it.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gpurl.algorithms.base import Algorithm, AlgorithmConfig, Decision, Metrics, PolicyState
from gpurl.algorithms.symmetry import Mirror, Symmetry
from gpurl.buffers.prioritized import PrioritizedReplay
from gpurl.buffers.replay import Replay
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_atoms, check_numbers
from gpurl.envs.stacked_box import StackedBox
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.optimizer import FlatAdam

# as `Replay.sample` returns it, with normalised observations and scaled rewards
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of every off-policy algorithm."""

    # stored priorities are powers of errors
    fixed: ClassVar[tuple[str, ...]] = (*AlgorithmConfig.fixed, "per_alpha")
    choices: ClassVar[Choices] = {"storage": ("float32", "bfloat16")}

    horizon: int = 1
    updates: int = 8
    """Updates after each horizon, each on a new batch."""
    batch_size: int = 256
    """Transitions in a batch."""
    replay_size: int = 1_000_000
    """Transitions in the replay buffer, the newest."""
    learning_starts: int = 5_000
    """Transitions before the first update; until then actions are random."""
    n_step: int = 1
    """Rewards that a target sums before it bootstraps; never past the end of an episode."""
    learning_rate: float = 3e-4
    reward_scale: float = 1.0
    """Factor by which rewards are multiplied before learning."""
    prioritized: bool = False
    """Draw transitions by their last TD error (Schaul et al. 2016) instead of uniformly."""
    per_alpha: float = 0.5
    """Exponent of the error in the priority; 0 draws uniformly."""
    per_beta: float = 0.4
    """Importance-sampling exponent at the start of training; it rises to 1 at the end."""
    priority_decay: float = 0.999
    """Decay per update of the largest priority so far, which new transitions get."""
    storage: str = "float32"
    """Type of stored observations: float32, or bfloat16 at half the memory (2 digits); images stay
    uint8.
    """
    final_obs_fraction: float = 1.0 / 16.0
    """Final observations in the replay buffer, as a fraction of its transitions; raise it if time
    limits end episodes after fewer than 16 steps.
    """
    symmetry: str = ""
    """Function that mirrors the task, MODULE:FUNCTION as my_task:mirror, or task for the method
    mirror of the environment: (obs, action) -> (obs, action), for batches [B, ...], action may be
    None. Every second row of a batch is mirrored, and the policy's asymmetry is logged.
    """
    save_replay: bool = False
    """Write the replay buffer into every checkpoint, for a resumed run; else it is filled again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one = ("updates", "batch_size", "replay_size", "learning_starts", "n_step")
        check_numbers(
            self,
            dict.fromkeys(at_least_one, 1),
            ("reward_scale", "final_obs_fraction"),
            zero_to_one=("per_alpha", "per_beta", "priority_decay", "final_obs_fraction"),
        )
        for name in () if self.is_filled else ("learning_starts", "replay_size"):
            if self.batch_size > getattr(self, name):
                raise UsageError(
                    f"batch_size {self.batch_size} is more than {name} {getattr(self, name)}"
                )

    @property
    def is_filled(self) -> bool:
        """Whether the replay buffer is complete at the start, whatever its settings are."""
        return False


@dataclass(frozen=True)
class CriticConfig(OffPolicyConfig):
    """Settings of every off-policy algorithm with critics and their target networks."""

    fixed: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed,
        "num_critics",
        "atoms",
        "v_min",
        "v_max",
    )

    num_critics: int = 1
    """Critics in the ensemble, each with its own initial weights."""
    tau: float = 0.005
    """Polyak averaging: target networks move by this fraction of the difference; 1 copies."""
    atoms: int = 0
    """Atoms of a critic's distribution of returns (C51, Bellemare et al. 2017); 0: a critic gives
    one number.
    """
    v_min: float = -10.0
    """Value of the lowest atom, of scaled rewards."""
    v_max: float = 10.0
    """Value of the highest atom."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"num_critics": 1, "atoms": 0}, ("tau",), zero_to_one=("tau",))
        check_atoms(self.atoms, self.v_min, self.v_max)

    def make_support(self) -> Tensor:
        """[Z] the values of the atoms."""
        return torch.linspace(self.v_min, self.v_max, max(self.atoms, 1))


class OffPolicy(Algorithm):
    """Collects `horizon` steps into a rollout, moves them into the replay buffer in `prepare`, and
    does `updates` updates in `learn`.
    """

    config: OffPolicyConfig
    common_streams = frozenset({"choice"})
    # set by `make_buffer`: a policy that does not train needs none, nor a student with a memory
    replay: Replay

    def make_training(self) -> None:
        seed = self.seed * 4
        self.learning_starts = self.config.learning_starts
        # a stream per environment, a stream per row of a batch, and one for the whole batch
        self.action_random = CounterRandom(seed + 1, self.num_envs, self.device)
        self.update_random = CounterRandom(seed + 2, self.config.batch_size, self.device)
        self.choice_random = CounterRandom(seed + 3, 1, self.device)
        self.random_streams = {
            "action": self.action_random,
            "update": self.update_random,
            "choice": self.choice_random,
        }
        self.is_random = False  # whether actions are random; `schedule` sets it

    def set_symmetry(self, mirror: Mirror, name: str) -> None:
        self.refuse_mirrored_images(name)
        if self.takes_agents:
            raise UsageError(f"symmetry {name} is for one agent, {self.label} is for several")
        spaces = self.observation_space, self.action_space, self.state_space
        self.symmetry = Symmetry(mirror, name, spaces, self.action_scaler(), self.device)

    # ---- what a subclass defines ----

    @abstractmethod
    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """(action with exploration [N, ...], as the replay buffer stores it, next policy state) at
        normalised obs, [N, D] or with S privileged numbers [N, D + S].
        """

    @abstractmethod
    def greedy(self, obs: Tensor) -> Tensor:
        """[N, ...] the best action at normalised obs as in `explore`, as stored."""

    @abstractmethod
    def random_action(self) -> Tensor:
        """[N, ...] uniform over all actions, as stored."""

    @abstractmethod
    def to_env(self, action: Tensor) -> Tensor:
        """[N, *action] the action that the environment receives."""

    @abstractmethod
    def update_step(self, batch: Batch, number: int) -> Metrics:
        """Update `number` of this iteration: an optimiser step of each network that is due.

        Returns metrics of any shape, logged as their means; "td_error" [B], which prioritised
        replay needs, is not logged.
        """

    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a stored observation."""
        return tuple(self.observation_space.shape or ())

    def action_shape(self) -> tuple[int, ...]:
        """Shape of a stored action."""
        return ()

    def action_scaler(self) -> ActionScaler | None:
        """Between stored actions and those of the environment; None where they are the same."""
        return None

    def extra_columns(self) -> dict[str, tuple[int, ...]]:
        """name -> shape, () or (n,), of what a step stores beside reward and action."""
        return {}

    def compute_extra_columns(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """name -> [T, N, ...] the `extra_columns` of a rollout."""
        return {}

    def make_adam(
        self,
        module: nn.Module,
        loss: str,
        target: nn.Module | None = None,
        tau: float = 1.0,
        learning_rate: float | None = None,
    ) -> FlatAdam:
        """The optimiser of `module` and its target network; loss: name of the method.
        learning_rate: by default the config's.
        """
        config = self.config
        return FlatAdam(
            module,
            learning_rate or config.learning_rate,
            1e-8,
            config.weight_decay,
            config.max_grad_norm,
            target,
            tau,
            (loss,),
        )

    def reward_unit(self) -> Tensor | float:
        return 1.0 / self.config.reward_scale

    # ---- acting ----

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        if not explore:
            inputs = self.inputs(self.without_state(obs))
            return Decision(self.to_env(self.greedy(inputs)), policy_state, {})
        inputs = self.inputs(obs)
        if self.is_random:
            action = self.random_action()
        else:
            action, policy_state = self.explore(inputs, policy_state)
        self.action_random.advance()
        return Decision(self.to_env(action), policy_state, {"action": action})

    # ---- recording ----

    def make_buffer(self) -> RolloutBuffer:
        """The rollout of one iteration; makes the replay buffer too."""
        config = self.config
        space = self.observation_space
        # a whole rollout fits, and so does an n-step return
        size = max(config.replay_size, config.horizon * self.num_envs)
        if config.n_step > size // self.num_envs:
            raise UsageError(
                f"n_step {config.n_step} is more than replay_size {config.replay_size} holds, "
                f"{size // self.num_envs} steps of {self.num_envs} environments"
            )
        shape = self.stored_shape()
        arguments = (
            size,
            self.num_envs,
            shape,
            {"reward": (), "action": self.action_shape()} | self.extra_columns(),
            self.device,
            self.seed * 4 + 4,
            torch.uint8 if space.dtype == np.uint8 else torch.float32,
            config.storage,
            config.final_obs_fraction,
            space.frames if isinstance(space, StackedBox) and shape == space.shape else 1,
        )
        if config.prioritized:
            self.replay = PrioritizedReplay(
                *arguments,
                alpha=config.per_alpha,
                beta=config.per_beta,
                decay=config.priority_decay,
                ranks=self.ranks,
            )
        else:
            self.replay = Replay(*arguments)
        self.replay.random.begin_at(self.ranks.index)
        return RolloutBuffer(config.horizon, self.device)

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.replay.mark_episode_break(mask)

    # ---- learning ----

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """Move the rollout into the replay buffer."""
        self.replay.add(buffer.columns | self.compute_extra_columns(buffer))
        self.update_normalizer(buffer["obs"], buffer.columns.get("valid"))
        if self.config.symmetry and self.symmetry is None:
            raise UsageError(f"symmetry {self.config.symmetry} is not loaded: call set_symmetry()")
        if self.symmetry is not None:
            rows = buffer["obs"][-1].flatten(1).float()
            self.symmetry.measure(lambda obs: self.act(obs, explore=False).action, rows)
        return {}

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        return self.run_updates(self.update_step)

    def run_updates(self, update_step: Callable[[Batch, int], Metrics]) -> Metrics:
        """`updates` calls of `update_step`, which an engine may replace by a faster form; returns
        the 0-d metrics of the last one.
        """
        metrics = Metrics()
        replay = getattr(self, "replay", None)
        for number in range(self.config.updates):
            batch = self.sample_batch()
            metrics = update_step(batch, number)
            # the next update draws other numbers
            self.update_random.advance()
            self.choice_random.advance()
            # transitions with a large error are drawn more often
            error = metrics.pop("td_error", None)
            if isinstance(replay, PrioritizedReplay):
                if error is None:
                    raise UsageError(
                        f"prioritized needs the error of each transition: wanted a [B] tensor "
                        f"'td_error' among the metrics of the loss of {self.label}, got "
                        f"{', '.join(metrics) or 'none'}"
                    )
                replay.update_priorities(batch["index"], error)
        self.num_updates += self.config.updates
        self.end_learning()
        logged = {
            f"train/{name}": value.mean() if value.dim() else value
            for name, value in metrics.items()
        }
        if self.symmetry is not None:
            logged["train/asymmetry"] = self.symmetry.asymmetry.clone()
        logged["train/n_updates"] = self.num_updates.clone()
        logged["train/learning_rate"] = next(iter(self.optimizers.values())).learning_rate.clone()
        return logged

    def sample_batch(self) -> Batch:
        """batch_size transitions of the replay buffer, as the losses take them."""
        config = self.config
        batch = self.replay.sample(config.batch_size, config.gamma, config.n_step, reuse=True)
        if self.symmetry is not None:  # before observations are normalised
            self.symmetry.mirror_every_second_(batch)
        for name in ("obs", "next_obs"):
            batch[name] = self.inputs(batch[name])
        if config.reward_scale != 1.0:
            batch["reward"] = batch["reward"] * config.reward_scale
        return batch

    def max_batch_rows(self) -> int:
        return max(self.num_envs, self.config.batch_size)

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        self.is_random = steps < self.config.learning_starts
        replay = getattr(self, "replay", None)
        if isinstance(replay, PrioritizedReplay):
            replay.set_progress(progress)

    # ---- states ----

    def replay_state(self) -> dict[str, Any]:
        return self.replay.state_dict() if self.config.save_replay else {}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        if not state:
            return 0
        self.replay.load_state_dict(state)
        # overwritten transitions count too: learning_starts may exceed replay_size
        return int(self.replay.ring.counts[0]) * self.num_envs
