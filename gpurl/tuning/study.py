"""The trials of a tuning in Optuna's storage: a journal of JSON lines or an SQLite file. Nothing in
either is executed: samplers and pruners are made anew, never read from it.
"""

import math
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpurl.checkpoints.plain_files import Json, edit_regular
from gpurl.errors import GpurlError, UsageError, first_line, install_extra
from gpurl.run.settings import Settings
from gpurl.run.trackers.tracker import flat
from gpurl.tuning.space import Space

STUDY = "gpurl"  # the name of the one study in a storage
JOURNALS = (".journal", ".jsonl", ".log")
DATABASES = (".db", ".sqlite", ".sqlite3")
JOURNAL_BEGINS = b'{"op_code":0,'  # a study is made
MAX_STORAGE_BYTES = 256 << 20
MAX_ATTEMPTS = 3  # to begin a trial whose tuning is killed each time
# of pruning: finished trials before the first, and the share of a training that none loses
STARTUP_TRIALS = 5
WARM_UP = 0.3
# settings that change no number of a trial: a tuning may go on with others
FREE = {
    *("root", "quiet", "track", "project", "log_every", "save_every", "keep_checkpoints"),
    *("tag_style", "device", "threads", "video_every", "rank_timeout", "preset", "population"),
}


@dataclass(frozen=True)
class TrialRow:
    """What is known of a trial."""

    number: int
    state: str  # finished, pruned, failed, unfinished: being trained, or its tuning was stopped
    value: float | None  # return of the last evaluation
    best: float | None  # of all evaluations
    seconds: float | None
    run: str  # its folder, below that of the tuning
    member: int | None  # of the population in that run
    reason: str  # why it was pruned or failed
    params: dict[str, Any]  # as Optuna stores them


def import_optuna() -> Any:
    """Optuna, quiet; UsageError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError(
            f"gpurl tune needs Optuna, which is missing: {install_extra('tune')}"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna


def folder_of(storage: Path) -> Path:
    """The folder of a storage's trials, pictures and best settings: its path without the ending."""
    if storage.suffix not in (*JOURNALS, *DATABASES):
        raise UsageError(
            f"the storage is {storage}; its ending must be {', '.join(JOURNALS)} (a journal) or "
            f"{', '.join(DATABASES)} (SQLite)"
        )
    return storage.with_suffix("")


class Tuning:
    """A study and the folder beside its storage."""

    def __init__(self, study: Any, storage: Path) -> None:
        self.study = study
        self.storage = storage
        self.folder = folder_of(storage)
        self.optuna = import_optuna()

    # ---- trials ----

    def ask(self, space: Space, sampler: str, seed: int) -> Any:
        """A new trial, an optuna.Trial. Its random numbers depend on its number alone, so a tuning
        that goes on samples what it would have sampled without the break.
        """
        number = len(self.study.get_trials(deepcopy=False))
        own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        kinds = {
            "tpe": self.optuna.samplers.TPESampler,
            "random": self.optuna.samplers.RandomSampler,
        }
        self.study.sampler = kinds[sampler](seed=own_seed)
        return self.study.ask({name: each.distribution() for name, each in space.items()})

    def left_behind(self, space: Space) -> list[Any]:
        """The trials that a tuning which was stopped or killed has not finished, to be continued
        under their numbers. One that began MAX_ATTEMPTS times fails: it may be what kills.
        """
        trials = []
        running = self.optuna.trial.TrialState.RUNNING
        for frozen in self.study.get_trials(deepcopy=False, states=(running,)):
            trial = self.optuna.trial.Trial(self.study, frozen._trial_id)
            if frozen.params.keys() != space.keys():
                self.fail(trial, "its tuning was killed before it had its settings")
            elif _whole(frozen.user_attrs.get("attempts")) >= MAX_ATTEMPTS:
                self.fail(trial, f"its tuning was killed {MAX_ATTEMPTS} times")
            else:
                trials.append(trial)
        return trials

    def note_attempt(self, trial: Any) -> None:
        """Count that a process begins it."""
        trial.set_user_attr("attempts", _whole(trial.user_attrs.get("attempts")) + 1)

    def num_trials(self) -> int:
        """All trials, also unfinished ones."""
        return len(self.study.get_trials(deepcopy=False))

    def finish(self, trial: Any, value: float) -> None:
        self.study.tell(trial, value)

    def prune(self, trial: Any, reason: str) -> None:
        """End a trial whose settings are bad; the sampler learns from it."""
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Any, reason: str) -> None:
        """End a trial that says nothing of its settings."""
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def rows(self) -> list[TrialRow]:
        """All trials, the best first, then by their numbers."""
        rows = [_row(each) for each in self.study.get_trials(deepcopy=False)]

        def key(row: TrialRow) -> tuple[bool, float, int]:
            is_finished = row.state == "finished" and row.value is not None
            return (not is_finished, -(row.value or 0.0) if is_finished else 0.0, row.number)

        return sorted(rows, key=key)

    def importances(self) -> dict[str, float]:
        """{setting: its share of what makes trials good}, largest first, by PED-ANOVA (Watanabe et
        al. 2023, arXiv:2304.10255), which draws no random numbers; {} for too few trials.
        """
        state = self.optuna.trial.TrialState.COMPLETE
        values = [t.value for t in self.study.get_trials(deepcopy=False, states=(state,))]
        if len(values) < 8 or len(set(values)) < 2:
            return {}
        # good are a tenth of the trials, and at least five
        share = max(0.1, 5 / len(values))
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator(target_quantile=share)
        with _reading(self.storage):
            found = self.optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _whole(value: object) -> int:
    """A number of the storage, which may hold anything."""
    return value if isinstance(value, int) else 0


