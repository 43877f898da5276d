"""What every algorithm is: it acts, it records a step in its buffer, it updates. One training loop
serves all of them.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_choices, check_numbers
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.nn.mlp import set_dtype
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.optimizer import FlatAdam

Buffer = RolloutBuffer
Metrics = dict[str, Tensor]  # by their names in the log
PolicyState = tuple[Tensor, ...]  # () without memory, else one [N, H] tensor a memory


class Decision(NamedTuple):
    """What `act` returns."""

    action: Tensor  # [N, *action] as the environment takes it
    policy_state: PolicyState  # memory after this step; () without memory
    columns: dict[str, Tensor]  # [N, ...] what the update will need, stored with the step


@dataclass(frozen=True)
class AlgorithmConfig:
    """Settings every algorithm has."""

    fixed: ClassVar[tuple[str, ...]] = (
        "normalize_obs",
    )  # a resumed run keeps them: they shape the weights or count at the start only
    schedules: ClassVar[tuple[str, ...]] = (
        "constant",
        "linear",
    )  # that the learning rate may follow

    gamma: float = 0.99
    """Discount factor."""
    horizon: int = 32
    """Steps of every environment between updates."""
    learning_rate: float = 1e-3
    """Adam's step size, or where it starts."""
    schedule: str = "constant"
    """Learning rate over time: constant or linear (to 0)."""
    max_grad_norm: float | None = None
    """Gradient norm above which a gradient is scaled down: that of all weights of an optimiser, all
    critics of an ensemble together.
    """
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    normalize_obs: bool = False
    """Running normalisation of observations, inside the policy; what is stored stays as it was."""

    def __post_init__(self) -> None:
        check_choices(self, {"schedule": self.schedules})
        check_numbers(
            self,
            {"horizon": 1, "weight_decay": 0},
            ("learning_rate", "max_grad_norm"),
            zero_to_one=("gamma",),
        )


