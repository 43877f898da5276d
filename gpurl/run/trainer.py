"""The life of a run: iterations until a limit, and around them log, evaluation, checkpoints and
signals. How an iteration is run is the engine's business."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.checkpoints.folders import list_checkpoints, save_checkpoint
from gpurl.engine.eager import Eager
from gpurl.engine.statistics import to_host
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import CheckpointError, DivergedError, EnvError, NonFiniteError
from gpurl.guards.dump import write_dump
from gpurl.run.callbacks import Callback, Callbacks, RunView
from gpurl.run.display import Display
from gpurl.run.evaluator import Evaluations, Stopped
from gpurl.run.interrupt import StopRequest
from gpurl.run.load import load_initial_actor
from gpurl.run.logger import Logger
from gpurl.run.resume import checkpoint_parts, restore_engine
from gpurl.run.settings import Settings, parse_interval


@dataclass
class Outcome:
    """How a run ended: total_steps, stop_return, max_seconds, signal or what a callback said; and
    the last evaluation."""

    reason: str
    steps: int
    evaluation: dict[str, float]
    signal_number: int | None = None
    unsaved: str = ""  # why the last state is in no checkpoint, where it is in none


class Trainer:
    """Holds a run; `run()` goes on until a limit of its settings."""

    def __init__(
        self,
        settings: Settings,
        engine: Eager,
        eval_env: VecEnv | None,
        folder: Path,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.settings, self.engine, self.folder = settings, engine, folder
        self.evaluations = Evaluations(settings, eval_env)
        self.callbacks, self.view = Callbacks(callbacks), RunView(engine, folder)
        self.elapsed = 0.0  # seconds of training, over all resumes
        self.saved_at = -1  # env steps
        self.last_save = self.last_log = time.monotonic()
        self.logged_steps = 0

    @property
    def algorithm(self) -> Algorithm:
        """What is trained."""
        return self.engine.algorithm

    @property
    def env(self) -> VecEnv:
        """The environments that train."""
        return self.engine.env

    @property
    def steps(self) -> int:
        """Of all environments together, so far."""
        return self.engine.steps

    # ---- the loop ----

    def start(self) -> None:
        """Begin a new run."""
        config = self.settings.train
        load_initial_actor(self.algorithm)
        self.engine.begin(config.seed, config.stagger)

    def iterate(self) -> Metrics:
        """One iteration; returns the update's metrics, on the device, true until the next call."""
        return self.engine.iterate(self.steps / self.settings.train.total_steps)

    def run(self, logger: Logger, display: Display) -> Outcome:
        """Train until a limit is reached or a signal comes. Whatever ends it, the state is saved,
        but for a policy that diverged.
        """
        # limits of time and return are of this process, not of an earlier one
        began, before = time.monotonic(), self.elapsed
        self.evaluations.is_new = False
        self.last_save = self.last_log = began
        self.logged_steps = self.steps
        reason = "" if self.steps < self.settings.train.total_steps else "total_steps"
        self._tell_of_sizes(display)
        self.view.folder = self.folder
        with StopRequest() as stop:
            try:
                self.callbacks.call("on_start", self.view)
                while not reason:
                    metrics = self.iterate()
                    self.callbacks.call("after_iteration", self.view, metrics)
                    self.elapsed = before + time.monotonic() - began
                    self._show_notes(display)
                    self._log_if_due(metrics, logger, display)
                    if self.steps >= self.evaluations.next_at:
                        self._evaluate(logger, display, stop)
                    reason = "signal" if stop.signal_number else self._limit_reached(before)
                    if not reason and self._save_is_due():
                        self.save(display)
                if reason != "signal" and self.evaluations.last_at != self.steps:
                    self._evaluate(logger, display, stop, is_last=True)
            except BaseException as error:
                self._save_and_reraise(error, display, stop.signal_number)
                reason = "signal"
            unsaved = self.save(display)
            self.callbacks.call("on_end", self.view)
        return Outcome(reason, self.steps, self.evaluations.newest, stop.signal_number, unsaved)

    def planned_steps(self) -> int:
        """total_steps rounded up to whole iterations."""
        rows = self.engine.buffer.horizon * self.env.num_envs
        return -(-self.settings.train.total_steps // rows) * rows

    def _limit_reached(self, elapsed_before: float) -> str:
        """Which one, or nothing; elapsed_before: seconds of earlier processes."""
        config = self.settings.train
        if self.view.stop_reason:
            return self.view.stop_reason
        if self.steps >= config.total_steps:
            return "total_steps"
        if config.max_seconds is not None and self.elapsed - elapsed_before >= config.max_seconds:
            return "max_seconds"
        if config.stop_return is None or not self.evaluations.is_new:
            return ""
        is_reached = self.evaluations.newest["eval/mean_reward"] >= config.stop_return
        return "stop_return" if is_reached else ""

    def _tell_of_sizes(self, display: Display) -> None:
        """A word where an iteration is more than the whole run, where the run ends before its
        replay holds enough to learn from, or fills a replay anew that was not saved.
        """
        horizon, num_envs = self.engine.buffer.horizon, self.env.num_envs
        total = self.settings.train.total_steps
        if horizon * num_envs > total > self.steps:
            self.warn(
                display,
                f"one iteration is {horizon * num_envs:,} steps (num_envs {num_envs:,} x horizon "
                f"{horizon:,}), more than total_steps {total:,}: it is played whole",
            )
        starts, stored = self.algorithm.learning_starts, self.engine.stored
        left = self.planned_steps() - self.steps
        if left <= 0 or stored >= starts:
            return
        if stored + left < starts:
            holds = f"the replay holds {stored} transitions and {left} are to come"
            self.warn(display, f"nothing will be learnt: {holds}, learning_starts is {starts}")
        elif self.steps and not stored:
            display.note(
                f"the replay was not saved (save_replay does): {starts} transitions are played "
                "before learning goes on"
            )

    # ---- log and evaluation ----

    def _show_notes(self, display: Display) -> None:
        notes = self.engine.notes
        while notes:
            display.note(notes.pop(0))

    def _log_if_due(self, metrics: Metrics, logger: Logger, display: Display) -> None:
        """Once per log_every seconds: the one transfer from the device, then the files and the
        screen.
        """
        engine, config = self.engine, self.settings.train
        now = time.monotonic()
        seconds = now - self.last_log
        if seconds >= config.log_every or self.steps >= config.total_steps:
            # one transfer for all that is on the device
            episodes, guards = engine.statistics.metrics(), engine.guards.metrics()
            of_callbacks, self.view.logged = self.view.logged, {}
            own = {name: each for name, each in of_callbacks.items() if isinstance(each, Tensor)}
            values = to_host(metrics | episodes | guards | own)
            values |= {name: float(of_callbacks[name]) for name in of_callbacks if name not in own}
            # what the guards have seen may end the run
            found = {name: values.pop(name) for name in guards}
            values |= engine.guards.report(found, engine.iteration)
            values |= engine.statistics.read({name: values.pop(name) for name in episodes})
            values |= self._times(seconds)
            self.last_log, self.logged_steps = now, self.steps
            logger.write(self.steps, values)
            display.update(self.steps, values)
        warnings = engine.guards.warnings
        while warnings:
            self.warn(display, warnings.pop(0))

    def _times(self, seconds: float) -> dict[str, float]:
        """Of the last `seconds`, since the log entry before."""
        phases = self.engine.stopwatch.read()
        return {
            "time/collect_seconds": phases.get("collect", 0.0),
            "time/update_seconds": phases.get("update", 0.0),
            "time/fps": (self.steps - self.logged_steps) / max(seconds, 1e-9),
            "time/iterations": float(self.engine.iteration),
            "time/total_timesteps": float(self.steps),
            "time/time_elapsed": self.elapsed,
        }

    def _evaluate(
        self, logger: Logger, display: Display, stop: StopRequest, is_last: bool = False
    ) -> None:
        """Play the evaluation episodes, keep the checkpoint when they are the best so far. Raises
        Stopped once `stop` is asked for.
        """
        evaluations = self.evaluations
        if is_last and evaluations.env is None and not evaluations.has_ended:
            evaluations.env = self.env  # after the training, where there can be no second ones
        values = evaluations.play(self.algorithm, self.steps, lambda: stop.signal_number)
        while evaluations.warnings:
            self.warn(display, evaluations.warnings.pop(0))
        if not values:
            return
        logger.write(self.steps, values)
        display.update(self.steps, values)
        self.callbacks.call("after_evaluation", self.view, values)
        if evaluations.is_best:
            self.save(display, is_best=True)

    def warn(self, display: Display, text: str) -> None:
        """On the screen, and on standard error where the screen is quiet."""
        display.note(f"warning: {text}")
        if self.settings.train.quiet:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    # ---- checkpoints ----

    def _save_is_due(self) -> bool:
        seconds, iterations = parse_interval(self.settings.train.save_every)
        if iterations is not None:
            return self.engine.iteration % iterations == 0
        return seconds is not None and time.monotonic() - self.last_save >= seconds

    def save(self, display: Display, is_best: bool = False) -> str:
        """Write a checkpoint; a full disk is a warning, which is returned, and the run tries again
        at the next interval.
        """
        self.last_save = time.monotonic()
        why = ""
        if weights := self.engine.guards.steps.bad_weights():
            why = f"the weights are not finite: {weights}"
        else:
            try:
                self.callbacks.call("before_save", self.view)
                save_checkpoint(
                    self.folder / "checkpoints",
                    self.steps,
                    self.state(),
                    keep=self.settings.train.keep_checkpoints,
                    is_best=is_best,
                    overwrite=self.saved_at != self.steps,
                )
                self.saved_at = self.steps
            except (CheckpointError, MemoryError, torch.OutOfMemoryError) as error:
                why = str(error)
        if why:
            self.warn(display, f"no checkpoint at step {self.steps}: {why}")
        return why

    def state(self) -> dict[str, dict[str, Any]]:
        """The parts of a checkpoint."""
        run = {"elapsed": self.elapsed, "threads": torch.get_num_threads()}
        return checkpoint_parts(self.engine, self.settings, run | self.evaluations.state_dict())

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """Continue exactly from a checkpoint's parts; where the environment cannot restore a state,
        its episodes begin anew. CheckpointError where they do not fit this run.
        """
        run = restore_engine(self.engine, parts, self.settings)
        self.elapsed = run["elapsed"]
        self.evaluations.load_state_dict(run, self.steps)
        self.saved_at = self.steps

    def _save_and_reraise(
        self, error: BaseException, display: Display, signal_number: int | None
    ) -> None:
        """In the handler of `error`: save what can be and raise it, or return where a signal has
        broken what was done, which is no error.
        """
        is_fault = not (signal_number and isinstance(error, (Stopped, EnvError)))
        try:
            self.engine.abandon()
            # LATEST stays a policy that one can go on from
            if is_fault and not isinstance(error, DivergedError):
                self.save(display)
        except Exception as another:
            text = f"{type(another).__name__}: {another}"
            self.warn(display, f"no checkpoint at step {self.steps}: {text}")
        if not is_fault:
            return
        advice = _way_on(self.folder) if isinstance(error, DivergedError) else ""
        if isinstance(error, NonFiniteError):
            dump = write_dump(self.folder, self.steps, error)
            advice += f". What led there: gpurl doctor {dump}" if dump else ""
        if advice:
            raise type(error)(f"{error}{advice}") from error
        raise error


def _way_on(folder: Path) -> str:
    """What can be done about a policy that diverged: there may be no checkpoint of it yet."""
    if not list_checkpoints(folder):
        return ". It left no checkpoint: begin anew with a lower learning_rate"
    return (
        ". To go on from the last checkpoint with smaller steps: gpurl train --resume RUN "
        "--learning-rate RATE"
    )