def _row(trial: Any) -> TrialRow:
    states = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
    numbers = [*trial.intermediate_values.values(), trial.value]
    values = [float(each) for each in numbers if each is not None and math.isfinite(each)]
    began, ended = trial.datetime_start, trial.datetime_complete
    attrs = trial.user_attrs
    member = attrs.get("member")
    return TrialRow(
        trial.number,
        states.get(trial.state.name, "unfinished"),
        None if trial.value is None else float(trial.value),
        max(values, default=None),
        (ended - began).total_seconds() if began and ended else None,
        str(attrs.get("run", "")),
        member if isinstance(member, int) else None,
        str(attrs.get("reason", "")),
        dict(trial.params),
    )


# ---- opening ----


def begin_or_continue(
    storage: Path, settings: Settings, space: Space, prune: bool, num_evaluations: int
) -> Tuning:
    """The tuning in `storage`, new or the same as before; UsageError for a file that cannot be
    read, and for the tuning of something else. Its folder must be locked.
    """
    optuna = import_optuna()
    about = _about(settings, space)
    is_new = not os.path.lexists(storage)
    if not is_new:
        _check_file(storage)
        _drop_half_line(storage)
    pruner = optuna.pruners.NopPruner()
    if prune:
        pruner = optuna.pruners.MedianPruner(
            STARTUP_TRIALS, n_warmup_steps=math.ceil(WARM_UP * num_evaluations)
        )
    with _reading(storage):
        backend = _backend(storage)
        names = [each.study_name for each in backend.get_all_studies()]
        if names and STUDY not in names:
            raise UsageError(
                f"{storage} holds no tuning of gpurl, but the study {names[0]!r}: choose another "
                f"--storage"
            )
        # `ask` sets the sampler; without one Optuna would make one of a random seed
        parts = {"sampler": optuna.samplers.RandomSampler(0), "pruner": pruner}
        if names:
            study = optuna.load_study(study_name=STUDY, storage=backend, **parts)
        else:
            study = optuna.create_study(
                study_name=STUDY, storage=backend, direction="maximize", **parts
            )
        saved = study.user_attrs.get("about")
    if saved is None:  # new, or killed in between
        study.set_user_attr("about", about)
    else:
        _check_same(storage, saved, about, space)
    return Tuning(study, storage)


def load_tuning(storage: Path) -> Tuning:
    """The tuning in `storage`, to be shown."""
    optuna = import_optuna()
    folder_of(storage)  # or an error
    if not storage.exists():
        raise UsageError(f"there is no storage {storage}; gpurl tune ALGORITHM ENV makes one")
    _check_file(storage)
    with _reading(storage):
        backend = _backend(storage)
        names = [each.study_name for each in backend.get_all_studies()]
        if STUDY not in names:
            raise UsageError(f"{storage} holds no tuning of gpurl")
        sampler = optuna.samplers.RandomSampler(0)
        study = optuna.load_study(study_name=STUDY, storage=backend, sampler=sampler)
        study.get_trials(deepcopy=False)
    return Tuning(study, storage)


