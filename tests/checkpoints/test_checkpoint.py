"""What a checkpoint saves comes back, of any state in test_properties_states.py; the newest and the
best are kept.
"""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from gpurl.checkpoints import folders as checkpoint
from gpurl.checkpoints import state_files
from gpurl.checkpoints.folders import (
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from gpurl.errors import CheckpointError
from tests.small_checkpoints import assert_same_bits, entries, small_parts, step_of

# ---- what is saved comes back ----


def test_views_and_shared_storage_come_back_as_independent_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base,
        "t": base.t(),
        "cut": base[1:3, ::2],
        "row": base[2],
        "again": base,
        "wide": torch.ones(1).expand(5),
    }
    state["weight"] = torch.nn.Parameter(base)
    state["__metadata__"] = torch.ones(2)  # a name that safetensors keeps for itself
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"model": OrderedDict(state)}))[0][
        "model"
    ]
    assert type(loaded) is dict
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
        assert not loaded[name].requires_grad
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(state)


def test_names_that_look_alike_when_joined_stay_apart(tmp_path: Path) -> None:
    names = ["a/b", "a~1b", "a.b", "a~0b", "~__metadata__", "__metadata__"]
    state = {
        "a": {"b": torch.tensor(-1.0)},
        **{name: torch.tensor(float(index)) for index, name in enumerate(names)},
    }
    assert_same_bits(
        load_checkpoint(save_checkpoint(tmp_path, 1, {"model": state}))[0]["model"], state
    )


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
def test_what_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, value: object, message: str
) -> None:
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


def test_state_json_of_insane_size_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"text": "x" * 3000}})
    monkeypatch.setattr(state_files, "MAX_JSON_BYTES", 2000)
    with pytest.raises(CheckpointError, match="more than 2000"):
        save_checkpoint(tmp_path, 2, {"model": {"text": "x" * 3000}})
    with pytest.raises(CheckpointError, match="more than 2000"):
        load_checkpoint(path)


# ---- keep, best, latest ----


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


def test_what_lies_behind_latest_is_left_for_as_long_as_nobody_comes_there_and_is_loaded_last(
    tmp_path: Path,
) -> None:
    """A training went on from step 30: the later ones are of the one that was left."""
    for step in (30, 40, 50):
        save_checkpoint(tmp_path, step, small_parts(step))
    for step in (32, 34, 36, 38):
        save_checkpoint(tmp_path, step, small_parts(step))
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [34, 36, 38, 40, 50]
    (tmp_path / "step_000000000038" / "manifest.json").unlink()
    assert load_checkpoint(tmp_path, quiet=True)[1]["step"] == 36
    save_checkpoint(tmp_path, 38, small_parts(38))
    save_checkpoint(tmp_path, 42, small_parts(42), keep=2)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [
        38,
        42,
        50,
    ]  # 40 is passed
    for step in (8, 7, 6, 5):
        save_checkpoint(tmp_path, step, small_parts(step), keep=2)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [5, 42, 50]


def test_run_folder_works_and_saving_beside_it_prunes_nothing_inside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "checkpoints", step, small_parts(step))
    assert step_of(tmp_path) == 3
    assert (
        latest_checkpoint(tmp_path)
        == list_checkpoints(tmp_path)[-1]
        == tmp_path / "checkpoints" / "step_000000000003"
    )
    save_checkpoint(tmp_path, 4, small_parts(4), keep=1)
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 3


def test_same_step_again_keeps_ones_own_and_replaces_a_damaged_one_or_anothers(
    tmp_path: Path,
) -> None:
    path = save_checkpoint(tmp_path, 5, small_parts(5))
    save_checkpoint(tmp_path, 9, small_parts(9))
    save_checkpoint(tmp_path, 5, small_parts(777), is_best=True, overwrite=False)
    assert step_of(tmp_path) == step_of(path) == 5
    assert best_checkpoint(tmp_path) == path
    (path / "model.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, 5, small_parts(777), overwrite=False, is_best=True)
    assert load_checkpoint(tmp_path)[0]["model"]["weight"][0, 0] == 777
    save_checkpoint(tmp_path, 5, small_parts(5))
    assert best_checkpoint(tmp_path) is None  # what was best is gone
    save_checkpoint(tmp_path, 5, small_parts(5), is_best=True)
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
    for garbage in (
        b"",
        b"../../etc",
        b"\xff\xfe",
        b"step_000000000002/../step_000000000002",
        b"step_000000000002" * 9,
    ):
        (tmp_path / "BEST").write_bytes(garbage)
        assert best_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, 3, small_parts(3), is_best=True)
    assert best_checkpoint(tmp_path) == tmp_path / "step_000000000003"


def test_temporaries_of_dead_runs_go_and_a_live_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / ".tmp-dead" / "model.safetensors").write_bytes(b"x")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(checkpoint, "LOCK_SECONDS", 0.1)
    with FileLock(tmp_path / ".lock"), pytest.raises(CheckpointError, match="lock"):
        save_checkpoint(tmp_path, 1, small_parts(1))
    assert entries(tmp_path) == [".tmp-dead", ".tmp-link"]
    save_checkpoint(tmp_path, 1, small_parts(1))
    assert entries(tmp_path) == ["LATEST", "step_000000000001"]
