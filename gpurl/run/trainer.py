"""The life of a run: iterations until a limit, and around them log, evaluation, checkpoints and
signals. How an iteration is run is the engine's business."""

import copy
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import NoReturn

import torch

from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.checkpoints.folders import (
    best_checkpoint,
    list_checkpoints,
    save_checkpoint,
    step_name,
)
from gpurl.checkpoints.run_parts import Parts
from gpurl.checkpoints.state_files import State
from gpurl.discovery import is_of_session
from gpurl.engine.eager import Eager
from gpurl.engine.graphs import Graphed
from gpurl.engine.privileged_state import AppendPrivilegedState
from gpurl.envs.deployment import deployment
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import CheckpointError, DivergedError, EnvError, NonFiniteError, UsageError
from gpurl.guards.dump import write_dump
from gpurl.guards.finite import SKIP_COMMAND
from gpurl.kernels.backend import announced_compilation
from gpurl.run.best_members import BestMembers
from gpurl.run.callbacks import Callback, Callbacks, RunView
from gpurl.run.display import Display
from gpurl.run.evaluator import Evaluations, Stopped
from gpurl.run.interrupt import StopRequest
from gpurl.run.load import begin_from_run
from gpurl.run.logger import Logger
from gpurl.run.reporter import Reporter
from gpurl.run.resume import checkpoint_parts, restore_engine, resume_call
from gpurl.run.settings import Settings, parse_interval
from gpurl.run.shards import check_same_weights
from gpurl.run.task_spaces import describe_task


