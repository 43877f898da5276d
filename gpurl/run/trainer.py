"""The one training loop: act, step, record, update; with logging, evaluation, checkpoints and
stopping around it.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpurl.algorithms.base import Algorithm, Decision, episode_ends, restart_carry
from gpurl.checkpoints.folders import save_checkpoint
from gpurl.checkpoints.spaces import space_to_dict
from gpurl.checkpoints.state_files import by_own_names
from gpurl.engine.graphed import Graphed, choose_graphs
from gpurl.engine.graphs import Backend, CudaGraphs
from gpurl.engine.persistent import PersistentRollout, make_persistent
from gpurl.engine.privileged_state import WithState
from gpurl.engine.statistics import EpisodeStatistics, Stopwatch, to_host
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import CheckpointError, EndlessEpisodeError, EnvError, GpurlError, NonFiniteError
from gpurl.guards.contract import EnvGuard, check_reset, load_env_state, reset_env, step_env
from gpurl.guards.finite import FiniteGuard
from gpurl.guards.steps import StepGuard
from gpurl.kernels.backend import host_may_look
from gpurl.kernels.memory_errors import is_out_of_memory
from gpurl.kernels.random import CounterRandom
from gpurl.run.display import Display
from gpurl.run.ending import leave
from gpurl.run.evaluator import evaluate, greedy
from gpurl.run.interrupt import StopRequest
from gpurl.run.logger import Logger
from gpurl.run.resume import fitting
from gpurl.run.settings import Settings, parse_interval

EVAL_SEED = 1_000_003  # evaluations play the same episodes every time, and never the training's


@dataclass
class Outcome:
    """How a run ended: total_steps, stop_return, max_seconds or signal; and the last evaluation."""

    reason: str
    steps: int
    evaluation: dict[str, float]
    signal_number: int | None = None
    unsaved: str = ""  # why the last state is in no checkpoint, where it is in none


class Trainer:
    """Holds what a run consists of; `run()` goes on until a limit of its settings."""

    def __init__(
        self,
        settings: Settings,
        algorithm: Algorithm,
        env: VecEnv,
        eval_env: VecEnv | None,
        folder: Path,
    ) -> None:
        self.settings, self.config = settings, settings.train
        self.algorithm, self.eval_env, self.folder = algorithm, eval_env, folder
        self.env = WithState(env) if algorithm.num_state else env
        self.buffer = algorithm.make_buffer()
        self.statistics = EpisodeStatistics(env.device)
        self.stopwatch = Stopwatch(env.device)
        self.guard = FiniteGuard(
            settings.env,
            env.device,
            self.config.nan,
            algorithm.num_inputs if algorithm.num_state else None,
        )
        self.step_guard, self.env_guard = StepGuard(algorithm), EnvGuard(self.env)
        self.steps = self.iteration = 0
        # transitions since nothing was stored: at the start, or when a run went on without its
        # replay
        self.stored = 0
        self.elapsed = 0.0  # seconds of training, over all resumes
        self.evaluation: dict[str, float] = {}
        self.evaluated_at = self.saved_at = -1
        self.best_return = float("-inf")
        self.obs = torch.empty(0)
        self.carry = algorithm.initial_carry(env.num_envs)
        self.eval_every = self.config.eval_every or max(self.config.total_steps // 10, 1)
        self.next_eval = self._evaluation_after(0)
        self.save_seconds, self.save_iterations = parse_interval(self.config.save_every)
        self.last_save = self.last_log = time.monotonic()
        self.logged_steps = 0
        self.began_at, self.evaluation_is_new = 0.0, False
        self.graph_backend: Backend | None = (
            CudaGraphs(env.device) if env.device.type == "cuda" else None
        )
        self.graphs: Graphed | None = None  # after the first iteration, where there are any
        self.graph_level = ""  # off, policy or full, once it is chosen
        self.persistent: PersistentRollout | None = (
            None  # one kernel for whole rollouts, where there is one
        )
        self.is_warm = False  # after the first iteration
        self.timestep: Timestep | None = None  # the newest, until graphs are chosen
        self.notes: list[str] = []  # for the screen
        self.warnings: list[str] = []
        self.evaluates_itself = (
            eval_env is None and env.single_instance and self.config.eval_episodes > 0
        )  # after the training
        if self.evaluates_itself:
            self.notes.append(
                f"{settings.env} can exist only once in a process: its one evaluation follows the "
                f"training"
            )

    # ---- the loop ----

    def start(self) -> None:
        """Begin a new run."""
        self.algorithm.start()
        self._begin_episodes(self.config.seed)
        self._choose_rollout()

    def _begin_episodes(self, seed: int) -> None:
        """Reset the environments, at different clocks if wanted."""
        self.obs = reset_env(self.env, seed)
        if self.config.stagger and self.env.max_episode_steps is not None:
            clocks = CounterRandom(seed + 7, self.env.num_envs, self.env.device)
            self.env.stagger(clocks.integers(0, self.env.max_episode_steps))

    def _choose_rollout(self) -> None:
        """The rollout kernel, where it can play this policy in this environment."""
        if (
            self.config.rollout == "steps" or self.config.graph == "policy"
        ):  # that one steps the environment
            return
        made = make_persistent(self.algorithm, self.env)
        if isinstance(made, PersistentRollout):
            self.persistent = made
        elif self.config.rollout == "persistent":
            self.notes.append(f"no persistent rollout kernel: {made}")

    def act(self) -> Decision:
        """The algorithm's decision at the present observations."""
        return self.algorithm.act(self.obs, self.carry)

    def take_in(self, decision: Decision, timestep: Timestep) -> None:
        """Record what `decision` led to, and go on from there."""
        self.algorithm.record(self.buffer, self.obs, decision, timestep)
        self.statistics.add(timestep)
        self.carry = restart_carry(decision.carry, episode_ends(timestep)) if decision.carry else ()
        self.obs = timestep.obs

    def collect(self) -> None:
        """Step the environments until the algorithm is ready to update."""
        if self.persistent is not None:
            self.persistent.play(self.buffer, self.obs, self.statistics)
            return
        while not self.algorithm.is_ready(self.buffer):
            decision = self.act()
            self.timestep = step_env(self.env, decision.action)
            self.env_guard.check(self.timestep, self.obs)
            self.take_in(decision, self.timestep)

    def prepare(self) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """(what the algorithm learns from, which environments gave NaN or infinity [N] or None):
        the phase after collecting.
        """
        bad_envs = self.guard.clean(self.buffer)
        if bad_envs is not None:
            self.carry = restart_carry(self.carry, bad_envs)  # whatever a memory has seen NaN with
        return self.algorithm.prepare(self.buffer), bad_envs

    def learn(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The algorithm's steps on what `prepare` gave; returns its metrics."""
        return self.algorithm.learn(data)

    def iterate(self) -> dict[str, torch.Tensor]:
        """Collect, then update; returns the update's metrics, on the device, true until the next
        call.
        """
        if self.is_warm and not self.graph_level:
            self.graph_level, self.graphs, notes = choose_graphs(self)
            self.timestep = None
            self.notes += notes
            if self.graph_backend is not None:
                self.notes.append(
                    f"CUDA graphs {self.graph_level}, rollout "
                    f"{'steps' if self.persistent is None else 'persistent'}"
                )
        stages = self.graphs or self
        self.algorithm.schedule(self.steps / self.config.total_steps, self.steps)
        self.stopwatch.mark("collect")
        before = self.buffer.size
        try:
            stages.collect()
            collected = self.buffer.size - before
            self.stopwatch.mark("update")
            data, bad_envs = stages.prepare()
            if bad_envs is not None and self.config.nan == "reset-envs":
                obs = reset_env(self.env, mask=bad_envs)
                self.obs = obs if self.graphs is None else self.obs.copy_(obs)
                self.algorithm.cut(bad_envs)
        except EnvError as error:
            at = self.steps + (self.buffer.size - before) * self.env.num_envs
            raise EnvError(
                f"environment {self.settings.env!r} at env step {at}: {error}"
            ) from error
        self.stored += collected * self.env.num_envs
        metrics = stages.learn(data) if self.stored >= self.algorithm.learning_starts else {}
        self.buffer.clear()
        self.stopwatch.mark("other")
        self.is_warm = True
        self.iteration += 1
        self.steps += collected * self.env.num_envs
        if host_may_look(self.env.device):
            if bad_envs is not None:
                self._report_rows(
                    to_host(self.guard.metrics()), bad_envs.nonzero().squeeze(1).tolist()
                )
            if self.step_guard.sees_any(self.iteration):
                self._report_steps(to_host(self.step_guard.metrics()))
        return metrics

    def run(self, logger: Logger, display: Display) -> Outcome:
        """Train until a limit is reached or a signal comes. Whatever ends it, the state is saved,
        but for a policy that diverged.
        """
        began, before = time.monotonic(), self.elapsed
        self.began_at, self.evaluation_is_new = (
            before,
            False,
        )  # limits of time and return are of this process, not of an earlier one
        self.last_save = self.last_log = began
        self.logged_steps = self.steps
        reason = "" if self.steps < self.config.total_steps else "total_steps"
        self._tell_of_replay(display)
        with StopRequest() as stop:
            try:
                while not reason:
                    metrics = self.iterate()
                    while self.notes:
                        display.note(self.notes.pop(0))
                    self.elapsed = before + time.monotonic() - began
                    self._log_if_due(metrics, logger, display)
                    while self.warnings:
                        self.warn(display, self.warnings.pop(0))
                    if self.steps >= self.next_eval:
                        self._evaluate(logger, display, stop)
                    reason = "signal" if stop.signal_number else self._limit_reached()
                    if not reason and self._save_is_due():
                        self.save(display)
                if reason != "signal" and self.evaluated_at != self.steps:
                    self.eval_env = self.env if self.evaluates_itself else self.eval_env
                    self._evaluate(logger, display, stop)
            except BaseException as error:
                leave(self, display, error, stop.signal_number)
                reason = "signal"
            unsaved = self.save(display)
        return Outcome(reason, self.steps, self.evaluation, stop.signal_number, unsaved)

    def planned_steps(self) -> int:
        """total_steps rounded up to whole iterations."""
        rows = self.buffer.horizon * self.env.num_envs
        return -(-self.config.total_steps // rows) * rows

    def _tell_of_replay(self, display: Display) -> None:
        """A word where the run ends before its replay holds enough to learn from, or fills a replay
        anew that was not saved.
        """
        starts, left = self.algorithm.learning_starts, self.planned_steps() - self.steps
        if left <= 0 or self.stored >= starts:
            return
        if self.stored + left < starts:
            holds = f"the replay holds {self.stored} transitions and {left} are to come"
            self.warn(display, f"nothing will be learnt: {holds}, learning_starts is {starts}")
        elif self.steps and not self.stored:
            display.note(
                f"the replay was not saved (save_replay does): {starts} transitions are played "
                f"before learning goes on"
            )

    def _evaluation_after(self, steps: int) -> int:
        return (steps // self.eval_every + 1) * self.eval_every

    def _limit_reached(self) -> str:
        if self.steps >= self.config.total_steps:
            return "total_steps"
        if (
            self.config.max_seconds is not None
            and self.elapsed - self.began_at >= self.config.max_seconds
        ):
            return "max_seconds"
        if self.config.stop_return is not None and self.evaluation_is_new:
            return (
                "stop_return"
                if self.evaluation["eval/mean_reward"] >= self.config.stop_return
                else ""
            )
        return ""

    # ---- around the loop ----

    def _log_if_due(
        self, metrics: dict[str, torch.Tensor], logger: Logger, display: Display
    ) -> None:
        """Once per log_every seconds: the one transfer from the device, then the files and the
        screen.
        """
        now = time.monotonic()
        seconds = now - self.last_log
        if seconds < self.config.log_every and self.steps < self.config.total_steps:
            return
        episodes, rows, steps = (
            self.statistics.metrics(),
            self.guard.metrics(),
            self.step_guard.metrics(),
        )
        values = to_host(metrics | episodes | rows | steps)
        self._report_rows({name: values.pop(name) for name in rows}, [])
        self._report_steps({name: values.pop(name) for name in steps})
        if self.config.nan != "raise":
            values["rollout/non_finite_rows"] = float(self.guard.total)
        values["train/skipped_steps"] = float(self.step_guard.total)
        values |= self.statistics.read({name: values.pop(name) for name in episodes})
        phases = self.stopwatch.read()
        values |= {
            "time/collect_seconds": phases.get("collect", 0.0),
            "time/update_seconds": phases.get("update", 0.0),
        }
        values |= {
            "time/fps": (self.steps - self.logged_steps) / max(seconds, 1e-9),
            "time/iterations": float(self.iteration),
        }
        values |= {"time/total_timesteps": float(self.steps), "time/time_elapsed": self.elapsed}
        self.last_log, self.logged_steps = now, self.steps
        logger.write(self.steps, values)
        display.update(self.steps, values)

    def _report_rows(self, values: dict[str, float], env_ids: list[int]) -> None:
        weights = self.step_guard.bad_weights() if values["policy_diverged"] else ""
        self.guard.report(values, self.env.num_envs, self.iteration, env_ids, weights)

    def _report_steps(self, values: dict[str, float]) -> None:
        self.warnings += self.step_guard.report(
            values, self.iteration, self.settings.env, self.config.nan == "raise"
        )

    def _evaluate(self, logger: Logger, display: Display, stop: StopRequest) -> None:
        """Play the evaluation episodes, keep the checkpoint when they are the best so far. Raises
        Stopped once `stop` is asked for.
        """
        self.next_eval = self._evaluation_after(self.steps)
        if self.eval_env is None:
            return
        self.evaluated_at = self.steps
        carry, act = self.algorithm.initial_carry(self.eval_env.num_envs), greedy(self.algorithm)
        try:
            values = evaluate(
                act,
                self.eval_env,
                self.config.eval_episodes,
                carry,
                EVAL_SEED,
                should_stop=lambda: stop.signal_number,
            )
        except EndlessEpisodeError as error:
            self.warn(display, f"no more evaluations: {error}")
            self.eval_env = None
            return
        if non_finite := values.get("eval/non_finite_episodes"):
            text = (
                f"{non_finite:.0f} evaluation episodes of environment {self.settings.env!r} gave "
                f"NaN or infinity"
            )
            if self.config.nan == "raise":
                raise NonFiniteError(
                    f"{text}; to leave such episodes out and go on: gpurl train --resume RUN --nan "
                    f"reset-envs"
                )
            self.warn(display, f"{text} and are left out")
        if not values["eval/episodes"]:
            return
        self.evaluation, self.evaluation_is_new = {**values, "at_step": self.steps}, True
        logger.write(self.steps, values)
        display.update(self.steps, values)
        if values["eval/mean_reward"] > self.best_return:
            self.best_return = values["eval/mean_reward"]
            self.save(display, is_best=True)

    def _save_is_due(self) -> bool:
        if self.save_iterations is not None:
            return self.iteration % self.save_iterations == 0
        return (
            self.save_seconds is not None and time.monotonic() - self.last_save >= self.save_seconds
        )

    def save(self, display: Display, is_best: bool = False) -> str:
        """Write a checkpoint; a full disk is a warning, which is returned, and the run tries again
        at the next interval.
        """
        self.last_save = time.monotonic()
        if weights := self.step_guard.bad_weights():
            self.warn(
                display,
                f"no checkpoint at step {self.steps}: the weights are not finite: {weights}",
            )
            return f"the weights are not finite: {weights}"
        try:
            keep, is_own = self.config.keep_checkpoints, self.saved_at == self.steps
            save_checkpoint(
                self.folder / "checkpoints",
                self.steps,
                self._parts(),
                keep=keep,
                is_best=is_best,
                is_own=is_own,
            )
            self.saved_at = self.steps
        except (CheckpointError, MemoryError, torch.OutOfMemoryError) as error:
            self.warn(display, f"no checkpoint at step {self.steps}: {error}")
            return str(error)
        return ""

    def warn(self, display: Display, text: str) -> None:
        display.note(f"warning: {text}")
        if self.config.quiet:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def running_state(self, iterations: int = 1) -> dict[str, Any]:
        """Copies of all that so many iterations change; what an environment that cannot restore a
        state holds is not among it.
        """
        parts: dict[str, Any] = {
            "algorithm": self.algorithm.snapshot(iterations * self.buffer.horizon),
            "env": self.env.state_dict(),
        }
        parts |= {
            "statistics": self.statistics.state_dict(),
            "guard": self.guard.metrics(),
            "left_out": self.step_guard.state_dict(),
        }
        parts |= {"obs": self.obs, "carry": list(self.carry)}
        return tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value, parts
        )

    def load_running_state(self, state: dict[str, Any]) -> None:
        """Go back to a `running_state()`, every tensor in its place."""
        self.algorithm.go_back(state["algorithm"])
        if state["env"]:
            self.env.load_state_dict(state["env"])
        self.statistics.load_state_dict(state["statistics"])
        self.guard.load(state["guard"])
        self.step_guard.load_state_dict(state["left_out"])
        for place, value in zip((self.obs, *self.carry), (state["obs"], *state["carry"])):
            place.copy_(value)

    def _parts(self) -> dict[str, dict[str, Any]]:
        counters = {
            "steps": self.steps,
            "iteration": self.iteration,
            "elapsed": self.elapsed,
            "threads": torch.get_num_threads(),
        }
        results = {"best_return": self.best_return, "evaluation": dict(self.evaluation)}
        running = {
            "obs": self.obs,
            "carry": list(self.carry),
            "statistics": self.statistics.state_dict(),
        }
        spaces = {
            name: space_to_dict(getattr(self.algorithm, name))
            for name in ("observation_space", "action_space", "state_space")
        }
        return {
            "model": self.algorithm.state_dict(),
            "training": self.algorithm.extra_state(),
            "env": self.env.state_dict(),
            "trainer": {**counters, **results, **running},
            "meta": {"settings": self.settings.to_dict(), **spaces},
            "replay": self.algorithm.replay_state(),
        }

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """Continue exactly from a checkpoint's parts; where the environment cannot restore a state,
        its episodes begin anew.

        CheckpointError when they are of something else or lack a part.
        """
        try:
            parts, notes = fitting(parts, self.settings, self.algorithm)
            self._restore(parts)
            self.notes += notes
        except GpurlError:
            raise
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint has no {error}: it was written by another version of gpurl"
            ) from error
        except (
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
            RuntimeError,
        ) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the checkpoint does not fit this run: {type(error).__name__}: {error}"
            ) from error

    def _restore(self, parts: dict[str, dict[str, Any]]) -> None:
        self.algorithm.load_state_dict(
            by_own_names(parts["model"], self.algorithm.state_dict(), "the checkpoint's model")
        )
        self.algorithm.load_extra_state(parts["training"])
        saved = parts["trainer"]
        self.steps, self.iteration, self.elapsed = (
            saved[name] for name in ("steps", "iteration", "elapsed")
        )
        self.saved_at = self.steps
        self.step_guard.begin(self.iteration)
        self.next_eval = self._evaluation_after(self.steps)
        self.best_return, self.evaluation = saved["best_return"], dict(saved["evaluation"])
        self.evaluated_at = int(self.evaluation.get("at_step", -1))
        self.statistics.load_state_dict(saved["statistics"])
        if parts["env"]:
            reset_env(self.env, self.config.seed)
            load_env_state(self.env, parts["env"])
            self.obs, self.carry = saved["obs"], tuple(saved["carry"])
            check_reset(self.env, self.obs)
        else:  # other episodes than the first ones again
            self._begin_episodes(self.config.seed + self.iteration)
        self.stored = self.algorithm.load_replay_state(parts["replay"])
        if self.stored and not parts["env"]:
            self.algorithm.cut()
        self._choose_rollout()
