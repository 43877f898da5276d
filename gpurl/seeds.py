"""Trainings with several seeds, at once or one after another, and their mean."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpurl.api import Run, run
from gpurl.envs.registry import make_env, resolve_env
from gpurl.errors import EnvError, GpurlError, NonFiniteError, UsageError
from gpurl.run.callbacks import make_callbacks
from gpurl.run.comparison import Group, compare_runs, plot_comparison
from gpurl.run.memory_need import check_memory
from gpurl.run.ranks import is_rank
from gpurl.run.run_folder import same_directory
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import choose_device, population_obstacle
from gpurl.run.terminal import say
from gpurl.runs_beside import run_beside

log = logging.getLogger("gpurl")


def train_seeds(
    algorithm: str,
    env: str,
    seeds: int | Sequence[int] = 5,
    jobs: int | None = None,
    **settings: object,
) -> list[Run]:
    """Train `algorithm` on `env` with each seed; names and settings as for `gpurl.train`.

    seeds: a number of seeds from `seed` on, or the seeds. They train as a population in one run
    where that is possible: each of the runs that are returned then stands for a member (`member`)
    of the same folder, and `policy()` is its best one. Else, or with `jobs`, each has a run of its
    own; jobs: trainings at a time, from two on each in a process with one thread, unless `threads`
    is set.

    A seed that diverges, or gets NaN from its environments, is logged, and the others go on; with
    runs of their own so is every error. The last one is raised if all fail. A signal ends the
    whole.
    """
    first = make_settings(algorithm, env, **settings)
    if isinstance(seeds, int):
        seeds = range(first.train.seed, first.train.seed + seeds)
    finished, failed = run_seeds(first, seeds, jobs=jobs)
    if failed and not finished:
        raise failed[-1]
    return finished


def run_seeds(
    settings: Settings,
    seeds: Sequence[int],
    command: Sequence[str] = (),
    callbacks: Sequence[str] = (),
    after: Callable[[Run], object] = lambda finished: None,
    jobs: int | None = None,
) -> tuple[list[Run], list[GpurlError]]:
    """(the finished runs, the errors of those that failed), in the order of `seeds`; ends early
    after a signal.

    command: for the runs' command.txt. callbacks: names of classes, of which each run has new
    instances. after: called with each run as it ends. jobs: as `train_seeds` has it.
    """
    if not seeds:
        raise UsageError(f"seeds must be at least 1, got {len(seeds)}")
    if len({*seeds}) < len(seeds):
        raise UsageError(f"seeds are {', '.join(map(str, seeds))}: each must be there once")
    if settings.train.population > 1:
        raise UsageError(
            f"seeds train agents of their own, and so does population, which is "
            f"{settings.train.population}: leave out seeds, or set population to 1"
        )
    make_callbacks(callbacks)  # or an error, before anything starts
    if jobs is None and len(seeds) > 1:
        obstacle = _population_obstacle(settings, seeds, callbacks)
        if not obstacle:
            return _run_population(settings, seeds, command, after)
        if not settings.train.quiet:
            say(f"seeds one after another, not as a population: {obstacle}")
    each_settings = [_with_seed(settings, seed) for seed in seeds]
    if jobs is not None and jobs > 1:
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


# ---- as a population ----


def _population_obstacle(settings: Settings, seeds: Sequence[int], callbacks: Sequence[str]) -> str:
    """Why the seeds need runs of their own, "" if they do not."""
    config = settings.train
    if [*seeds] != [*range(seeds[0], seeds[0] + len(seeds))]:
        return f"seeds {', '.join(map(str, seeds))} do not follow each other"
    if is_rank():
        return "several processes train one agent together"
    # what is meant for each run
    for name, is_given in (
        ("callback", bool(callbacks)),
        ("max_seconds", config.max_seconds is not None),
        ("stop_return", config.stop_return is not None),
        ("track", bool(config.track)),
        ("video_every", config.video_every is not None),
    ):
        if is_given:
            return f"{name} is meant for a run of each seed"
    device = choose_device(config.device)
    if device.type == "cuda":
        return "on a GPU a run of its own has kernels that members lack"
    # an instance tells more than its class: a wrapper is what it wraps
    env_class, named = resolve_env(settings.env)
    if not env_class.is_quick_to_make({**named, **settings.env_options}):
        obstacle = population_obstacle(settings, env_class.takes_share_seeds)
        return obstacle or f"what {settings.env} takes of memory is known only once it is made"
    with same_directory():
        env = make_env(settings.env, 1, **settings.env_options)
        env.close()
        if obstacle := population_obstacle(settings, env.takes_share_seeds):
            return obstacle
        try:
            check_memory(_as_population(settings, seeds), device)
        except UsageError as error:
            return str(error)
    return ""


def _as_population(settings: Settings, seeds: Sequence[int]) -> Settings:
    """The settings of one run, whose members have the seeds."""
    train = dataclasses.replace(settings.train, seed=seeds[0], population=len(seeds))
    return dataclasses.replace(settings, train=train)


def _run_population(
    settings: Settings,
    seeds: Sequence[int],
    command: Sequence[str],
    after: Callable[[Run], object],
) -> tuple[list[Run], list[GpurlError]]:
    """As `run_seeds`; a member that was lost is a seed that failed."""
    try:
        one = run(_as_population(settings, seeds), command=command)
    except EnvError as error:
        hint = "by jobs 1 each seed has a run of its own, and costs itself only"
        raise type(error)(f"{error}; {hint}") from error
    after(one)
    lost = one.outcome.lost
    for k, reason in lost.items():
        log.error("seed %d failed, member %d of %s: %s", seeds[k], k, one.folder, reason)
    runs = [_of_member(one, k) for k in range(len(seeds)) if k not in lost]
    return runs, [NonFiniteError(reason) for reason in lost.values()]


def _of_member(one: Run, member: int) -> Run:
    """What a run of a population is of one member."""
    evaluations = one.outcome.members
    evaluation = evaluations[member] if evaluations else {}
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
