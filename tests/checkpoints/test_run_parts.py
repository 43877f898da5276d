"""What a run's checkpoint must hold, and that one of another format is refused by name."""

from pathlib import Path

import pytest

from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.checkpoints.run_parts import FORM
from gpurl.errors import CheckpointError
from tests.checkpoints.test_checkpoint_damage import sign
from tests.small_runs import small_run


def test_parts_that_are_no_run_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"meta": {}, "model": {}})
    with pytest.raises(CheckpointError, match="it holds meta, model and is no checkpoint of a run"):
        load_checkpoint(path)


def test_what_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    parts, _ = load_checkpoint(small_run(tmp_path / "run", 1, eval_episodes=0).folder)
    for place, kinds in FORM.items():
        part, _, inner = place.partition(".")
        for name in kinds:
            for change in ("missing", "is a set"):
                state = dict(parts[part][inner] if inner else parts[part])
                if change == "missing":
                    del state[name]
                else:
                    state[name] = (1, 2)
                changed = parts | {part: parts[part] | {inner: state} if inner else state}
                path = save_checkpoint(tmp_path / f"{place}_{name}_{change[:2]}", 1, changed)
                with pytest.raises(CheckpointError):
                    load_checkpoint(path)


def test_an_older_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"own": {}})
    sign(path, format_version=3)
    with pytest.raises(CheckpointError, match="format 3 is older than 4, which this gpurl reads"):
        load_checkpoint(path)
