"""Runs the trials of a tuning in processes beside each other, and tells Optuna what they return."""

import json
import math
import queue
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurl.checkpoints.folders import latest_checkpoint
from gpurl.checkpoints.plain_files import append_regular, make_folder, replace_file
from gpurl.errors import GpurlError, NonFiniteError, UsageError, first_line
from gpurl.run.child import Child, how_it_died
from gpurl.run.config_file import as_yaml
from gpurl.run.interrupt import StopRequest
from gpurl.run.run_folder import lock_run
from gpurl.run.settings import Settings
from gpurl.tuning.space import Space, with_values
from gpurl.tuning.study import Tuning, begin_or_continue, best_params, folder_of, import_optuna
from gpurl.tuning.trial import GO_ON, STOP

POLL_SECONDS = 0.2
FAILURES = 5  # of the first trials, after which nothing else is tried
BEST_FILE = "best.yaml"
NO_RETURN = "it was lost, or no episode of its last evaluation ended"


@dataclass(frozen=True)
class Plan:
    """What to tune and how."""

    settings: Settings  # of every trial, where the space has nothing else
    space: Space
    storage: Path
    trials: int = 30  # in all
    jobs: int = 1  # processes at a time
    prune: bool = True
    sampler: str = "tpe"
    command: tuple[str, ...] = ()  # for the runs' command.txt


class Training:
    """One process and the trials that it trains. Its messages go into `messages` as (training,
    message), None when the process has ended.
    """

    def __init__(
        self, trials: Sequence[Any], run: str, folder: Path, messages: "queue.Queue[Any]"
    ) -> None:
        self.trials = list(trials)
        self.run = run
        self.outcome: dict[str, Any] = {}
        self.is_pruned = False
        with append_regular(folder / f"{run}.log") as output:
            self.child = Child("gpurl.tuning.trial:main", self, messages, output)


