"""A trained policy by itself: loaded from a run, it acts on observations and needs neither the
environment nor the trainer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, PolicyState
from gpurl.checkpoints.state_files import State
from gpurl.checks import check_torch_defaults
from gpurl.envs.observation_groups import GroupedBox, bytes_of, grouped_values, tensor_of
from gpurl.errors import UsageError
from gpurl.export import parity
from gpurl.kernels.backend import on_device, on_own_device
from gpurl.nn.acting import GroupedPolicyModule, PolicyModule, RecurrentPolicyModule
from gpurl.run.ensemble import ensemble_state, greedy_ensemble
from gpurl.run.evaluator import Act, greedy_player
from gpurl.run.load import Loaded, load_algorithm, load_members
from gpurl.run.members import member_number
from gpurl.run.own_algorithm import explain_own_errors
from gpurl.run.setup import named_device
from gpurl.run.task_spaces import TaskSpaces

Observations: TypeAlias = Any  # a number, an array, a tensor, or dicts and tuples of them


class Policy:
    """`act(obs)` for one observation or a batch; a recurrent policy keeps its hidden state between
    calls until `reset()`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        settings: State,
        step: int = 0,
        deployment: State | None = None,
        task: TaskSpaces | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.step = step  # environment steps of the training up to here
        # what the environment told: control_step, names, the robot (`gpurl.envs.deployment`)
        self.deployment = deployment or {}
        self.task = task  # what a Gymnasium environment gives and takes
        self.device = algorithm.device
        self._policy_state: PolicyState | None = None

    def __repr__(self) -> str:
        names = f"{self.settings['algorithm']} on {self.settings['env']}"
        return f"Policy({names}, {self.step:,} steps, {self.device})"

    @on_own_device
    def act(self, obs: Observations, deterministic: bool = True) -> Any:
        """obs: one observation or a batch of N, as the environment gives it -> the action or N
        actions, as the environment takes them.

        Of gpurl's environments these are [*obs] or [N, *obs], numpy or torch, of a Dict space a
        dict of them by name, and actions [*action] or [N, *action] of the same type. A run on a
        Gymnasium task takes what a Gymnasium environment, or a vector of them, returns: numbers,
        arrays, dicts and tuples; actions have its space's dtype and shape. Tensors are those of
        `gpurl.make_env` there, too: encoded, with choices that count from 0.
        """
        _refuse_trace("act")
        batch, is_single = self._batch(obs)
        algorithm = self.algorithm
        policy_state = self._policy_state
        # a batch of another size begins new episodes
        if policy_state is None or (policy_state and len(policy_state[0]) != len(batch)):
            policy_state = algorithm.initial_policy_state(len(batch))
        if not deterministic:
            if len(batch) != algorithm.num_envs:
                raise UsageError(
                    f"this policy samples actions for {algorithm.num_envs} environments, got "
                    f"{len(batch)} observations; load(..., num_envs={len(batch)}) makes one that "
                    f"fits"
                )
            batch = algorithm.without_state(batch)
        with explain_own_errors(type(algorithm)):
            decision = algorithm.act(batch, policy_state, explore=not deterministic)
        self._policy_state = decision.policy_state
        return self._action(decision.action, is_single, obs)

    @on_own_device
    def value(self, obs: Observations, state: np.ndarray | Tensor | None = None) -> Any:
        """Expected return from obs, which are those of `act`, in the environment's own rewards: a
        number for one, [N] for N. state: [*state] or [N, *state], the privileged observations of an
        asymmetric critic.

        A recurrent policy takes obs as the successor of the observations it acted on: call it
        before `act(obs)`, not after it.
        """
        _refuse_trace("value")
        batch, is_single = self._batch(obs)
        # append what only the critic sees
        if num_state := self.algorithm.num_state:
            rows = None
            if state is not None:
                rows = torch.as_tensor(state, device=self.device).float().reshape(-1, num_state)
            if rows is None or len(rows) != len(batch):
                got = "none" if state is None else f"one of shape {tuple(state.shape)}"
                raise UsageError(
                    f"this policy's critic reads privileged observations: value(obs, state "
                    f"[{len(batch)}, {num_state}]), got {got}"
                )
            batch = torch.cat((batch.flatten(1), rows), dim=1)
        elif state is not None:
            raise UsageError("this policy's critic reads observations only: value(obs)")
        # the hidden state must be of these episodes
        policy_state = self._policy_state or self.algorithm.initial_policy_state(len(batch))
        if policy_state and len(policy_state[0]) != len(batch):
            raise UsageError(
                f"the hidden state is of {len(policy_state[0])} episodes, got {len(batch)} "
                f"observations; reset() empties it"
            )
        value = self.algorithm.value(batch, policy_state) * self.algorithm.reward_unit()
        return float(value[0]) if is_single else _like(value, obs)

    @on_own_device
    def module(self) -> PolicyModule:
        """A plain nn.Module that acts greedily: forward(obs [N, *obs]) -> action [N, *action], with
        the normaliser and the action's scale inside. It takes and gives tensors as `act` does: of a
        Gymnasium task encoded observations.

        A recurrent policy gives a `RecurrentPolicyModule`, forward(obs, memory [N, S]) -> (action,
        next memory), with zeros where an episode begins. A policy of named groups or of images
        gives a `GroupedPolicyModule`, which takes a tensor of each group. In eval mode, with copies
        of the weights that need no gradient. UsageError for an algorithm that does not say what
        acts, or says something else than its `act`.
        """
        algorithm = self.algorithm
        actor = algorithm.actor_modules()
        normalizer = algorithm.normalizer
        space = algorithm.observation_space
        module: PolicyModule
        takes_groups = algorithm.takes_groups()
        if takes_groups or algorithm.reads_bytes or isinstance(space, GroupedBox):
            groups = algorithm.groups
            num_floats = groups.num_floats if algorithm.reads_bytes else algorithm.num_inputs
            copied = None if normalizer is None else normalizer.to_torch(num_floats)
            module = GroupedPolicyModule(groups, takes_groups, copied, actor)
        else:
            copied = None if normalizer is None else normalizer.to_torch(algorithm.num_inputs)
            kind = PolicyModule if actor.memory is None else RecurrentPolicyModule
            module = kind(algorithm.num_inputs, copied, actor)
        module.eval().requires_grad_(False)

        def play(
            obs: parity.Observations, memory: np.ndarray | None
        ) -> tuple[np.ndarray, np.ndarray | None]:
            inputs = parity.arrays_of(obs, memory)
            outputs = module(*(torch.as_tensor(each, device=self.device) for each in inputs))
            if isinstance(outputs, Tensor):
                return outputs.cpu().numpy(), None
            return outputs[0].cpu().numpy(), outputs[1].cpu().numpy()

        fresh = Policy(algorithm, self.settings, self.step)  # keeps this one's hidden state
        title = f"the module of {algorithm.label}"
        parity.check_parity(fresh, play, module, space, normalizer, title)
        return module

    def player(self, num_envs: int) -> tuple[Act, PolicyState]:
        """(the greedy policy, its hidden state at the start of episodes), for evaluations."""
        with explain_own_errors(type(self.algorithm)):
            act, policy_state = greedy_player(self.algorithm, num_envs)
        return explain_own_errors(type(self.algorithm))(act), policy_state

    def reset(self) -> None:
        """Empty the hidden state: the next observation begins an episode."""
        self._policy_state = None

    def _action(self, action: Tensor, is_single: bool, obs: Observations) -> Any:
        """action [N, *action] of the policy as the environment that gave `obs` takes it."""
        if self.task is None or _has_tensors(obs):
            return _like(action[0] if is_single else action, obs)
        actions = self.task.decoder.decode(action.cpu().numpy())
        return actions[0] if is_single else actions

    def _batch(self, obs: Observations) -> tuple[Tensor, bool]:
        """(observations [N, *obs] on the device, whether `obs` is a single one)."""
        space = self.algorithm.observation_space
        if self.task is not None and not _has_tensors(obs):
            rows, is_single = self.task.encode(obs)
            return torch.from_numpy(rows).to(self.device), is_single
        if isinstance(obs, Mapping):
            return self._batch_of_groups(obs)
        shape = space.shape
        tensor = tensor_of(obs).to(self.device)
        if self.algorithm.reads_bytes:
            tensor = bytes_of(tensor)
        elif tensor.is_floating_point():
            tensor = tensor.float()
        if tuple(tensor.shape) == shape:
            return tensor.unsqueeze(0), True
        if tuple(tensor.shape[1:]) == shape and tensor.dim() == len(shape) + 1 and len(tensor):
            return tensor, False
        raise UsageError(
            f"the policy takes observations of shape {shape} or (N, {', '.join(map(str, shape))}), "
            f"got {tuple(tensor.shape)}"
        )

    def _batch_of_groups(self, obs: Mapping[str, Any]) -> tuple[Tensor, bool]:
        """As `_batch`, of a dict of [*group] or [N, *group] by name."""
        space = self.algorithm.observation_space
        if not isinstance(space, GroupedBox):
            raise UsageError(f"the policy takes observations of {space}, got a dict of {[*obs]}")
        parts = {name: part.to(self.device) for name, part in grouped_values(space, obs).items()}
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        wanted = {group.name: group.shape for group in space.groups}
        is_single = shapes == wanted
        counts = {part.shape[:1] for part in parts.values()}
        if not is_single and (
            len(counts) != 1 or {name: shape[1:] for name, shape in shapes.items()} != wanted
        ):
            raise UsageError(
                f"the policy takes a dict of observations of shapes {wanted}, or of N of each; got "
                f"{shapes}"
            )
        if is_single:
            parts = {name: part.unsqueeze(0) for name, part in parts.items()}
        return space.join(parts), is_single