@contextmanager
def _reading(storage: Path) -> Iterator[None]:
    """A `with` block in which what Optuna cannot read is a UsageError."""
    try:
        yield
    except GpurlError:
        raise
    except Exception as error:  # damaged files raise errors of any type there
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(
            f"cannot read {storage} as a storage of Optuna ({what}): choose another --storage"
        ) from error


def _check_file(storage: Path) -> None:
    """UsageError for what is no regular file, is too large or, as a data base, is not Optuna's:
    Optuna would write its tables into it.
    """
    with _reading(storage), edit_regular(storage) as file:
        if (size := file.seek(0, 2)) > MAX_STORAGE_BYTES:
            raise UsageError(f"{storage} has {size} bytes, more than {MAX_STORAGE_BYTES}")
    if storage.suffix in JOURNALS or not size:
        return
    with _reading(storage):
        address = f"{storage.absolute().as_uri()}?mode=rw"  # a killed commit is rolled back
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.execute("SELECT study_name FROM studies").fetchall()


def _drop_half_line(storage: Path) -> None:
    """Cut off the end of a journal that a killed process has not written to its end: the next line
    would be added to it, and nothing after it could be read. UsageError for a file that is no
    journal, which stays as it is.
    """
    if storage.suffix not in JOURNALS:
        return
    with _reading(storage), edit_regular(storage) as file:
        content = file.read(MAX_STORAGE_BYTES)
        begin = content[: len(JOURNAL_BEGINS)]
        if begin != JOURNAL_BEGINS[: len(content)]:
            raise UsageError(f"{storage} is no journal of Optuna: choose another --storage")
        file.truncate(content.rfind(b"\n") + 1)


class _NoLock:
    """The journal's own lock outlives a killed process; the tuning's folder is locked already."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing is held."""


def _backend(storage: Path) -> Any:
    optuna = import_optuna()
    if storage.suffix in DATABASES:
        path = str(storage.absolute())
        if "?" in path:  # begins the options of a URL
            raise UsageError(f"the storage is {path}; SQLite takes a path without ?")
        return optuna.storages.RDBStorage(f"sqlite:///{path}")
    file = optuna.storages.journal.JournalFileBackend(str(storage), _NoLock())
    return optuna.storages.JournalStorage(file)


def _about(settings: Settings, space: Space) -> dict[str, Json]:
    """What makes trials comparable: the task, the settings that are not sampled, the space."""
    values = settings.to_dict()
    about: dict[str, Json] = {key: values.pop(key) for key in ("algorithm", "env")}
    about["settings"] = {
        name: str(value) for name, value in flat(values) if name not in FREE and name not in space
    }
    about["space"] = {name: each.as_dict() for name, each in space.items()}
    return about


def _check_same(storage: Path, saved: Any, about: Mapping[str, Json], space: Space) -> None:
    """UsageError, with what differs, for the tuning of something else."""
    with _reading(storage):
        before, now = (f"{each['algorithm']} on {each['env']}" for each in (saved, about))
        if before != now:
            raise UsageError(
                f"{storage} is a tuning of {before}, not of {now}: choose another --storage"
            )
        # settings of both first, as a default space follows from them
        for part, what, has_both in (
            ("settings", "has", True),
            ("space", "searches", False),
            ("settings", "has", False),
        ):
            old, new = dict(saved[part]), about[part]
            assert isinstance(new, dict)
            for name in sorted({*old, *new}):
                is_compared = not has_both or (name in old and name in new)
                if is_compared and old.get(name) != new.get(name):
                    before, now = _said(old, name), _said(new, name)
                    raise UsageError(
                        f"{storage} {what} {name} {before}, now it is {now}: trials could not be "
                        f"compared; leave it as it was or choose another --storage"
                    )


def _said(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not at all"


def best_params(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The finished trial with the largest return; the first of equals."""
    finished = [row for row in rows if row.state == "finished" and row.value is not None]
    return finished[0] if finished else None
