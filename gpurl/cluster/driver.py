"""Drives a population on a cluster: gives slices to the places that are there, hears how they end,
and keeps the schedule on storage, so that the same command goes on after any kill.
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from gpurl.algorithms.off_policy import OffPolicyConfig
from gpurl.checkpoints.folders import latest_checkpoint
from gpurl.checkpoints.leaderboard import Entry
from gpurl.checkpoints.plain_files import Json, make_folder, replace_file
from gpurl.checkpoints.state_files import read_json
from gpurl.checkpoints.storage import is_url
from gpurl.cluster.board import Board, FolderBoard
from gpurl.cluster.schedule import Job, Result, Schedule, check_members
from gpurl.errors import CheckpointError, GpurlError, UsageError
from gpurl.run.interrupt import StopRequest
from gpurl.run.members import ONE_AGENT
from gpurl.run.run_folder import lock_run
from gpurl.run.settings import Settings
from gpurl.run.trackers.tracker import flat

FILE, BOARD = "schedule.json", "board"
POLL_SECONDS = 0.5
UNLIMITED = 1 << 20  # entries of the board of a population, whose schedule removes them
# settings that change no number of a member, and limits of the whole
FREE = {
    *("root", "quiet", "track", "project", "log_every", "save_every", "keep_checkpoints"),
    *("tag_style", "device", "threads", "video_every", "rank_timeout", "preset", "max_seconds"),
    *("stop_return", "eval_every"),
}


@dataclass(frozen=True)
class Plan:
    """What to train and how."""

    settings: Settings  # of the population, as `gpurl train --population P --pbt` takes them
    folder: Path
    is_tournament: bool = False  # members draw entries of a leaderboard, in place of each other
    waits: bool = False  # all members finish a slice before the next one begins
    threads: int = 1  # of a member, unless the settings have them
    command: tuple[str, ...] = ()  # for the runs' command.txt

    @property
    def board(self) -> Path:
        """The folder of the board, which several tournaments may share; on other storage, that of
        the copy for all nodes.
        """
        chosen = self.settings.train.pbt_leaderboard
        if not chosen or self.url:
            return self.folder / BOARD
        return Path(chosen).expanduser().absolute()

    @property
    def url(self) -> str:
        """Where the board is on other storage, else ""."""
        chosen = self.settings.train.pbt_leaderboard or ""
        return chosen if is_url(chosen) else ""

    @property
    def capacity(self) -> int:
        """Entries of the board: of a leaderboard two a member."""
        return 2 * self.settings.train.population if self.is_tournament else UNLIMITED


class Event(NamedTuple):
    """What happened at a place."""

    place: int
    result: Result | None = None  # of its slice; None: it is ready for the first one, or has ended
    died: str = ""  # why it has ended, "" if it is there
    had_begun: bool = True  # whether its slice had; False: it ended before, while it was idle


class Places(Protocol):
    """Where slices are trained; they may come and go."""

    def train(self, place: int, job: Job, settings: Mapping[str, Any]) -> None:
        """Begin a slice at a place that is ready."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """What has happened, at the latest after so many seconds."""


class Driver:
    """One run of the command."""

    def __init__(
        self, plan: Plan, schedule: Schedule, board: Board, say: Callable[[str], object]
    ) -> None:
        self.plan = plan
        self.schedule = schedule
        self.board = board
        self.say = say
        self.settings = settings_of_members(plan)
        self.idle: list[int] = []
        self.busy: dict[int, int] = {}  # the member that a place trains
        self._dropped: set[str] = set()  # entries that are on the board no more

    def run(self, places: Places) -> int | None:
        """Train until no slice is left; returns the signal that ended it, if one did. GpurlError if
        all members are lost.
        """
        config = self.plan.settings.train
        began = time.monotonic()
        with StopRequest() as stop:
            while not self.schedule.is_done and stop.signal_number is None:
                seconds = time.monotonic() - began
                if config.max_seconds is not None and seconds >= config.max_seconds:
                    self.say(f"max_seconds {config.max_seconds:g} reached")
                    break
                if config.stop_return is not None and self._best() >= config.stop_return:
                    self.say(f"stop_return {config.stop_return:g} reached")
                    break
                self._give_out(places)
                for event in places.wait(POLL_SECONDS):
                    self._hear(event)
        check_live(self.schedule)
        return stop.signal_number

    def _best(self) -> float:
        slices = [each for member in self.schedule.members for each in member.slices]
        return max((each.score for each in slices if math.isfinite(each.score)), default=-math.inf)

    # ---- slices ----

    def _give_out(self, places: Places) -> None:
        """Begin slices while there are places and members that wait."""
        while self.idle and (k := self.schedule.next_member()) is not None:
            is_new = self.schedule.members[k].job is None
            job = self.schedule.begin(k, self._entries() if is_new else ())
            # on storage first: after a kill the slice is what it was
            self.save()
            if job.source and is_new:
                self.say(_take_over_text(k, job, self.schedule.members[k].score))
            place = self.idle.pop(0)
            self.busy[place] = k
            places.train(place, job, self.settings[k])

    def _entries(self) -> list[Entry]:
        if not self.schedule.draws:
            return []
        try:
            return self.board.entries()
        except CheckpointError as error:
            self.say(f"the leaderboard cannot be read, members go on by themselves: {error}")
            return []

    def _hear(self, event: Event) -> None:
        k = self.busy.pop(event.place, None)
        if event.died:
            if event.place in self.idle:
                self.idle.remove(event.place)
            if k is not None:
                if event.had_begun:
                    self.schedule.die(k, event.died, self._saved_steps(k))
                else:
                    self.schedule.give_back(k)
                self.say(f"member {k}: {event.died}; another process goes on with it")
                self._after(k)
            return
        self.idle.append(event.place)
        if k is None or event.result is None:
            return
        self._report(k, event.result)
        self.schedule.finish(k, event.result)
        self._after(k)

    def _saved_steps(self, k: int) -> int:
        """Steps of the newest checkpoint of member k's run."""
        newest = latest_checkpoint(self.plan.folder / self.schedule.run_folder(k))
        return 0 if newest is None else int(newest.name.removeprefix("step_"))

    def _report(self, k: int, result: Result) -> None:
        for note in result["notes"]:
            self.say(f"member {k}: {note}")
        if result["error"]:
            self.say(f"member {k} failed: {result['error']}")
            return
        member = self.schedule.members[k]
        number = len(member.slices) + 1
        steps = member.offset + result["steps"]
        score = "no return" if result["score"] is None else f"return {result['score']:.4g}"
        self.say(f"member {k}: {score} after slice {number}, {steps:,} steps")

    def _after(self, k: int) -> None:
        """A slice has ended: save the table, drop entries that nobody needs."""
        if lost := self.schedule.members[k].lost:
            self.say(f"member {k} is lost, the others go on: {lost}")
        self.save()
        check_live(self.schedule)
        if self.schedule.draws:
            return
        needed = self.schedule.needed_entries()
        dropped = self.schedule.entries() - needed - self._dropped
        self._dropped |= dropped
        if dropped:
            try:
                self.board.remove(dropped)
            except CheckpointError as error:
                self.say(f"old entries stay: {error}")

    def save(self) -> None:
        """Write the schedule."""
        content = self.schedule.to_dict() | {"about": about(self.plan)}
        path = self.plan.folder / FILE
        try:
            replace_file(path, json.dumps(content, allow_nan=False, indent=1).encode())
        except OSError as error:
            raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error