class Tuner:
    """Asks for trials, trains them, and tells their returns."""

    def __init__(self, plan: Plan, tuning: Tuning, say: Callable[[str], object]) -> None:
        self.plan = plan
        self.tuning = tuning
        self.say = say
        self.messages: queue.Queue[Any] = queue.Queue()
        self.running: list[Training] = []
        self.waiting = self._left_behind()
        self.failures: list[tuple[str, int]] = []  # reason and exit code, while nothing succeeds
        self.has_succeeded = any(row.value is not None for row in tuning.rows())

    def _left_behind(self) -> list[tuple[list[Any], str]]:
        """(trials, their run) of what is to be continued; trials of a population whose training
        has no checkpoint begin anew, as those of a new one.
        """
        runs: dict[str, list[Any]] = {}
        for trial in self.tuning.left_behind(self.plan.space):
            run = str(trial.user_attrs.get("run", ""))
            runs.setdefault(run, []).append(trial)
        groups = []
        for run, trials in runs.items():
            is_whole = run == run_name(trials) and latest_checkpoint(self.tuning.folder / run)
            size = len(trials) if is_whole else self.plan.settings.train.population
            groups += [trials[first : first + size] for first in range(0, len(trials), size)]
        return [(trials, run_name(trials)) for trials in groups]

    # ---- the loop ----

    def run(self) -> int | None:
        """Train until all trials are done; returns the signal that ended it, if one did. GpurlError
        if the first trials all fail.
        """
        try:
            with StopRequest() as stop:
                is_stopping = False
                while self._begin_some(is_stopping) or self.running:
                    if stop.signal_number is not None and not is_stopping:
                        is_stopping = True
                        for training in self.running:
                            training.child.stop()
                    with suppress(queue.Empty):
                        training, message = self.messages.get(timeout=POLL_SECONDS)
                        self._receive(training, message, is_stopping)
                return stop.signal_number
        finally:
            for training in self.running:
                training.child.stop()
                training.child.close()

    def _begin_some(self, is_stopping: bool) -> bool:
        """Begin trainings while there is room; returns whether it did."""
        has_begun = False
        while not is_stopping and len(self.running) < self.plan.jobs:
            if self.waiting:
                trials, run = self.waiting.pop(0)
            else:
                size = self.plan.settings.train.population
                size = min(size, self.plan.trials - self.tuning.num_trials())
                if size < 1:
                    break
                ask = (self.plan.space, self.plan.sampler, self.plan.settings.train.seed)
                trials = [self.tuning.ask(*ask) for _ in range(size)]
                run = run_name(trials)
            self._begin(trials, run)
            has_begun = True
        return has_begun

    def _begin(self, trials: Sequence[Any], run: str) -> None:
        """Start the process of these trials, unless their settings exclude each other."""
        try:
            settings = self._settings_of(trials)
        except UsageError as error:
            for trial in trials:
                self._end(trial, None, f"settings: {error}", error.exit_code)
            return
        for member, trial in enumerate(trials):
            self.tuning.note_attempt(trial)
            if len(trials) > 1:
                trial.set_user_attr("member", member)
            trial.set_user_attr("run", run)
        try:
            training = Training(trials, run, self.tuning.folder, self.messages)
        except OSError as error:
            raise GpurlError(f"cannot begin {run}: {error}") from error
        self.running.append(training)
        values = settings.to_dict()
        job = {
            "settings": values,
            "run_dir": str(self.tuning.folder / run),
            "command": self.plan.command,
        }
        training.child.send(json.dumps(job))

    def _settings_of(self, trials: Sequence[Any]) -> Settings:
        """The settings of the run that trains these trials."""
        plan = self.plan
        train = replace(
            plan.settings.train,
            population=len(trials),
            run_dir=None,
            root=str(self.tuning.folder),
            threads=plan.settings.train.threads or 1,
            # every evaluation takes place, at the same steps in all trials
            eval_every=evaluate_every(plan.settings),
        )
        settings = replace(plan.settings, train=train)
        sampled = [self.values_of(trial.params) for trial in trials]
        if len(trials) == 1:
            return with_values(settings, sampled[0])
        lists = {name: [values[name] for values in sampled] for name in plan.space}
        return with_values(settings, {"member": lists})

    def values_of(self, params: dict[str, Any]) -> dict[str, Any]:
        """{setting: value} of what Optuna has sampled."""
        return {name: each.value(params[name]) for name, each in self.plan.space.items()}

    # ---- what trainings say ----

    def _receive(self, training: Training, message: Any, is_stopping: bool) -> None:
        if message is None:
            self.running.remove(training)
            self._conclude(training, training.child.close(), is_stopping)
        elif "steps" in message:
            self._report(training, message)
        else:
            training.outcome = message

    def _report(self, training: Training, message: dict[str, Any]) -> None:
        """Note the evaluations, and say whether to go on: a population ends if all would."""
        number = message["steps"] // evaluate_every(self.plan.settings)
        wants_stop = []
        for trial, value in zip(training.trials, message["returns"]):
            if value is not None and math.isfinite(value):
                trial.report(value, number)
                wants_stop.append(trial.should_prune())
        if message["asks"]:
            training.is_pruned = bool(wants_stop) and all(wants_stop)
            training.child.send(STOP if training.is_pruned else GO_ON)

    def _conclude(self, training: Training, code: int, is_stopping: bool) -> None:
        """Tell Optuna how the trials of a process ended."""
        outcome = training.outcome
        if "returns" in outcome:
            for trial, value in zip(training.trials, outcome["returns"]):
                self._end(trial, value, "pruned" if training.is_pruned else "")
        elif is_stopping:
            for trial in training.trials:  # to be continued
                trial.set_user_attr("attempts", 0)
        elif "stopped" in outcome:  # by somebody else's signal
            self.waiting.append((training.trials, training.run))
        else:
            reason = str(outcome.get("error") or how_it_died(code))
            for trial in training.trials:
                self._end(trial, None, reason, int(outcome.get("code", 1)))

    def _end(self, trial: Any, value: float | None, reason: str, code: int = 0) -> None:
        """Tell how a trial ended. reason: "pruned" if Optuna ended it. Diverged trainings and
        settings that exclude each other count as pruned, so that the sampler avoids them.
        """
        name = f"trial {trial.number}"
        if code in (UsageError.exit_code, NonFiniteError.exit_code):
            self.tuning.prune(trial, reason)
            self.say(f"{name} failed: {reason}")
        elif code:
            self.tuning.fail(trial, reason)
            self.say(f"{name} failed: {reason}")
        elif reason == "pruned":
            self.tuning.prune(trial, "worse than the median of the others")
            self.say(f"{name} pruned at {_said(value)}")
        elif value is None or not math.isfinite(value):
            reason = NO_RETURN if value is None else f"its return is {value}"
            code = NonFiniteError.exit_code
            self.tuning.prune(trial, reason)
            self.say(f"{name} failed: {reason}")
        else:
            self.tuning.finish(trial, value)
            best = best_params(self.tuning.rows())
            assert best is not None
            self.say(
                f"{name}: return {_said(value)}; best {_said(best.value)} of trial {best.number}"
            )
        self._note_failure(reason, code)

    def _note_failure(self, reason: str, code: int) -> None:
        """GpurlError once the first trials have all failed."""
        if not code:
            self.has_succeeded = True
        if self.has_succeeded:
            return
        self.failures.append((reason, code))
        if len(self.failures) >= min(FAILURES, self.plan.trials):
            error = GpurlError(
                f"none of {len(self.failures)} trials had a return, the last because: "
                f"{first_line(reason)}; their output is in {self.tuning.folder}/*.log"
            )
            error.exit_code = code
            raise error


