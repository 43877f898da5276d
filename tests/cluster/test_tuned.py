"""What Ray Tune trains, without Ray: a run in slices, saved, and replaced by another one."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurl.api import train
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cluster import ray_tune
from gpurl.cluster.ray_places import check_installed
from gpurl.cluster.ray_tune import SlicedRun, tune_trainable
from gpurl.errors import CheckpointError, DivergedError, UsageError
from gpurl.run.settings import make_settings
from tests.cluster.here import SHORT, SMALL_SAC
from tests.small_runs import ITERATION, SMALL, assert_same, state_of


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.run.records.versions", dict)


def values(algorithm: str = "ppo", **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"total_steps": 3 * ITERATION, "threads": 1, "env_options": SHORT}
    own |= SMALL | {"schedule": "constant"} if algorithm == "ppo" else SMALL_SAC
    return make_settings(algorithm, "pendulum", **(own | changes)).to_dict()


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_slices_are_one_run(algorithm: str, tmp_path: Path) -> None:
    """Saved after the first one and loaded elsewhere: bit for bit the run without a break, with the
    replay buffer.
    """
    first = SlicedRun(tmp_path / "a", values(algorithm), {"gamma": 0.9}, ITERATION)
    one = first.train()
    assert {"steps": one["steps"], "done": one["done"]} == {"steps": ITERATION, "done": False}
    assert math.isfinite(one["return"])
    first.save(tmp_path / "saved")
    other = SlicedRun(tmp_path / "b", values(algorithm), {"gamma": 0.9}, ITERATION)
    other.load(tmp_path / "saved")
    assert [other.train()["done"], other.train()["done"]] == [False, True]
    saved = {} if algorithm == "ppo" else {"save_replay": True}
    alone = train(**(values(algorithm, gamma=0.9) | saved), run_dir=str(tmp_path / "alone"))
    assert_same(state_of(other.place), state_of(alone.folder))


def test_another_trial_is_taken_over_with_new_settings(tmp_path: Path) -> None:
    donor = SlicedRun(tmp_path / "a", values(seed=5), {"gamma": 0.9, "learning_rate": 1e-2}, 128)
    donor.train()
    donor.save(tmp_path / "saved")
    config = {"gamma": 0.95, "learning_rate": 5e-3}
    own = SlicedRun(tmp_path / "b", values(), config, ITERATION)
    own.train()
    before = own.place
    own.load(tmp_path / "saved")
    assert own.place != before
    done = own.train()
    assert done["steps"] == donor.steps + ITERATION
    parts, _ = load_checkpoint(own.place)
    assert config.items() <= parts["meta"]["settings"].items()
    assert parts["meta"]["settings"]["seed"] == 5
    (optimizer,) = parts["training"]["optimizers"].values()
    assert float(optimizer["learning_rate"]) == pytest.approx(5e-3)


def test_a_policy_that_diverges_has_the_worst_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(*words: Any, **options: Any) -> Any:
        raise DivergedError("NaN")

    run = SlicedRun(tmp_path / "a", values(), {}, ITERATION)
    with monkeypatch.context() as patch:
        patch.setattr(ray_tune, "run", diverges)
        for number in (1, 2, 3):
            assert run.train() == {
                "return": -math.inf,
                "steps": number * ITERATION,
                "done": number == 3,
            }
    # there is no checkpoint to save, nor to load: the next slice begins anew
    run = SlicedRun(tmp_path / "b", values(), {}, ITERATION)
    run.save(tmp_path / "nothing")
    run.load(tmp_path / "nothing")
    run.load(tmp_path / "not there")
    assert run.train()["steps"] == ITERATION


def test_a_slice_without_an_evaluation_has_not_the_return_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes no longer end in the second slice."""
    monkeypatch.setattr("gpurl.run.evaluator.MAX_STEPS", 64)
    own = values(total_steps=2 * ITERATION, env_options={}) | {"env": "tests.tiny_envs:Lingering"}
    run = SlicedRun(tmp_path, own, {}, ITERATION)
    assert math.isfinite(run.train()["return"])
    assert run.train() == {"return": -math.inf, "steps": 2 * ITERATION, "done": True}


@pytest.mark.parametrize("slices", [0, 1])
def test_slices_that_diverged_count_after_a_pause(
    slices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers end the process of a trial between slices: it ends as often as it diverges."""

    def diverges(*words: Any, **options: Any) -> Any:
        raise DivergedError("NaN")

    run = SlicedRun(tmp_path / "0", values(), {}, ITERATION)
    for _ in range(slices):
        run.train()
    monkeypatch.setattr(ray_tune, "run", diverges)
    for number in range(slices + 1, 4):
        assert run.train()["done"] == (number == 3)
        run.save(tmp_path / f"saved {number}")
        run = SlicedRun(tmp_path / str(number), values(), {}, ITERATION)
        run.load(tmp_path / f"saved {number}")
        assert run.steps == number * ITERATION


def test_what_is_cut_off_or_no_setting_is_named(tmp_path: Path) -> None:
    run = SlicedRun(tmp_path / "a", values(), {}, ITERATION)
    run.train()
    run.save(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*/*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        run.load(tmp_path / "saved")
    for content in (b"", b"[]", b"{}", b'{"steps": "x"}', b'{"steps": -1}'):
        (tmp_path / "saved" / ray_tune.FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"trial\.json"):
            run.load(tmp_path / "saved")
    with pytest.raises(UsageError, match="learning_rat"):
        SlicedRun(tmp_path / "b", values(), {"learning_rat": 1.0}, ITERATION)


def test_a_folder_of_that_name_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path[:0]])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert importlib.util.find_spec("ray") is not None
    with pytest.raises(UsageError, match=r"need Ray, which is missing: pip install "):
        check_installed()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert importlib.util.find_spec("ray") is None
    with pytest.raises(UsageError, match=r"need Ray, which is missing: pip install .*\[ray\]"):
        tune_trainable("ppo", "pendulum", 100)
