"""Checkpoints survive kills, full disks, damage and malice, and give back every bit."""

import errno
import hashlib
import json
import math
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from gpurl import checkpoint, state_files
from gpurl.checkpoint import best_checkpoint, latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError


def verify_checkpoint(path: Path) -> str | None:
    """Why the checkpoint cannot be loaded; None if it can."""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return None


def small_parts(step: int = 0) -> dict:
    return {"model": {"weight": torch.full((3, 5), float(step)), "step": step}, "optim": {"m": [torch.arange(4), (1, math.inf)]}}


def random_tensor(rng: random.Random) -> Tensor:
    """Random bits of a random type and shape: NaN payloads, subnormals, sometimes empty or 0-d."""
    dtype = rng.choice(sorted(state_files.DTYPES, key=str))
    shape = [rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randrange(4))]
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
    return torch.frombuffer(bytearray(rng.randbytes(count * dtype.itemsize) or b"\0" * 8), dtype=dtype)[:count].reshape(shape)


def random_state(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(6 if depth < 5 else 3)
    if kind < 2:
        return random_tensor(rng)
    if kind == 2:
        big, nan = rng.getrandbits(rng.choice([8, 63, 64, 20000])), struct.unpack(">d", bytes.fromhex("7ff8") + rng.randbytes(6))[0]
        real = struct.unpack(">d", rng.randbytes(8))[0]
        return rng.choice([None, True, False, big, -big, nan, math.inf, -math.inf, -0.0, real, "", "ä\ud800\0", "!int"])
    items = [random_state(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 3:
        return items if rng.random() < 0.5 else tuple(items)
    names = ["a", "a.b", "a/b", "a~1b", "0", "", "!int", "!!", "!tensor", "__metadata__", "ü\n", "~__metadata__"]
    return dict(zip(rng.sample(names, len(items)), items))


def assert_same(got: object, wanted: object) -> None:
    """Same types, same order, same bits."""
    assert type(got) is type(wanted)
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert bytes(got.flatten().view(torch.uint8).tolist()) == bytes(wanted.flatten().view(torch.uint8).tolist())
    elif isinstance(wanted, float):
        assert struct.pack(">d", got) == struct.pack(">d", wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        assert_same(list(got.values()), list(wanted.values()))
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted):
            assert_same(one, other)
    else:
        assert got == wanted


def sign(folder: Path, **changes: object) -> None:
    """Gives a tampered checkpoint the manifest that an attacker would write: all sums right."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    names = [file.name for file in folder.iterdir() if file.name != "manifest.json"]
    content = {name: (folder / name).read_bytes() for name in names}
    manifest["files"] = {name: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in content.items()}
    raw = json.dumps({**manifest, **changes, "sha256": "0" * 64}).encode()
    (folder / "manifest.json").write_bytes(raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode()))


def step_of(folder: Path) -> int:
    """The step that a load gives, its tensors checked; a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts, manifest = load_checkpoint(folder)
    assert_same(parts, small_parts(manifest["step"]))
    return manifest["step"]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# ---- what is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_random_states_come_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    parts = {name: {str(index): random_state(rng) for index in range(8)} for name in ("model", "optim", "state", "manifest")}
    parts["empty"] = {}
    path = save_checkpoint(tmp_path, seed, parts)
    loaded, manifest = load_checkpoint(path)
    assert_same(dict(sorted(loaded.items())), dict(sorted(parts.items())))
    assert (manifest["step"], manifest["format_version"]) == (seed, 1)


def test_every_dtype_is_tried() -> None:
    rng = random.Random(0)
    seen = [random_tensor(rng) for _ in range(500)]
    assert {tensor.dtype for tensor in seen} == state_files.DTYPES
    assert {0, 1} <= {tensor.numel() for tensor in seen}
    assert 0 in {tensor.dim() for tensor in seen}


def test_views_and_shared_storage_come_back_as_independent_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"base": base, "t": base.t(), "cut": base[1:3, ::2], "row": base[2], "again": base, "wide": torch.ones(1).expand(5)}
    state["weight"] = torch.nn.Parameter(base)
    state["__metadata__"] = torch.ones(2)  # a name that safetensors keeps for itself
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"model": OrderedDict(state)}))[0]["model"]
    assert type(loaded) is dict
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
        assert not loaded[name].requires_grad
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(state)


