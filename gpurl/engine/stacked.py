"""The engine that trains a population as if it were one agent: weights, optimisers, normalisers,
random streams and rollouts of all members lie side by side, [P, ...], and each operation is one
launch for all of them.

Members and their results are those of `Population`, whose work it takes over after the first
iteration that learns: by then everything is allocated. On a GPU it is captured by CUDA graphs then.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gpurl.algorithms.base import Algorithm, AlgorithmConfig, Decision, Metrics, PolicyState
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.algorithms.ppo import PPO
from gpurl.engine.eager import Eager, Prepared
from gpurl.engine.graphs import Backend, Graphed
from gpurl.engine.population import Population, Result
from gpurl.engine.stack import Stack
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.guards.finite import FiniteGuard
from gpurl.guards.guards import Guards
from gpurl.guards.steps import StepGuard
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.nn.batch_norm import BatchNorm
from gpurl.nn.optimizer import FlatAdam

# settings in which members may differ: those that tensors of their own hold or that only `schedule`
# reads, ...
IN_TENSORS = frozenset(
    {
        *("learning_rate", "actor_learning_rate", "temperature_learning_rate"),
        *("initial_temperature", "temperature", "clip_range", "entropy_coef"),
        *("epsilon_start", "epsilon_end", "epsilon_fraction"),
    }
)
# ... and those that get a tensor [P] here
AS_TENSORS = frozenset({"gamma", "gae_lambda", "target_kl"})
# attributes that the stages of an iteration neither read nor write
OUTSIDE: dict[type, tuple[str, ...]] = {
    Eager: ("stopwatch", "stages"),
    Algorithm: ("seed", "changed_settings"),
    FlatAdam: ("initial_rate",),
    CounterRandom: ("seed", "_ahead"),
    EpisodeStatistics: ("logged_episodes", "began"),
    Guards: ("steps_before", "rows_before"),
    StepGuard: ("total",),
    FiniteGuard: ("total",),
}
# modules of torch that gpurl's networks consist of, and plain layers
KNOWN = (nn.ModuleList, nn.Sequential, nn.Linear, nn.Conv2d, nn.Flatten, nn.ReLU, nn.Tanh, nn.ELU)
Observed = tuple[Tensor, PolicyState]  # what a policy acts on


def stacked_obstacle(
    algorithms: Sequence[Algorithm], explored: Iterable[str], knows_only: bool
) -> str:
    """Why they cannot be stacked, or "". explored: settings that population based training changes.
    knows_only: an algorithm, a network or a mirror of somebody's own, of which nobody knows whether
    torch.func.vmap can batch it, is an obstacle too.
    """
    first = algorithms[0]
    config = first.config
    names = {item.name for item in dataclasses.fields(config)}
    differing = {
        name
        for name in names
        if any(getattr(each.config, name) != getattr(config, name) for each in algorithms)
    }
    if others := sorted((differing | {*explored}) - IN_TENSORS - AS_TENSORS):
        return f"members differ in {', '.join(others)}"
    if any(isinstance(module, BatchNorm) for module in first.modules()):
        return "batch norms change their statistics while the loss is computed"
    if getattr(config, "target_subset", None) is not None:
        return "target_subset copies critics while the loss is computed"
    if isinstance(first, PPO) and first.config.network.memory == "mingru":
        return "the scan of memory mingru has no rule for torch.func.vmap"
    if not knows_only:
        return ""
    if not type(first).__module__.startswith("gpurl."):
        return f"{type(first).__name__} is not an algorithm of gpurl"
    for module in first.modules():
        if not type(module).__module__.startswith("gpurl.") and type(module) not in KNOWN:
            return f"{type(module).__name__} is not a module of gpurl"
    return "the mirror of the task is not a part of gpurl" if first.symmetry is not None else ""


class StackedPopulation(Population):
    """As `Population`. Its members compute in torch, but for kernels with an axis of members."""

    def __init__(
        self,
        members: Sequence[Eager],
        env: VecEnv,
        backend: Backend | None = None,
        levels: Sequence[str] = (),
    ) -> None:
        """backend, levels: as `Graphed` has them; None: no CUDA graphs."""
        super().__init__(members, env)
        self.name = f"stacked population of {len(members)}"
        self._backend = backend
        self._levels = list(levels)
        self._stack: Stack | None = None
        # [P] of each setting in AS_TENSORS in which members may differ, and its last values
        self._settings: dict[str, Tensor] = {}
        self._values: dict[str, list[float]] = {}
        # the data of `prepare`, [P, ...]
        self._prepared: dict[str, Tensor] = {}
        # [P] the members that are not lost
        self._is_live = torch.ones(len(members), dtype=torch.bool, device=env.device)
        self._lost = frozenset[int]()
        self._reason = ""  # why they are in turn still

    # ---- from a population to a stack ----

    def iterate(self, progress: float) -> Metrics:
        if self._stack is not None:
            self._refresh()
            return super().iterate(progress)
        lost = {**self.guards.lost}
        metrics = super().iterate(progress)
        # of a lost member not all is allocated
        lost |= self.guards.lost
        if metrics and not lost:
            self._join()
        elif metrics:
            self._note(f"member {min(lost)} is lost")
        return metrics

    def _of_each(
        self, work: Callable[[int, Eager], Result], in_threads: bool = True
    ) -> dict[int, Result]:
        # members take a GPU's ways in turn too, whatever the device: the stack takes them
        return super()._of_each(no_host_syncs()(work), in_threads)

    def _note(self, reason: str) -> None:
        """Tell the user, once, why members are still computed in turn."""
        if reason != self._reason:
            self.notes.append(f"members are computed in turn: {reason}")
        self._reason = reason

    def schedule(self, progress: float) -> None:
        # of lost ones too: the first is the model of all
        for member in self._members:
            member.algorithm.schedule(progress, self.steps)

    def _join(self) -> None:
        """Put the members' tensors side by side."""
        members = self._members
        stack = Stack(members, OUTSIDE)
        differing = {each.path.removeprefix(".algorithm.config.") for each in stack.differences}
        if unknown := sorted(differing - IN_TENSORS - AS_TENSORS):
            self._note(f"they differ in {', '.join(unknown)}")
            return
        explored = set[str]() if self.pbt is None else {*self.pbt.options.spans}
        self._settings = {
            name: torch.zeros(len(members), device=self.env.device)
            for name in sorted((differing | explored) & AS_TENSORS)
        }
        for k in range(len(members)):
            for stream in stack.of_kind(CounterRandom, k):
                stream.count_on_device()
        stack.join()
        for member in members:
            member.guards.steps.find_counts()
        self._stack = stack
        states = zip(*(member.policy_state for member in members))
        self.policy_state = tuple(torch.cat(memories) for memories in states)
        # counts the steps for all
        self.buffer = members[0].buffer
        self._refresh()
        if self._backend is not None:
            self.stages = Graphed(self, self._backend, self._levels)

    def _refresh(self) -> None:
        """Write the members' settings, and which are lost, to where the stages read them."""
        for name, tensor in self._settings.items():
            values = [float(getattr(each.algorithm.config, name)) for each in self._members]
            if values != self._values.get(name):
                self._values[name] = values
                tensor.copy_(torch.tensor(values))
        lost = frozenset(self.guards.lost)
        if lost != self._lost:
            self._lost = lost
            self._is_live.copy_(torch.tensor([k not in lost for k in range(len(self._members))]))

    def _call(self, function: Any, *arguments: Any) -> Any:
        """`function(member, *arguments)` for all members at once; see `Stack.call`."""
        assert self._stack is not None

        def compute(member: Eager, settings: dict[str, Tensor], *own: Any) -> Any:
            if settings:
                member.algorithm.config = with_tensors(member.algorithm.config, settings)
            return function(member, *own)

        return self._stack.call(compute, self._settings, *arguments)

    def _shares(self, value: Any) -> Any:
        """[P n, ...] -> [P, n, ...] of all tensors in `value`."""
        shape = len(self._members), self.num_envs
        return tree_map_only(Tensor, lambda each: each.unflatten(0, shape), value)

    # ---- the stages ----

    def collect(self) -> None:
        if self._stack is None:
            super().collect()
        else:
            Eager.collect(self)

    def act(self) -> Decision:
        def act(member: Eager, obs: Tensor, policy_state: PolicyState) -> Decision:
            return member.algorithm.act(obs, policy_state)

        before: Observed = self._shares((self.obs, self.policy_state))
        action, policy_state, columns = self._call(act, *before)
        # the environments of lost members idle
        is_live = self._is_live.view(-1, *[1] * (action.dim() - 1))
        action = torch.where(is_live, action, self.idle_action).flatten(0, 1)
        return Decision(action, policy_state, columns)

    def record_step(self, decision: Decision, timestep: Timestep) -> None:
        def record(
            member: Eager, before: Observed, decision: Decision, timestep: Timestep
        ) -> Observed:
            member.obs, member.policy_state = before
            member.record_step(decision, timestep)
            return member.obs, member.policy_state

        before = self._shares((self.obs, self.policy_state))
        own = self._shares(timestep._replace(info=of_rows(timestep.info, self.env.num_envs)))
        decision = decision._replace(action=self._shares(decision.action))
        obs, policy_state = self._call(record, before, decision, own)
        self.obs = obs.flatten(0, 1)
        self.policy_state = tuple(memory.flatten(0, 1) for memory in policy_state)
        self.statistics.add_log(timestep.info)

    def prepare(self) -> Prepared:
        if self._stack is None:
            return super().prepare()

        def prepare(member: Eager, policy_state: PolicyState) -> tuple[Prepared, PolicyState]:
            member.policy_state = policy_state
            return member.prepare(), member.policy_state

        prepared, policy_state = self._call(prepare, self._shares(self.policy_state))
        self._prepared, bad_envs = prepared
        self.policy_state = tuple(memory.flatten(0, 1) for memory in policy_state)
        self.guards.bad_envs = dict(enumerate(bad_envs))
        return {}, None

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        if self._stack is None:
            return super().learn(data)
        metrics = self._call(Eager.learn, self._prepared)
        count = self._is_live.sum()
        return {
            name: torch.where(self._is_live, each.double(), 0.0).sum() / count
            for name, each in metrics.items()
        }

    def abandon(self) -> None:
        # replays of graphs count the steps in one buffer only
        if self._stack is not None:
            for member in self._members:
                member.buffer.size = self.buffer.size
        super().abandon()

    # ---- selection and states ----

    def forget(self, k: int) -> None:
        super().forget(k)
        for memory in self.policy_state:
            memory.unflatten(0, (-1, self.num_envs))[k] = 0.0

    def _revive(self, k: int) -> None:
        super()._revive(k)
        algorithm = self._members[k].algorithm
        if self._stack is not None and isinstance(algorithm, OffPolicy):
            # it has stored what its idling environments did as results of its policy's actions
            algorithm.replay.clear()

    def state_dict(self) -> dict[str, Any]:
        if self._stack is not None:
            self._set_episodes(self.obs, self.policy_state)  # of the members
        return super().state_dict()


def of_rows(info: dict[str, Any], rows: int) -> dict[str, Any]:
    """What `info` says of each environment: its tensors [rows, ...], also in dicts."""
    own: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, dict) and name != "log":
            own[name] = of_rows(value, rows)
        elif isinstance(value, Tensor) and value.shape[:1] == (rows,):
            own[name] = value
    return own


def with_tensors(config: AlgorithmConfig, settings: dict[str, Tensor]) -> AlgorithmConfig:
    """`config` with 0-d tensors in place of some numbers."""
    own = copy.copy(config)
    for name, tensor in settings.items():
        object.__setattr__(own, name, tensor)  # frozen
    return own
