"""Leaderboards on other storage, by fsspec's file systems in memory and on this disk."""

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from gpurl.checkpoints import leaderboard
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.checkpoints.storage import Storage, is_url
from gpurl.errors import CheckpointError, UsageError
from tests.checkpoints.test_leaderboard import entry, parts_of

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = f"{uuid.uuid4().hex}/board" if request.param == "memory" else f"{tmp_path}/far/board"
    yield f"{request.param}://{place}"
    fsspec.filesystem("memory").store.clear()


def files_of(url: str) -> set[str]:
    """Relative to the leaderboard."""
    files, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/") for path in files.find(root)}


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://bucket/board", "file:///tmp/x", "memory://a", "GS://b")))
    assert not any(map(is_url, ("board", "/tmp/x", "../b:c", "s3:/b", "://x", "s3://", "C:\\b")))


def test_two_copies_share_a_leaderboard(url: str, tmp_path: Path) -> None:
    first = Leaderboard(tmp_path / "one", 2, Storage(url))
    assert first.entries() == ()
    assert first.submit(entry("a", 1.0, 5), parts_of(1.0))
    second = Leaderboard.at_url(url, 2)
    assert second.entries() == (entry("a", 1.0, 5),)
    assert second.load(entry("a", 1.0, 5), CPU)["weights"]["w"].tolist() == [1.0] * 3
    # a better one of a name takes the place of its checkpoint, everywhere
    assert second.submit(entry("b", 2.0, 3), parts_of(2.0))
    assert first.submit(entry("a", 9.0, 8), parts_of(9.0))
    assert not first.submit(entry("a", 4.0, 9), parts_of(4.0))
    for board in (first, second):
        assert board.entries() == (entry("a", 9.0, 8), entry("b", 2.0, 3))
        for each in board.entries():
            assert board.load(each, CPU)["weights"]["w"].tolist() == [each.score] * 3
    # what leaves the list leaves the storage and the copies
    assert first.submit(entry("c", 3.0, 1), parts_of(3.0))
    assert [each.name for each in second.entries()] == ["a", "c"]
    second.remove(["a"])
    assert [each.name for each in first.entries()] == ["c"]
    for board in (first, second):
        assert [path.name for path in (board.folder / "entries").iterdir()] == ["c"]
    checkpoint = {"manifest.json", "state.json", "weights.safetensors", "learning.safetensors"}
    expected = {f"entries/c/step_000000000001/{name}" for name in checkpoint}
    assert files_of(url) == {"leaderboard.json", *expected}


def test_a_better_entry_of_the_same_step_keeps_its_files(url: str, tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "one", 2, Storage(url))
    for score in (1.0, 2.0):
        assert board.submit(entry("a", score, 5), parts_of(score))
    other = Leaderboard(tmp_path / "two", 2, Storage(url))
    assert other.entries() == (entry("a", 2.0, 5),)
    assert other.load(entry("a", 2.0, 5), CPU)["weights"]["w"].tolist() == [2.0] * 3


def test_the_storage_has_a_leaderboard_of_its_own(url: str, tmp_path: Path) -> None:
    """Files that were fetched by any other program are a leaderboard, too."""
    board = Leaderboard.at_url(url, 2)
    board.submit(entry("a", 1.0, 5), parts_of(7.0))
    files, root = fsspec.core.url_to_fs(url)
    files.get(root, str(tmp_path / "fetched"), recursive=True)
    fetched = Leaderboard(tmp_path / "fetched", 2)
    assert fetched.load(fetched.entries()[0], CPU)["weights"]["w"].tolist() == [7.0] * 3


def test_a_storage_that_was_emptied_gets_the_copy(url: str, tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "one", 4, Storage(url))
    for name in "ab":
        board.submit(entry(name, 1.0), parts_of(1.0))
    files, root = fsspec.core.url_to_fs(url)
    files.rm(root, recursive=True)
    shutil.rmtree(tmp_path / "one" / "entries" / "b")
    assert [each.name for each in Leaderboard(tmp_path / "one", 4, Storage(url)).entries()] == ["a"]
    other = Leaderboard.at_url(url, 4)
    assert other.load(other.entries()[0], CPU)["weights"]["w"].tolist() == [1.0] * 3


def test_a_copy_ends_with_its_leaderboard(url: str) -> None:
    board = Leaderboard.at_url(url, 2)
    folder = board.folder
    assert folder.is_dir()
    del board
    assert not folder.exists()


def test_entries_that_another_run_replaces_are_left_out(url: str, tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "one", 4, Storage(url))
    for name in "ab":
        board.submit(entry(name, 1.0), parts_of(1.0))
    files, root = fsspec.core.url_to_fs(url)
    files.rm(f"{root}/entries/a", recursive=True)
    assert [each.name for each in Leaderboard.at_url(url, 4).entries()] == ["b"]
    assert [each.name for each in board.entries()] == ["a", "b"]  # it has a copy