def test_names_that_look_alike_when_joined_stay_apart(tmp_path: Path) -> None:
    names = ["a/b", "a~1b", "a.b", "a~0b", "~__metadata__", "__metadata__"]
    state = {"a": {"b": torch.tensor(-1.0)}, **{name: torch.tensor(float(index)) for index, name in enumerate(names)}}
    assert_same(load_checkpoint(save_checkpoint(tmp_path, 1, {"model": state}))[0]["model"], state)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(100_000)}})
    weight = load_checkpoint(path)[0]["model"]["w"]
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert bool((weight == 1).all())


def test_loads_to_the_device_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, small_parts())
    assert load_checkpoint(tmp_path, "meta")[0]["model"]["weight"].device.type == "meta"
    with pytest.raises(RuntimeError):  # torch's own error: the checkpoint is not to blame
        load_checkpoint(tmp_path, "nonsense")


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = save_checkpoint(tmp_path, 1, small_parts())
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "builtins.object"),
        (torch.Size([1]), "Size"),
        (torch.zeros(1).numpy()[0], "numpy.float32"),
        ({1: 2}, "got 1"),
        ({"\ud800": 1}, "UTF-8"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (LOOP, "deep"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, value: object, message: str) -> None:
    save_checkpoint(tmp_path, 1, small_parts(1))
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 2, {"model": {"bad_one": value}})
    with pytest.raises(CheckpointError, match="bad_one"):
        save_checkpoint(tmp_path, 2, {"model": {"bad_one": value}})
    assert entries(tmp_path) == ["LATEST", "step_000000000001"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a.b", "ä", "-x", "x" * 65])
def test_part_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="parts named"):
        save_checkpoint(tmp_path, 1, {name: {}})


def test_state_json_of_insane_size_is_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"text": "x" * 3000}})
    monkeypatch.setattr(state_files, "MAX_JSON_BYTES", 2000)
    with pytest.raises(CheckpointError, match="more than 2000"):
        save_checkpoint(tmp_path, 2, {"model": {"text": "x" * 3000}})
    with pytest.raises(CheckpointError, match="more than 2000"):
        load_checkpoint(path)


# ---- keep, best, latest -----------------------------------------------------------------------------------------------


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is best_checkpoint(tmp_path) is None
    for step in range(1, 8):
        save_checkpoint(tmp_path, step * 10, small_parts(step * 10), keep=2, is_best=step in (1, 3))
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [30, 60, 70]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000000000070"
    best = best_checkpoint(tmp_path)
    assert best == tmp_path / "step_000000000030"
    assert step_of(best) == 30


def test_going_back_to_an_older_step_does_not_prune_what_was_just_saved(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, small_parts(step), keep=2)
    save_checkpoint(tmp_path, 15, small_parts(15), keep=2)
    assert step_of(tmp_path) == 15
    assert len(list_checkpoints(tmp_path)) == 3


def test_run_folder_works_and_saving_beside_it_prunes_nothing_inside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "checkpoints", step, small_parts(step))
    assert step_of(tmp_path) == 3
    assert latest_checkpoint(tmp_path) == list_checkpoints(tmp_path)[-1] == tmp_path / "checkpoints" / "step_000000000003"
    save_checkpoint(tmp_path, 4, small_parts(4), keep=1)
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 3


