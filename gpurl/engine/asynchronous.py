"""The engine that learns beside collecting: while the algorithm learns from one rollout, a copy of
its policy plays the next one.

For simulators that no CUDA graph can hold. The schedule is fixed: the rollout of iteration k + 1 is
played by the policy as it was before iteration k learned, so the lag is one iteration whatever the
speeds, and V-trace corrects the targets for it. Between iterations nothing runs: one rollout is
complete and not learned from yet, and checkpoints hold it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Decision, Metrics, global_stream
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.cpu_ppo import PpoInC, cpu_ppo_obstacle
from gpurl.engine.eager import Eager, Prepared
from gpurl.engine.obstacles import overridden
from gpurl.engine.statistics import Stopwatch
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.guards.guards import Guards
from gpurl.kernels.backend import host_sync_is_free

# what a subclass of PPO may override: the acting copy does not need it, or has it too
OWN_METHODS = ("loss", "reward_of", "reads_state", "make_networks", "_make_network")
Result = TypeVar("Result")


def asynchronous_obstacle(algorithm: Algorithm) -> str:
    """Why `algorithm` cannot learn from a rollout that its policy of one iteration ago played; ""
    if it can.
    """
    if not isinstance(algorithm, PPO):
        return f"V-trace corrects the lag of ppo and a2c, not of {type(algorithm).__name__}"
    if algorithm.is_recurrent:
        return "a hidden state of the policy that acted is not one of the policy that learns"
    if algorithm.reads_bytes:
        return "of images no final observations are kept, which the policy that learns would value"
    return overridden(algorithm, PPO, OWN_METHODS)


class Beside(Protocol):
    """Runs two functions beside each other."""

    def run(self, learn: Callable[[], Result], collect: Callable[[], None]) -> Result:
        """Run both, `collect` in the caller's thread; returns the result of `learn` when both have
        ended. An error of `learn` is raised then. `collect` raises none.
        """


class LearningThread:
    """On a CPU: `learn` in a thread of its own. Environments stay in the thread that made them."""

    def __init__(self) -> None:
        # one thread for all iterations: OpenMP starts helpers for every new one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpurl-learn")

    def run(self, learn: Callable[[], Result], collect: Callable[[], None]) -> Result:
        learning = self._thread.submit(learn)
        collect()
        return learning.result()


class LearningStream:
    """On a GPU: `learn` on a stream of its own, launched before `collect` on the current one. Each
    stream waits for the other, the host for none.

    Memory of one stream that the other frees is safe without `record_stream`: a stream allocates
    only between the two waits, and none of its memory is used beyond them by the other stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, learn: Callable[[], Result], collect: Callable[[], None]) -> Result:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                result = learn()
            collect()
        finally:
            current.wait_stream(self.stream)
        return result


