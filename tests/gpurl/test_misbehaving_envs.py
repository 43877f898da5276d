"""Environments that misbehave in a run: what is wrong is named with its place, and nothing of it is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpurl
from gpurl.checkpoint import load_checkpoint
from gpurl.envs.torch_env import State
from gpurl.errors import EnvError, NonFiniteError
from gpurl.kernels.random import CounterRandom
from tests.small_runs import ITERATION, small_run
from tests.tiny_envs import RandomWalk


class BrokenWalk(RandomWalk):
    """A RandomWalk whose fault comes at its 5th step."""

    fault = ""

    def step(self, actions: torch.Tensor) -> Any:
        timestep = super().step(actions)
        self.count = getattr(self, "count", 0) + 1
        if self.count < 5 or self.count > 6:
            return timestep
        if self.fault == "nan reward":
            timestep.reward[3] = float("nan")
        if self.fault in ("nan obs", "inf obs"):
            timestep.obs[3] = float(self.fault[:3])
        changes = {
            "shape": {"obs": timestep.obs[:, :2]},
            "dtype": {"reward": timestep.reward.double()},
            "device": {"terminated": timestep.terminated.to("meta")},
        }
        return timestep._replace(**changes.get(self.fault, {}))  # type: ignore[arg-type]


def train_broken(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **changes: Any) -> gpurl.Run:
    monkeypatch.setattr(BrokenWalk, "fault", fault)
    return small_run(folder, 3, "ppo", "tests.gpurl.test_misbehaving_envs:BrokenWalk", **changes)


class WrongWalk(RandomWalk):
    """A RandomWalk whose transition returns what `wrong` makes of it."""

    wrong: Any = None

    def transition(self, state: State, action: torch.Tensor, rng: CounterRandom) -> tuple[State, torch.Tensor, torch.Tensor]:
        return self.wrong(*super().transition(state, action, rng))


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda self, state, reward, ended: (state, reward.unsqueeze(1), ended), r"reward: wanted .* \(16,\), .* shape \(16, 1\)"),
    (lambda self, state, reward, ended: (state, reward.double(), ended), r"reward: wanted .* got torch.float64"),
    (lambda self, state, reward, ended: (state, reward, ended.float()), r"terminated: wanted .* torch.bool, .* got torch.float32"),
])  # fmt: skip
def test_a_wrong_transition_is_named_with_its_env_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str
) -> None:
    monkeypatch.setattr(WrongWalk, "wrong", wrong)
    name = "tests.gpurl.test_misbehaving_envs:WrongWalk"
    with pytest.raises(EnvError, match=rf"environment '{name}' at env step 0: WrongWalk.transition: {message}"):
        small_run(tmp_path / "run", 3, env=name)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_gradient_that_is_not_finite_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", 1, value_coef=1e38, normalize_value=False, eval_episodes=0)
    assert f"the gradient at step {ITERATION} is not finite" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["nan reward", "nan obs", "inf obs"])
def test_nan_stops_with_env_step_and_index_and_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with pytest.raises(NonFiniteError, match=r"BrokenWalk' gave NaN or infinity .* step [45] of the rollout, environments 3\)"):
        train_broken(tmp_path / "run", monkeypatch, fault)
    parts, _ = load_checkpoint(tmp_path / "run")  # nothing is lost: the state was saved before stopping
    assert all(torch.isfinite(value).all() for value in parts["model"].values())
    run = train_broken(tmp_path / "skip", monkeypatch, fault, nan="skip")
    assert run.outcome.reason == "total_steps"
    assert all(torch.isfinite(value).all() for value in load_checkpoint(run.folder)[0]["model"].values())
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    norms = [record["train/grad_norm"] for record in records if "train/grad_norm" in record]
    assert len(norms) == 3
    assert None not in norms  # each update did learn from the other rows


@pytest.mark.parametrize("fault", ["shape", "dtype", "device"])
def test_a_wrong_shape_dtype_or_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with pytest.raises(EnvError, match=rf"BrokenWalk' at env step {4 * 16}: BrokenWalk.step: "):
        train_broken(tmp_path / "run", monkeypatch, fault)
