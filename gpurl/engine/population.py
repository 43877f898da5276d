"""The engine that trains a population: P whole agents on P shares of the environments, which step
as one.

A member is an ordinary engine of its own (in C where a single run is) with its own weights,
optimiser, normalisers, random streams and settings; it acts on its share of the observations,
records its share of the steps and learns from them. So an algorithm knows nothing of populations,
and a member computes what a single run of its seed computes, to the bit where the work is done by
the same number of threads.

What a population saves, on a CPU: an environment step costs mostly Python and the calls of torch,
and one step serves all members; and members learn beside each other, each in one thread, where a
single agent would divide every matrix among the cores. C and torch leave Python's lock meanwhile.
On a GPU members follow each other: launches grow with P. There they are stacked where that is
possible: see `gpurl.engine.stacked`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Decision, Metrics, PolicyState
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checkpoints.state_files import State
from gpurl.engine.eager import STAGGER_SEED, Eager, Prepared
from gpurl.engine.pbt import PopulationBasedTraining
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.vec_env import Info, ShareSeeds, Timestep, VecEnv
from gpurl.errors import NonFiniteError
from gpurl.guards.contract import reset_env, step_env
from gpurl.guards.finite import HOW_TO_GO_ON
from gpurl.guards.guards import Guards
from gpurl.kernels.random import CounterRandom

# observations of a member, with fewer of which handing them to a thread costs more than acting
MIN_ROWS = 256
Result = TypeVar("Result")


class Share(VecEnv):
    """`num_envs` of the environments of `env`, as the engine of one member knows them: it never
    steps them, the population does.
    """

    def __init__(self, env: VecEnv, num_envs: int) -> None:
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.single_state_space = env.single_state_space
        self.num_agents = env.num_agents
        self.resets_late = env.resets_late
        self.max_episode_steps = env.max_episode_steps
        super().__init__(num_envs, env.device)
        self.training_progress = env.training_progress


class PopulationGuards(Guards):
    """The guards of all members. What would end a single run costs the population that member only:
    it is lost, the others go on; the error of the last one is raised.
    """

    def __init__(self, members: Sequence[Guards], env: VecEnv) -> None:
        first = members[0]
        # of its own it uses the contract of a step only
        super().__init__(first.env_name, first.steps.algorithm, env, first.nan)
        self.members = tuple(members)
        # why members are lost, by index
        self.lost: dict[int, str] = {}
        # [n] which environments of a member gave NaN in this iteration, or None
        self.bad_envs: dict[int, Tensor | None] = {}

    @property
    def live(self) -> dict[int, Guards]:
        """The guards of the members that are not lost."""
        return {k: each for k, each in enumerate(self.members) if k not in self.lost}

    def state_dict(self) -> State:
        return {str(k): each.state_dict() for k, each in enumerate(self.members)}

    def load_state_dict(self, state: State) -> None:
        for k, each in enumerate(self.members):
            each.load_state_dict(state[str(k)])

    def begin(self, iteration: int) -> None:
        for each in self.members:
            each.begin(iteration)

    def bad_weights(self) -> str:
        found = {k: each.bad_weights() for k, each in self.live.items()}
        return "; ".join(f"member {k}: {weights}" for k, weights in found.items() if weights)

    def after_learn(self, iteration: int, bad_envs: Tensor | None) -> None:
        self._of_each(lambda k, each: each.after_learn(iteration, self.bad_envs.get(k)))

    def metrics(self) -> dict[str, Tensor]:
        return {
            f"{name} of member {k}": value
            for k, each in self.live.items()
            for name, value in each.metrics().items()
        }

    def report(self, values: dict[str, float], iteration: int) -> dict[str, float]:
        """The sums over members to log."""
        logged: dict[str, float] = {}

        def report(k: int, each: Guards) -> None:
            end = f" of member {k}"
            own = {name.removesuffix(end): x for name, x in values.items() if name.endswith(end)}
            for name, value in each.report(own, iteration).items():
                logged[name] = logged.get(name, 0.0) + value

        self._of_each(report)
        return logged

    def _of_each(self, call: Callable[[int, Guards], None]) -> None:
        """Call it for the members that are not lost; an error loses one."""
        for k, each in self.live.items():
            try:
                call(k, each)
            except NonFiniteError as error:
                # a resume brings no lost member back
                advice = "A new run with --nan skip leaves such steps out"
                error.args = (str(error).replace(HOW_TO_GO_ON, advice),)
                self.lost[k] = str(error)
                if not self.live:
                    raise
                text = f"member {k} is lost, the others go on: {error}"
                self.warnings.append(text)
            self.warnings += [f"member {k}: {text}" for text in each.warnings]
            each.warnings.clear()


class PopulationStatistics(EpisodeStatistics):
    """The statistics of all members: the means over members by their usual names, the return of
    member k as members/k/ep_rew_mean. The environments' own terms are means over all environments.
    """

    def __init__(
        self, members: Sequence[EpisodeStatistics], guards: PopulationGuards, env: VecEnv
    ) -> None:
        super().__init__(env.num_envs, env.device, env.max_episode_steps)
        self.members = tuple(members)
        self.guards = guards

    def metrics(self) -> dict[str, Tensor]:
        metrics = super().metrics()
        for k in self.guards.live:
            own = self.members[k].metrics()
            metrics |= {f"{name} of member {k}": value for name, value in own.items()}
        return metrics

    def read(self, values: dict[str, float], steps: int) -> dict[str, float]:
        """As `EpisodeStatistics.read`; steps: of one member."""
        # members that were lost since `metrics()` are left out
        found = dict[int, dict[str, float]]()
        for k in self.guards.live:
            end = f" of member {k}"
            own = {name.removesuffix(end): x for name, x in values.items() if name.endswith(end)}
            found[k] = self.members[k].read(own, steps)
        terms = super().read(values, steps)
        terms.pop("rollout/episodes")
        means = mean_of_each([*found.values()])
        returns = {
            f"members/{k}/ep_rew_mean": each["rollout/ep_rew_mean"]
            for k, each in found.items()
            if "rollout/ep_rew_mean" in each
        }
        if "rollout/episodes" in means:
            means["rollout/episodes"] *= len(found)
        return means | terms | returns

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"members": [each.state_dict() for each in self.members]}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        super().load_state_dict(state, steps)
        for each, saved in zip(self.members, state["members"], strict=True):
            each.load_state_dict(saved, steps)


class Population(Eager):
    """Collects for all members at once, prepares and learns for each. `steps` are those of one
    member, `env` has the environments of all, those of member 0 first.
    """

    name = "population"
    guards: PopulationGuards

    def __init__(
        self, members: Sequence[Eager], env: VecEnv, workers: int = 1, threads: int = 1
    ) -> None:
        """members: their engines, each on a `Share` of `env`. workers: members that learn at a
        time, each in a thread of its own with `threads` threads of torch and C; 1: in this thread.
        """
        first = members[0]
        guards = PopulationGuards([member.guards for member in members], env)
        # counts the steps of a rollout, which members keep
        counter = RolloutBuffer(first.buffer.horizon, env.device)
        super().__init__(first.algorithm, env, guards, counter)
        self.name = f"population of {len(members)}, each {first.name}"
        self._members = tuple(members)
        self.num_envs = first.num_envs
        self.statistics: PopulationStatistics = PopulationStatistics(
            [member.statistics for member in members], guards, env
        )
        self.idle_action = idle_action(env, self.num_envs)
        self.acts_in_threads = self.num_envs >= MIN_ROWS
        # selects among members, where the settings want it
        self.pbt: PopulationBasedTraining | None = None
        self._data: dict[int, dict[str, Tensor]] = {}
        self._threads: ThreadPoolExecutor | None = None
        if workers > 1:
            self._threads = ThreadPoolExecutor(
                workers, "gpurl-member", torch.set_num_threads, (threads,)
            )

    @property
    def members(self) -> tuple[Eager, ...]:
        return self._members

    @property
    def policies(self) -> tuple[Algorithm | None, ...]:
        lost = self.guards.lost
        return tuple(None if k in lost else each.algorithm for k, each in enumerate(self._members))

    @property
    def lost(self) -> dict[int, str]:
        return dict(self.guards.lost)

    @property
    def live(self) -> dict[int, Eager]:
        """The members that are not lost, by index."""
        return {k: self._members[k] for k in self.guards.live}

    def obstacle(self) -> str:
        return next(filter(None, (member.obstacle() for member in self._members)), "")

    def _of_each(
        self, work: Callable[[int, Eager], Result], in_threads: bool = True
    ) -> dict[int, Result]:
        """The results of `work` for the members that are not lost; in_threads: where there are
        some.
        """
        if self._threads is None or not in_threads:
            return {k: work(k, member) for k, member in self.live.items()}
        futures = {k: self._threads.submit(work, k, member) for k, member in self.live.items()}
        # an error is raised when nothing runs any more
        wait(futures.values())
        return {k: future.result() for k, future in futures.items()}

    # ---- episodes ----

    def begin(self, seed: int, staggered: bool) -> None:
        """As `Eager.begin`; member k has the environments of seed + k."""
        seeds = ShareSeeds(range(seed, seed + len(self._members)))
        policy_state = self.algorithm.initial_policy_state(self.env.num_envs)
        self._set_episodes(reset_env(self.env, seeds), policy_state)
        limit = self.env.max_episode_steps
        if staggered and limit is not None:
            clocks = CounterRandom(0, self.env.num_envs, self.env.device)
            clocks.restart([each + STAGGER_SEED for each in seeds])
            self.env.stagger(clocks.integers(0, limit))

    def _set_episodes(self, obs: Tensor, policy_state: PolicyState) -> None:
        """Set the observations [P n, *obs] and hidden states of all members."""
        self.obs = obs
        states = [memory.split(self.num_envs) for memory in policy_state]
        for k, (member, own) in enumerate(zip(self._members, obs.split(self.num_envs))):
            member.obs = own
            member.policy_state = tuple(memory[k] for memory in states)

    # ---- the stages ----

    def schedule(self, progress: float) -> None:
        for member in self.live.values():
            member.algorithm.schedule(progress, self.steps)

    def collect(self) -> None:
        while not self.buffer.is_full:
            # members act on their observations, the environments step once
            decisions = self._of_each(lambda k, member: member.act(), self.acts_in_threads)
            timestep = step_env(self.env, self._joined(decisions))
            self.guards.after_step(timestep, self.obs)
            self.obs = timestep.obs
            self.statistics.add_log(timestep.info)
            # each records its own steps
            parts = self._split(timestep)
            self._record(decisions, parts)
            self.buffer.size += 1

    def _record(self, decisions: dict[int, Decision], parts: Sequence[Timestep]) -> None:
        self._of_each(
            lambda k, member: member.record_step(decisions[k], parts[k]), in_threads=False
        )

    def _joined(self, decisions: dict[int, Decision]) -> Tensor:
        """[P n, *action] the actions of all members; the environments of lost ones idle."""
        count = len(self._members)
        if len(decisions) == count:
            return torch.cat([decision.action for decision in decisions.values()])
        shares = {k: decision.action for k, decision in decisions.items()}
        return torch.cat([shares.get(k, self.idle_action) for k in range(count)])

    def _split(self, timestep: Timestep) -> list[Timestep]:
        """The shares of a step, views."""
        rows, size = self.env.num_envs, self.num_envs
        info = {name: value for name, value in timestep.info.items() if name != "log"}
        columns = [split(value, rows, size) for value in timestep[:4]]
        infos = split(info, rows, size)
        return [Timestep(*values) for values in zip(*columns, infos)]

    def prepare(self) -> Prepared:
        """Each member prepares its data, which `learn` takes."""
        prepared = self._of_each(lambda k, member: member.prepare())
        self._data = {k: data for k, (data, _) in prepared.items()}
        self.guards.bad_envs = {k: bad_envs for k, (_, bad_envs) in prepared.items()}
        return {}, None

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """Each member learns; returns the means of their metrics."""
        prepared = self._data
        metrics = self._of_each(lambda k, member: member.learn(prepared[k]))
        return mean_metrics([*metrics.values()])

    def iterate(self, progress: float) -> Metrics:
        before = self.steps
        metrics = super().iterate(progress)
        for member in self._members:
            member.buffer.clear()
            member.steps, member.iteration = self.steps, self.iteration
        if self.pbt is not None and self.pbt.is_due(before, self.steps):
            self._select(self.pbt)
        return metrics

    def _select(self, pbt: PopulationBasedTraining) -> None:
        """Bad and lost members take over others; what happened is logged."""
        taken = pbt.select(self.guards.lost.keys())
        self.notes += pbt.notes
        pbt.notes.clear()
        event: dict[str, float] = {"members/take_overs": len(taken)}
        for each in taken:
            self.notes.append(str(each))
            event[f"members/{each.member}/source"] = each.source.member
            if each.member in self.guards.lost:
                self._revive(each.member)
            self.forget(each.member)
        for k in self.live:
            event |= {f"members/{k}/{name}": x for name, x in pbt.settings_of(k).items()}
        self.events.append(event)

    def forget(self, k: int) -> None:
        """Begin anew with the memory of member k, which another network cannot read."""
        member = self._members[k]
        member.policy_state = member.algorithm.initial_policy_state(self.num_envs)

    def _revive(self, k: int) -> None:
        """A lost member, whose weights are another's now, takes part again."""
        del self.guards.lost[k]
        member = self._members[k]
        member.guards.begin(self.iteration)
        # its environments have idled meanwhile
        member.obs = self.obs.split(self.num_envs)[k]
        member.algorithm.mark_episode_break()

    def abandon(self) -> None:
        super().abandon()
        for member in self._members:
            member.abandon()

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        # the hidden states of all: a copy, since CUDA graphs hold the addresses of their own
        states = zip(*(member.policy_state for member in self._members))
        policy_state = [torch.cat(memories) for memories in states]
        lost = {str(k): reason for k, reason in self.guards.lost.items()}
        pbt = {} if self.pbt is None else self.pbt.state_dict()
        return super().state_dict() | {"policy_state": policy_state, "lost": lost, "pbt": pbt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.guards.lost = {int(k): reason for k, reason in state["lost"].items()}
        for member in self._members:
            member.iteration, member.steps = self.iteration, self.steps
        # a run may begin to select when it is resumed
        if self.pbt is not None and state.get("pbt"):
            self.pbt.load_state_dict(state["pbt"])


def idle_action(env: VecEnv, rows: int) -> Tensor:
    """[rows, *action] the first choice, or the number nearest to 0."""
    space = env.single_action_space
    if isinstance(space, Box):
        numbers = np.clip(np.zeros(space.shape, np.float32), space.low, space.high)
        action = torch.as_tensor(numbers, dtype=torch.float32)
    else:
        assert isinstance(space, Discrete | MultiDiscrete)
        action = torch.as_tensor(space.start, dtype=torch.int64)
    return action.to(env.device).expand(rows, *action.shape).clone()


def split(value: Any, rows: int, size: int) -> Sequence[Any]:
    """The shares of `size` rows of a tensor [rows, ...] or of a dict of them; of anything else the
    same for all.
    """
    if isinstance(value, Tensor) and value.shape[:1] == (rows,):
        return value.split(size)
    if isinstance(value, dict):
        shares = {name: split(each, rows, size) for name, each in value.items()}
        infos: list[Info] = [
            {name: each[k] for name, each in shares.items()} for k in range(rows // size)
        ]
        return infos
    return [value] * (rows // size)


def mean_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """The means of 0-d tensors over members, float64, of the names that all of them have."""
    names = [name for name in metrics[0] if all(name in each for each in metrics)]
    return {name: torch.stack([each[name].double() for each in metrics]).mean() for name in names}


def mean_of_each(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """The means of numbers over those members that have them."""
    names = dict.fromkeys(name for each in values for name in each)
    found = {name: [each[name] for each in values if name in each] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}
