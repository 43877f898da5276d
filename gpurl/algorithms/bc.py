"""Behaviour cloning: the actor learns to do what was done, in a dataset or by a teacher; also where
the student itself gets to (DAgger).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch, OffPolicy, OffPolicyConfig
from gpurl.buffers.demonstrations import read_demonstrations
from gpurl.buffers.replay import Replay
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.squash import squashed_likelihood, squashed_mode, squashed_sample
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.distributions import Categorical, MultiCategorical, make_head
from gpurl.nn.mlp import BodyConfig, make_network
from gpurl.nn.optimizer import FlatAdam

UNUSED = {
    "n_step": 1,
    "reward_scale": 1.0,
    "prioritized": False,
}  # settings of the family that cloning has no use for


@dataclass(frozen=True)
class BCConfig(OffPolicyConfig):
    """Settings of behaviour cloning. It needs a dataset or a teacher, one of them."""

    fixed: ClassVar[tuple[str, ...]] = (*OffPolicyConfig.fixed, "head", "actor_network")

    dataset: str | None = None
    """What to clone: FILE.npz or FILE.safetensors with obs [M, ...] and action [M, ...] as the
    environment has them, or minari:DATASET_ID.
    The student plays, which is for the log; all transitions are learnt from."""
    teacher: str | None = None
    """Whom to clone: a run folder (its best checkpoint) or a checkpoint folder. The teacher
    plays.
    """
    dagger: bool = False
    """Once something was learnt the student plays and the teacher says what it would have done
    (DAgger, Ross et al. 2011).
    """
    head: str = "squashed"
    """Of continuous actions: squashed (mean and deviation, the most likely; fits sac) or
    deterministic (squared error; fits ddpg, td3).
    """
    logit_penalty: float = 0.01
    """Of discrete actions: weight of the mean square of the logits, beside the cross-entropy."""
    actor_network: BodyConfig = field(default_factory=BodyConfig)
    """Shape of the actor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"head": ("squashed", "deterministic")})
        check_numbers(self, {"logit_penalty": 0})
        for name, default in UNUSED.items():
            if (value := getattr(self, name)) != default:
                raise UsageError(
                    f"bc clones actions, whatever they led to: leave out {name} {value}"
                )


