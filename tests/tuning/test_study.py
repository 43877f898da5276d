"""The storage of a tuning: both kinds, what is refused, what a killed process leaves in it, and
that what is sampled depends on a trial's number and results alone.
"""

import json
import pickle
import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="gpurl tune needs Optuna: pip install -e '.[tune]'")

import optuna

from gpurl.errors import UsageError
from gpurl.run.settings import Settings
from gpurl.tuning import study as module
from gpurl.tuning.space import Dimension, Space
from gpurl.tuning.study import Tuning, begin_or_continue, best_params, load_tuning
from tests.tuning.small_tunings import RATE, WIDE, small_settings

BOTH = pytest.mark.parametrize("ending", ["journal", "db"])


def opened(path: Path, space: Space = WIDE, prune: bool = True, **changes: Any) -> Tuning:
    return begin_or_continue(path, small_settings(path.parent, **changes), space, prune, 10)


def value_of(trial: Any) -> float:
    """A return that one of the two settings decides."""
    return -abs(trial.params["gamma"] - 0.93) + 1e-3 * trial.params["learning_rate"]


# ---- trials ----


@BOTH
def test_trials_are_kept_with_what_became_of_them(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"own.{ending}"
    tuning = opened(path)
    trials = [tuning.ask(WIDE, "tpe", 0) for _ in range(4)]
    trials[0].report(5.0, 1)
    trials[0].report(9.0, 2)
    trials[1].report(2.0, 1)
    trials[0].set_user_attr("run", "trial_0000")
    tuning.finish(trials[0], 7.0)
    tuning.prune(trials[1], "worse")
    tuning.fail(trials[2], "it fell\x1b[2J")
    for each in (tuning, opened(path), load_tuning(path)):
        rows = {row.number: row for row in each.rows()}
        assert [rows[k].state for k in range(4)] == ["finished", "pruned", "failed", "unfinished"]
        assert [rows[k].value for k in range(4)] == [7.0, 2.0, None, None]
        assert [rows[k].best for k in range(4)] == [9.0, 2.0, None, None]
        assert rows[0].run == "trial_0000"
        assert (rows[1].reason, rows[2].reason) == ("worse", "it fell\x1b[2J")
        assert rows[0].params == trials[0].params
        assert each.num_trials() == 4
    (left,) = opened(path).left_behind(WIDE)
    assert left.number == 3
    assert left.params == trials[3].params


def test_the_best_come_first_and_of_equals_the_earliest(tmp_path: Path) -> None:
    tuning = opened(tmp_path / "own.journal")
    assert best_params(tuning.rows()) is None
    for value in (-3.0, 2.0, None, 2.0, -1.0):
        trial = tuning.ask(WIDE, "random", 0)
        tuning.fail(trial, "") if value is None else tuning.finish(trial, value)
    assert [row.number for row in tuning.rows()] == [1, 3, 4, 0, 2]
    best = best_params(tuning.rows())
    assert best is not None
    assert best.number == 1


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_tuning_that_is_opened_anew_samples_the_same(sampler: str, tmp_path: Path) -> None:
    """So that one that was killed ends as one that was not."""
    params: dict[str, list[Any]] = {}
    for name, breaks in (("whole", ()), ("broken", (3, 11, 12))):
        path = tmp_path / f"{name}.journal"
        tuning = opened(path)
        for number in range(14):
            if number in breaks:
                tuning = opened(path)
            trial = tuning.ask(WIDE, sampler, 5)
            params.setdefault(name, []).append(trial.params)
            tuning.finish(trial, value_of(trial))
    assert params["whole"] == params["broken"]
    assert len({each["gamma"] for each in params["whole"]}) == 14
    other = opened(tmp_path / "other.journal").ask(WIDE, sampler, 6)
    assert other.params != params["whole"][0]


def test_the_sampler_learns_what_is_good(tmp_path: Path) -> None:
    tuning = opened(tmp_path / "own.journal")
    errors = []
    for _ in range(40):
        trial = tuning.ask(WIDE, "tpe", 0)
        tuning.finish(trial, value_of(trial))
        errors.append(abs(trial.params["gamma"] - 0.93))
    assert sum(errors[-10:]) < 0.5 * sum(errors[:10])  # the first ten are drawn at random


def test_a_trial_that_kills_its_tuning_each_time_fails(tmp_path: Path) -> None:
    path = tmp_path / "own.journal"
    trial = opened(path).ask(WIDE, "tpe", 0)
    for _ in range(module.MAX_ATTEMPTS):
        tuning = opened(path)
        (trial,) = tuning.left_behind(WIDE)
        tuning.note_attempt(trial)
    assert not opened(path).left_behind(WIDE)
    (row,) = opened(path).rows()
    assert (row.state, row.reason) == ("failed", "its tuning was killed 3 times")


def test_a_trial_without_all_of_its_settings_fails(tmp_path: Path) -> None:
    tuning = opened(tmp_path / "own.journal")
    tuning.study.ask({"gamma": WIDE["gamma"].distribution()})
    assert not tuning.left_behind(WIDE)
    assert [row.state for row in tuning.rows()] == ["failed"]


def test_what_is_worse_than_the_median_is_pruned_after_a_warm_up(tmp_path: Path) -> None:
    for prune in (True, False):
        tuning = opened(tmp_path / f"{prune}.journal", prune=prune)
        for level in range(module.STARTUP_TRIALS):
            trial = tuning.ask(WIDE, "random", 0)
            for step in range(1, 11):
                trial.report(10.0 * level + step, step)
                assert not trial.should_prune()  # too few to compare with
            tuning.finish(trial, 10.0 * level + 10)
        bad = tuning.ask(WIDE, "random", 0)
        ends = []
        for step in range(1, 11):
            bad.report(10.0 + step, step)  # the median is 20 + step
            ends.append(bad.should_prune())
        assert ends == [False] * 2 + [prune] * 8  # 3 of 10 evaluations come first
        good = tuning.ask(WIDE, "random", 0)
        good.report(31.0, 5)
        assert not good.should_prune()


# ---- importances ----


def test_importances_find_the_setting_that_decides(tmp_path: Path) -> None:
    tuning = opened(tmp_path / "own.journal")
    rng = random.Random(0)
    distributions = {name: each.distribution() for name, each in WIDE.items()}
    for number in range(50):
        params = {"learning_rate": 10 ** rng.uniform(-4, -2), "gamma": rng.uniform(0.9, 0.99)}
        done = optuna.create_trial(params=params, distributions=distributions, value=0.0)
        done.value = value_of(done)
        tuning.study.add_trial(done)
        assert (tuning.importances() == {}) == (number < 7)
    found = tuning.importances()
    assert list(found) == ["gamma", "learning_rate"]
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["gamma"] > 0.7
    assert found == load_tuning(tmp_path / "own.journal").importances()


def test_importances_of_equal_returns_and_of_one_choice(tmp_path: Path) -> None:
    space = WIDE | {"epochs": Dimension("epochs", choices=(3,))}
    tuning = opened(tmp_path / "own.journal", space)
    for _ in range(9):
        tuning.finish(tuning.ask(space, "random", 0), 1.0)
    assert tuning.importances() == {}
    for value in range(3):
        tuning.finish(tuning.ask(space, "random", 0), float(value))
    assert set(tuning.importances()) <= set(space)


# ---- what is refused ----


@BOTH
def test_the_tuning_of_something_else(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"own.{ending}"
    opened(path)
    settings = small_settings(tmp_path)
    other = replace(settings, env="acrobot")

    def refusal(settings: Settings, space: Space = WIDE) -> str:
        with pytest.raises(UsageError) as caught:
            begin_or_continue(path, settings, space, True, 10)
        return str(caught.value)

    assert "is a tuning of ppo on pendulum, not of ppo on acrobot" in refusal(other)
    longer = refusal(small_settings(tmp_path, iterations=3))
    assert "has total_steps 256, now it is 384: trials could not be compared" in longer
    assert "searches learning_rate" in refusal(settings, {"gamma": WIDE["gamma"]})
    # of both, what the space follows from
    both = refusal(small_settings(tmp_path, iterations=3), {"gamma": WIDE["gamma"]})
    assert "has total_steps 256" in both
    narrow = WIDE | {"gamma": Dimension("gamma", 0.5, 0.6)}
    assert "searches gamma {'low': 0.9, 'high': 0.99}, now it is {'low': 0.5" in refusal(
        settings, narrow
    )
    assert "searches gae_lambda not at all, now" in refusal(
        settings, WIDE | {"gae_lambda": Dimension("gae_lambda", 0.9, 1.0)}
    )
    # what changes no return may change, and what is sampled
    begin_or_continue(
        path,
        small_settings(tmp_path / "x", quiet=False, threads=2, log_every=1.0, gamma=0.5),
        WIDE,
        False,
        10,
    )


@BOTH
@pytest.mark.parametrize("content", [b"garbage\nmore\n", b"{}\n{}\n", b"\x00" * 100, b"[" * 9999])
def test_an_unreadable_storage(ending: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"own.{ending}"
    path.write_bytes(content)
    for open_ in (opened, load_tuning):
        with pytest.raises(UsageError, match=f"own.{ending}"):
            open_(path)
    assert path.read_bytes() == content


@BOTH
def test_a_storage_that_is_too_large(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"own.{ending}"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    for open_ in (opened, load_tuning):
        with pytest.raises(UsageError, match="has 268435457 bytes, more than 268435456"):
            open_(path)


def test_places_that_are_no_storage(tmp_path: Path) -> None:
    (tmp_path / "folder.journal").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "other.db")
    (tmp_path / "other.db").write_bytes(b"")
    (tmp_path / "mine.jsonl").write_bytes(b'{"a": 1}\n{"b": 2}')
    with pytest.raises(UsageError, match="is no journal of Optuna"):
        opened(tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_bytes() == b'{"a": 1}\n{"b": 2}'
    for name in ("folder.journal", "link.db"):
        with pytest.raises(UsageError, match=f"cannot read .*{name}"):
            opened(tmp_path / name)
    with pytest.raises(UsageError, match=r"its ending must be \.journal, \.jsonl, \.log"):
        opened(tmp_path / "own.txt")
    with pytest.raises(UsageError, match="there is no storage"):
        load_tuning(tmp_path / "none.journal")
    assert not (tmp_path / "none.journal").exists()


def test_a_data_base_of_something_else_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "music.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    before = path.read_bytes()
    for open_ in (opened, load_tuning):
        with pytest.raises(UsageError, match=r"cannot read .*music.db.*no such table: studies"):
            open_(path)
    assert path.read_bytes() == before


@BOTH
def test_the_studies_of_another_program(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"theirs.{ending}"
    optuna.create_study(storage=module._backend(path), study_name="theirs")
    with pytest.raises(UsageError, match="holds no tuning of gpurl, but the study 'theirs'"):
        opened(path)
    with pytest.raises(UsageError, match="holds no tuning of gpurl"):
        load_tuning(path)


# ---- what a killed process leaves ----


def test_half_a_line_at_the_end_of_a_journal_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "own.journal"
    tuning = opened(path)
    tuning.finish(tuning.ask(WIDE, "tpe", 0), 3.0)
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for end in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        load_tuning(path)
        again = opened(path)
        assert path.read_bytes() == whole[:last]
        again.ask(WIDE, "tpe", 0)
        assert opened(path).num_trials() == 2
    path.write_bytes(whole[:5])  # of the first line
    assert opened(path).num_trials() == 0


def test_a_storage_without_a_description_gets_one(tmp_path: Path) -> None:
    """A process killed between the two."""
    path = tmp_path / "own.journal"
    optuna.create_study(storage=module._backend(path), study_name=module.STUDY)
    opened(path)
    settings = replace(small_settings(tmp_path), env="acrobot")
    with pytest.raises(UsageError, match="is a tuning of ppo on pendulum"):
        begin_or_continue(path, settings, WIDE, True, 10)


# ---- what a hostile one may hold ----


class Alarm:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@BOTH
def test_pickles_in_a_storage_are_not_opened(ending: str, tmp_path: Path) -> None:
    """Where Optuna's CMA-ES keeps the pickle of its optimizer, and in all other texts."""
    path, alarm = tmp_path / f"own.{ending}", tmp_path / "alarm"
    tuning = opened(path)
    live = pickle.dumps(Alarm(alarm)).hex()
    for name in ("cma:optimizer", "sampler"):
        tuning.study._storage.set_study_system_attr(tuning.study._study_id, name, live)
        tuning.study.set_user_attr(name, live)
    for _ in range(2):
        trial = tuning.ask(WIDE, "tpe", 0)
        for name in ("cma:optimizer:0", "run", "reason"):
            tuning.study._storage.set_trial_system_attr(trial._trial_id, name, live)
            trial.set_user_attr(name, live)
        tuning.finish(trial, 1.0)
    left = tuning.ask(WIDE, "tpe", 0)
    left.set_user_attr("attempts", live)
    again = opened(path)
    again.left_behind(WIDE)
    again.ask(WIDE, "tpe", 0).should_prune()
    again.rows()
    load_tuning(path).importances()
    assert not alarm.exists()
    pickle.loads(bytes.fromhex(live))
    assert alarm.exists()


def test_a_description_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "own.journal"
    opened(path).study.set_user_attr("about", [1, 2])
    with pytest.raises(UsageError, match="cannot read"):
        opened(path)


def test_a_journal_is_json(tmp_path: Path) -> None:
    path = tmp_path / "own.journal"
    tuning = opened(path, RATE)
    tuning.finish(tuning.ask(RATE, "tpe", 0), 3.0)
    for line in path.read_text().splitlines():
        json.loads(line)