def check_live(schedule: Schedule) -> None:
    """GpurlError if all members are lost."""
    if not schedule.live:
        reason = schedule.members[-1].lost
        count = len(schedule.members)
        raise GpurlError(f"all {count} members are lost, the last because: {reason}")


def _take_over_text(k: int, job: Job, score: float) -> str:
    changes = ", ".join(
        f"{name} {old:.3g} -> {job.settings[name]:.3g}" for name, old in job.source_settings.items()
    )
    returns = f"return {score:.4g} -> {job.source_score:.4g}"
    return f"member {k} goes on from {job.source} ({returns}), {changes}"


# ---- the parts of a driver ----


def settings_of_members(plan: Plan) -> list[dict[str, Any]]:
    """The settings of each member's run."""
    settings, train = plan.settings, plan.settings.train
    made = []
    for config in settings.member_configs():
        # what a slice resumes is what the one before left
        if isinstance(config, OffPolicyConfig):
            config = replace(config, save_replay=True)
        one = replace(
            settings,
            algorithm_config=config,
            train=replace(
                train,
                max_seconds=None,
                stop_return=None,
                quiet=True,
                threads=train.threads or plan.threads,
                # once, at the end of each slice
                eval_every=train.eval_every or train.total_steps,
            ),
        )
        made.append(one.to_dict() | ONE_AGENT | {"command": list(plan.command)})
    return made


