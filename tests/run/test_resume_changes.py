"""A resumed run follows the settings that were changed, or refuses them by name."""

import math
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.api import resume
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
from gpurl.run.callbacks import Callback, RunView
from tests.small_runs import small_settings


class SeesTemperature(Callback):
    """Notes the temperature before the first iteration, and the steps of its optimiser."""

    def on_start(self, run: RunView) -> None:
        temperature: Any = run.algorithm.temperature
        self.value = float(temperature.value().detach())
        optimizer = run.algorithm.optimizers.get("temperature")
        self.steps = None if optimizer is None else int(optimizer.state.step)


def first_run(folder: Path, name: str, env: str, **changes: Any) -> Path:
    shape = {
        "num_envs": 4,
        "horizon": 2,
        "total_steps": 80,
        "eval_episodes": 0,
        "device": "cpu",
        "threads": 1,
        "quiet": True,
        "run_dir": folder,
    }
    return gpurl.train(name, env, **(small_settings(name) | shape | changes)).folder


def resumed(folder: Path, total_steps: int, **changes: Any) -> SeesTemperature:
    seen = SeesTemperature()
    resume(folder, callbacks=[seen], total_steps=total_steps, **changes)
    return seen


@pytest.mark.parametrize(
    ("name", "env"),
    [("sac", "pendulum"), ("mod_sac", "pendulum"), ("discrete_sac", "cart_pole")],
)
def test_a_temperature_is_fixed_changed_and_learned_again(
    name: str, env: str, tmp_path: Path
) -> None:
    folder = first_run(tmp_path / "run", name, env, learning_rate=0.01)
    model = load_checkpoint(folder)[0]["model"]
    learned = float(model["temperature.log"].exp())
    assert learned != 1.0
    # the same settings: it continues
    seen = resumed(folder, 88)
    assert seen.value == pytest.approx(learned, rel=1e-6)
    assert seen.steps
    # learned -> fixed, fixed -> another value
    for total_steps, value in ((96, 0.5), (104, 0.25)):
        seen = resumed(folder, total_steps, temperature=value)
        assert (seen.value, seen.steps) == (pytest.approx(value, rel=1e-6), None)
        parts = load_checkpoint(folder)[0]
        assert float(parts["model"]["temperature.log"]) == pytest.approx(math.log(value))
    # fixed -> learned: from the value that was fixed, with a new optimiser
    seen = resumed(folder, 112, temperature=None)
    assert (seen.value, seen.steps) == (pytest.approx(0.25, rel=1e-6), 0)
    parts = load_checkpoint(folder)[0]
    assert parts["training"]["optimizers"]["temperature"]["step"] > 0
    assert float(parts["model"]["temperature.log"]) != pytest.approx(math.log(0.25), rel=1e-6)


def test_a_lost_optimiser_is_no_change_of_settings(tmp_path: Path) -> None:
    """Only a temperature that was fixed may lack its optimiser."""
    folder = first_run(tmp_path / "run", "sac", "pendulum")
    parts = load_checkpoint(folder)[0]
    del parts["training"]["optimizers"]["temperature"]
    save_checkpoint(folder / "checkpoints", 80, parts, overwrite=True)
    with pytest.raises(CheckpointError, match="has no 'temperature'"):
        resume(folder, total_steps=88)


@pytest.mark.parametrize(
    ("algorithm", "env", "changes"),
    [
        ("sac", "pendulum", {"initial_temperature": 0.5}),
        ("ddpg", "pendulum", {"noise": "ornstein_uhlenbeck"}),
        ("td3", "pendulum", {"noise": "episode"}),
    ],
    ids=str,
)
def test_what_cannot_change_is_refused_by_name(
    algorithm: str, env: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = first_run(tmp_path / "run", algorithm, env)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=rf"has {name} .*, this run {value}; .* keeps it"):
        resume(folder, total_steps=88, **changes)
    assert resume(folder, total_steps=88).outcome.steps == 88