class Ensemble(Policy):
    """All members of a population as one greedy policy: the mean of continuous actions, the choice
    of most members between discrete ones (`gpurl.run.ensemble`).
    """

    def __init__(self, members: Sequence[Loaded]) -> None:
        """members: the best one first, whose choice decides where votes are equal."""
        super().__init__(*members[0][:4], members[0].task)
        self.members = {each.member: each.algorithm for each in members}

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {len(self.members)} members"

    def player(self, num_envs: int) -> tuple[Act, PolicyState]:
        algorithms = [*self.members.values()]
        return greedy_ensemble(algorithms), ensemble_state(algorithms, num_envs)

    @on_own_device
    def act(self, obs: Observations, deterministic: bool = True) -> Any:
        _refuse_trace("act")
        if not deterministic:
            raise UsageError(
                "an ensemble acts greedily: to sample actions load one member, load(RUN, member=0)"
            )
        batch, is_single = self._batch(obs)
        act, first_state = self.player(len(batch))
        state = self._policy_state
        # a batch of another size begins new episodes
        if state is None or (state and len(state[0]) != len(batch)):
            state = first_state
        action, self._policy_state = act(batch, state)
        return self._action(action, is_single, obs)

    def value(self, obs: Observations, state: np.ndarray | Tensor | None = None) -> Any:
        raise UsageError("an ensemble has a value for each member: load one, load(RUN, member=0)")

    def module(self) -> PolicyModule:
        raise UsageError(
            "an ensemble is no single module: load one member, load(RUN, member=0), or average "
            "their weights, gpurl soup RUN"
        )


