"""Behaviour cloning: the actor learns to imitate the actions of a dataset or of a teacher; with
DAgger also in states that the student itself reaches.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState, episode_ends
from gpurl.algorithms.off_policy import Batch, OffPolicy, OffPolicyConfig
from gpurl.algorithms.symmetry import Mirror
from gpurl.buffers.demonstrations import Actions, read_demonstrations
from gpurl.buffers.replay import Replay
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.squash import squashed_likelihood, squashed_mode, squashed_sample
from gpurl.nn.acting import Actor, FirstHalf, chain
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.actor_critic import ActorCritic, NetworkConfig
from gpurl.nn.distributions import Categorical, MultiCategorical, make_head
from gpurl.nn.encoders import EncoderConfig, make_encoded_network
from gpurl.nn.mlp import Dense, Sequential, to_torch
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.parts import Part, dense_actor_part, describe, state_tensors

# settings of off-policy algorithms without meaning here, with the values they must keep
UNUSED = {"n_step": 1, "reward_scale": 1.0, "prioritized": False}


@dataclass(frozen=True)
class StudentConfig(EncoderConfig):
    """Shape of the student."""

    choices: ClassVar[Choices] = {"memory": NetworkConfig.choices["memory"]}

    memory: str = "none"
    """A recurrent layer before the hidden layers, as ppo's: the student then learns from sequences
    of horizon steps of its newest rollout. It needs a teacher.
    """
    memory_size: int = 64
    """Units of the memory."""

    def of_actor_critic(self) -> NetworkConfig:
        """The shape of ppo's network whose actor is this student."""
        return NetworkConfig(
            hidden=self.hidden,
            activation=self.activation,
            layer_norm=self.layer_norm,
            body=self.body,
            encoder=self.encoder,
            encoders=self.encoders,
            shared=bool(self.hidden),
            memory=self.memory,
            memory_size=self.memory_size,
        )