class Algorithm(ABC, nn.Module):
    """`state_dict()` and `extra_state()` are what a checkpoint holds.

    Nothing in act, record or update waits for the device: metrics stay tensors.
    """

    takes_agents: ClassVar[bool] = (
        # obs [N, A, D], actions [N, A] or [N, A, d], reward [N, A]; without it one agent only
        False
    )
    # the name of another algorithm that takes its place for a Discrete action space
    discrete_form: ClassVar[str] = ""
    values_final_obs: ClassVar[bool] = False  # whether targets need the values of final_obs
    learning_starts: int = (
        0  # transitions to be collected, since nothing was stored, before the first `learn`
    )
    config: AlgorithmConfig
    name: str
    normalizer: Normalizer | None

    def __init__(
        self,
        config: AlgorithmConfig,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        num_envs: int,
        device: torch.device,
        seed: int = 0,
        state_space: gymnasium.Space | None = None,
    ) -> None:
        super().__init__()
        self.config, self.label = config, type(self).__name__
        self.observation_space, self.action_space = observation_space, action_space
        self.num_envs, self.device, self.seed = num_envs, device, seed
        if not isinstance(observation_space, Box):
            raise UsageError(
                f"{self.label} needs a Box observation space, this one is {observation_space}"
            )
        self.num_inputs = math.prod(observation_space.shape)
        self.state_space = (
            state_space if self.reads_state() else None
        )  # where it is not None, rows of obs have the state behind them
        self.num_state = 0 if self.state_space is None else math.prod(self.state_space.shape or ())
        self.normalizer = (
            Normalizer(self.num_inputs + self.num_state) if config.normalize_obs else None
        )
        self.make_networks()
        if device.type != "cpu":
            self.to(device)
        # of whole iterations, logged as train/n_updates; steps that were left out are among them,
        # train/skipped_steps says how many
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.make_training()

    @abstractmethod
    def make_networks(self) -> None:
        """Set the modules; UsageError for spaces that do not fit."""

    @abstractmethod
    def make_training(self) -> None:
        """Set what trains the modules, which are on the device now: optimisers, random numbers,
        scalars.
        """

    def reads_state(self) -> bool:
        """Whether the critic reads what an environment shows to critics only."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Algorithm":
        raise TypeError(
            f"{type(self).__name__} shares memory between weights, optimiser and arrays, which a "
            f"copy would tear apart: "
            "make another one (make_algorithm, gpurl.load) and give it the state_dict()"
        )

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """Memory at the start of an episode: () or tensors [num_envs, H]."""
        return ()

    @abstractmethod
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        """obs: [N, *obs]. explore=False gives the greedy action."""

    @abstractmethod
    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        """[N] expected return from obs [N, *obs]."""

    @abstractmethod
    def make_buffer(self) -> Buffer:
        """Storage for what `record_step` writes."""

    def record_step(
        self,
        buffer: Buffer,
        obs: Tensor,
        decision: Decision,
        timestep: Timestep,
        final_value: Tensor | None = None,
    ) -> None:
        """Store one step: `decision` was taken at `obs` and led to `timestep`.

        final_value: [N] of its final observations, where `values_final_obs` and the engine has
        asked for it already.
        """
        row = {
            "obs": obs,
            "reward": self.reward_of(timestep),
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            **decision.columns,
        }
        if final_value is None:
            row["final_obs"] = timestep.info["final_obs"]
        else:
            row["final_value"] = final_value
        if "valid" in timestep.info:
            row["valid"] = timestep.info["valid"]
        buffer.add(row)

    def reward_of(self, timestep: Timestep) -> Tensor:
        """[N] what is learnt from of a step's reward."""
        return timestep.reward

    def row_shape(self) -> tuple[int, ...]:
        """Of one observation as training stores it."""
        return (
            (self.num_inputs + self.num_state,)
            if self.num_state
            else tuple(self.observation_space.shape or ())
        )

    def inputs(self, obs: Tensor) -> Tensor:
        """[N, *obs] -> [N, D] float32, normalised."""
        rows = obs.reshape(obs.shape[0], -1).float()
        return rows if self.normalizer is None else self.normalizer(rows)

    def is_ready(self, buffer: Buffer) -> bool:
        """Whether it is time to update."""
        return buffer.size == buffer.horizon

    @abstractmethod
    def prepare(self, buffer: Buffer) -> dict[str, Tensor]:
        """What `learn` learns from: targets of a rollout, or a sample of a replay buffer."""

    @abstractmethod
    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the optimiser's steps; returns 0-d metrics on the device, named as they are logged.
        data: what `prepare` gave.
        """

    def update(self, buffer: Buffer) -> dict[str, Tensor]:
        """Learn from the buffer; returns the metrics."""
        return self.learn(self.prepare(buffer))

    def all_optimizers(self) -> dict[str, FlatAdam]:
        """Whatever moves weights, by the name before those of its parameters in `state_dict()`; ""
        where they stand there as they are.
        """
        return {}

    @abstractmethod
    def max_batch_rows(self) -> int:
        """Rows of the largest batch that goes through the networks many times."""

    def set_precision(self, precision: str) -> None:
        """Compute products in float32, tf32 or bf16; parameters, gradients and sums stay
        float32.
        """
        if precision == "bf16" and not set_dtype(self, torch.bfloat16):
            raise UsageError(
                f"{self.label} has no layers that compute in {precision}, only in float32"
            )

    @abstractmethod
    def schedule(self, progress: float, steps: int) -> None:
        """Before an iteration: set what changes with training; progress runs from 0 to 1, `steps`
        of the environments were taken so far.
        """

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        """The environments were reset from outside, all or those of mask [N]: what was recorded
        last is not continued by what comes.
        """

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """What continues a run beside the weights: optimiser and random state."""

    @abstractmethod
    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from `extra_state()`."""

    def replay_state(self) -> dict[str, Any]:
        """The stored transitions, where they are to be in checkpoints; else {}."""
        return {}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        """Continue from `replay_state()`; returns how many transitions were stored until then."""
        return 0


def episode_ends(timestep: Timestep) -> Tensor:
    """[N] bool: what follows belongs to another episode. A step that is not a real transition ends
    one too: a reset happened in it.
    """
    ended = timestep.terminated | timestep.truncated
    valid = timestep.info.get("valid")
    return ended if valid is None else ended | ~valid


def restart_policy_state(policy_state: PolicyState, ended: Tensor) -> PolicyState:
    """Empty the memory where ended [N]."""
    return tuple(memory.masked_fill(ended.unsqueeze(1), 0.0) for memory in policy_state)
