"""The leaderboard: who enters, who is drawn, and what its folder may hold."""

import json
import math
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.checkpoints.leaderboard import (
    Entry,
    Leaderboard,
    draw_entry,
    entered,
    same_form,
)
from gpurl.errors import CheckpointError, UsageError

CPU = torch.device("cpu")


def entry(name: str, score: float, step: int = 0) -> Entry:
    return Entry(name, score, step, {"gamma": 0.9})


def parts_of(value: float) -> dict[str, Any]:
    return {"weights": {"w": torch.full((3,), value)}, "learning": {"step": 1}}


# ---- the list ----


def test_only_what_is_better_enters() -> None:
    entries: tuple[Entry, ...] = ()
    for name, score in (("a", 3.0), ("b", 5.0), ("c", 4.0)):
        entries = entered(entries, entry(name, score), 3)
    assert [each.name for each in entries] == ["b", "c", "a"]
    # full: the worst one leaves for a better one only, and ties leave what was there
    assert entered(entries, entry("d", 3.0), 3) == entries
    assert [each.name for each in entered(entries, entry("d", 4.0), 3)] == ["b", "c", "d"]
    # of one name only the better one
    assert entered(entries, entry("a", 3.0, step=9), 3) == entries
    assert [(each.name, each.score) for each in entered(entries, entry("a", 9.0), 3)] == [
        ("a", 9.0),
        ("b", 5.0),
        ("c", 4.0),
    ]
    for score in (math.nan, math.inf):
        assert entered(entries, entry("d", score), 3) == entries
    assert entered((), entry("a", -1e9), 1) == (entry("a", -1e9),)


def test_a_leaderboard_holds_the_best_whatever_the_order() -> None:
    numbers = random.Random(0)
    scores = {f"n{i}": float(numbers.sample(range(1000), 1)[0]) + i / 1e4 for i in range(30)}
    for _ in range(10):
        entries: tuple[Entry, ...] = ()
        for name in numbers.sample([*scores], len(scores)):
            entries = entered(entries, entry(name, scores[name]), 7)
        best = sorted(scores, key=lambda name: -scores[name])[:7]
        assert [each.name for each in entries] == best


def test_good_entries_are_drawn_more_often() -> None:
    assert draw_entry((), 0.5) is None
    entries = (entry("a", 3.0), entry("b", 1.0))  # z-scores 1 and -1
    edge = 1 / (1 + math.exp(-2))
    assert [draw_entry(entries, edge + few).name for few in (-1e-9, 1e-9)] == ["a", "b"]  # type: ignore[union-attr]
    equal = tuple(entry(name, 2.0) for name in "abcd")
    drawn = Counter(draw_entry(equal, (i + 0.5) / 40).name for i in range(40))  # type: ignore[union-attr]
    assert drawn == {name: 10 for name in "abcd"}


# ---- the folder ----


def test_entries_are_kept_with_their_checkpoints(tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "new" / "board", 2)
    assert board.entries() == ()
    results = [
        board.submit(entry(name, score, step), parts_of(score))
        for step, (name, score) in enumerate([("a", 1.0), ("b", 2.0), ("c", 0.5), ("d", 3.0)])
    ]
    assert results == [True, True, False, True]
    # another process reads the same
    again = Leaderboard(tmp_path / "new" / "board", 2)
    assert again.entries() == (entry("d", 3.0, 3), entry("b", 2.0, 1))
    for each in again.entries():
        assert again.load(each, CPU)["weights"]["w"].tolist() == [each.score] * 3
    # what left takes no place
    assert sorted(path.name for path in (again.folder / "entries").iterdir()) == ["b", "d"]
    with pytest.raises(CheckpointError):
        again.load(entry("a", 1.0), CPU)
    # a better one of a name replaces its checkpoint
    assert board.submit(entry("b", 9.0, 7), parts_of(9.0))
    assert not board.submit(entry("b", 8.0, 8), parts_of(8.0))
    assert again.load(again.entries()[0], CPU)["weights"]["w"].tolist() == [9.0] * 3


def test_writers_do_not_lose_entries_of_each_other(tmp_path: Path) -> None:
    boards = [Leaderboard(tmp_path, 20) for _ in range(4)]

    def submit(number: int) -> None:
        for step in range(3):
            name = f"run{number}-{step}"
            boards[number].submit(entry(name, number + step / 10), parts_of(1.0))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {each.name for each in boards[0].entries()}
    assert names == {f"run{number}-{step}" for number in range(4) for step in range(3)}


GOOD = {"name": "a", "score": 1.0, "step": 3, "settings": {"gamma": 0.9}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "entries": []}',
        '{"format": 1, "entries": {}, "more": 1}',
        '{"format": 1, "entries": 5}',
        *(
            json.dumps({"format": 1, "entries": [GOOD | change]})
            for change in (
                {"name": "../../etc"},
                {"score": 10**400},
                {"name": ""},
                {"name": "a" * 65},
                {"name": 5},
                {"score": math.nan},
                {"score": "1"},
                {"score": True},
                {"step": -1},
                {"step": 1.5},
                {"settings": {"gamma": math.inf}},
                {"settings": {"gamma": "x"}},
                {"settings": []},
                {"more": 1},
            )
        ),
        json.dumps({"format": 1, "entries": [GOOD, GOOD]}),
        json.dumps({"format": 1, "entries": [{"name": "a"}]}),
        "[" * 100_000,
    ],
    ids=lambda content: content[:60],
)
def test_what_is_no_leaderboard_is_named(tmp_path: Path, content: str) -> None:
    board = Leaderboard(tmp_path, 2)
    (tmp_path / "leaderboard.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"leaderboard\.json is no leaderboard: "):
        board.entries()
    with pytest.raises(CheckpointError, match="is no leaderboard"):
        board.submit(entry("b", 2.0), parts_of(1.0))
    assert (tmp_path / "leaderboard.json").read_text() == content


def test_a_good_list_is_read(tmp_path: Path) -> None:
    board = Leaderboard(tmp_path, 2)
    (tmp_path / "leaderboard.json").write_text(json.dumps({"format": 1, "entries": [GOOD]}))
    assert board.entries() == (Entry("a", 1.0, 3, {"gamma": 0.9}),)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    places = [tmp_path / "file", tmp_path / "file" / "board", tmp_path / "link"]
    if os.getuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        places.append(tmp_path / "closed")
    for place in places:
        with pytest.raises(UsageError, match=r"the leaderboard .* cannot be written: .*; choose"):
            Leaderboard(place, 4)


def test_forms_are_compared() -> None:
    state = {"a": torch.zeros(2), "b": {"c": 1, "d": None}}
    assert same_form(state, {"a": torch.ones(2), "b": {"c": 7, "d": None}})
    for other in (
        {"a": torch.zeros(3), "b": state["b"]},
        {"a": torch.zeros(2).double(), "b": state["b"]},
        {"a": torch.zeros(2), "b": {"c": 1.0, "d": None}},
        {"a": torch.zeros(2), "b": {"c": 1}},
        {"a": torch.zeros(2), "b": torch.zeros(1)},
        {"a": 1, "b": state["b"]},
        [],
    ):
        assert not same_form(state, other)
