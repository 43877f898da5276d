"""Who trains next and from whose state: decided by numbers alone, and the same after a kill."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gpurl.checkpoints.leaderboard import Entry
from gpurl.cluster.schedule import MAX_ATTEMPTS, Job, Schedule
from gpurl.errors import CheckpointError, UsageError
from gpurl.selection import FACTORS
from tests.cluster.here import EVERY, new_schedule, result

RATE = {"learning_rate": (1e-5, 1e-2)}


def finish(schedule: Schedule, k: int, score: float | None, **changes: Any) -> Job:
    """Member k trains its next slice and has a score."""
    job = schedule.begin(k)
    took = {"took_over": bool(job.source), "settings": dict(job.settings)}
    schedule.finish(k, result(job.until, score, **took | changes))
    return job


def play(schedule: Schedule, scores: list[float]) -> list[Job]:
    """One slice of each member, in the order of the queue."""
    jobs = []
    for _ in scores:
        k = schedule.next_member()
        assert k is not None
        jobs.append(finish(schedule, k, scores[k]))
    return jobs


# ---- whose state ----


def test_the_worst_goes_on_from_the_best_with_other_settings(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, explore=RATE, pbt_resample=0.0)
    first = play(schedule, [1.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    assert [job.member for job in first] == [0, 1, 2, 3, 4, 5]
    assert [job.source for job in first] == [""] * 6
    assert [(job.begin, job.until, job.total) for job in first] == [(0, EVERY, 3 * EVERY)] * 6
    assert [job.seed for job in first] == [0, 1, 2, 3, 4, 5]
    # a quarter of six is one: the worst of them, from the best of them
    jobs = play(schedule, [8.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    assert jobs[0].source == first[2].entry
    assert (jobs[0].source_score, jobs[0].begin, jobs[0].until) == (9.0, EVERY, 2 * EVERY)
    rate = jobs[0].source_settings["learning_rate"]
    assert jobs[0].settings["learning_rate"] / rate in [pytest.approx(x) for x in FACTORS]
    assert schedule.members[0].settings == jobs[0].settings
    assert schedule.members[0].slices[-1].source == first[2].entry


def test_nobody_is_selected_before_all_have_a_score(tmp_path: Path) -> None:
    """A member that is faster than the others goes on by itself."""
    schedule = new_schedule(tmp_path)
    schedule.begin(1)
    finish(schedule, 0, -5.0)
    assert [finish(schedule, k, 9.0).source for k in (2, 3, 4, 5)] == [""] * 4
    assert finish(schedule, 0, -5.0).source == ""
    schedule.finish(1, result(EVERY, 1.0))
    assert finish(schedule, 0, -5.0).source != ""


def test_members_compare_with_the_newest_scores_of_the_others(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    play(schedule, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    finish(schedule, 3, 50.0)
    job = schedule.begin(0)
    assert (job.source, job.source_score) == (schedule.members[3].slices[1].entry, 50.0)


@pytest.mark.parametrize("how", [{"waits": True}, {"pbt_rule": "generation"}], ids=str)
def test_members_that_wait_see_the_scores_of_one_slice(how: dict[str, Any], tmp_path: Path) -> None:
    """Whoever is first: the decisions are the same, from the same entries."""
    decided = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        schedule = new_schedule(tmp_path, **how)
        for k in order:
            finish(schedule, k, float(k))
        assert schedule.next_member() == order[0]
        jobs = {k: finish(schedule, k, 100.0 - k) for k in order}
        decided.append([(jobs[k].source[-3:], jobs[k].settings) for k in range(6)])
    assert decided[0] == decided[1]
    assert any(source for source, _ in decided[0])


def test_no_member_is_a_slice_ahead_where_all_wait(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, waits=True)
    for k in range(6):
        schedule.begin(k)
    for k in (5, 3, 1, 0, 2):
        schedule.finish(k, result(EVERY, 1.0))
        assert schedule.next_member() is None
    # who is lost is not waited for
    for _ in range(MAX_ATTEMPTS):
        schedule.die(4, "killed", 0)
    assert schedule.next_member() == 5


def test_who_diverges_twice_in_its_last_slice_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    """It then has more slices than those that are finished, and goes on from their newest."""
    schedule = new_schedule(tmp_path, waits=True)
    for _ in range(2):
        play(schedule, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    failed = {"code": 4, "error": "NaN", "entered": False}
    for k in range(5):
        finish(schedule, k, float(k))
    for _ in range(3):
        assert schedule.next_member() == 5
        finish(schedule, 5, None, **failed)
    assert schedule.next_member() == 5
    job = finish(schedule, 5, 7.0)
    assert job.source == schedule.members[4].slices[2].entry
    assert schedule.is_done


def test_a_tournament_draws_better_entries(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, is_tournament=True)
    play(schedule, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    good = Entry("other-3", 60.0, 100, {"learning_rate": 0.5, "unknown": 1.0})
    bad = Entry("other-4", 0.5, 100, {})
    job = schedule.begin(0, [good])
    assert (job.source, job.source_score, job.entry) == ("other-3", 60.0, f"{schedule.run}-0")
    # within the ranges of this population
    assert job.source_settings["learning_rate"] == 0.01
    assert {*job.settings} == {*schedule.options.spans}
    assert schedule.begin(1, [bad]).source == ""
    assert schedule.begin(2, []).source == ""


# ---- what fails ----


def test_a_slice_whose_process_died_is_trained_again_as_it_was(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    play(schedule, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    job = schedule.begin(0)
    assert job.source
    finish(schedule, 1, 90.0)
    schedule.die(0, "killed", EVERY)
    # first in the queue, from the same source
    assert schedule.next_member() == 0
    assert schedule.begin(0) == job
    assert job.source in schedule.needed_entries()
    for _ in range(MAX_ATTEMPTS - 1):
        assert not schedule.members[0].lost
        schedule.die(0, "killed", EVERY)
        if not schedule.members[0].lost:
            schedule.begin(0)
    assert schedule.members[0].lost == "killed (5 attempts in a row)"
    assert schedule.live == [1, 2, 3, 4, 5]
    assert schedule.next_member() != 0


def test_who_comes_further_between_deaths_is_not_lost(tmp_path: Path) -> None:
    """A process that is taken away often, each time after a checkpoint."""
    schedule = new_schedule(tmp_path)
    for steps in range(1, 4 * MAX_ATTEMPTS):
        schedule.begin(0)
        if steps % 2:
            schedule.die(0, "preempted", steps)
        else:
            schedule.finish(0, result(steps, None, code=3, error="preempted", entered=False))
        assert (schedule.members[0].attempts, schedule.members[0].lost) == (1, "")
    # without another checkpoint each counts
    for _ in range(MAX_ATTEMPTS - 1):
        schedule.begin(0)
        schedule.die(0, "killed", steps)
    assert schedule.members[0].lost == "killed (5 attempts in a row)"


def test_a_slice_that_did_not_begin_is_no_attempt(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    for _ in range(2 * MAX_ATTEMPTS):
        job = schedule.begin(0)
        schedule.give_back(0)
        assert schedule.next_member() == 0
        assert schedule.begin(0) == job
        schedule.give_back(0)
    assert schedule.members[0].attempts == 0


def test_a_member_that_diverged_is_replaced(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    play(schedule, [9.0, 2.0, 3.0, 4.0, 5.0])  # of the first five
    failed = {"code": 4, "error": "NaN", "entered": False}
    finish(schedule, 5, None, **failed)
    assert math.isnan(schedule.members[5].slices[0].score)
    # not before the others: they may have no score yet
    assert schedule.next_member() == 0
    job = schedule.begin(5)
    assert job.source_score == 9.0
    # in the last slice, too: it is not finished by it
    schedule.finish(5, result(2 * EVERY, 9.5))
    finish(schedule, 5, None, **failed)
    assert not schedule.is_finished(5)
    assert schedule.begin(5).until == 3 * EVERY


def test_without_a_finite_return_it_is_as_one_that_diverged(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    finish(schedule, 0, None)
    assert math.isnan(schedule.members[0].score)
    assert schedule.members[0].attempts == 0


def test_a_run_that_cannot_be_read_goes_on_from_its_entry(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path)
    first = play(schedule, [1.0, 9.0, 3.0, 4.0, 5.0, 6.0])
    cut = {"code": 5, "error": "no checkpoint to load", "unreadable": True, "entered": False}
    job = schedule.begin(1)
    schedule.finish(1, result(0, None, **cut))
    job = schedule.begin(schedule.next_member() or -1)
    assert (job.member, job.folder, job.source) == (1, "member_001-2", first[1].entry)
    # its steps count on
    assert (job.begin, job.until, job.total) == (0, EVERY, 2 * EVERY)
    schedule.finish(1, result(EVERY, 8.0, took_over=True))
    assert schedule.members[1].slices[-1].steps == 2 * EVERY
    # what did not enter the board in its newest slice goes on from the best of the others
    finish(schedule, 4, 80.0, entered=False)
    schedule.begin(4)
    schedule.finish(4, result(0, None, **cut))
    job = schedule.begin(4)
    assert (job.source, job.source_score) == (schedule.members[1].slices[-1].entry, 8.0)
    assert job.source in schedule.needed_entries()
    # before its first slice it begins anew
    schedule = new_schedule(tmp_path)
    schedule.begin(0)
    schedule.finish(0, result(0, None, **cut))
    job = schedule.begin(0)
    assert (job.folder, job.source, job.until) == ("member_000-2", "", EVERY)


def test_in_a_tournament_it_goes_on_from_the_leaderboard(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, is_tournament=True)
    play(schedule, [1.0, 9.0, 3.0, 4.0, 5.0, 6.0])
    cut = {"code": 5, "error": "cut off", "unreadable": True, "entered": False}
    entries = [Entry("best-1", 99.0, 1, {}), Entry(f"{schedule.run}-0", 1.0, 1, {})]
    for expected, listed in ((entries[1].name, entries), ("best-1", entries[:1])):
        schedule.begin(0, [])
        schedule.finish(0, result(0, None, **cut))
        assert schedule.begin(0, listed).source == expected
        schedule.finish(0, result(EVERY, 2.0))


# ---- the board ----


@pytest.mark.parametrize("waits", [False, True])
def test_an_entry_stays_as_long_as_somebody_may_need_it(waits: bool, tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, waits=waits)
    gone: set[str] = set()
    while not schedule.is_done:
        k = schedule.next_member()
        assert k is not None
        job = schedule.begin(k)
        assert job.source not in gone
        assert job.source in schedule.needed_entries() or not job.source
        schedule.finish(k, result(job.until, float(hash((k, job.number)) % 7)))
        gone |= schedule.entries() - schedule.needed_entries()
        assert len(schedule.needed_entries()) <= 2 * 6
    assert len(gone) == 12


# ---- the file ----


def test_a_saved_schedule_goes_on_the_same(tmp_path: Path) -> None:
    one = new_schedule(tmp_path, explore=RATE)
    play(one, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    finish(one, 1, None)
    running = one.begin(0)
    text = json.dumps(one.to_dict(), allow_nan=False)
    other = new_schedule(tmp_path, explore=RATE)
    other.load_dict(json.loads(text))
    assert other.to_dict() == json.loads(text)
    assert other.next_member() == 0  # the others have done as many, or more
    assert other.begin(0) == running
    one.finish(0, result(2 * EVERY, 7.0))
    other.finish(0, result(2 * EVERY, 7.0))
    assert one.begin(2) == other.begin(2)


SPOILED: dict[str, Any] = {
    "format": lambda saved: saved.update(format=2),
    "run is a path": lambda saved: saved.update(run="../../elsewhere"),
    "run is a number": lambda saved: saved.update(run=3),
    "members": lambda saved: saved.update(members=[]),
    "no list": lambda saved: saved.update(members=3),
    "nothing": lambda saved: saved.clear(),
    "too few": lambda saved: saved["members"].pop(),
    "steps": lambda saved: saved["members"][0].update(steps=-1),
    "lost": lambda saved: saved["members"][0].update(lost=["x"]),
    "new": lambda saved: saved["members"][0].update(is_new="x"),
    "settings": lambda saved: saved["members"][0].update(settings={"learning_rate": "x"}),
    "other settings": lambda saved: saved["members"][0].update(settings={"gamma": 0.9}),
    "slices": lambda saved: saved["members"][0].update(slices=[3]),
}
for key, value in (
    ("folder", "/tmp/elsewhere"),
    ("entry", "../../elsewhere"),
    ("source", "../../elsewhere"),
    ("source", None),
    ("source_score", math.nan),
    ("source_score", "x"),
    ("source_settings", {"seed": 1.0}),
    ("settings", {"learning_rate": 1e-3, "seed": 1.0}),
    ("member", 1),
    ("number", "x"),
    ("seed", 1.5),
):
    SPOILED[f"job {key} {value}"] = lambda saved, key=key, value=value: saved["members"][0][
        "job"
    ].update({key: value})
for key, value in (
    ("entry", "../../elsewhere"),
    ("source", "/tmp/elsewhere"),
    ("entry", 0),
    ("settings", {}),
    ("score", math.inf),
    ("score", "1"),
):
    SPOILED[f"slice {key} {value}"] = lambda saved, key=key, value=value: saved["members"][0][
        "slices"
    ][0].update({key: value})


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_no_schedule(spoil: Any, tmp_path: Path) -> None:
    """What another program has written leads to no file outside of the folder."""
    schedule = new_schedule(tmp_path, explore=RATE)
    play(schedule, [1.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    assert schedule.begin(0).source
    saved = json.loads(json.dumps(schedule.to_dict()))
    new_schedule(tmp_path, explore=RATE).load_dict(saved)
    spoil(saved)
    with pytest.raises(CheckpointError, match="it is no schedule"):
        new_schedule(tmp_path, explore=RATE).load_dict(saved)


def test_a_population_of_one_selects_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="population is 1: --population 6"):
        new_schedule(tmp_path, population=1, pbt=False, pbt_every=None)
    with pytest.raises(UsageError, match="by their evaluations, but eval_episodes is 0"):
        new_schedule(tmp_path, eval_episodes=0)