def test_same_step_again_keeps_an_intact_checkpoint_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 5, small_parts(5))
    save_checkpoint(tmp_path, 9, small_parts(9))
    save_checkpoint(tmp_path, 5, small_parts(777), is_best=True)
    assert step_of(tmp_path) == step_of(path) == 5
    assert best_checkpoint(tmp_path) == path
    (path / "model.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, 5, small_parts(5))
    assert step_of(tmp_path) == 5
    assert entries(tmp_path) == ["BEST", "LATEST", "step_000000000005", "step_000000000009"]


def test_pruned_or_damaged_best(tmp_path: Path) -> None:
    best = save_checkpoint(tmp_path, 1, small_parts(1), is_best=True)
    (best / "model.safetensors").unlink()
    save_checkpoint(tmp_path, 2, small_parts(2), keep=1)
    assert best_checkpoint(tmp_path) == best
    with pytest.raises(CheckpointError, match=r"step_000000000001: .*model\.safetensors"):
        load_checkpoint(best)
    best.rename(tmp_path / "elsewhere")
    assert best_checkpoint(tmp_path) is None
    for garbage in (b"", b"../../etc", b"\xff\xfe", b"step_000000000002/../step_000000000002", b"step_000000000002" * 9):
        (tmp_path / "BEST").write_bytes(garbage)
        assert best_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, 3, small_parts(3), is_best=True)
    assert best_checkpoint(tmp_path) == tmp_path / "step_000000000003"


def test_temporaries_of_dead_runs_go_and_a_live_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / ".tmp-dead" / "model.safetensors").write_bytes(b"x")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(checkpoint, "LOCK_SECONDS", 0.1)
    with FileLock(tmp_path / ".lock"), pytest.raises(CheckpointError, match="lock"):
        save_checkpoint(tmp_path, 1, small_parts(1))
    assert entries(tmp_path) == [".tmp-dead", ".tmp-link"]
    save_checkpoint(tmp_path, 1, small_parts(1))
    assert entries(tmp_path) == ["LATEST", "step_000000000001"]


# ---- damage -----------------------------------------------------------------------------------------------------------


def assert_detected(path: Path) -> None:
    assert verify_checkpoint(path) is not None
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_every_flip_truncation_addition_and_loss_is_detected(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        where = range(len(good)) if file.name == "manifest.json" else rng.sample(range(len(good)), 80)
        flipped = [good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :] for at in where]
        truncated = [good[: rng.randrange(len(good))] for _ in range(20)]
        for bad in [*flipped, *truncated, b"", good + b"\n"]:
            file.write_bytes(bad)
            assert_detected(path)
        file.unlink()
        assert_detected(path)
        file.write_bytes(good)
        assert verify_checkpoint(path) is None
    (path / "extra.txt").write_text("x")
    assert_detected(path)


def test_damaged_latest_falls_back_to_the_newest_intact_with_a_warning(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, small_parts(step))
    (tmp_path / "step_000000000003" / "optim.safetensors").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"step_000000000003: optim\.safetensors has 1 bytes"):
        assert load_checkpoint(tmp_path)[1]["step"] == 2
    (tmp_path / "step_000000000002" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step_000000000002.*manifest"):
        assert_same(load_checkpoint(tmp_path)[0], small_parts(1))
    with pytest.raises(CheckpointError, match=r"step_000000000002: .*manifest\.json"):  # named outright: no way back
        load_checkpoint(tmp_path / "step_000000000002")
    (tmp_path / "step_000000000001" / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"(?s)step_000000000003.*step_000000000002.*step_000000000001"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("garbage", [None, b"", b"\xff\0", b"step_000000000099\n", b"../step_000000000001\n", b"x" * 100_000])
def test_garbage_in_latest_falls_back_with_a_warning(tmp_path: Path, garbage: bytes | None) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, small_parts(step))
    (tmp_path / "LATEST").unlink()
    if garbage is not None:
        (tmp_path / "LATEST").write_bytes(garbage)
    with pytest.warns(UserWarning, match="LATEST in .* names no checkpoint"):
        assert load_checkpoint(tmp_path)[1]["step"] == 2


def test_a_renamed_checkpoint_loads_by_its_new_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1)).rename(tmp_path / "the_good_one")
    assert step_of(path) == 1
    sign(path, step="1")
    with pytest.raises(CheckpointError, match=r"the_good_one: manifest\.json is of step '1'"):
        load_checkpoint(path)


def test_nothing_to_load_says_where_it_looked(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "step_000000000001"):
        with pytest.raises(CheckpointError, match=str(path)):
            load_checkpoint(path)


