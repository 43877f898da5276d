"""`gpurl.train` as a trainable of Ray Tune, for its schedulers, PopulationBasedTraining among them:
a step is a slice of a run, a checkpoint of Tune holds one of gpurl.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpurl.api import run
from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint, save_checkpoint
from gpurl.checkpoints.plain_files import make_folder, replace_file
from gpurl.checkpoints.state_files import read_json
from gpurl.cluster.ray_places import check_installed
from gpurl.errors import CheckpointError, GpurlError, NonFiniteError, UsageError
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.settings import make_settings, merge

FILE = "trial.json"


def tune_trainable(algorithm: str, env: str, every: int, **settings: object) -> type:
    """A class for `ray.tune.Tuner`; each trial trains `algorithm` on `env`, with its own settings
    in place of `settings`, in slices of `every` steps.

    It reports `return` (mean of the evaluation, -inf where the policy diverged or no episode
    ended), `steps` and `done` after `total_steps`. A trial that goes on from another one takes over
    all of its run, the environments and random streams too, and resumes it with settings of its
    own, as `gpurl.resume` does: those that shape the networks stay as they were.
    UsageError for settings that cannot work.
    """
    check_installed()
    from ray import tune

    if every < 1:
        raise UsageError(f"every must be at least 1, got {every}")
    values = make_settings(algorithm, env, **settings).to_dict()

    class GpurlTrainable(tune.Trainable):  # type: ignore[misc, name-defined]
        """A run in slices."""

        def setup(self, config: dict[str, Any]) -> None:
            self.run = SlicedRun(Path(self.logdir), values, config, every)

        def step(self) -> dict[str, Any]:
            return self.run.train()

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.run.save(Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint: str) -> None:
            self.run.load(Path(checkpoint))

    return GpurlTrainable


class SlicedRun:
    """A run that is trained a slice at a time, and can be replaced by another one."""

    def __init__(
        self, folder: Path, values: Mapping[str, Any], config: Mapping[str, Any], every: int
    ) -> None:
        """folder: of its run folders. config: settings in place of `values`. UsageError for what is
        none.
        """
        self.values = merge(values, config) | {"quiet": True, "stop_return": None}
        if "save_replay" in self.values:  # else a slice would begin without what it has seen
            self.values["save_replay"] = True
        self.values |= {"eval_every": self.values["total_steps"], "max_seconds": None}
        make_settings(**self.values)  # type: ignore[arg-type]
        self.every = every
        self._folder = folder
        self._count = 0
        self.place = self._next_place()
        self.steps = 0

    def _next_place(self) -> Path:
        """A folder that no earlier process of this trial has used."""
        while (place := self._folder / f"run_{self._count}").exists():
            self._count += 1
        return place

    def train(self) -> dict[str, Any]:
        """One slice, from the newest checkpoint on; GpurlError if it fails."""
        settings = make_settings(**self.values, run_dir=str(self.place))  # type: ignore[arg-type]
        total = settings.train.total_steps
        resumed = self.place if latest_checkpoint(self.place) is not None else None
        callback = _Slice(self.steps + self.every)
        try:
            is_last = callback.until >= total
            words = ("ray.tune",)
            finished = run(settings, resumed, words, callbacks=[callback], draws=is_last)
        except NonFiniteError:
            # its slice is over all the same: the trial ends after as many slices as the others
            self.steps = min(self.steps + self.every, total)
            return {"return": -math.inf, "steps": self.steps, "done": self.steps >= total}
        outcome = finished.outcome
        if outcome.unsaved:
            raise CheckpointError(outcome.unsaved)
        if outcome.signal_number is not None:
            raise GpurlError(f"the trial got signal {outcome.signal_number}")
        self.steps = outcome.steps
        value = finished.final_evaluation.get("eval/mean_reward", -math.inf)
        return {"return": value, "steps": self.steps, "done": self.steps >= total}

    def save(self, folder: Path) -> None:
        """Copy the newest checkpoint, if there is one yet, into `folder`. Its steps are kept beside
        it: slices that diverged count, but leave no checkpoint. CheckpointError if that fails.
        """
        try:
            make_folder(folder)
            replace_file(folder / FILE, json.dumps({"steps": self.steps}).encode())
        except OSError as error:
            raise CheckpointError(f"cannot save {folder / FILE}: {error}") from error
        if latest_checkpoint(self.place) is None:
            return
        parts, manifest = load_checkpoint(self.place, quiet=True)
        save_checkpoint(folder, manifest["step"], parts, keep=1)

    def load(self, folder: Path) -> None:
        """Go on from what `save` has written, in a new run folder; CheckpointError if that cannot
        be read.
        """
        self.steps = max(self.steps, steps := _saved_steps(folder))
        if latest_checkpoint(folder) is None:
            return
        parts, manifest = load_checkpoint(folder, quiet=True)
        # the other trial's: a resumed run keeps its seed
        self.values["seed"] = parts["meta"]["settings"]["seed"]
        self._count += 1
        self.place = self._next_place()
        self.steps = max(manifest["step"], steps)
        save_checkpoint(self.place / "checkpoints", manifest["step"], parts, keep=1)


def _saved_steps(folder: Path) -> int:
    """The steps that `SlicedRun.save` has written, 0 if nothing is there."""
    file = folder / FILE
    try:
        steps = read_json(file)[0]["steps"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if type(steps) is not int or steps < 0:
        raise CheckpointError(f"{file} has steps {str(steps)[:80]!r}, wanted a whole number")
    return steps


class _Slice(Callback):
    """Ends a run at a step."""

    def __init__(self, until: int) -> None:
        self.until = until

    def after_iteration(self, run: RunView, metrics: object) -> None:
        if run.steps >= self.until:
            run.stop("slice")
