"""Behaviour cloning: the actor learns to imitate the actions of a dataset or of a teacher; with
DAgger also in states that the student itself reaches.
"""

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState
from gpurl.algorithms.off_policy import Batch, OffPolicy, OffPolicyConfig
from gpurl.algorithms.symmetry import Mirror
from gpurl.buffers.demonstrations import Actions, read_demonstrations
from gpurl.buffers.replay import Replay
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.squash import squashed_likelihood, squashed_mode, squashed_sample
from gpurl.nn.acting import Actor, FirstHalf, chain
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.distributions import Categorical, MultiCategorical, make_head
from gpurl.nn.mlp import BodyConfig, make_network
from gpurl.nn.optimizer import FlatAdam, call_loss

# settings of off-policy algorithms without meaning here, with the values they must keep
UNUSED = {"n_step": 1, "reward_scale": 1.0, "prioritized": False}


@dataclass(frozen=True)
class BCConfig(OffPolicyConfig):
    """Settings of behaviour cloning. It needs either a dataset or a teacher."""

    choices: ClassVar[Choices] = {"head": ("squashed", "deterministic")}
    fixed: ClassVar[tuple[str, ...]] = (*OffPolicyConfig.fixed, "head", "actor_network")

    dataset: str | None = None
    """Dataset to clone: FILE.npz or FILE.safetensors with obs [M, ...] and action [M, ...] in the
    environment's units, or minari:DATASET_ID. The student acts, for the log only; all rows of the
    dataset are learnt from.
    """
    teacher: str | None = None
    """Policy to clone: a run folder (its best checkpoint) or a checkpoint folder. The teacher
    acts.
    """
    dagger: bool = False
    """After the first update the student acts, and the teacher labels its observations (DAgger,
    Ross et al. 2011).
    """
    head: str = "squashed"
    """Head for continuous actions: squashed (tanh-squashed Gaussian, log-likelihood; can continue
    as sac) or deterministic (squared error; can continue as ddpg or td3).
    """
    logit_penalty: float = 0.01
    """For discrete actions: weight of the mean squared logit, added to the cross-entropy."""
    actor_network: BodyConfig = field(default_factory=BodyConfig)
    """Shape of the actor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"logit_penalty": 0})
        for name, default in UNUSED.items():
            if (value := getattr(self, name)) != default:
                raise UsageError(
                    f"bc clones actions, so {name} {value} would have no effect: leave out {name}"
                )


class BC(OffPolicy):
    """The actor has the form of those of sac, ddpg and td3, which can start from it
    (`actor_from`).
    """

    config: BCConfig
    # in a tuple, so that it is no submodule and its weights are in no checkpoint
    _teacher: tuple[Algorithm, ...] = ()

    def make_networks(self) -> None:
        config = self.config
        space = self.action_space
        self.head: ImitationHead
        if isinstance(space, Box) and space.low.size:
            kind = SquashedHead if config.head == "squashed" else DeterministicHead
            self.head = kind(space, self.label)
        else:
            head = make_head(space, algorithm=self.label)
            assert isinstance(head, Categorical | MultiCategorical), space
            self.head = DiscreteHead(head, tuple(space.shape or ()), config.logit_penalty)
        self.actor = make_network(1, self.num_inputs, self.head.num_outputs, config.actor_network)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        return {"actor": self.make_adam(self.actor, "actor_loss")}

    # ---- acting ----

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        """In training the teacher acts, if there is one, and policy_state is its policy state."""
        # without a teacher, as every off-policy algorithm
        if self.teacher is None or not explore:
            return super().act(obs, policy_state, explore)
        # the teacher's action is the label in any case
        env_action, policy_state, _ = self.teacher.act(obs, policy_state, explore=False)
        label = self.head.from_env(env_action)
        # with DAgger the student acts, unless it has learnt nothing yet
        if self.config.dagger:
            action, _ = self.explore(self.inputs(obs), ())
            self.action_random.advance()
            env_action = torch.where(self.num_updates > 0, self.to_env(action), env_action)
        return Decision(env_action, policy_state, {"action": label})

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        self.is_random = False  # random actions would teach nothing

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return () if self.teacher is None else self.teacher.initial_policy_state(num_envs)

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return self.head.sample(self.actor(obs).squeeze(0), self.action_random), policy_state

    def greedy(self, obs: Tensor) -> Tensor:
        return self.head.mode(self.actor(obs).squeeze(0))

    def actor_modules(self) -> Actor:
        return Actor(self.actor.to_torch(), self.head.to_torch())

    def random_action(self) -> Tensor:
        raise AssertionError("behaviour cloning takes no random actions")

    def to_env(self, action: Tensor) -> Tensor:
        return self.head.to_env(action)

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        """[N] NaN: no value is learnt. The actor runs nevertheless, because this call is timed to
        choose the number of threads.
        """
        with torch.no_grad():
            return self.actor(self.inputs(obs)).squeeze(0).sum(-1) * math.nan

    # ---- training data ----

    def set_symmetry(self, mirror: Mirror, name: str) -> None:
        raise UsageError(f"bc imitates a policy as it is, symmetric or not: leave out {name}")

    def action_shape(self) -> tuple[int, ...]:
        return self.head.shape

    def make_buffer(self) -> RolloutBuffer:
        """Makes the replay buffer too, and fills it with the dataset, if there is one."""
        config = self.config
        if (config.dataset is None) == (config.teacher is None):
            raise UsageError(
                f"bc needs either a dataset or a teacher; got dataset {config.dataset} and teacher "
                f"{config.teacher}"
            )
        if config.teacher is not None:
            assert self.teacher is not None, "set_teacher() comes first"
            return super().make_buffer()
        if config.dagger:
            raise UsageError(
                f"dagger needs a teacher to label observations, got dataset {config.dataset}: give "
                f"a teacher instead"
            )
        obs, action = read_demonstrations(
            str(config.dataset),
            cast(Box, self.observation_space),
            cast(Actions, self.action_space),
        )
        self._fill_replay(torch.from_numpy(obs), torch.from_numpy(action))
        self.learning_starts = 0  # the replay buffer is complete
        return RolloutBuffer(config.horizon, self.device)

    @property
    def teacher(self) -> Algorithm | None:
        """The policy that is cloned, if it is not a dataset."""
        return self._teacher[0] if self._teacher else None

    def set_teacher(self, teacher: Algorithm) -> None:
        """Clone `teacher`, which config.teacher names, made for the same number of environments.
        To be called before `make_buffer`. UsageError if its spaces differ.
        """
        for name in ("observation_space", "action_space"):
            teacher_space = getattr(teacher, name)
            space = getattr(self, name)
            if teacher_space != space:
                raise UsageError(
                    f"the teacher {self.config.teacher} is of another environment: its {name} is "
                    f"{teacher_space}, this one's {space}"
                )
        self._teacher = (teacher,)

    def _fill_replay(self, obs: Tensor, action: Tensor) -> None:
        """Store obs [M, *obs] and action [M, *action], in the environment's units, as M steps of
        one environment.
        """
        count = len(obs)
        obs = obs.to(self.device)
        self.replay = Replay(
            count,
            1,
            tuple(obs.shape[1:]),
            {"reward": (), "action": self.head.shape},
            self.device,
            self.seed * 4 + 4,
            obs.dtype,
            self.config.storage,
        )
        # rewards and ends are not learnt from
        zeros = torch.zeros(count, device=self.device)
        columns = {
            "obs": obs,
            "final_obs": obs,
            "action": self.head.from_env(action.to(self.device)),
            "reward": zeros,
            "terminated": zeros.bool(),
            "truncated": zeros.bool(),
        }
        self.replay.add({name: column.unsqueeze(1) for name, column in columns.items()})
        if self.normalizer is not None:
            self.normalizer.update(obs.reshape(count, -1).float())

    # the rows of a dataset never change: rollouts are not added to them, and a checkpoint holds
    # only the random stream of the replay buffer

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        return {} if self.teacher is None else super().prepare(buffer)

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        if self.teacher is not None:
            super().mark_episode_break(mask)

    def replay_state(self) -> dict[str, Any]:
        if self.teacher is not None:
            return super().replay_state()
        return {"random": self.replay.random.state_dict()}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        if self.teacher is not None:
            return super().load_replay_state(state)
        self.replay.random.load_state_dict(state["random"])
        return 0

    def update_step(self, batch: Batch, number: int) -> Metrics:
        loss, metrics = call_loss(self.actor_loss, batch)
        return metrics | {"grad_norm": self.optimizers["actor"].step(loss, of=self.actor_loss)}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(0-d mean loss of the rows that are transitions, metrics)."""
        rows = self.head.loss(self.actor(batch["obs"]).squeeze(0), batch["action"])
        loss = rows @ (batch["weight"] / batch["weight"].sum().clamp(min=1.0))
        return loss, {"actor_loss": loss.detach()}


