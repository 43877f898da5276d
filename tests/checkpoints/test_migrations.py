"""Checkpoints that older states of this program wrote load, play as they did and go on; what cannot
is refused by name.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.api import evaluate_run, resume, train
from gpurl.checkpoints import migrations
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.checkpoints.state_files import by_own_names
from gpurl.errors import CheckpointError
from gpurl.run.settings import merge
from gpurl.run.trainer import EVAL_SEED
from tests.small_runs import assert_same, exit_code
from tests.small_runs import small_run as new_run

OLD = Path(__file__).resolve().parents[1] / "old_checkpoints"
READ = [
    "foundation_ppo",
    "off_policy_dqn",
]  # written when the foundation and when the replaying algorithms were done


def old_run(name: str, folder: Path) -> Path:
    shutil.copytree(OLD / name, folder / name)
    return folder / name


def format_of(folder: Path) -> int:
    (manifest,) = folder.glob("checkpoints/step_*/manifest.json")
    return json.loads(manifest.read_text())["format_version"]


def shape_of(value: Any) -> Any:
    """The names in a state, and the shapes and kinds of what they name."""
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape_of(item) for item in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__


def test_they_are_of_every_older_format() -> None:
    formats = {format_of(folder) for folder in OLD.iterdir()}
    assert formats == set(migrations.MIGRATIONS)


@pytest.mark.parametrize("name", READ)
def test_an_old_policy_plays_as_it_did_and_its_run_goes_on(name: str, tmp_path: Path) -> None:
    folder = old_run(name, tmp_path)
    before = load_checkpoint(folder)[0]["trainer"]
    values = evaluate_run(folder, 2, "cpu", seed=EVAL_SEED)
    assert values["eval/mean_reward"] == before["evaluation"]["eval/mean_reward"]
    run = resume(folder, total_steps=before["steps"] + 32, quiet=True)
    assert run.outcome.steps == before["steps"] + 32
    parts, manifest = load_checkpoint(folder)
    assert manifest["format_version"] == migrations.FORMAT_VERSION
    assert parts["trainer"]["iteration"] > before["iteration"]


@pytest.mark.parametrize("name", READ)
def test_an_old_checkpoint_takes_the_form_that_is_written_today(name: str, tmp_path: Path) -> None:
    """Whoever changes what is written changes FORMAT_VERSION and tells migrations.py what older
    checkpoints lack.
    """
    old = load_checkpoint(OLD / name)[0]
    settings = merge(
        old["meta"]["settings"],
        {"run_dir": str(tmp_path / "run"), "quiet": True, "eval_every": 10**9},
    )
    new = load_checkpoint(train(settings.pop("algorithm"), settings.pop("env"), **settings).folder)[
        0
    ]
    old["meta"]["settings"] = new["meta"][
        "settings"
    ]  # those that came since stand at their defaults
    old["trainer"]["threads"] = new["trainer"]["threads"]  # a number, or unknown
    assert shape_of(old) == shape_of(new)


def test_the_first_days_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = old_run("first_days_ppo", tmp_path)
    for words in (["eval", str(folder)], ["train", "--resume", str(folder)]):
        assert exit_code(words) == CheckpointError.exit_code
        assert "its networks are those of the first days of 0.1.0" in capsys.readouterr().err


def test_what_skip_did_then_is_called_reset_envs_now() -> None:
    parts, _ = load_checkpoint(OLD / "foundation_ppo")
    meta, spaces = parts["meta"], ("observation_space", "action_space")
    for nan, now in (("stop", "raise"), ("skip", "reset-envs")):
        state = {
            **parts,
            "meta": {name: meta[name] for name in spaces}
            | {"settings": meta["settings"] | {"nan": nan}},
        }
        assert migrations.migrate(state, 1)["meta"]["settings"]["nan"] == now
    late = {
        **parts,
        "meta": meta | {"settings": meta["settings"] | {"nan": "skip"}, "state_space": None},
    }
    assert migrations.migrate(late, 1)["meta"]["settings"]["nan"] == "skip"


def test_a_format_older_than_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurl.checkpoints.folders.OLDEST_FORMAT", 2)
    with pytest.raises(
        CheckpointError, match="format 1 is older than 2, the oldest that this gpurl reads"
    ):
        gpurl.load(OLD / "foundation_ppo")


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_names_of_wrapped_modules_are_their_own(tmp_path: Path, wrapper: str) -> None:
    folder = new_run(tmp_path / "run", 1, eval_episodes=0).folder
    wanted, obs = gpurl.load(folder), torch.ones(2, 3)
    parts, manifest = load_checkpoint(folder)
    for place in ("", "network."):
        changed = {
            name.replace(place, place + wrapper, 1) if place in name else name: value
            for name, value in parts["model"].items()
        }
        assert changed.keys() != parts["model"].keys()
        path = save_checkpoint(
            tmp_path / f"wrapped_{place}", manifest["step"], parts | {"model": changed}
        )
        assert torch.equal(gpurl.load(path).act(obs), wanted.act(obs))
    twice = parts["model"] | {f"{wrapper}{name}": value for name, value in parts["model"].items()}
    path = save_checkpoint(tmp_path / "twice", 1, parts | {"model": twice})
    with pytest.raises(
        CheckpointError, match="twice: once by itself, once inside _orig_mod or module"
    ):
        gpurl.load(path)


class Wrapping(PPO):
    """PPO with layers called as wrappers call theirs."""

    config: PPOConfig

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.module, self._orig_mod = (
            torch.nn.Linear(2, 2),
            torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)}),
        )


def test_a_module_may_be_called_as_a_wrapper_is(tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run", 1, f"{__name__}:Wrapping", eval_episodes=0).folder
    parts, manifest = load_checkpoint(folder)
    own = parts["model"]
    assert {"module.weight", "_orig_mod.module.weight"} <= own.keys()
    assert_same(dict(gpurl.load(folder).algorithm.state_dict()), own)
    assert resume(folder, total_steps=256, eval_episodes=0).outcome.steps == 256
    wrapped = {
        f"module.{name}": value for name, value in own.items() if not name.startswith("module.")
    }
    path = save_checkpoint(
        tmp_path / "wrapped", manifest["step"], parts | {"model": {**own, **wrapped}}
    )
    with pytest.raises(CheckpointError, match="twice"):
        gpurl.load(path)
    assert by_own_names(
        {f"_orig_mod.{name}": name for name in own if "module" not in name}, own, ""
    ) == {name: name for name in own if "module" not in name}


def test_parts_that_are_no_run_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"meta": {}, "model": {}})
    with pytest.raises(CheckpointError, match="it holds meta, model and is no checkpoint of a run"):
        load_checkpoint(path)