def make_schedule(plan: Plan) -> Schedule:
    """A new one; UsageError for a plan without members to select or returns to compare."""
    settings, train = plan.settings, plan.settings.train
    options = check_members(settings.pbt_options(), train.population)
    if not train.eval_episodes:
        raise UsageError("members are compared by their evaluations, but eval_episodes is 0")
    own = [
        {name: getattr(config, name) for name in options.spans}
        for config in settings.member_configs()
    ]
    return Schedule(
        *(options, train.total_steps, train.seed, own, uuid.uuid4().hex[:12]),
        draws=plan.is_tournament,
        waits=plan.waits,
    )


def about(plan: Plan) -> dict[str, Json]:
    """What a schedule that goes on must have in common with the earlier one."""
    values = {name: str(value) for name, value in flat(plan.settings.to_dict()) if name not in FREE}
    return {**values, "tournament": str(plan.is_tournament), "synchronous": str(plan.waits)}


def open_schedule(plan: Plan) -> Schedule:
    """The schedule in the plan's folder, or a new one; UsageError for that of something else, and
    CheckpointError for one that cannot be read.
    """
    schedule = make_schedule(plan)
    path = plan.folder / FILE
    if not path.exists():
        return schedule
    try:
        saved, _ = read_json(path)
        before = dict(cast(dict[str, Json], saved["about"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): choose another --run-dir"
        ) from None
    now = about(plan)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{plan.folder} is of {name} {before.get(name)}, now it is {now.get(name)}: leave "
                f"it as it was, or choose another --run-dir"
            )
    try:
        schedule.load_dict(saved)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; choose another --run-dir") from None
    return schedule


def train_population(
    plan: Plan,
    begin: Callable[[ExitStack], tuple[Places, Board]],
    say: Callable[[str], object],
) -> tuple[Schedule, int | None]:
    """(the schedule, the signal that ended it): train the plan where `begin` says, which is called
    once the folders are known to be good, and ends what it has begun with the stack.

    Raises UsageError for a plan or folders that cannot work, or if another process works in the
    folder, GpurlError if all members are lost.
    """
    schedule = make_schedule(plan)
    try:
        make_folder(plan.folder)
    except OSError as error:
        raise UsageError(
            f"no folder {plan.folder}: {error.strerror}; choose another --run-dir"
        ) from None
    with ExitStack() as cleanup:
        cleanup.enter_context(lock_run(plan.folder, "schedule"))
        schedule = open_schedule(plan)
        FolderBoard(str(plan.board), plan.capacity, plan.url)  # or an error
        population = len(schedule.members)
        slices = sum(len(member.slices) for member in schedule.members)
        say(
            f"{plan.folder}: {population} members, {slices} slices of "
            f"{schedule.options.every:,} steps are done"
        )
        check_live(schedule)
        if schedule.is_done:
            return schedule, None
        places, board = begin(cleanup)
        return schedule, Driver(plan, schedule, board, say).run(places)