class ImitationHead(nn.Module):
    """Turns the actor's outputs [B, num_outputs] into actions, and compares them with labels."""

    num_outputs: int
    shape: tuple[int, ...]  # of a stored action

    @abstractmethod
    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        """[B] loss of each row; action: [B, *shape] as stored."""

    @abstractmethod
    def mode(self, output: Tensor) -> Tensor:
        """[B, *shape] the greedy action."""

    @abstractmethod
    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        """[B, *shape] the action of the student in training."""

    @abstractmethod
    def to_env(self, action: Tensor) -> Tensor:
        """[B, *action] in the environment's units, of actions as stored."""

    @abstractmethod
    def to_torch(self) -> nn.Module:
        """[B, *action] greedy, in the environment's units, of the actor's output, in torch's own
        modules.
        """

    @abstractmethod
    def from_env(self, action: Tensor) -> Tensor:
        """[B, *shape] as stored, of actions in the environment's units."""


class DeterministicHead(ImitationHead):
    """An action in [-1, 1]^A: a = tanh(output), loss mean over A of (a - action)^2."""

    def __init__(self, space: Box, algorithm: str) -> None:
        super().__init__()
        self.box = ActionScaler(space)
        self.box.require_bounds(algorithm)
        self.num_actions = int(space.low.size)
        self.num_outputs = self.num_actions
        self.shape = (self.num_actions,)

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        return (output.tanh() - action).square().mean(-1)

    def mode(self, output: Tensor) -> Tensor:
        return output.tanh()

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return self.mode(output)

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def to_torch(self) -> nn.Module:
        return chain(nn.Tanh(), copy.deepcopy(self.box))

    def from_env(self, action: Tensor) -> Tensor:
        return self.box.from_env(action).clamp(-1.0, 1.0)