class TwoStopwatches(Stopwatch):
    """Seconds of collecting and, by `learning`, of learning beside it; each waits for the other at
    the end of an iteration.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.learning = Stopwatch(device)

    def read(self) -> dict[str, float]:
        return super().read() | self.learning.read()


class Asynchronous(Eager):
    """Learns beside collecting, in C where `CpuPpo` could. `rollout` holds the steps to learn from,
    `buffer` those that are being played.
    """

    name = "asynchronous"
    algorithm: PPO

    def __init__(self, algorithm: PPO, env: VecEnv, guards: Guards, beside: Beside) -> None:
        super().__init__(algorithm, env, guards)
        self.beside = beside
        self.stopwatch: TwoStopwatches = TwoStopwatches(env.device)
        # the policy that acts, whose random stream is the one that checkpoints hold
        self.actor = _same_algorithm(algorithm)
        algorithm.random_streams["action"] = self.actor.random_streams["action"]
        # in C where that is possible
        self.in_c = not cpu_ppo_obstacle(algorithm)
        self.acting = PpoInC(self.actor) if self.in_c else self.actor
        self.learning = PpoInC(algorithm) if self.in_c else algorithm
        if self.in_c:
            self.name = "asynchronous C"
        self.rollout = RolloutBuffer(self.buffer.horizon, env.device)
        # 0-d, iterations between the policy that acted and the one that learns
        self._lags = torch.arange(2.0, device=env.device).unbind()
        self.lag = self._lags[0]

    def obstacle(self) -> str:
        obstacle = asynchronous_obstacle(self.algorithm)
        return obstacle or (cpu_ppo_obstacle(self.algorithm) if self.in_c else "")

    # ---- collecting ----

    def act(self) -> Decision:
        """The decision of the acting copy at the current observations."""
        return self.acting.act(self.obs)

    def _final_value(self, decision: Decision, timestep: Timestep) -> Tensor | None:
        """None: values are those of the critic that learns."""
        return None

    def _follow(self) -> None:
        """Make the acting copy equal to the policy as it is now, normalisers included."""
        learned = self.algorithm.state_dict()
        acting = self.actor.state_dict()
        torch._foreach_copy_(list(acting.values()), [learned[name] for name in acting])

    def _keep_rollout(self) -> None:
        """Move the steps that were played to where `prepare` reads them, always at the same
        addresses.
        """
        played = self.buffer.columns
        self.rollout.clear()
        if self.rollout.columns.keys() != played.keys():
            self.rollout.set_columns({name: torch.empty_like(x) for name, x in played.items()})
        columns = [self.rollout.columns[name] for name in played]
        torch._foreach_copy_(columns, list(played.values()))
        self.rollout.size = self.rollout.horizon
        self.buffer.clear()

    # ---- learning ----

    def prepare(self) -> Prepared:
        """As `Eager.prepare`, with targets for the policy as it is now."""
        rollout = self.rollout
        rollout.drop_derived()  # graphs are captured on a rollout that was prepared before
        bad_envs = self.guards.after_rollout(rollout)
        self._set_final_values()
        self.algorithm.catch_up(rollout)
        # how far the policy has moved since it acted: E[exp(x) - 1 - x], x the log-ratio
        log_ratio = rollout["log_ratio"]
        divergence = log_ratio.expm1() - log_ratio
        valid = rollout.columns.get("valid")
        if valid is not None:
            divergence = divergence.masked_fill(~valid, 0.0)
        data = self.algorithm.prepare(rollout)
        return data | {"lag_kl": divergence.mean()}, bad_envs

    def _set_final_values(self) -> None:
        """On a CPU value those final observations that targets need; on a GPU one batch of all is
        cheaper, which the algorithm computes itself.
        """
        rollout = self.rollout
        if not host_sync_is_free(self.env.device):
            return
        is_needed = rollout["truncated"].clone()
        is_needed[-1] = True
        index = is_needed.flatten().nonzero().squeeze(1)
        value = torch.zeros(is_needed.numel())
        value[index] = self.learning.value(rollout["final_obs"].flatten(0, 1)[index])
        rollout.columns["final_value"] = value.view_as(rollout["value"])

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `Eager.learn`; also logs the lag."""
        with self.algorithm.train_mode():
            metrics = self.learning.learn(data)
        return metrics | {"train/lag": self.lag, "train/lag_kl": data["lag_kl"]}

    # ---- an iteration ----

    def iterate(self, progress: float) -> Metrics:
        """Learn from one rollout while the next one is played. An error of the environment is
        raised after the iteration was counted.
        """
        self.algorithm.schedule(progress, self.steps)
        self.env.training_progress.fill_(progress)
        # the first rollout; all others were played beside the learning before
        self.lag = self._lags[self.rollout.is_full]
        if not self.rollout.is_full:
            self._follow()
            self._collect(self.steps)
            self._keep_rollout()
        # learn from it beside the next one; after an error in here it is not learned from again
        collected = self.rollout.horizon * self.env.num_envs
        self.rollout.size = 0
        self._follow()
        errors = list[BaseException]()
        metrics, bad_envs = self.beside.run(
            self._learn_beside, lambda: self._collect_beside(self.steps + collected, errors)
        )
        self.stopwatch.mark("other")
        self.stopwatch.learning.mark("other")
        # count the iteration
        self.stored += collected
        self.iteration += 1
        self.steps += collected
        self.guards.after_learn(self.iteration, bad_envs)
        if errors:
            raise errors[0]
        self._keep_rollout()
        with self._at(self.steps + collected):
            self._reset_bad(bad_envs)
        return metrics

    def _learn_beside(self) -> tuple[Metrics, Tensor | None]:
        """(metrics, as `prepare` the environments that gave NaN) of the kept rollout."""
        self.stopwatch.learning.mark("update")
        data, bad_envs = self.stages.prepare()
        metrics = self.stages.learn(data)
        self.stopwatch.learning.mark("update_wait")
        return metrics, bad_envs

    def _collect_beside(self, steps: int, errors: list[BaseException]) -> None:
        """Play the next rollout, from env step `steps` on; adds an error to `errors`."""
        try:
            self._collect(steps)
        except BaseException as error:
            errors.append(error)
        self.stopwatch.mark("collect_wait")

    def _collect(self, steps: int) -> None:
        self.stopwatch.mark("collect")
        with self._at(steps):
            self.stages.collect()

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """Also the rollout that was played but not learned from."""
        columns = dict(self.rollout.columns) if self.rollout.is_full else {}
        return super().state_dict() | {"rollout": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Eager.load_state_dict`. Without a rollout, or with one of another size, the first
        iteration plays one.
        """
        super().load_state_dict(state)
        columns: dict[str, Tensor] = state.get("rollout", {})
        self.rollout.size = 0
        shape = (self.rollout.horizon, self.env.num_envs)
        if columns and all(column.shape[:2] == shape for column in columns.values()):
            device = self.env.device
            self.rollout.set_columns({name: x.to(device) for name, x in columns.items()})
            self.rollout.size = self.rollout.horizon


def _same_algorithm(algorithm: PPO) -> PPO:
    """Another one of the same class, settings, spaces and seed."""
    # its first weights are not used: nobody else's random numbers change for them
    with global_stream(algorithm.seed):
        same = type(algorithm)(
            algorithm.config,
            algorithm.observation_space,
            algorithm.action_space,
            algorithm.num_envs,
            algorithm.device,
            algorithm.seed,
            algorithm.state_space,
        )
    same.set_precision(algorithm.precision)
    return same