@dataclass(frozen=True)
class BCConfig(OffPolicyConfig):
    """Settings of behaviour cloning. It needs either a dataset or a teacher."""

    choices: ClassVar[Choices] = {"head": ("squashed", "deterministic", "gaussian")}
    fixed: ClassVar[tuple[str, ...]] = (*OffPolicyConfig.fixed, "head", "actor_network")

    dataset: str | None = None
    """Dataset to clone: FILE.npz or FILE.safetensors with obs [M, ...] and action [M, ...] in the
    environment's units, or minari:DATASET_ID. The student acts, for the log only; all rows of the
    dataset are learned from.
    """
    teacher: tuple[str, ...] = ()
    """Policy to clone: a run folder (its best checkpoint) or a checkpoint folder. The teacher
    acts. It reads the observations, the privileged ones, or both, whichever its own training had.
    Several teachers have an equal share of the environments each, in their order.
    """
    dagger: bool = False
    """After the first update the student acts, and the teacher labels its observations (DAgger,
    Ross et al. 2011).
    """
    head: str = "squashed"
    """Head for continuous actions: squashed (tanh-squashed Gaussian, log-likelihood; can continue
    as sac, or as ppo with squash), deterministic (tanh, squared error; as ddpg or td3) or gaussian
    (no tanh, squared error; as ppo).
    """
    logit_penalty: float = 0.01
    """For discrete actions: weight of the mean squared logit, added to the cross-entropy."""
    actor_network: StudentConfig = field(default_factory=StudentConfig)
    """Shape of the actor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"logit_penalty": 0})
        for name, default in UNUSED.items():
            if (value := getattr(self, name)) != default:
                raise UsageError(
                    f"bc clones actions, so {name} {value} would have no effect: leave out {name}"
                )

    @property
    def is_filled(self) -> bool:
        return self.dataset is not None


class BC(OffPolicy):
    """The actor has the form of those of sac, ddpg, td3 and ppo, which can begin with it
    (`init_from`).

    With teachers that read privileged observations, rows of observations are [N, D + S] as for an
    asymmetric critic; the student reads the first D numbers.
    """

    config: BCConfig
    # in a tuple, so that they are no submodules and their weights are in no checkpoint
    _teachers: tuple["Teacher", ...] = ()

    def reads_state(self) -> bool:
        return bool(self.config.teacher)

    def encoder_config(self) -> EncoderConfig:
        return self.config.actor_network

    def make_networks(self) -> None:
        config = self.config
        space = self.action_space
        self.head: ImitationHead
        if isinstance(space, Box) and space.low.size:
            self.head = CONTINUOUS_HEADS[config.head](space, self.label)
        else:
            head = make_head(space, algorithm=self.label)
            assert isinstance(head, Categorical | MultiCategorical), space
            self.head = DiscreteHead(head, tuple(space.shape or ()), config.logit_penalty)
        self.is_recurrent = config.actor_network.memory != "none"
        sizes, observed = (self.num_inputs, self.head.num_outputs), self.observation_space
        self.actor: Sequential | ActorCritic
        if self.is_recurrent:  # its critic stays untrained
            self.actor = ActorCritic(config.actor_network.of_actor_critic(), *sizes, observed)
        else:
            self.actor = make_encoded_network(*sizes, observed, config.actor_network)
        if self.num_state and self.normalizer is not None:  # of what the student reads
            self.normalizer = Normalizer(self.num_inputs, epsilon=config.normalize_obs_epsilon)

    def make_optimizers(self) -> dict[str, FlatAdam]:
        return {"actor": self.make_adam(self.actor, "actor_loss")}

    def make_training(self) -> None:
        super().make_training()
        # what a student with a memory learns from, see `prepare`
        self._sequences: dict[str, Tensor] = {}
        if self.is_recurrent:
            self.learning_starts = 0  # the newest rollout is all it needs

    def parts(self) -> dict[str, Part]:
        head = self.head
        if isinstance(self.actor, ActorCritic):
            body, last = self.actor.actor_part(), self.actor.actor
        else:
            *layers, output = self.actor.layers
            assert isinstance(output, Dense)
            body, last = (describe(*layers), state_tensors(*layers)), output
        num_actions = getattr(head, "num_actions", head.num_outputs)
        return {"actor": dense_actor_part(body, last, num_actions, head.actions)}

    # ---- acting ----

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        """policy_state: the student's memory, then in training those of the teachers, each [N, S]
        although a teacher acts in its share of the environments only.
        """
        own, of_teachers = policy_state[: self.is_recurrent], policy_state[self.is_recurrent :]
        output, next_own = self._outputs(self.inputs(obs), own)
        if not explore:
            action = self.to_env(self.head.mode(output))
            return Decision(action, (*next_own, *of_teachers), {})
        action = self.head.sample(output, self.action_random)
        self.action_random.advance()
        env_action = self.to_env(action)
        # the teacher's action is the label in any case
        if self._teachers:
            teacher_action, of_teachers = self._ask_teachers(obs, of_teachers)
            action = self.head.from_env(teacher_action)
            # with DAgger the student acts, unless it has learned nothing yet
            if self.config.dagger:
                env_action = torch.where(self.num_updates > 0, env_action, teacher_action)
            else:
                env_action = teacher_action
        columns = {"action": action}
        if own:
            columns["policy_state"] = own[0]
        return Decision(env_action, (*next_own, *of_teachers), columns)

    def _ask_teachers(self, obs: Tensor, states: PolicyState) -> tuple[Tensor, PolicyState]:
        """(the greedy actions of the teachers, each in its share of the environments, their next
        policy states) at obs [N, *obs] or [N, D + S].
        """
        actions, next_states = [], list[Tensor]()
        for teacher, rows in zip(self._teachers, self._shares(len(obs))):
            count = len(teacher.algorithm.initial_policy_state(1))
            mine, states = states[:count], states[count:]
            if rows.start == rows.stop:  # another rank has its share
                next_states += mine
                continue
            read = teacher.read(obs[rows], self.num_inputs)
            shares = tuple(memory[rows] for memory in mine)
            action, new, _ = teacher.algorithm.act(read, shares, explore=False)
            actions.append(action)
            for memory, part in zip(mine, new):
                before, after = memory[: rows.start], memory[rows.stop :]
                next_states.append(torch.cat((before, part, after)))
        return torch.cat(actions), tuple(next_states)

    def _shares(self, num_envs: int) -> list[slice]:
        """Which of this rank's environments each teacher has; it has a share of those of all."""
        count, ranks = len(self._teachers), self.ranks
        of_all = [num_envs * ranks.count * (number + 1) // count for number in range(count)]
        ends = [min(max(end - ranks.index * num_envs, 0), num_envs) for end in of_all]
        return [slice(start, end) for start, end in zip((0, *ends), ends)]

    def inputs(self, obs: Tensor) -> Tensor:
        """[N, *obs] or [N, D + S] -> [N, D] float32, normalised."""
        return super().inputs(obs.flatten(1)[:, : self.num_inputs])

    def _outputs(self, inputs: Tensor, memory: PolicyState) -> tuple[Tensor, PolicyState]:
        """(the actor's outputs [N, num_outputs], its next memory) at normalised inputs [N, D]."""
        if not isinstance(self.actor, ActorCritic):
            return self.actor(inputs).squeeze(0), ()
        features, h = self.actor.remember(inputs, memory[0])
        return self.actor(features)[0], (h,)

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        self.is_random = False  # random actions would teach nothing

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        own: PolicyState = ()
        if isinstance(self.actor, ActorCritic) and self.actor.memory is not None:
            own = (torch.zeros(num_envs, self.actor.memory.state_size, device=self.device),)
        teachers = (each.algorithm.initial_policy_state(num_envs) for each in self._teachers)
        return (*own, *(memory for states in teachers for memory in states))

    def explore(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        raise AssertionError("behaviour cloning has an act of its own")

    def greedy(self, obs: Tensor) -> Tensor:
        raise AssertionError("behaviour cloning has an act of its own")

    def actor_modules(self) -> Actor:
        if not isinstance(self.actor, ActorCritic):
            return Actor(to_torch(self.actor), self.head.to_torch())
        assert self.actor.memory is not None
        memory = self.actor.memory
        return Actor(
            self.actor.actor_to_torch(), self.head.to_torch(), memory.to_torch(), memory.state_size
        )

    def random_action(self) -> Tensor:
        raise AssertionError("behaviour cloning takes no random actions")

    def to_env(self, action: Tensor) -> Tensor:
        return self.head.to_env(action)

    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        """[N] NaN: no value is learned. The actor runs nevertheless, because this call is timed to
        choose the number of threads.
        """
        with torch.no_grad():
            return self._outputs(self.inputs(obs), policy_state)[0].sum(-1) * math.nan

    # ---- training data ----

    def set_symmetry(self, mirror: Mirror, name: str) -> None:
        raise UsageError(f"bc imitates a policy as it is, symmetric or not: leave out {name}")

    def action_shape(self) -> tuple[int, ...]:
        return self.head.shape

    def make_buffer(self) -> RolloutBuffer:
        """Makes the replay buffer too, and fills it with the dataset, if there is one."""
        config = self.config
        if (config.dataset is None) == (not config.teacher):
            raise UsageError(
                f"bc needs either a dataset or a teacher; got dataset {config.dataset} and teacher "
                f"{', '.join(config.teacher) or None}"
            )
        if config.teacher:
            assert self._teachers, "set_teachers() comes first"
            if self.is_recurrent:
                return RolloutBuffer(config.horizon, self.device, config.storage)
            return super().make_buffer()
        if config.dagger:
            raise UsageError(
                f"dagger needs a teacher to label observations, got dataset {config.dataset}: give "
                f"a teacher instead"
            )
        if self.is_recurrent:
            raise UsageError(
                f"actor_network.memory {config.actor_network.memory} needs a teacher: dataset "
                f"{config.dataset} has single steps and no sequences"
            )
        obs, action = read_demonstrations(
            str(config.dataset),
            cast(Box, self.observation_space),
            cast(Actions, self.action_space),
        )
        self._fill_replay(torch.from_numpy(obs), torch.from_numpy(action))
        self.learning_starts = 0  # the replay buffer is complete
        return RolloutBuffer(config.horizon, self.device)

    def set_teachers(self, teachers: Sequence[Algorithm]) -> None:
        """Clone `teachers`, which config.teacher names, each made for at least as many environments
        as its share. To be called before `make_buffer`. UsageError if one has other actions, or
        reads what this environment does not give.
        """
        if len(teachers) > (num_envs := self.num_envs * self.ranks.count):
            raise UsageError(
                f"{len(teachers)} teachers share the environments, num_envs is {num_envs}: wanted "
                f"one for each at least"
            )
        spaces = self.observation_space, self.state_space
        self._teachers = tuple(
            Teacher(teacher, reads_of(teacher, name, self.action_space, *spaces))
            for teacher, name in zip(teachers, self.config.teacher, strict=True)
        )

    def record_step(
        self,
        buffer: RolloutBuffer,
        obs: Tensor,
        decision: Decision,
        timestep: Timestep,
        final_value: Tensor | None = None,
    ) -> None:
        if self.is_recurrent:
            columns = decision.columns | {"ended": episode_ends(timestep)}
            decision = decision._replace(columns=columns)
        super().record_step(buffer, obs, decision, timestep, final_value)

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
        self.replay.random.begin_at(self.ranks.index)
        # rewards and ends are not learned from
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
        self.update_normalizer(obs.unsqueeze(1), None)

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """A student with a memory: columns [T, N, ...], "policy_state" [1, N, S] before the first
        step, "episode_starts" [T, N]; else the rollout goes into the replay buffer.
        """
        # the rows of a dataset never change: rollouts are not added to them
        if not self._teachers:
            return {}
        columns = dict(buffer.columns)
        if self.num_state:
            shape = tuple(self.observation_space.shape or ())
            for name in ("obs", "final_obs"):
                columns[name] = columns[name][..., : self.num_inputs].unflatten(-1, shape)
        self.update_normalizer(columns["obs"], columns.get("valid"))
        if not self.is_recurrent:
            self.replay.add(columns)
            return {}
        ended = columns["ended"]
        data = {
            "obs": columns["obs"],
            "action": columns["action"],
            "policy_state": columns["policy_state"][:1],
            "episode_starts": torch.cat((torch.zeros_like(ended[:1]), ended[:-1])),
        }
        return data | ({"valid": columns["valid"]} if "valid" in columns else {})

    # a checkpoint of a run on a dataset holds only the random stream of the replay buffer

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        if self._teachers and not self.is_recurrent:
            super().mark_episode_break(mask)

    def replay_state(self) -> dict[str, Any]:
        if self.config.teacher:
            return {} if self.is_recurrent else super().replay_state()
        return {"random": self.replay.random.state_dict()}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        if self.config.teacher:
            return 0 if self.is_recurrent else super().load_replay_state(state)
        self.replay.random.load_state_dict(state["random"])
        return 0

    # ---- learning ----

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        self._sequences = data
        return super().learn(data)

    def sample_batch(self) -> Batch:
        """With a memory about batch_size steps of the newest rollout, those of whole environments:
        [T, B, ...]; else transitions [B, ...] of the replay buffer.
        """
        if not self.is_recurrent:
            return super().sample_batch()
        count = min(max(self.config.batch_size // self.config.horizon, 1), self.num_envs)
        order = self.choice_random.uniform(shape=(self.num_envs,))[0].argsort()[:count]
        batch = {name: column.index_select(1, order) for name, column in self._sequences.items()}
        obs = batch["obs"]
        batch["obs"] = self.inputs(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        valid = batch.pop("valid", None)
        batch["weight"] = (
            torch.ones(obs.shape[:2], device=self.device) if valid is None else valid.float()
        )
        return batch

    def update_step(self, batch: Batch, number: int) -> Metrics:
        optimizer = self.optimizers["actor"]
        loss, metrics = optimizer.evaluate(self.actor_loss, batch)
        return metrics | {"grad_norm": optimizer.step(loss, of=self.actor_loss)}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """(0-d mean loss of the rows that are transitions, metrics)."""
        action, weight = batch["action"], batch["weight"]
        if isinstance(self.actor, ActorCritic):
            memory = batch["policy_state"][0]
            features = self.actor.unroll(batch["obs"], memory, batch["episode_starts"])
            output = self.actor(features.flatten(0, 1))[0]
            action, weight = action.flatten(0, 1), weight.flatten()
        else:
            output = self.actor(batch["obs"]).squeeze(0)
        # every row of all ranks weighs the same
        number = self.ranks.average(weight.sum()).clamp(min=1.0 / self.ranks.count)
        loss = self.head.loss(output, action) @ (weight / number)
        return loss, {"actor_loss": loss.detach()}


@dataclass(frozen=True)
class Teacher:
    """A policy that labels, and which part of a row of observations it reads."""

    algorithm: Algorithm
    reads: str  # "observations", "privileged observations" or "both"

    def read(self, obs: Tensor, num_inputs: int) -> Tensor:
        """Its observations [N, *obs] of those here: [N, *obs], or rows [N, D + S] of D = num_inputs
        numbers and S privileged ones.
        """
        shape = tuple(self.algorithm.observation_space.shape or ())
        if self.reads == "observations":
            return obs.flatten(1)[:, :num_inputs].view(-1, *shape)
        return (obs if self.reads == "both" else obs[:, num_inputs:]).reshape(-1, *shape)


def reads_of(
    teacher: Algorithm,
    name: str,
    action_space: gymnasium.Space,
    observation_space: gymnasium.Space,
    state_space: gymnasium.Space | None,
) -> str:
    """What `teacher` reads of an environment, see `Teacher`; UsageError, with its name, if its
    spaces are of another environment.
    """
    offered = {"observations": observation_space, "privileged observations": state_space}
    if isinstance(observation_space, Box) and isinstance(state_space, Box):
        boxes = observation_space, state_space
        low = np.concatenate([box.low.reshape(-1) for box in boxes])
        high = np.concatenate([box.high.reshape(-1) for box in boxes])
        offered["both"] = Box(low, high, dtype=np.float32)
    wanted = teacher.observation_space
    reads = next((kind for kind, space in offered.items() if space == wanted), None)
    place = f"the teacher {name} is of another environment: its"
    if reads is None:
        state = "" if state_space is None else f", its privileged observations {state_space}"
        raise UsageError(
            f"{place} observation_space is {wanted}, this one's {observation_space}{state}; give a "
            f"teacher that was trained on one of these"
        )
    if teacher.action_space != action_space:
        raise UsageError(
            f"{place} action_space is {teacher.action_space}, this one's {action_space}; a student "
            f"imitates actions as they are, so give a teacher with the same"
        )
    return reads


class ImitationHead(nn.Module):
    """Turns the actor's outputs [B, num_outputs] into actions, and compares them with labels."""

    num_outputs: int
    shape: tuple[int, ...]  # of a stored action
    actions: str  # how outputs become actions, see `gpurl.nn.parts.ActorPart`

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

    actions = "squashed"

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


class GaussianHead(ImitationHead):
    """The mean of an action in the policy's units, of which only the environment's is clipped, as
    `gpurl.nn.distributions.Gaussian` has it; loss mean over A of (mean - action)^2.
    """

    actions = "clipped"

    def __init__(self, space: Box, algorithm: str) -> None:
        super().__init__()
        self.box = ActionScaler(space)
        self.num_actions = self.num_outputs = int(space.low.size)
        self.shape = (self.num_actions,)

    def loss(self, output: Tensor, action: Tensor) -> Tensor:
        return (output - action).square().mean(-1)

    def mode(self, output: Tensor) -> Tensor:
        return output

    def sample(self, output: Tensor, rng: CounterRandom) -> Tensor:
        return output

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def to_torch(self) -> nn.Module:
        return copy.deepcopy(self.box)

    def from_env(self, action: Tensor) -> Tensor:
        return self.box.from_env(action)


CONTINUOUS_HEADS: dict[str, type[DeterministicHead] | type[GaussianHead]] = {
    "squashed": SquashedHead,
    "deterministic": DeterministicHead,
    "gaussian": GaussianHead,
}


class DiscreteHead(ImitationHead):
    """Categorical actions, loss -log p(action) + penalty * mean squared logit. d3rlpy has this
    penalty too, of weight 0.5.
    """

    actions = "logits"

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
