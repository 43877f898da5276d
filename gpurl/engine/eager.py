"""The engine that specifies an iteration: act, step, record, prepare, learn, one operation after
the other. Every other engine gives the same results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gpurl.algorithms.base import (
    Algorithm,
    Decision,
    Metrics,
    PolicyState,
    episode_ends,
    restart_policy_state,
)
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.statistics import EpisodeStatistics, Stopwatch
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError
from gpurl.guards.contract import check_reset, load_env_state, reset_env, step_env
from gpurl.guards.guards import Guards
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom

# far from the seeds of all other streams
STAGGER_SEED = 1 << 32
Prepared = tuple[dict[str, Tensor], Tensor | None]


class Stages(Protocol):
    """The three stages of an iteration, as an engine or CUDA graphs of it run them."""

    def collect(self) -> None:
        """Step the environments until the algorithm is ready to update."""

    def prepare(self) -> Prepared:
        """(the training data, a mask [N] of the environments that gave NaN or None)."""

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """Take the algorithm's optimiser steps on the data of `prepare`; returns its metrics."""


class Eager:
    """Runs every algorithm and every loss on every device."""

    name = "eager"

    def __init__(
        self,
        algorithm: Algorithm,
        env: VecEnv,
        guards: Guards,
        buffer: RolloutBuffer | None = None,
    ) -> None:
        """buffer: of the rollout, by default one that the algorithm makes."""
        self.algorithm = algorithm
        self.env = env
        self.guards = guards
        self.buffer = algorithm.make_buffer() if buffer is None else buffer
        # the processes that train this agent; its environments on all of them, of which steps are
        # counted
        self.ranks = algorithm.ranks
        self.num_envs = env.num_envs * self.ranks.count
        self.statistics = EpisodeStatistics(
            env.num_envs, env.device, env.max_episode_steps, self.num_envs
        )
        self.stopwatch = Stopwatch(env.device)
        # runs collect, prepare and learn: this engine, or CUDA graphs of it
        self.stages: Stages = self
        # for the user; and numbers to log at this step whatever the time
        self.notes: list[str] = []
        self.events: list[dict[str, float]] = []
        # whether obs and policy_state must keep their addresses, which CUDA graphs read
        self.in_place = False
        # [N, *obs] the newest observations, and the policy's hidden state before them
        self.obs = torch.empty(0)
        self.policy_state = algorithm.initial_policy_state(env.num_envs)
        # environment steps, summed over environments, of whole iterations
        self.steps = 0
        self.iteration = 0
        # transitions since the replay buffer was empty
        self.stored = 0

    @property
    def members(self) -> "tuple[Eager, ...]":
        """The engines of the agents in training: of a population several, else this one."""
        return (self,)

    @property
    def policies(self) -> tuple[Algorithm | None, ...]:
        """The algorithm of each agent, None where it is lost; see `gpurl.engine.population`."""
        return (self.algorithm,)

    @property
    def lost(self) -> dict[int, str]:
        """Agents that diverged while others went on, by index, and why."""
        return {}

    def obstacle(self) -> str:
        """What the engine would ignore of the algorithm as it is now, or "". Methods of the
        algorithm can be replaced after the engine was chosen.
        """
        return ""

    # ---- episodes ----

    def begin(self, seed: int, staggered: bool) -> None:
        """Reset the environments; staggered: at different clocks, so that not all time limits fall
        on the same step.
        """
        self._set_episodes(reset_env(self.env, seed), self.policy_state)
        if staggered and self.env.max_episode_steps is not None:
            first = self.ranks.index * self.env.num_envs
            clocks = CounterRandom(seed + STAGGER_SEED, self.env.num_envs, self.env.device, first)
            self.env.stagger(clocks.integers(0, self.env.max_episode_steps))

    # ---- the stages ----

    def act(self) -> Decision:
        """The algorithm's decision at the current observations."""
        return self.algorithm.act(self.obs, self.policy_state)

    def record_step(self, decision: Decision, timestep: Timestep) -> None:
        """Store the result of `decision` and make it the current state."""
        value = self._final_value(decision, timestep)
        self.algorithm.record_step(self.buffer, self.obs, decision, timestep, value)
        self.statistics.add(timestep)
        if decision.policy_state:
            self.policy_state = restart_policy_state(decision.policy_state, episode_ends(timestep))
        self.obs = timestep.obs

    def value(self, obs: Tensor, policy_state: PolicyState) -> Tensor:
        """[N] expected return from obs [N, *obs]."""
        return self.algorithm.value(obs, policy_state)

    def _final_value(self, decision: Decision, timestep: Timestep) -> Tensor | None:
        """[N] values of the final observations, 0 where no episode was truncated. None where the
        algorithm needs none, and on a GPU, where one batch after the rollout is cheaper.
        """
        if not self.algorithm.values_final_obs or not host_sync_is_free(self.env.device):
            return None
        final_obs = timestep.info["final_obs"]
        policy_state = decision.policy_state
        # after the last step of a rollout every environment bootstraps
        if self.buffer.size == self.buffer.horizon - 1:
            return self.value(final_obs, policy_state)
        # before that only truncated episodes do
        value = torch.zeros(len(final_obs))
        if bool(timestep.truncated.any()):
            index = timestep.truncated.nonzero().squeeze(1)
            truncated_state = tuple(memory[index] for memory in policy_state)
            value[index] = self.value(final_obs[index], truncated_state)
        return value

    def collect(self) -> None:
        """Step the environments until the algorithm is ready to update."""
        while not self.buffer.is_full:
            decision = self.act()
            timestep = step_env(self.env, decision.action)
            self.guards.after_step(timestep, self.obs)
            self.record_step(decision, timestep)

    def prepare(self) -> Prepared:
        """(the training data, a mask [N] of the environments that gave NaN or None)."""
        bad_envs = self.guards.after_rollout(self.buffer)
        if bad_envs is not None:
            # a hidden state that has read NaN stays NaN
            self.policy_state = restart_policy_state(self.policy_state, bad_envs)
        self._mark_valid_like_others()
        return self.algorithm.prepare(self.buffer), bad_envs

    def _mark_valid_like_others(self) -> None:
        """Rows are marked as valid or not on all ranks or on none: they merge the same columns. On
        a GPU the guards mark them always.
        """
        if self.ranks.count == 1 or not host_sync_is_free(self.env.device):
            return
        columns = self.buffer.columns
        (is_marked,) = self.ranks.any("valid" in columns)
        if is_marked and "valid" not in columns:
            columns["valid"] = torch.ones_like(columns["terminated"])

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """Take the algorithm's optimiser steps on the data of `prepare`; returns its metrics."""
        with self.algorithm.train_mode():
            return self.algorithm.learn(data)

    # ---- an iteration ----

    def schedule(self, progress: float) -> None:
        """Set learning rates and the like for the next iteration."""
        self.algorithm.schedule(progress, self.steps)

    def iterate(self, progress: float) -> Metrics:
        """Collect, then update. progress: of the training, from 0 to 1.

        Returns the update's metrics: tensors on the device, valid until the next call. EnvError
        names the environment and the step where it failed.
        """
        self.schedule(progress)
        self.env.training_progress.fill_(progress)
        before = self.buffer.size
        with self._at(self.steps - before * self.num_envs):
            # play the rollout
            self.stopwatch.mark("collect")
            self.stages.collect()
            collected = (self.buffer.size - before) * self.num_envs
            # check it for NaN and compute the targets
            self.stopwatch.mark("update")
            data, bad_envs = self.stages.prepare()
            self._reset_bad(bad_envs)
        # learn, once enough transitions are stored
        self.stored += collected
        is_learning = self.stored >= self.algorithm.learning_starts
        metrics = self.stages.learn(data) if is_learning else {}
        # count the iteration
        self.buffer.clear()
        self.stopwatch.mark("other")
        self.iteration += 1
        self.steps += collected
        self.guards.after_learn(self.iteration, bad_envs)
        return metrics

    @contextmanager
    def _at(self, steps: int) -> Iterator[None]:
        """A `with` block whose EnvErrors name the environment and its step; steps: env steps at the
        start of the rollout in `buffer`.
        """
        try:
            yield
        except EnvError as error:
            step = steps + self.buffer.size * self.num_envs
            place = f"environment {self.guards.env_name!r} at env step {step}"
            raise EnvError(f"{place}: {error}") from error

    def _reset_bad(self, bad_envs: Tensor | None) -> None:
        """Reset the environments that gave NaN, under `--nan reset-envs`."""
        if bad_envs is None or self.guards.nan != "reset-envs":
            return
        self._set_episodes(reset_env(self.env, mask=bad_envs), self.policy_state)
        self.algorithm.mark_episode_break(bad_envs)

    def abandon(self) -> None:
        """Discard an iteration that an error or a signal interrupted.

        Counters stay those of the last whole iteration. If `learn` was interrupted, the weights
        have taken some steps and the replay buffer holds the rollout: valid data, stored once.
        """
        if not self.buffer.size:
            return
        self.buffer.clear()
        # the environments may be ahead of the last transition stored
        self.algorithm.mark_episode_break()

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """The loop's own part of a checkpoint; the algorithm and the environments have theirs."""
        return {
            "steps": self.steps,
            "iteration": self.iteration,
            "obs": self.obs,
            "policy_state": list(self.policy_state),
            "statistics": self.statistics.state_dict(),
            "curriculum": self.env.curriculum_state(),
            "skipped": self.guards.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters and statistics; `load_episodes` restores observations and hidden
        state.
        """
        self.steps = state["steps"]
        self.iteration = state["iteration"]
        self.guards.begin(self.iteration)
        self.statistics.load_state_dict(state["statistics"], self.steps)
        if "skipped" in state:  # older checkpoints lack it
            self.guards.load_state_dict(state["skipped"])
        if state["curriculum"]:
            self.env.load_curriculum_state(state["curriculum"])

    def load_episodes(self, env_state: dict[str, Any], state: dict[str, Any], seed: int) -> None:
        """Continue the episodes of a checkpoint: the environments' state and `state_dict()`'s."""
        reset_env(self.env, seed)
        load_env_state(self.env, env_state)
        check_reset(self.env, state["obs"])
        policy_state = tuple(state["policy_state"])
        first = self.algorithm.initial_policy_state(self.env.num_envs)
        if [each.shape for each in policy_state] != [each.shape for each in first]:
            policy_state = first  # noise that lasts, which the run before had not
        self._set_episodes(state["obs"], policy_state)

    def _set_episodes(self, obs: Tensor, policy_state: PolicyState) -> None:
        """Set the current observations [N, *obs] and hidden state."""
        if not self.in_place:
            self.obs = obs
            self.policy_state = policy_state
            return
        for target, source in zip((self.obs, *self.policy_state), (obs, *policy_state)):
            target.copy_(source)