def test_newer_format_is_refused_by_name_and_never_skipped_or_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, small_parts(1))
    path = save_checkpoint(tmp_path, 2, small_parts(2))
    sign(path, format_version=2)
    for call in (lambda: load_checkpoint(path), lambda: load_checkpoint(tmp_path), lambda: save_checkpoint(tmp_path, 2, small_parts(2))):
        with pytest.raises(CheckpointError, match="format 2 is newer than 1"):
            call()
    assert "format 2 is newer" in str(verify_checkpoint(path))
    assert json.loads((path / "manifest.json").read_bytes())["format_version"] == 2


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0])
def test_format_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    sign(path, format_version=version)
    assert_detected(path)


# ---- malice: all sums are right ---------------------------------------------------------------------------------------

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
                bad[rng.randrange(min(len(bad), 160))] = rng.choice([rng.randrange(256), *b'019-[]{}",:'])
            file.write_bytes(bad[: rng.randrange(len(bad))] if trial % 4 == 0 else bad)
            sign(path)
            try:
                load_checkpoint(path)
            except CheckpointError:
                refused += 1
        file.write_bytes(good)
    assert refused > 200


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/hostname", "sub/x.safetensors", "..", "", "x.pt", ".safetensors", "a\0b.safetensors"]
)
def test_manifest_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    (tmp_path / "evil.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    sign(path, files={**files, name: files["model.safetensors"]})
    with pytest.raises(CheckpointError, match="no file of a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize("files", [None, [], 5, {"state.json": 1}, {"state.json": {}}, {"state.json": {"size": "x", "sha256": 1}}, {}])
def test_manifest_of_wrong_types_is_refused(tmp_path: Path, files: object) -> None:
    path = save_checkpoint(tmp_path, 1, small_parts(1))
    sign(path, files=files)
    assert_detected(path)
    sign(path, step="1")
    assert_detected(path)
    sign(path, step=2)
    assert_detected(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
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
    with pytest.warns(UserWarning, match="LATEST"):
        load_checkpoint(tmp_path)


class Bomb:
    """Unpickling this creates the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.canary),))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", "../LATEST"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
@pytest.mark.filterwarnings("ignore:loaded")
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


# ---- full disks -------------------------------------------------------------------------------------------------------


def test_a_disk_that_refuses_at_any_moment_costs_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, messages, done = os.fsync, [], False
    while not done:
        folder = tmp_path / str(len(messages))
        save_checkpoint(folder, 1, small_parts(1))
        left = [len(messages)]  # calls that still work

        def fsync(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            save_checkpoint(folder, 2, small_parts(2))
            done = True
        except CheckpointError as error:
            messages.append(str(error))
        monkeypatch.setattr(os, "fsync", real)
        assert step_of(folder / "step_000000000001") == 1
        assert step_of(folder) == (1 if len(messages) < 8 and not done else 2)
        assert not [name for name in entries(folder) if name.startswith(".tmp")]
        save_checkpoint(folder, 2, small_parts(2))
        assert step_of(folder) == 2
    assert len(messages) == 8  # three files, manifest, their folder, its parent, LATEST's text, and LATEST's folder once more
    for message in messages:
        assert re.search(r"step_000000000002: .*No space left.*[0-9]+ bytes free", message)


HEADER = """
import os, random, resource, shutil, signal, sys, time, warnings
from pathlib import Path
import torch
from gpurl.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
warnings.simplefilter("error")
torch.set_num_threads(1)
folder = Path(sys.argv[1])
def parts(step):
    return {"model": {"w": torch.full((1 << 17,), float(step))}, "rng": {"step": step, "text": "x" * 10_000}}
def load():
    got, manifest = load_checkpoint(folder)
    assert bool((got["model"]["w"] == manifest["step"]).all()) and got["rng"]["step"] == manifest["step"]
    return manifest["step"]
def damaged():
    found = []
    for path in list_checkpoints(folder):
        try:
            load_checkpoint(path)
        except CheckpointError as error:
            found.append(str(error))
    return found
"""


def run_script(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", HEADER + script, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_file_size_limit_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    """EFBIG comes through safetensors for the large file, through Python for the small ones; SIGXFSZ must not kill."""
    out = run_script(
        """
save_checkpoint(folder, 1, parts(1))
before = sorted(os.listdir(folder))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step, limit in enumerate((100_000, 11_000, 5000, 3, 0), 2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        save_checkpoint(folder, step, parts(step))
        sys.exit("saved beyond the limit")
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(message)
    assert f"step_{step:012d}" in message and "bytes free" in message, message
    assert sorted(os.listdir(folder)) == before, os.listdir(folder)
    assert load() == 1
save_checkpoint(folder, 7, parts(7))
assert load() == 7
""",
        tmp_path,
    )
    assert out.count("File too large") == 5


# ---- kills ------------------------------------------------------------------------------------------------------------


def test_forty_kills_leave_no_corrupt_no_missing_and_no_older_checkpoint(tmp_path: Path) -> None:
    """A forked process saves without pause until SIGKILL; what it announced as saved must be there."""
    out = run_script(
        """
rng = random.Random(7)
save_checkpoint(folder, 1, parts(1))
started = time.perf_counter()
for latest in (2, 3, 4):
    save_checkpoint(folder, latest, parts(latest))
seconds, interrupted = (time.perf_counter() - started) / 3, 0
for kill in range(40):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(latest + 1, latest + 1000):
            save_checkpoint(folder, step, parts(step), keep=1 + kill % 2, is_best=step % 5 == 0)
            os.write(writer, step.to_bytes(8, "little"))
    os.close(writer)
    announced = b"".join(os.read(reader, 8) for _ in range(kill % 3))  # a slow machine only makes the test longer
    time.sleep(rng.uniform(0.0, 1.2 * seconds))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with os.fdopen(reader, "rb") as stream:
        announced += stream.read()
    saved = int.from_bytes(announced[-8:], "little") if announced else latest
    interrupted += any(name.startswith(".tmp-") for name in os.listdir(folder))
    now = load()
    assert now >= saved >= latest, (now, saved, latest)
    bad = damaged()
    assert not bad, bad
    latest = now
save_checkpoint(folder, latest + 1, parts(latest + 1))
assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
print(interrupted, latest)
""",
        tmp_path,
    )
    interrupted, latest = map(int, out.split())
    assert interrupted >= 5  # else the kills missed what they were to hit
    assert latest >= 4 + 39  # 0, 1 or 2 whole saves before each kill


@pytest.mark.parametrize("damaged", [0, 1], ids=["new step", "over a damaged one"])
def test_death_at_each_system_call_leaves_the_old_or_the_new(tmp_path: Path, damaged: int) -> None:
    """Random kills seldom hit the moments between two renames: here the process dies before its n-th change of the disk."""
    out = run_script(
        """
CHANGES = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "chmod", "open")
seen = []
for deadline in range(1000):
    shutil.rmtree(folder)
    save_checkpoint(folder, 1, parts(1), keep=2)
    if int(sys.argv[2]):
        shutil.copytree(folder / "step_000000000001", folder / "step_000000000002")
    child = os.fork()
    if child == 0:
        calls = 0
        def dying(function):
            def call(*arguments, **keywords):
                global calls
                calls += 1
                if calls > deadline:
                    os._exit(9)
                return function(*arguments, **keywords)
            return call
        for name in CHANGES:
            setattr(os, name, dying(getattr(os, name)))
        save_checkpoint(folder, 2, parts(2), keep=1, is_best=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen.append(load())
    bad = damaged()
    assert not bad or int(sys.argv[2]), bad
    save_checkpoint(folder, 3, parts(3), keep=1)
    assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
    if code == 0:
        break
    assert code == 9, code
assert seen == sorted(seen), seen
print(seen.count(1), seen.count(2))
""",
        tmp_path,
        damaged,
    )
    before, after = map(int, out.split())
    assert before > 15  # died before LATEST named the new one
    assert after > 5  # died after
