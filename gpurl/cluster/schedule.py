"""Which member of a population trains next, and from whose state: the decisions of population based
training where members finish at different times, as a table that can be saved.

A member trains slices of `every` steps. After a slice it has a score, and the board has its state
as an entry. How members are compared is `gpurl.selection`; nothing here trains, reads or writes.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from gpurl.checkpoints.leaderboard import NAME, Entry, draw_entry
from gpurl.checkpoints.plain_files import Json
from gpurl.engine.pbt import SELECTION_SEED, PbtOptions, explored, parents_of, within
from gpurl.errors import CheckpointError, NonFiniteError, UsageError

MAX_ATTEMPTS = 5  # of a slice in a row, after which its member is lost
FORMAT_VERSION = 1


class Result(TypedDict):
    """How a slice ended."""

    steps: int  # environment steps of the run, in its newest checkpoint
    score: float | None  # mean return of its evaluation; None if it has none
    entered: bool  # whether the board has its state
    took_over: bool  # whether it went on from the source of its job
    settings: dict[str, float]  # the explored ones that the run has; {} if it ended early
    unreadable: bool  # whether no checkpoint of its run can be read
    notes: list[str]  # warnings of the training
    error: str  # why it ended early, "" if it did not
    code: int  # exit code of that error


@dataclass(frozen=True)
class Job:
    """A slice to train, in words that another process understands."""

    member: int
    number: int  # of the slice
    folder: str  # of the run, below that of the schedule
    seed: int
    begin: int  # steps of the run so far, unless an earlier attempt has come further
    until: int  # steps of the run
    total: int  # steps of the run in all, by which its schedules go
    entry: str  # name under which it enters the board
    source: str = ""  # entry that it goes on from, "": its own state
    source_score: float = 0.0
    source_settings: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)  # those that are explored, from now


@dataclass(frozen=True)
class Slice:
    """What a member has done."""

    score: float  # NaN if it diverged
    steps: int  # of the member, over all of its runs
    settings: Mapping[str, float]
    entry: str  # on the board, "" if it is not there
    source: str  # the entry that it went on from, "" if from its own state


@dataclass
class Member:
    """A row of the table."""

    settings: dict[str, float]  # those that are explored
    slices: list[Slice] = field(default_factory=list)
    steps: int = 0  # of the newest checkpoint of its run
    offset: int = 0  # steps of its earlier runs
    runs: int = 0  # earlier runs, whose checkpoints cannot be read any more
    is_new: bool = False  # whether its next run is another one than before
    attempts: int = 0  # in a row that have failed and came no further
    job: Job | None = None  # given out, and not finished
    lost: str = ""  # why it takes part no more

    @property
    def score(self) -> float:
        """Of the newest slice; -inf before the first."""
        return self.slices[-1].score if self.slices else -math.inf


class Schedule:
    """The table of all members, and who is next."""

    def __init__(
        self,
        options: PbtOptions,
        total_steps: int,
        seed: int,
        settings: Sequence[Mapping[str, float]],
        run: str,
        draws: bool = False,
        waits: bool = False,
    ) -> None:
        """settings: those of each member that are explored, at the start. run: a name that is
        unique among those that share a board. draws: members go on from entries of the board that
        they draw, in place of each other by the rule. waits: all members finish a slice before the
        next one begins, as the rule of generations needs it.
        """
        self.options = options
        self.total_steps = total_steps
        self.seed = seed
        self.run = run
        self.draws = draws
        self.waits = (waits or options.rule == "generation") and not draws
        self.members = [Member(dict(each)) for each in settings]
        self._queue = list(range(len(self.members)))

    # ---- who is next ----

    @property
    def live(self) -> list[int]:
        """Members that are not lost."""
        return [k for k, member in enumerate(self.members) if not member.lost]

    @property
    def is_done(self) -> bool:
        """Whether no slice is left."""
        return all(self.is_finished(k) for k in self.live)

    def is_finished(self, k: int) -> bool:
        """Whether member k has done all of its steps."""
        slices = self.members[k].slices
        return bool(slices) and slices[-1].steps >= self.total_steps

    def next_member(self) -> int | None:
        """The member that has waited longest and can begin a slice; None if none can."""
        waiting = [k for k in self.live if not self.is_finished(k)]
        fewest = min((len(self.members[k].slices) for k in waiting), default=0)
        for k in self._queue:
            if not self.waits or len(self.members[k].slices) == fewest:
                return k
        return None

    def begin(self, k: int, entries: Sequence[Entry] = ()) -> Job:
        """Give out the next slice of member k. entries: of the board, if members draw them."""
        member = self.members[k]
        self._queue.remove(k)
        # a slice that was not finished: as it was decided, whoever trains it
        if member.job is None:
            member.job = self._decide(k, entries)
        return member.job

    def run_folder(self, k: int) -> str:
        """The name of the folder of member k's run."""
        runs = self.members[k].runs
        return f"member_{k:03d}-{runs + 1}" if runs else f"member_{k:03d}"

    def _job(self, k: int, **source: Any) -> Job:
        member = self.members[k]
        number = len(member.slices)
        until = min((number + 1) * self.options.every, self.total_steps)
        entry = f"{self.run}-{k}" if self.draws else f"{self.run}-{k}-{number}"
        return Job(
            *(k, number, self.run_folder(k), self.seed + k, member.steps),
            *(until - member.offset, self.total_steps - member.offset, entry),
            **{"settings": dict(member.settings)} | source,
        )

    # ---- whose state it goes on from ----

    def _decide(self, k: int, entries: Sequence[Entry]) -> Job:
        member = self.members[k]
        if member.is_new:
            member.is_new = False
            return self._in_another_run(k, entries)
        if not member.slices:
            return self._job(k)
        if self.draws:
            return self._draw(k, entries)
        # selection begins when every member has a score
        place = len(member.slices) - 1
        rows = {j: self.members[j].slices for j in self.live}
        if not all(rows.values()):
            return self._job(k)
        # one that diverged in its last slice has more slices than those that are finished
        newest = {
            j: slices[min(place, len(slices) - 1) if self.waits else -1]
            for j, slices in rows.items()
        }
        ready = [*newest]
        uniforms = [float(self._numbers(j, place + 1)[0]) for j in ready]
        parents = parents_of(self.options, [each.score for each in newest.values()], uniforms)
        source = newest[ready[parents[ready.index(k)]]]
        if ready[parents[ready.index(k)]] == k or not source.entry:
            return self._job(k)
        return self._from(k, source.entry, source.score, source.settings)

    def _draw(self, k: int, entries: Sequence[Entry]) -> Job:
        """From an entry that is better, if the member draws such a one."""
        number = len(self.members[k].slices)
        entry = draw_entry(entries, float(self._numbers(k, number)[0]))
        if entry is None or self.members[k].score >= entry.score:
            return self._job(k)
        settings = within(self.options.spans, self.members[k].settings, entry.settings)
        return self._from(k, entry.name, entry.score, settings)

    def _from(self, k: int, entry: str, score: float, settings: Mapping[str, float]) -> Job:
        numbers = self._numbers(k, len(self.members[k].slices))[1:].tolist()
        return self._job(
            k,
            source=entry,
            source_score=score,
            source_settings=dict(settings),
            settings=explored(self.options, settings, numbers),
        )

    def _numbers(self, k: int, number: int) -> np.ndarray:
        """Random numbers of member k for a slice: one for the rule, two for each setting; they
        depend on nothing else.
        """
        key = [self.seed, SELECTION_SEED, k, number]
        return np.random.default_rng(key).random(1 + 2 * len(self.options.spans))

    def _in_another_run(self, k: int, entries: Sequence[Entry]) -> Job:
        """A new run of member k goes on from its own newest entry on the board, else from the best
        one, else from the beginning.
        """
        member = self.members[k]
        if self.draws:
            own = [each for each in entries if each.name == f"{self.run}-{k}"]
            found = [(each.name, each.score, each.settings) for each in (*own, *entries)]
        else:
            rows = [self.members[j].slices for j in self.live]
            others = [each[-1] for each in rows if each and math.isfinite(each[-1].score)]
            others.sort(key=lambda each: -each.score)
            # older ones are on the board no more
            slices = [*member.slices[-1:], *others]
            found = [(each.entry, each.score, each.settings) for each in slices if each.entry]
        if not found or not member.slices:
            return self._job(k)
        name, score, settings = found[0]
        settings = within(self.options.spans, member.settings, settings)
        source = {"source": name, "source_score": score, "source_settings": settings}
        return self._job(k, **source, settings=dict(settings))

    # ---- how a slice ended ----

    def finish(self, k: int, result: Result) -> None:
        """A place has reported: the slice is done, or is to be trained again."""
        member = self.members[k]
        job = member.job
        assert job is not None
        came_further = result["steps"] > member.steps
        if not result["unreadable"]:
            member.steps = result["steps"]
        if result["settings"]:
            member.settings = dict(result["settings"])
        diverged = result["code"] == NonFiniteError.exit_code
        if result["code"] and not diverged:
            self._failed(k, result["error"], came_further=came_further)
            if result["unreadable"] and not member.lost:
                self._begin_anew(k)
            return
        # a member that diverged, or whose episodes do not end, is replaced by any rule
        score = math.nan if diverged or result["score"] is None else result["score"]
        steps = member.offset + result["steps"]
        if diverged:
            steps = min(job.until + member.offset, self.total_steps - 1)
        entry = job.entry if result["entered"] else ""
        source = job.source if result["took_over"] else ""
        member.slices.append(Slice(score, steps, dict(member.settings), entry, source))
        member.job = None
        if diverged:
            self._failed(k, result["error"], is_first=False)
        else:
            member.attempts = 0
            self._wait(k)

    def die(self, k: int, reason: str, steps: int) -> None:
        """The process that trained member k has ended: another one goes on. steps: of the newest
        checkpoint of its run.
        """
        member = self.members[k]
        came_further = steps > member.steps
        member.steps = max(steps, member.steps)
        self._failed(k, reason, came_further=came_further)

    def give_back(self, k: int) -> None:
        """The slice of member k has not begun: it is first in the queue."""
        self._wait(k, is_first=True)

    def _failed(
        self, k: int, reason: str, is_first: bool = True, came_further: bool = False
    ) -> None:
        member = self.members[k]
        # a process that is taken away again and again, but not before it has saved, costs nothing
        member.attempts = 1 if came_further else member.attempts + 1
        if member.attempts >= MAX_ATTEMPTS:
            member.lost = f"{reason} ({member.attempts} attempts in a row)"
        else:
            self._wait(k, is_first)

    def _wait(self, k: int, is_first: bool = False) -> None:
        if not self.is_finished(k):
            self._queue.insert(0 if is_first else len(self._queue), k)

    def _begin_anew(self, k: int) -> None:
        """Member k has lost its run: its next slice is that of a new one."""
        member = self.members[k]
        member.runs += 1
        member.is_new = True
        member.job = None
        member.steps = 0
        member.offset = member.slices[-1].steps if member.slices else 0

    # ---- the board ----

    def needed_entries(self) -> set[str]:
        """Entries that a member may still go on from."""
        live = [self.members[k] for k in self.live]
        jobs = [member.job for member in live if member.job is not None]
        fewest = min((len(member.slices) for member in live), default=0)
        needed = {job.source for job in jobs} | {job.entry for job in jobs}
        for member in live:
            first = fewest - 1 if self.waits else len(member.slices) - 1
            needed |= {each.entry for each in member.slices[max(first, 0) :]}
        return needed - {""}

    def entries(self) -> set[str]:
        """All entries that have ever been made."""
        return {each.entry for member in self.members for each in member.slices} - {""}

    # ---- as a file ----

    def to_dict(self) -> dict[str, Json]:
        """The table, without what the options decide."""
        rows: list[Json] = []
        for member in self.members:
            row = asdict(member)
            for each in row["slices"]:  # JSON has no NaN
                each["score"] = each["score"] if math.isfinite(each["score"]) else None
            rows.append(row)
        return {"format": FORMAT_VERSION, "run": self.run, "members": rows}

    def load_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `to_dict()`: what was running is trained again. CheckpointError for what
        another program has written.
        """
        try:
            if saved["format"] != FORMAT_VERSION:
                raise ValueError(f"it has format {saved['format']!r}, wanted {FORMAT_VERSION}")
            names = {*self.options.spans}
            rows = [_member(k, row, names) for k, row in enumerate(saved["members"])]
            if len(rows) != len(self.members):
                raise ValueError(f"it has {len(rows)} members, wanted {len(self.members)}")
            run = saved["run"]
            if not NAME.fullmatch(run):
                raise ValueError(f"its run {run[:80]!r} is no name")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"it is no schedule: {error}") from None
        self.run = run
        self.members = rows
        waiting = [k for k in self.live if not self.is_finished(k)]
        self._queue = sorted(waiting, key=lambda k: len(rows[k].slices))


def _member(k: int, row: Mapping[str, Any], names: Set[str]) -> Member:
    """Row k of a saved table, which explores the settings `names`; ValueError for a wrong one."""
    values = dict(row)
    slices = [Slice(**each) for each in values.pop("slices")]
    job = values.pop("job")
    member = Member(**values, slices=slices, job=None if job is None else Job(**job))
    if type(member.lost) is not str or type(member.is_new) is not bool:
        raise ValueError("whether it is lost or new is not said")
    whole = [member.steps, member.offset, member.runs, member.attempts]
    whole += [each.steps for each in slices]
    numbers = [each.score for each in slices if each.score is not None]
    settings = [member.settings, *(each.settings for each in slices)]
    # a path in place of a name would lead elsewhere
    found = [name for each in slices for name in (each.entry, each.source)]
    if member.job is not None:
        job = member.job
        whole += [job.number, job.seed, job.begin, job.until, job.total]
        numbers.append(job.source_score)
        settings += [job.settings, job.source_settings] if job.source else [job.settings]
        found += [job.folder, job.entry, job.source]
        if job.member != k or not job.folder or not job.entry:
            raise ValueError(f"member {k} has a slice of member {job.member!r}, or without names")
    if not all(each == "" or NAME.fullmatch(each) for each in found):
        raise ValueError("its folder or its entries are no names")
    if not all(type(each) is int and each >= 0 for each in whole):
        raise ValueError("its steps are no whole numbers")
    if any({*each} != names for each in settings):
        raise ValueError(f"it explores other settings than {', '.join(sorted(names))}")
    numbers += [value for each in settings for value in each.values()]
    if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
        raise ValueError("its scores or its settings are no numbers")
    member.slices = [
        replace(each, score=math.nan if each.score is None else each.score) for each in slices
    ]
    return member


def check_members(options: PbtOptions | None, population: int) -> PbtOptions:
    """The options; UsageError where there is nothing to select."""
    if options is None or population < 2:
        raise UsageError(f"selection is among members, population is {population}: --population 6")
    return options