@dataclass
class Outcome:
    """How a run ended: total_steps, stop_return, max_seconds, signal or a callback's reason; and
    the last evaluation."""

    reason: str
    steps: int
    evaluation: dict[str, float]
    signal_number: int | None = None
    unsaved: str = ""  # why the final state is in no checkpoint; empty if it is
    new_steps: int = 0  # of this process, without those before a resume
    lost: dict[int, str] = field(default_factory=dict)  # members that diverged, and why
    # the last evaluation of each member of a population
    members: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Trains with `run()` until a limit of its settings is reached."""

    def __init__(
        self,
        settings: Settings,
        engine: Eager,
        eval_env: VecEnv | None,
        folder: Path,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.settings = settings
        self.engine = engine
        # the processes of the run; the first decides what depends on the time, and writes
        self.ranks = engine.ranks
        self.is_first = self.ranks.index == 0
        self.folder = folder
        self.evaluations = Evaluations(eval_env, settings.env, settings.train, self.ranks)
        self.callbacks = Callbacks(callbacks)
        # what a controller outside of the simulator needs, and what a policy alone does
        env = engine.env.env if isinstance(engine.env, AppendPrivilegedState) else engine.env
        self.env_facts = {"deployment": deployment(env), **describe_task(env)}
        # no command can make its environment: see `gpurl.resume`
        self.needs_env = is_of_session(settings.env)
        self.view = RunView(engine, folder)
        self.elapsed = 0.0  # seconds of training, over all resumes
        self.last_save = time.monotonic()
        self.saved_at = -1  # env steps
        self.best_members = BestMembers()
        self.drops_best = False  # whether the best checkpoint in the folder is of another task
        # the environments' state at the end of the training, if an evaluation then changes it
        self.env_state: State | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in training, of a population that of member 0."""
        return self.engine.algorithm

    @property
    def env(self) -> VecEnv:
        """The training environments."""
        return self.engine.env

    @property
    def steps(self) -> int:
        """Env steps so far, summed over environments."""
        return self.engine.steps

    # ---- the loop ----

    def start(self) -> None:
        """Begin a new run."""
        config = self.settings.train
        notes = [begin_from_run(member.algorithm) for member in self.engine.members]
        self.engine.notes += notes[0]  # the same for all
        self.env.training_progress.zero_()
        self.engine.begin(config.seed, config.stagger)
        check_same_weights(self.algorithm)

    def iterate(self) -> Metrics:
        """One iteration; returns the update's metrics, on the device, valid until the next call."""
        return self.engine.iterate(self.steps / self.settings.train.total_steps)

    def run(self, logger: Logger | None, display: Display) -> Outcome:
        """Train until a limit is reached or a signal arrives. However it ends, the state is saved,
        unless the policy diverged or another rank is gone. logger: None on ranks that write none.
        """
        config = self.settings.train
        self.last_save = time.monotonic()
        steps_before = self.steps
        self.evaluations.is_new = False
        self.view.folder = self.folder
        reporter = Reporter(self.engine, self.view, logger, display, config.log_every)
        reporter.begin(config.total_steps, self.remaining_steps())

        def announce() -> None:
            display.note("compiling kernels, once: the first iterations take up to a minute")

        with (
            StopRequest(display.is_live, not self.is_first) as stop,
            announced_compilation(announce),
        ):
            self.view.should_stop = lambda: stop.signal_number is not None
            self.view.show_activity = display.activity
            try:
                reason = self._train(reporter, stop)
                # evaluate the final policy
                is_due = self.is_first and self.evaluations.last_at != self.steps
                if reason != "signal" and any(self.ranks.any(is_due)):
                    if self.evaluations.end_training(self.env):
                        self.env_state = copy.deepcopy(self.env.state_dict())
                    with self._interruptible(stop):
                        self._evaluate(reporter, stop, math.inf)
                unsaved = self.save(display)
            except BaseException as error:
                self._save_and_reraise(error, display)
            self.callbacks.call("on_end", self.view)
        reason = "signal" if stop.signal_number else reason
        return Outcome(
            reason,
            self.steps,
            self.evaluations.newest,
            stop.signal_number,
            unsaved,
            self.steps - steps_before,
            self.engine.lost,
            self.evaluations.newest_of_members,
        )

    def _train(self, reporter: Reporter, stop: StopRequest) -> str:
        """Iterate until a limit is reached or a signal arrives; returns the `Outcome.reason`."""
        # max_seconds and stop_return count in this process only, not in the runs before a resume
        start = time.monotonic()
        elapsed_before = self.elapsed
        reason = ""
        metrics: Metrics = {}
        with self._interruptible(stop):
            self.callbacks.call("on_start", self.view)
            if obstacle := self.engine.obstacle():
                raise UsageError(
                    f"a callback's on_start has changed the algorithm, and engine "
                    f"{self.engine.name} would ignore it: {obstacle}; change it in a subclass"
                )
            reason, _ = self._agree_on_end(stop, elapsed_before)
            # an evaluation that a signal interrupted before the resume
            was_missed = self.is_first and self.evaluations.was_missed(self.steps)
            if not reason and any(self.ranks.any(was_missed)):
                self._evaluate(reporter, stop, math.inf)
                reason, _ = self._agree_on_end(stop, elapsed_before)
            while not reason:
                metrics = self.iterate()
                self.callbacks.call("after_iteration", self.view, metrics)
                # log and evaluate when it is time to
                self.elapsed = elapsed_before + time.monotonic() - start
                is_last = self.steps >= self.settings.train.total_steps
                seconds = self.elapsed - elapsed_before
                logs, evaluates = self.ranks.any(
                    self.is_first and reporter.is_due(is_last),
                    self.is_first and self.evaluations.is_due(self.steps, seconds),
                )
                reporter.after_iteration(metrics, self.elapsed, logs)
                if evaluates:
                    self._evaluate(reporter, stop, seconds)
                # end or save
                reason, saves = self._agree_on_end(stop, elapsed_before)
                if not reason and saves:
                    self.save(reporter.display)
        # log the rest of the last interval, which a checkpoint of this step counts as not logged
        if reporter.logged_steps != self.steps:
            reporter.after_iteration(metrics, self.elapsed, logs=True)
            self.saved_at = -1
        return reason or "signal"

    @contextmanager
    def _interruptible(self, stop: StopRequest) -> Iterator[None]:
        """A `with` block that ends early, without an error, if a signal interrupts an evaluation or
        the environment.
        """
        try:
            yield
        except (Stopped, EnvError) as error:
            # the other ranks are inside the iteration that an environment did not finish
            if isinstance(error, EnvError) and (stop.signal_number is None or self.ranks.count > 1):
                raise
            self.engine.abandon()

    def remaining_steps(self) -> int:
        """Env steps until total_steps, rounded up to whole iterations."""
        remaining = max(self.settings.train.total_steps - self.steps, 0)
        iteration = self.engine.buffer.horizon * self.engine.num_envs
        return -(-remaining // iteration) * iteration

    def _agree_on_end(self, stop: StopRequest, elapsed_before: float) -> tuple[str, bool]:
        """(what ends the run on some rank, "" if nothing does; whether to save)."""
        reason = "signal" if stop.signal_number else self._limit_reached(elapsed_before)
        is_due = stop.wants_save or (self.is_first and self._save_is_due())
        stop.wants_save = False
        ends, saves = self.ranks.any(bool(reason), is_due)
        return next(filter(None, self.ranks.share(reason))) if ends else "", saves

    def _limit_reached(self, elapsed_before: float) -> str:
        """The limit that ends the run, "" if none does; elapsed_before: seconds of training before
        this process.
        """
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

    def _evaluate(self, reporter: Reporter, stop: StopRequest, seconds: float) -> None:
        """Play the evaluation episodes, if they do not take too long after `seconds` of training,
        and save the best policy so far. Raises Stopped if a signal arrives meanwhile.
        """
        stages = self.engine.stages
        values = self.evaluations.play(
            self.engine.policies,
            self.steps,
            lambda: stop.signal_number,
            stages.beside if isinstance(stages, Graphed) else lambda: None,
            seconds,
        )
        reporter.warn(self.evaluations.warnings)
        if not values:
            return
        reporter.write(values)
        self.best_members.note(values, self.steps, self.engine.policies)
        self.saved_at = -1  # a checkpoint of this step that was written before knows nothing of it
        self.callbacks.call("after_evaluation", self.view, values)
        # the first rank knows what the disk has
        if any(self.ranks.any(self.is_first and self.evaluations.best_at == self.steps)):
            self.save(reporter.display)

    # ---- checkpoints ----

    def _save_is_due(self) -> bool:
        seconds, iterations = parse_interval(self.settings.train.save_every)
        if iterations is not None:
            return self.engine.iteration % iterations == 0
        return seconds is not None and time.monotonic() - self.last_save >= seconds

    def save(self, display: Display, calls_callbacks: bool = True) -> str:
        """Write a checkpoint. If that fails, for example on a full disk, the reason is shown as a
        warning and returned, and the run tries again at the next interval.
        """
        # weights with NaN must not replace good ones
        self.last_save = time.monotonic()
        problem = ""
        check_same_weights(self.algorithm)
        if weights := self.engine.guards.bad_weights():
            problem = f"the weights are not finite: {weights}"
        else:
            try:
                if calls_callbacks:
                    self.callbacks.call("before_save", self.view)
                parts = self.state()
                if self.is_first:
                    self._write(parts)
                self.saved_at = self.steps
                self.drops_best = False
            except (CheckpointError, MemoryError, torch.OutOfMemoryError) as error:
                problem = str(error)
        if problem:
            display.warn(f"no checkpoint at step {self.steps}: {problem}")
        return problem

    def _write(self, parts: Parts) -> None:
        """CheckpointError if that fails."""
        folder = self.folder / "checkpoints"
        try:
            save_checkpoint(
                folder,
                self.steps,
                parts,
                keep=self.settings.train.keep_checkpoints,
                is_best=self.evaluations.best_at == self.steps,
                overwrite=self.saved_at != self.steps,
                drop_best=self.drops_best,
            )
        finally:  # BEST may be written, and what follows it not
            best = best_checkpoint(folder)
            if best is not None and best.name == step_name(self.steps):
                self.evaluations.note_saved(self.steps)

    def state(self) -> Parts:
        """The parts of a checkpoint, of all ranks on the first."""
        run = {"elapsed": self.elapsed, "threads": torch.get_num_threads()}
        parts = checkpoint_parts(
            self.engine,
            self.settings.to_dict(),
            run | self.evaluations.state_dict(self.steps),
            self.env_facts,
            self.env_state,
        )
        if len(self.engine.members) > 1:
            parts["best"] = self.best_members.state_dict()
        return parts

    def restore(self, parts: Parts, in_new_folder: bool = False) -> None:
        """Continue exactly from a checkpoint's parts; if the environment cannot restore a state,
        its episodes start anew. in_new_folder: which has neither this checkpoint nor the best one.
        Raises as `restore_engine`.
        """
        run = restore_engine(self.engine, parts, self.settings)
        self.elapsed = run["elapsed"]
        self.drops_best = run["is_other_task"]
        if in_new_folder:
            run |= {"best_return": -math.inf}
        elif not self.drops_best:
            self.best_members.load_state_dict(parts.get("best", {}))
        self.evaluations.load_state_dict(run)
        self.saved_at = -1 if in_new_folder else self.steps
        check_same_weights(self.algorithm)

    def _save_and_reraise(self, error: BaseException, display: Display) -> NoReturn:
        """In the handler of `error`: save what can be saved and raise it."""
        try:
            self.engine.abandon()
            # a diverged policy is not saved: LATEST stays a policy that training can continue from
            # callbacks are not called: one of them may have raised the error
            # a checkpoint is of all ranks, and the others are elsewhere
            if not isinstance(error, DivergedError) and self.ranks.count == 1:
                self.save(display, calls_callbacks=False)
        except Exception as another:
            text = f"{type(another).__name__}: {another}"
            display.warn(f"no checkpoint at step {self.steps}: {text}")
        if not isinstance(error, NonFiniteError):
            raise error
        # what the user can do, in commands that can be copied, and a dump of the NaN
        advice = self._advice_after_divergence() if isinstance(error, DivergedError) else ""
        if dump := write_dump(self.folder, self.steps, error):
            advice += f". For the steps that led there: gpurl doctor {quote(str(dump))}"
        skips = self._how_to_resume("--nan reset-envs", "nan='reset-envs'")
        raise type(error)(f"{error}{advice}".replace(SKIP_COMMAND, skips)) from error

    def _advice_after_divergence(self) -> str:
        """What the user can do; there may be no checkpoint yet."""
        if not list_checkpoints(self.folder):
            return ". There is no checkpoint yet: start again with a lower learning_rate"
        smaller = self._how_to_resume("--learning-rate RATE", "learning_rate=...")
        return f". To continue from the last checkpoint with smaller steps: {smaller}"

    def _how_to_resume(self, flag: str, change: str) -> str:
        """The command that continues the run with another setting, or the call if no command
        can.
        """
        if self.needs_env or is_of_session(self.settings.algorithm):
            return resume_call(self.folder, self.needs_env, change)
        return f"gpurl train --resume {quote(str(self.folder))} {flag}"