class BC(OffPolicy):
    """The actor is that of sac, ddpg and td3, so that they can go on from it (`actor_from`)."""

    config: BCConfig
    # no module of this one, so its weights are in no checkpoint: see `set_teacher`
    _teacher: tuple[Algorithm, ...] = ()

    def make_networks(self) -> None:
        config, space = self.config, self.action_space
        self.head: CloneHead
        if isinstance(space, Box) and space.low.size:
            self.head = (Squashed if config.head == "squashed" else Deterministic)(
                space, self.label
            )
        else:
            head = make_head(space, algorithm=self.label)
            assert isinstance(head, Categorical | MultiCategorical), space
            self.head = Choice(head, tuple(space.shape or ()), config.logit_penalty)
        self.actor = make_network(1, self.num_inputs, self.head.num_outputs, config.actor_network)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        config = self.config
        return {
            "actor": FlatAdam(
                self.actor,
                config.learning_rate,
                1e-8,
                config.weight_decay,
                config.max_grad_norm,
                losses=("actor_loss",),
            )
        }

    # ---- acting ----

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        """While training the teacher plays, where there is one; policy_state is its memory."""
        if not explore:
            return Decision(self.to_env(self.greedy(self.inputs(obs))), policy_state, {})
        if self.teacher is None:
            action, policy_state = self.decide(self.inputs(obs), policy_state)
            self.action_random.advance()
            return Decision(self.to_env(action), policy_state, {"action": action})
        played, policy_state, _ = self.teacher.act(obs, policy_state, explore=False)
        label = self.head.from_env(played)
        if self.config.dagger:
            action, _ = self.decide(self.inputs(obs), ())
            self.action_random.advance()
            played = torch.where(self.num_updates > 0, self.to_env(action), played)
        return Decision(played, policy_state, {"action": label})

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return () if self.teacher is None else self.teacher.initial_policy_state(num_envs)

    def decide(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return self.head.sample(self.actor(obs).squeeze(0), self.action_random), policy_state

    def greedy(self, obs: Tensor) -> Tensor:
        return self.head.mode(self.actor(obs).squeeze(0))

    def random_action(self) -> Tensor:
        raise AssertionError(
            "before it has learnt anything the teacher plays, or the student as it is"
        )

    def to_env(self, action: Tensor) -> Tensor:
        return self.head.to_env(action)

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        """NaN: cloning knows nothing of rewards. The actor runs all the same, since its time
        decides the number of threads.
        """
        with torch.no_grad():
            return self.actor(self.inputs(obs)).squeeze(0).sum(-1) * math.nan

    # ---- what is learnt from ----

    def action_shape(self) -> tuple[int, ...]:
        return self.head.shape

    def make_buffer(self) -> RolloutBuffer:
        """Reads the dataset: a run needs it or a teacher, a policy by itself does not."""
        config = self.config
        if (config.dataset is None) == (config.teacher is None):
            raise UsageError(
                f"bc needs a dataset or a teacher, one of them; got dataset {config.dataset} and "
                f"teacher {config.teacher}"
            )
        if config.teacher is not None:
            assert self.teacher is not None, "set_teacher() comes first"
            return super().make_buffer()
        if config.dagger:
            raise UsageError(
                f"dagger asks a teacher what it would have done, dataset {config.dataset} cannot "
                f"say: give a teacher instead"
            )
        self.learning_starts = 0  # all that there will be is there
        spaces: Any = self.observation_space, self.action_space
        self._hold(*read_demonstrations(str(config.dataset), *spaces))
        return RolloutBuffer(config.horizon, self.device)

    @property
    def teacher(self) -> Algorithm | None:
        """Who plays and is cloned, where there is one."""
        return self._teacher[0] if self._teacher else None

    def set_teacher(self, teacher: Algorithm) -> None:
        """Clone `teacher`, which config.teacher names, made for as many environments. Before
        `make_buffer`; UsageError where its spaces are others.
        """
        for name in ("observation_space", "action_space"):
            theirs, own = getattr(teacher, name), getattr(self, name)
            if theirs != own:
                raise UsageError(
                    f"the teacher {self.config.teacher} is of another environment: its {name} is "
                    f"{theirs}, this one's {own}"
                )
        self._teacher = (teacher,)

    def _hold(self, obs: Any, action: Any) -> None:
        """Put arrays obs [M, *obs] and action [M, *action] into a replay that stays as it is: M
        steps of one environment.
        """
        seen, done = (torch.from_numpy(array).to(self.device) for array in (obs, action))
        columns = {"reward": (), "action": self.head.shape}
        shape, kind, storage = tuple(seen.shape[1:]), seen.dtype, self.config.storage
        self.replay = Replay(
            len(seen), 1, shape, columns, self.device, self.seed * 4 + 4, kind, storage
        )
        nothing = torch.zeros(len(seen), device=self.device)
        rows = {
            "obs": seen,
            "final_obs": seen,
            "action": self.head.from_env(done),
            "reward": nothing,
        }
        rows |= {"terminated": nothing.bool(), "truncated": nothing.bool()}
        self.replay.add({name: column.unsqueeze(1) for name, column in rows.items()})
        if self.normalizer is not None:
            self.normalizer.update(seen.reshape(len(seen), -1).float())

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """Move the rollout into the replay; with a dataset nothing of it is learnt from."""
        return {} if self.teacher is None else super().prepare(buffer)

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        if self.teacher is not None:
            super().mark_episode_break(mask)

    def replay_state(self) -> dict[str, Any]:
        return (
            {"random": self.replay.random.state_dict()}
            if self.teacher is None
            else super().replay_state()
        )

    def load_replay_state(self, state: dict[str, Any]) -> int:
        if self.teacher is not None:
            return super().load_replay_state(state)
        self.replay.random.load_state_dict(state["random"])
        return 0

    def update_step(self, batch: Batch, number: int) -> Metrics:
        loss, metrics = self.actor_loss(batch)
        return metrics | {"grad_norm": self.optimizers["actor"].step(loss, of=self.actor_loss)}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(loss 0-d, the mean over rows that are transitions; metrics)."""
        rows = self.head.loss(self.actor(batch["obs"]).squeeze(0), batch["action"])
        loss = rows @ (batch["weight"] / batch["weight"].sum().clamp(min=1.0))
        return loss, {"actor_loss": loss.detach()}


class CloneHead(nn.Module):
    """What the actor's numbers [B, num_outputs] mean, and how far they are from an action that was
    taken.
    """

    num_outputs: int
    shape: tuple[int, ...]  # of a stored action

    @abstractmethod
    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        """[B] of each row, differentiable by output; action: [B, *shape], as the replay gives
        it.
        """

    @abstractmethod
    def mode(self, output: Tensor) -> Tensor:
        """The greedy action."""

    @abstractmethod
    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        """What the student does while it is trained."""

    @abstractmethod
    def to_env(self, action: Tensor) -> Tensor:
        """What the environment receives."""

    @abstractmethod
    def from_env(self, action: Tensor) -> Tensor:
        """[B, *shape] to be stored, of what the environment received."""


class Deterministic(CloneHead):
    """An action in [-1, 1]^A: a = tanh(output), loss mean over A of (a - action)^2."""

    def __init__(self, space: Box, algorithm: str) -> None:
        super().__init__()
        self.box = ActionScaler(space)
        self.box.require_bounds(algorithm)
        self.num_actions = int(space.low.size)
        self.num_outputs, self.shape = self.num_actions, (self.num_actions,)

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        return (output.tanh() - action).square().mean(-1)

    def mode(self, output: Tensor) -> Tensor:
        return output.tanh()

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return self.mode(output)

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def from_env(self, action: Tensor) -> Tensor:
        return self.box.from_env(action).clamp(-1.0, 1.0)


class Squashed(Deterministic):
    """A tanh-squashed Gaussian, loss -log p(action): see `gpurl.kernels.squash`."""

    def __init__(self, space: Box, algorithm: str) -> None:
        super().__init__(space, algorithm)
        self.num_outputs = 2 * self.num_actions

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        return -squashed_likelihood(output, action)

    def mode(self, output: Tensor) -> Tensor:
        return squashed_mode(output)

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return squashed_sample(output, rng.normal((self.num_actions,)))[0]


class Choice(CloneHead):
    """One or several of a few actions, loss -log p(action) + penalty * mean of the logits' squares
    (d3rlpy's, with 0.5 there).
    """

    def __init__(
        self, head: Categorical | MultiCategorical, shape: tuple[int, ...], penalty: float
    ) -> None:
        super().__init__()
        self.head, self.shape, self.penalty = head, shape, penalty
        self.num_outputs = head.num_outputs
        each = head.heads if isinstance(head, MultiCategorical) else [head]
        self.sizes = [part.num_outputs for part in each]

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        choices = action.long().view(len(action), -1, 1).unbind(1)
        loss = self.penalty * output.square().mean(-1)
        for logits, choice in zip(output.split(self.sizes, dim=1), choices):
            loss = loss - logits.log_softmax(-1).gather(1, choice).squeeze(1)
        return loss

    def mode(self, output: Tensor) -> Tensor:
        return self.head.mode(output)

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return self.head.sample(output, rng)[0]

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def from_env(self, action: Tensor) -> Tensor:
        return action