def _refuse_trace(name: str) -> None:
    """A trace records torch's operations only: what numpy and C compute would be a constant."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise UsageError(
            f"policy.{name} cannot be traced or exported, the result would be a constant: take "
            f"policy.module(), a plain nn.Module, or the command gpurl export RUN"
        )


def _has_tensors(obs: Observations) -> bool:
    """Whether `obs` is a tensor, or the first one in a dict, tuple or list is."""
    while isinstance(obs, (Mapping, tuple, list)) and obs:
        obs = next(iter(obs.values() if isinstance(obs, Mapping) else obs))
    return isinstance(obs, Tensor)


def _like(tensor: Tensor, obs: Observations) -> Any:
    """`tensor` as the type of `obs`."""
    return tensor if _has_tensors(obs) else tensor.cpu().numpy()


def load(
    path: str | Path,
    device: str = "cpu",
    num_envs: int = 1,
    best: bool = True,
    member: int | str | None = None,
) -> Policy:
    """The policy of a checkpoint folder, or of the best checkpoint of a run folder (best=False: the
    latest). device: auto, cpu, cuda or cuda:N. member: of a population, by default the best one in
    its evaluation; "all": an `Ensemble` of all members.
    """
    device = str(named_device(str(device)))
    check_torch_defaults(device)
    with on_device(torch.device(device)):
        if member == "all":
            return Ensemble(load_members(path, device, num_envs, best))
        chosen = member_number(member)
        loaded = load_algorithm(path, device, num_envs, best, chosen)
        return Policy(*loaded[:4], loaded.task)