@pytest.mark.parametrize(
    "content",
    [
        b"no JSON",
        b"{}",
        json.dumps({"format": 1, "entries": [{"name": "../x"}]}).encode(),
        json.dumps(
            {"format": 1, "entries": [{"name": "../x", "score": 1, "step": 1, "settings": {}}]}
        ).encode(),
    ],
)
def test_what_others_spoil_is_named(content: bytes, url: str, tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "one", 4, Storage(url))
    board.submit(entry("a", 1.0), parts_of(1.0))
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/leaderboard.json", content)
    for call in (board.entries, lambda: board.submit(entry("b", 2.0), parts_of(2.0))):
        with pytest.raises(CheckpointError, match="is no leaderboard"):
            call()
    assert Leaderboard(tmp_path / "one", 4).entries() == (entry("a", 1.0),)  # the copy stays


def test_a_checkpoint_with_foreign_files_or_damage_is_refused(url: str, tmp_path: Path) -> None:
    board = Leaderboard(tmp_path / "one", 4, Storage(url))
    for name in "abc":
        board.submit(entry(name, 1.0), parts_of(1.0))
    files, root = fsspec.core.url_to_fs(url)
    step = "step_000000000000"
    files.pipe_file(f"{root}/entries/a/{step}/.bad", b"")
    files.pipe_file(f"{root}/entries/b/{step}/weights.safetensors", b"cut")
    other = Leaderboard.at_url(url, 4)
    assert [each.name for each in other.entries()] == ["b", "c"]
    with pytest.raises(CheckpointError):
        other.load(entry("b", 1.0), CPU)
    assert load_checkpoint(other.folder / "entries" / "c", quiet=True)[1]["step"] == 0


def test_a_storage_that_fails_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Leaderboard(tmp_path / "one", 4, Storage(url))
    board.submit(entry("a", 1.0), parts_of(1.0))
    kind = type(fsspec.core.url_to_fs(url)[0])

    class Odd(OSError):
        """Made as those of some packages, without a number."""

        def __init__(self, host: str, port: int) -> None:
            super().__init__("no route to host\nand more")

    def fails(*_: Any, **__: Any) -> None:
        raise Odd("host", 1)

    for name in ("cat_file", "pipe_file", "put_file"):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fails)
            with pytest.raises(CheckpointError, match=f"{url}: no route to host"):
                board.submit(entry("b", 2.0), parts_of(2.0))
            if name == "cat_file":
                with pytest.raises(CheckpointError, match="no route to host"):
                    board.entries()
                with pytest.raises(UsageError, match=r"cannot be written: .*no route to host"):
                    Leaderboard.at_url(url, 4)
    # a better one of a name that could not be stored is not taken for the old one
    for name in ("put_file", "pipe_file"):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fails)
            with pytest.raises(CheckpointError):
                board.submit(entry("a", 7.0, 6), parts_of(7.0))
        (listed,) = board.entries()
        assert listed == entry("a", 1.0)
        assert board.load(listed, CPU)["weights"]["w"].tolist() == [1.0] * 3
    # nothing is listed that is not there
    assert [each.name for each in Leaderboard.at_url(url, 4).entries()] == ["a"]
    assert board.submit(entry("b", 2.0), parts_of(2.0))
    assert [each.name for each in Leaderboard.at_url(url, 4).entries()] == ["b", "a"]


def test_other_errors_and_large_lists_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Leaderboard.at_url(url, 4)
    monkeypatch.setattr(leaderboard, "MAX_JSON_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"leaderboard.json has more than 10 bytes"):
        board.entries()
    monkeypatch.undo()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the token has expired")

    monkeypatch.setattr(type(fsspec.core.url_to_fs(url)[0]), "cat_file", fails)
    with pytest.raises(CheckpointError, match=f"{url}: the token has expired"):
        board.submit(entry("a", 1.0), parts_of(1.0))


def test_a_protocol_in_capitals_is_the_same() -> None:
    place = f"{uuid.uuid4().hex}/board"
    assert Leaderboard.at_url(f"MEMORY://{place}", 4).submit(entry("a", 1.0), parts_of(1.0))
    assert [each.name for each in Leaderboard.at_url(f"memory://{place}", 4).entries()] == ["a"]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("nosuch://bucket/board", "no storage at nosuch://bucket/board: Protocol not known"),
        ("simplecache::memory://x", "is a chain of protocols"),
        ("memory://b[1]/board", r"is a pattern, with one of"),
        ("memory://b*", r"is a pattern, with one of"),
        ("sftp://me:secret@host/board", r"^the URL of a storage has a password"),
    ],
)
def test_wrong_urls_are_named(url: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Leaderboard.at_url(url, 4)
