"""One training for each of several seeds, and their mean."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpurl.api import Run, run
from gpurl.errors import GpurlError, UsageError
from gpurl.run.callbacks import make_callbacks
from gpurl.run.comparison import Group, compare_runs, plot_comparison
from gpurl.run.settings import Settings, make_settings
from gpurl.runs_beside import run_beside

log = logging.getLogger("gpurl")


def train_seeds(
    algorithm: str,
    env: str,
    seeds: int | Sequence[int] = 5,
    jobs: int = 1,
    at_once: bool = False,
    **settings: object,
) -> list[Run]:
    """Train `algorithm` on `env` once for each seed; names and settings as for `gpurl.train`.

    seeds: a number of seeds from `seed` on, or the seeds. jobs: trainings at a time, from two on
    each in a process with one thread, unless `threads` is set. A training that fails is logged, and
    the next seed is trained; the last failure is raised if all fail. A signal ends the whole.
    at_once: one run, whose population has a member for each seed; each of the runs that are
    returned stands for a member. UsageError for what cannot be trained so.
    """
    first = make_settings(algorithm, env, **settings)
    if isinstance(seeds, int):
        seeds = range(first.train.seed, first.train.seed + seeds)
    finished, failed = run_seeds(first, seeds, jobs=jobs, at_once=at_once)
    if failed and not finished:
        raise failed[-1]
    return finished


def run_seeds(
    settings: Settings,
    seeds: Sequence[int],
    command: Sequence[str] = (),
    callbacks: Sequence[str] = (),
    after: Callable[[Run], object] = lambda finished: None,
    jobs: int = 1,
    at_once: bool = False,
) -> tuple[list[Run], list[GpurlError]]:
    """(the finished runs, the errors of those that failed), in the order of `seeds`; ends early
    after a signal.

    command: for the runs' command.txt. callbacks: names of classes, of which each run has new
    instances. after: called with each run as it ends. jobs: trainings at a time. at_once: as
    `train_seeds` has it.
    """
    if not seeds:
        raise UsageError(f"seeds must be at least 1, got {len(seeds)}")
    if len({*seeds}) < len(seeds):
        raise UsageError(f"seeds are {', '.join(map(str, seeds))}: each must be there once")
    if at_once:
        if jobs > 1 or settings.train.population > 1:
            raise UsageError("at_once is a population of seeds: leave out jobs and population")
        one = run(
            _of_population(settings, seeds), command=command, callbacks=make_callbacks(callbacks)
        )
        after(one)
        return [_of_member(one, k) for k in range(len(seeds))], []
    each_settings = [_with_seed(settings, seed) for seed in seeds]
    make_callbacks(callbacks)  # or an error, before anything starts
    if jobs > 1:
        return run_beside(each_settings, jobs, command, callbacks, after)
    finished: list[Run] = []
    failed: list[GpurlError] = []
    for each in each_settings:
        try:
            one = run(each, command=command, callbacks=make_callbacks(callbacks))
        except UsageError:  # of every seed
            raise
        except GpurlError as error:
            log.error("seed %d failed: %s", each.train.seed, error)
            failed.append(error)
            continue
        finished.append(one)
        after(one)
        if one.outcome.signal_number is not None:
            break
    return finished, failed


def _of_population(settings: Settings, seeds: Sequence[int]) -> Settings:
    """The settings of one run, whose members have the seeds."""
    if [*seeds] != [*range(seeds[0], seeds[0] + len(seeds))]:
        raise UsageError(
            f"at once, seeds follow each other, got {', '.join(map(str, seeds))}; leave at_once out"
        )
    train = dataclasses.replace(settings.train, seed=seeds[0], population=len(seeds))
    return dataclasses.replace(settings, train=train)


def _of_member(one: Run, member: int) -> Run:
    """What a run of a population is of one member, without an evaluation if that was lost."""
    values = one.outcome.evaluation
    evaluation = {}
    if (mean := values.get(f"members/{member}/eval_reward")) is not None:
        evaluation = {"eval/mean_reward": mean, "eval/episodes": values["eval/episodes"]}
    outcome = dataclasses.replace(one.outcome, evaluation=evaluation)
    return dataclasses.replace(one, outcome=outcome, member=member)


def _with_seed(settings: Settings, seed: int) -> Settings:
    """The settings of one run; a given run_dir is the folder of all, with one for each seed."""
    folder = settings.train.run_dir
    run_dir = None if folder is None else str(Path(folder) / f"seed_{seed}")
    train = dataclasses.replace(settings.train, seed=seed, run_dir=run_dir)
    return dataclasses.replace(settings, train=train)


def compare_seeds(runs: Sequence[Run]) -> tuple[Group, Path]:
    """(the runs as a group, their picture: beside the run folders, or in that of a population)."""
    folders = [*dict.fromkeys(one.folder for one in runs)]
    (group,) = compare_runs(folders)
    first, others = folders[0], len(folders) - 1
    picture = first.with_name(f"{first.name}_and_{others}_more.png")
    if not others:
        picture = first / "members.png"
    return group, plot_comparison([group], picture)
