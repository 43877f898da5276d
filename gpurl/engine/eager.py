"""The engine that specifies an iteration: act, step, record, prepare, learn, one operation after
the other. Every other engine gives what this one gives."""

from typing import Any, Protocol

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Decision, Metrics, episode_ends, restart_policy_state
from gpurl.engine.statistics import EpisodeStatistics, Stopwatch
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError
from gpurl.guards.contract import check_reset, load_env_state, reset_env, step_env
from gpurl.guards.guards import Guards
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom
from gpurl.nn.networks import PolicyState

Prepared = tuple[dict[str, Tensor], Tensor | None]


class Stages(Protocol):
    """The three stages of an iteration."""

    def collect(self) -> None:
        """Step the environments until the algorithm is ready to update."""

    def prepare(self) -> Prepared:
        """(what the algorithm learns from, which environments gave NaN [N] or None)."""

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """The algorithm's steps on what `prepare` gave; returns its metrics."""


class Eager:
    """Runs everywhere, for every algorithm and every loss of one's own."""

    name = "eager"

    def __init__(self, algorithm: Algorithm, env: VecEnv, guards: Guards) -> None:
        self.algorithm, self.env, self.guards = algorithm, env, guards
        self.buffer = algorithm.make_buffer()
        self.statistics = EpisodeStatistics(env.device)
        self.stopwatch = Stopwatch(env.device)
        self.stages: Stages = self  # who runs them: this engine, or CUDA graphs of it
        self.notes: list[str] = []  # for the user
        self.in_place = False  # whether graphs read obs and policy_state where they are now
        self.obs = torch.empty(0)  # [N, *obs] the newest observations
        self.policy_state = algorithm.initial_policy_state(
            env.num_envs
        )  # the policy's hidden state
        self.steps = 0  # of all environments together, those of whole iterations
        self.iteration = 0
        self.stored = 0  # transitions since the replay buffer was empty

    # ---- episodes ----

    def begin(self, seed: int, staggered: bool) -> None:
        """Reset the environments, at different clocks if wanted."""
        self._go_on_from(reset_env(self.env, seed), self.policy_state)
        if staggered and self.env.max_episode_steps is not None:
            clocks = CounterRandom(seed + 7, self.env.num_envs, self.env.device)
            self.env.stagger(clocks.integers(0, self.env.max_episode_steps))

    # ---- the stages ----

    def act(self) -> Decision:
        """The algorithm's decision at the present observations."""
        return self.algorithm.act(self.obs, self.policy_state)

    def record_step(self, decision: Decision, timestep: Timestep) -> None:
        """Record what `decision` led to, and go on from there."""
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
        """[N] value of the true successor, 0 where nobody asks for it; None where nobody asks at
        all, and on a device, which values all in one batch after the rollout for less.
        """
        if not self.algorithm.values_final_obs or not host_sync_is_free(self.env.device):
            return None
        final_obs, policy_state = timestep.info["final_obs"], decision.policy_state
        # after the last step everybody's counts
        if self.buffer.size == self.buffer.horizon - 1:
            return self.value(final_obs, policy_state)
        # else that of episodes which time cut off
        value = torch.zeros(len(final_obs))
        if bool(timestep.truncated.any()):
            index = timestep.truncated.nonzero().squeeze(1)
            of_cut = tuple(memory[index] for memory in policy_state)
            value[index] = self.value(final_obs[index], of_cut)
        return value

    def collect(self) -> None:
        """Step the environments until the algorithm is ready to update."""
        while not self.algorithm.is_ready(self.buffer):
            decision = self.act()
            timestep = step_env(self.env, decision.action)
            self.guards.after_step(timestep, self.obs)
            self.record_step(decision, timestep)

    def prepare(self) -> Prepared:
        """(what the algorithm learns from, which environments gave NaN [N] or None)."""
        bad_envs = self.guards.after_rollout(self.buffer)
        if bad_envs is not None:
            # whatever a hidden state has seen NaN with
            self.policy_state = restart_policy_state(self.policy_state, bad_envs)
        return self.algorithm.prepare(self.buffer), bad_envs

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """The algorithm's steps on what `prepare` gave; returns its metrics."""
        return self.algorithm.learn(data)

    # ---- an iteration ----

    def iterate(self, progress: float) -> Metrics:
        """Collect, then update; returns the update's metrics, on the device, true until the next
        call. progress: of the training, from 0 to 1.
        """
        self.algorithm.schedule(progress, self.steps)
        before = self.buffer.size
        try:
            # play the rollout
            self.stopwatch.mark("collect")
            self.stages.collect()
            collected = (self.buffer.size - before) * self.env.num_envs
            # clean it and make targets of it
            self.stopwatch.mark("update")
            data, bad_envs = self.stages.prepare()
            self._reset_bad(bad_envs)
        except EnvError as error:
            at = self.steps + (self.buffer.size - before) * self.env.num_envs
            where = f"environment {self.guards.env_name!r} at env step {at}"
            raise EnvError(f"{where}: {error}") from error
        # learn from it, once there is enough
        self.stored += collected
        is_learning = self.stored >= self.algorithm.learning_starts
        metrics = self.stages.learn(data) if is_learning else {}
        self.buffer.clear()
        self.stopwatch.mark("other")
        self.iteration += 1
        self.steps += collected
        self.guards.after_learn(self.iteration, bad_envs)
        return metrics

    def _reset_bad(self, bad_envs: Tensor | None) -> None:
        """Restart the environments that gave NaN, where the user wants that."""
        if bad_envs is None or self.guards.nan != "reset-envs":
            return
        self._go_on_from(reset_env(self.env, mask=bad_envs), self.policy_state)
        self.algorithm.mark_episode_break(bad_envs)

    def abandon(self) -> None:
        """Forget an iteration that broke off."""
        if not self.buffer.size:
            return
        # An iteration that broke off does not count: its rollout is not kept, and counters are
        # those of the last whole one. Where it broke off in `learn` the weights are some steps
        # further, and a replay holds the rollout: all of it true, and none of it twice.
        self.buffer.clear()
        self.algorithm.mark_episode_break()  # the environments may be steps ahead of what is stored

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the loop itself; the algorithm and the environments have
        states of their own.
        """
        return {
            "steps": self.steps,
            "iteration": self.iteration,
            "obs": self.obs,
            "policy_state": list(self.policy_state),
            "statistics": self.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, but for observations and hidden state: `load_episodes`."""
        self.steps, self.iteration = state["steps"], state["iteration"]
        self.guards.begin(self.iteration)
        self.statistics.load_state_dict(state["statistics"])

    def load_episodes(self, env_state: dict[str, Any], state: dict[str, Any], seed: int) -> None:
        """Continue the episodes that `env_state` and `state_dict()` are of."""
        reset_env(self.env, seed)
        load_env_state(self.env, env_state)
        check_reset(self.env, state["obs"])
        self._go_on_from(state["obs"], tuple(state["policy_state"]))

    def _go_on_from(self, obs: Tensor, policy_state: PolicyState) -> None:
        """Take observations [N, *obs] and hidden state from outside."""
        if not self.in_place:
            self.obs, self.policy_state = obs, policy_state
            return
        for place, value in zip((self.obs, *self.policy_state), (obs, *policy_state)):
            place.copy_(value)
