"""Environments that misbehave in a run: what is wrong is named with its place, and nothing of it is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpurl
from gpurl.checkpoint import load_checkpoint
from gpurl.cli import main
from gpurl.envs.torch_env import State
from gpurl.errors import EnvError, NonFiniteError
from gpurl.kernels.random import CounterRandom
from tests.small_runs import small_run
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


@pytest.mark.parametrize("fault", ["nan reward", "nan obs", "inf obs"])
def test_nan_stops_with_env_step_and_index_and_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with pytest.raises(NonFiniteError, match=r"BrokenWalk' gave NaN or infinity .* step [45] of the rollout, environments 3\)") as caught:
        train_broken(tmp_path / "run", monkeypatch, fault)
    found = str(caught.value).partition("first in ")[2].partition(" (")[0]
    assert found == "reward" if fault == "nan reward" else "obs" in found
    parts, _ = load_checkpoint(tmp_path / "run")  # nothing is lost: the state was saved before stopping
    assert all(torch.isfinite(value).all() for value in parts["model"].values())
    run = train_broken(tmp_path / "skip", monkeypatch, fault, nan="reset-envs")
    assert run.outcome.reason == "total_steps"
    assert all(torch.isfinite(value).all() for value in load_checkpoint(run.folder)[0]["model"].values())
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    norms = [record["train/grad_norm"] for record in records if "train/grad_norm" in record]
    assert len(norms) == 3
    assert None not in norms  # each update did learn from the other rows


def test_what_led_to_nan_is_dumped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonFiniteError, match="What led there: gpurl doctor ") as caught:
        train_broken(tmp_path / "run", monkeypatch, "nan reward")
    dump = Path(str(caught.value).rpartition("gpurl doctor ")[2])
    columns = load_checkpoint(dump)[0]["dump"]["columns"]
    assert columns["reward"].isnan().tolist() == [False] * 4 + [True, True, False, False]
    assert columns["obs"].shape == (8, 3)
    assert main(["doctor", str(dump)]) == 0
    text = capsys.readouterr().out
    assert "BrokenWalk', number 3: NaN or infinity at step 4 of 8 of the rollout of iteration 1" in text
    assert "first in: reward" in text
    here = text.partition("step 4 <- here\n")[2].partition("step 5")[0]
    assert "reward      nan" in here
    assert "step 3\n" in text
    assert main(["doctor", str(tmp_path / "run")]) == 5
    assert "is a checkpoint of a run, not a dump of NaN" in capsys.readouterr().err


@pytest.mark.parametrize(("nan", "resets"), [("skip", 0), ("reset-envs", 1)])
def test_skip_leaves_environments_alone_and_reset_envs_restarts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nan: str, resets: int
) -> None:
    masks, real = [], BrokenWalk.reset

    def reset(self: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        masks.append((options or {}).get("reset_mask"))
        return real(self, seed=seed, options=options)

    monkeypatch.setattr(BrokenWalk, "reset", reset)
    run = train_broken(tmp_path / "run", monkeypatch, "nan obs", nan=nan, eval_episodes=0)
    assert run.outcome.reason == "total_steps"
    given = [mask.nonzero().flatten().tolist() for mask in masks if mask is not None]
    assert given == [[3]] * resets
    assert caplog.text.count(f"gives NaN or infinity, which --nan {nan} leaves out") == 1
    counts = [json.loads(line)["rollout/non_finite_rows"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()[1:]]
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("fault", ["shape", "dtype", "device"])
def test_a_wrong_shape_dtype_or_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with pytest.raises(EnvError, match=rf"BrokenWalk' at env step {4 * 16}: BrokenWalk.step: "):
        train_broken(tmp_path / "run", monkeypatch, fault)