def run_name(trials: Sequence[Any]) -> str:
    """`trial_0003`, or `trials_0008_0015` of a population."""
    first, last = trials[0].number, trials[-1].number
    return f"trial_{first:04d}" if first == last else f"trials_{first:04d}_{last:04d}"


def _said(value: float | None) -> str:
    return "no return" if value is None else f"{value:.4g}"


def evaluate_every(settings: Settings) -> int:
    """Env steps between the evaluations of a trial."""
    return settings.train.eval_every or max(settings.train.total_steps // 10, 1)


def tune(plan: Plan, say: Callable[[str], object] = print) -> tuple[Tuning, int | None]:
    """(the tuning, the signal that ended it): train until `plan.trials` trials are done, and write
    best.yaml. A tuning that its storage has begun goes on.

    Raises UsageError for a plan that cannot work, or if another process works on it, GpurlError if
    all trials fail or the storage cannot be written.
    """
    check_plan(plan)
    optuna = import_optuna()
    folder = folder_of(plan.storage)
    try:
        make_folder(folder)
    except OSError as error:
        raise UsageError(
            f"no folder {folder}: {error.strerror}; choose another --storage"
        ) from None
    with ExitStack() as cleanup:
        cleanup.enter_context(lock_run(folder, "tuning"))
        evaluations = max(plan.settings.train.total_steps // evaluate_every(plan.settings), 1)
        tuning = begin_or_continue(plan.storage, plan.settings, plan.space, plan.prune, evaluations)
        try:
            tuner = Tuner(plan, tuning, say)
            say(
                f"{plan.storage}: {tuning.num_trials()} of {plan.trials} trials have begun, "
                f"{len(tuner.waiting)} of them go on; sampled are {', '.join(plan.space)}"
            )
            number = tuner.run()
        except (OSError, optuna.exceptions.StorageInternalError) as error:
            raise GpurlError(f"{plan.storage} cannot be written: {error}") from error
        write_best(plan, tuner)
        return tuning, number


def check_plan(plan: Plan) -> None:
    """UsageError for what cannot be tuned."""
    train = plan.settings.train
    for name in ("trials", "jobs"):
        if getattr(plan, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(plan, name)}")
    if not plan.space:
        raise UsageError(
            f"nothing of {plan.settings.algorithm} is in the default space: name settings in a "
            f"file of --space"
        )
    if train.eval_episodes == 0:
        raise UsageError("trials are compared by their evaluations, but eval_episodes is 0")
    if train.run_dir is not None:
        raise UsageError(
            f"trials have folders of their own, beside --storage: leave out run_dir {train.run_dir}"
        )
    if train.pbt:
        raise UsageError(
            "under pbt a return is not that of the values that were sampled: leave out pbt"
        )
    for name in plan.settings.member:
        raise UsageError(f"a tuning chooses the values of members: leave out member.{name}")


def write_best(plan: Plan, tuner: Tuner) -> None:
    """best.yaml in the tuning's folder: the settings of the best trial as a file for --config."""
    best = best_params(tuner.tuning.rows())
    if best is None:
        return
    # members of a population were trained with seeds of their own
    seed = plan.settings.train.seed + (best.member or 0)
    settings = replace(plan.settings, train=replace(plan.settings.train, population=1, seed=seed))
    values = with_values(settings, tuner.values_of(best.params)).to_dict()
    head = f"# trial {best.number}: return {best.value}, the last evaluation\n"
    path = tuner.tuning.folder / BEST_FILE
    try:
        replace_file(path, head.encode() + as_yaml(values))
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error
