"""Damaged checkpoints are seen and named, those with right sums and bad intent too; nothing of them
is executed.
"""

import hashlib
import json
import logging
import os
import pickle
import random
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
from tests.small_checkpoints import assert_same_bits, small_parts, step_of, verify_checkpoint


def sign(folder: Path, **changes: object) -> None:
    """Gives a tampered checkpoint the manifest that an attacker would write: all sums right."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    names = [file.name for file in folder.iterdir() if file.name != "manifest.json"]
    content = {name: (folder / name).read_bytes() for name in names}
    manifest["files"] = {
        name: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in content.items()
    }
    raw = json.dumps({**manifest, **changes, "sha256": "0" * 64}).encode()
    (folder / "manifest.json").write_bytes(
        raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode())
    )


# ---- damage ----


def test_a_thousand_flips_and_a_hundred_truncations_are_all_detected(tmp_path: Path) -> None:
    """Named outright the checkpoint is refused, and by its folder the one before is loaded with a
    warning: never anything else.
    """
    rng = random.Random(3)
    save_checkpoint(tmp_path, 1, small_parts(1))
    path = save_checkpoint(tmp_path, 2, small_parts(2))
    content = {file: file.read_bytes() for file in sorted(path.iterdir())}
    seen = dict.fromkeys(content, 0)
    for number in range(1100):
        file = rng.choice(list(content))
        good, at = content[file], rng.randrange(len(content[file]))
        file.write_bytes(
            good[:at]
            if number < 100
            else good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
        )
        with patch.object(logging.getLogger("gpurl"), "warning") as warning:
            parts, manifest = load_checkpoint(tmp_path)
        assert manifest["step"] == 1
        assert "step_000000000002" in warning.call_args.args[-1]
        with pytest.raises(CheckpointError, match="step_000000000002"):
            load_checkpoint(path)
        if not seen[file]:
            assert_same_bits(parts, small_parts(1))
        seen[file] += 1
        file.write_bytes(good)
    assert len(seen) == 4
    assert min(seen.values()) > 200
    assert step_of(tmp_path) == 2


def test_an_empty_longer_lost_or_additional_file_is_detected(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for bad in (b"", good + b"\n"):
            file.write_bytes(bad)
            assert verify_checkpoint(path)
        file.unlink()
        assert verify_checkpoint(path)
        file.write_bytes(good)
        assert verify_checkpoint(path) is None
    (path / "extra.txt").write_text("x")
    assert verify_checkpoint(path)


def test_damaged_latest_falls_back_to_the_newest_intact_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, small_parts(step))
    (tmp_path / "step_000000000003" / "optim.safetensors").write_bytes(b"x")
    assert load_checkpoint(tmp_path, quiet=True)[1]["step"] == 2
    assert not caplog.messages
    assert load_checkpoint(tmp_path)[1]["step"] == 2
    (message,) = caplog.messages
    assert "loaded" in message
    assert "step_000000000002 instead" in message
    assert "step_000000000003: optim.safetensors has 1 bytes" in message
    (tmp_path / "step_000000000002" / "manifest.json").unlink()
    assert_same_bits(load_checkpoint(tmp_path)[0], small_parts(1))
    assert re.search("step_000000000002.*manifest", caplog.messages[1])
    with pytest.raises(
        CheckpointError, match=r"step_000000000002: .*manifest\.json"
    ):  # named outright: no way back
        load_checkpoint(tmp_path / "step_000000000002")
    (tmp_path / "step_000000000001" / "state.json").write_bytes(b"{}")
    with pytest.raises(
        CheckpointError, match=r"(?s)step_000000000003.*step_000000000002.*step_000000000001"
    ):
        load_checkpoint(tmp_path)


def test_a_damaged_best_falls_back_to_latest_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, 1, small_parts(1))
    assert load_checkpoint(tmp_path, best=True)[1]["step"] == 1  # there is none
    save_checkpoint(tmp_path, 2, small_parts(2), is_best=True)
    for step in (3, 4):
        save_checkpoint(tmp_path, step, small_parts(step), keep=9)
    save_checkpoint(tmp_path, 3, small_parts(3), keep=9)  # LATEST is not the newest
    assert [load_checkpoint(tmp_path, best=best)[1]["step"] for best in (True, False)] == [2, 3]
    assert not caplog.messages
    (tmp_path / "step_000000000002" / "model.safetensors").write_bytes(b"x")
    assert load_checkpoint(tmp_path, best=True)[1]["step"] == 3
    (message,) = caplog.messages
    assert re.search(
        "loaded .*step_000000000003 instead: .*step_000000000002: model.safetensors has 1 bytes",
        message,
    )


def test_a_folder_of_runs_names_the_one_that_saved_last(tmp_path: Path) -> None:
    """`gpurl eval runs` in place of `gpurl eval runs/NAME`."""
    with pytest.raises(CheckpointError, match=r"or in its checkpoints/$"):
        load_checkpoint(tmp_path)
    for name, saved_at in (("a", 30), ("b", 50), ("c", 40)):
        folder = tmp_path / name / "checkpoints"
        save_checkpoint(folder, 1, small_parts(1))
        os.utime(folder, (saved_at, saved_at))
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)  # begun, nothing saved
    with pytest.raises(CheckpointError, match=f"holds runs, of which {tmp_path / 'b'} saved last"):
        load_checkpoint(tmp_path)
    # a run that is removed meanwhile costs the hint only
    with (
        patch.object(Path, "glob", side_effect=FileNotFoundError),
        pytest.raises(CheckpointError, match=r"or in its checkpoints/$"),
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "garbage",
    [None, b"", b"\xff\0", b"step_000000000099\n", b"../step_000000000001\n", b"x" * 100_000],
)
def test_garbage_in_latest_falls_back_with_a_warning(
    tmp_path: Path, garbage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, small_parts(step))
    (tmp_path / "LATEST").unlink()
    if garbage is not None:
        (tmp_path / "LATEST").write_bytes(garbage)
    assert load_checkpoint(tmp_path)[1]["step"] == 2
    assert re.search("LATEST in .* names no checkpoint", caplog.text)


def test_a_renamed_checkpoint_loads_by_its_new_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1)).rename(tmp_path / "the_good_one")
    assert step_of(path) == 1
    sign(path, step="1")
    with pytest.raises(CheckpointError, match=r"the_good_one: manifest\.json is of step '1'"):
        load_checkpoint(path)


def test_nothing_to_load_says_where_it_looked(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(b"of another program")
    (tmp_path / "damaged" / "checkpoints" / "step_000000000001").mkdir(parents=True)
    # only a folder without any checkpoint is wrong use
    for path, code in (
        (tmp_path, 2),
        (tmp_path / "absent", 5),
        (tmp_path / "step_000000000001", 5),
        (tmp_path / "file.pt", 5),
        (tmp_path / "damaged", 5),
    ):
        with pytest.raises(CheckpointError, match=str(path)) as error:
            load_checkpoint(path)
        assert error.value.exit_code == code


def test_newer_format_is_refused_by_name_and_never_skipped_or_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, small_parts(1))
    path = save_checkpoint(tmp_path, 2, small_parts(2))
    sign(path, format_version=5)
    for call in (
        lambda: load_checkpoint(path),
        lambda: load_checkpoint(tmp_path),
        lambda: save_checkpoint(tmp_path, 2, small_parts(2)),
    ):
        with pytest.raises(CheckpointError, match="format 5 is newer than 4"):
            call()
    assert "format 5 is newer" in str(verify_checkpoint(path))
    assert json.loads((path / "manifest.json").read_bytes())["format_version"] == 5


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0])
def test_format_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    sign(path, format_version=version)
    assert verify_checkpoint(path)


# ---- malice: all sums are right ----

HOSTILE_STATES = [
    b"[" * 200_000,
    b'{"model": {"a": {"!tensor": "weight"}, "b": ' + b"[" * 70 + b"]" * 70 + b"}}",
    b'{"model": {"a": ' + b"1" * 5000 + b"}}",
    b"\xff",
    b"[]",
    b"{}",
    b'{"model": 5}',
    b'{"model": {"!tensor": "weight"}}',
    b'{"model": {}}',
    b'{"model": {"a": {"!tensor": "absent"}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!tensor": "weight"}}}',
    b'{"model": {"a": {"!tensor": ["weight"]}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!int": "z"}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!int": 5}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!float": "00"}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!tuple": {}}}}',
    b'{"model": {"a": {"!tensor": "weight"}, "b": {"!eval": "1"}}}',
    b'{"model": {"a": {"!tensor": "weight", "b": 1}}}',
    b'{"model": {"a": {"!tensor": "weight"}}, "../model": {}}',
]


@pytest.mark.parametrize("content", HOSTILE_STATES, ids=range(len(HOSTILE_STATES)))
def test_hostile_state_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"weight": torch.ones(2)}})
    (path / "state.json").write_bytes(content)
    sign(path)
    with pytest.raises(CheckpointError, match="step_000000000001: "):
        load_checkpoint(path)


def test_json_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    (path / "manifest.json").write_bytes(b"[]")
    assert "manifest.json holds a list, wanted an object" in str(verify_checkpoint(path))


def test_hostile_bytes_with_right_sums_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    rng = random.Random(5)
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    refused = 0
    for file in (path / "model.safetensors", path / "optim.safetensors", path / "state.json"):
        good = file.read_bytes()
        for trial in range(120):
            bad = bytearray(good)
            for _ in range(rng.choice([1, 1, 4])):
                bad[rng.randrange(min(len(bad), 160))] = rng.choice(
                    [rng.randrange(256), *b'019-[]{}",:']
                )
            file.write_bytes(bad[: rng.randrange(len(bad))] if trial % 4 == 0 else bad)
            sign(path)
            try:
                load_checkpoint(path)
            except CheckpointError:
                refused += 1
        file.write_bytes(good)
    assert refused > 200


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "/etc/hostname",
        "sub/x.safetensors",
        "..",
        "",
        "x.pt",
        ".safetensors",
        "a\0b.safetensors",
    ],
)
def test_manifest_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    (tmp_path / "evil.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    sign(path, files={**files, name: files["model.safetensors"]})
    with pytest.raises(CheckpointError, match="no file of a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        5,
        {"state.json": 1},
        {"state.json": {}},
        {"state.json": {"size": "x", "sha256": 1}},
        {},
    ],
)
def test_manifest_of_wrong_types_is_refused(tmp_path: Path, files: object) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    sign(path, files=files)
    assert verify_checkpoint(path)
    sign(path, step="1")
    assert verify_checkpoint(path)
    sign(path, step=2)
    assert verify_checkpoint(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    for name in ("model.safetensors", "state.json", "manifest.json"):
        good = (path / name).read_bytes()
        (path / name).unlink()
        if kind == "link":
            (tmp_path / "outside").write_bytes(good)
            (path / name).symlink_to(tmp_path / "outside")
        elif kind == "pipe":
            os.mkfifo(path / name)  # reading it would hang
        else:
            (path / name).mkdir()
        assert "not a regular file" in str(verify_checkpoint(path))
        if kind == "folder":
            (path / name).rmdir()
        else:
            (path / name).unlink()
        (path / name).write_bytes(good)
    (tmp_path / "LATEST").unlink()
    os.mkfifo(tmp_path / "LATEST")
    load_checkpoint(tmp_path)
    assert "LATEST" in caplog.text


class Bomb:
    """Unpickling this creates the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.canary),))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", "../LATEST"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_in_any_place_is_not_executed(tmp_path: Path, name: str, write: object) -> None:
    canary = tmp_path / "canary"
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    with (path / name).open("wb") as stream:
        write({"a": Bomb(canary)}, stream)
    if name in ("model.safetensors", "state.json"):
        sign(path)
    if name != "../LATEST":
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path)
    else:
        load_checkpoint(tmp_path)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()  # the bomb was live