class SquashedHead(DeterministicHead):
    """A tanh-squashed Gaussian, loss -log p(action): see `gpurl.kernels.squash`."""

    def __init__(self, space: Box, algorithm: str) -> None:
        super().__init__(space, algorithm)
        self.num_outputs = 2 * self.num_actions

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        return -squashed_likelihood(output, action)

    def mode(self, output: Tensor) -> Tensor:
        return squashed_mode(output)

    def to_torch(self) -> nn.Module:
        return chain(FirstHalf(), super().to_torch())

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return squashed_sample(output, rng.normal((self.num_actions,)))[0]


class DiscreteHead(ImitationHead):
    """Categorical actions, loss -log p(action) + penalty * mean squared logit. d3rlpy has this
    penalty too, of weight 0.5.
    """

    def __init__(
        self, head: Categorical | MultiCategorical, shape: tuple[int, ...], penalty: float
    ) -> None:
        super().__init__()
        self.head = head
        self.shape = shape
        self.penalty = penalty
        self.num_outputs = head.num_outputs
        heads = head.heads if isinstance(head, MultiCategorical) else [head]
        self.sizes = [each.num_outputs for each in heads]  # logits of each component

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        choices = action.long().view(len(action), -1, 1).unbind(1)  # each [B, 1]
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

    def to_torch(self) -> nn.Module:
        return self.head.to_torch()

    def from_env(self, action: Tensor) -> Tensor:
        return action
