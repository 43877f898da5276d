"""`gpurl export` writes a file and its description, both complete and checked, or one sentence."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpurl
from gpurl.api import train
from gpurl.cli.main import main
from gpurl.envs.numpy.spaces import make_encoder
from gpurl.errors import UsageError
from gpurl.export.parity import random_observations
from gpurl.export.run import export_run
from gpurl.nn.acting import Normalize
from tests.export.runs import OWN, make_run
from tests.small_runs import SMALL, small_settings
from tests.tiny_envs import RandomWalk

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ppo on pendulum, with a normaliser."""
    return make_run(tmp_path_factory.mktemp("ppo"), "ppo")


def nothing_left(folder: Path, *but: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(but)


# ---- what is written ----


def test_the_description_says_what_goes_in_and_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "a.onnx")]) == 0
    assert "actions differ by" in capsys.readouterr().out
    assert nothing_left(tmp_path, "a.onnx", "a.onnx.json")
    described = json.loads((tmp_path / "a.onnx.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    assert described.pop("git_commit") == (commit.stdout.strip() or None)
    assert described == {
        "format_version": 2,
        "file": "a.onnx",
        "format": "onnx",
        "inputs": [{"name": "obs", "shape": ["batch", 3], "dtype": "float32"}],
        "outputs": [{"name": "action", "shape": ["batch", 1], "dtype": "float32"}],
        "memory": None,
        "observation_space": {
            "kind": "Box",
            "shape": [3],
            "dtype": "float32",
            "low": [-1.0, -1.0, -8.0],
            "high": [1.0, 1.0, 8.0],
        },
        "action_space": {
            "kind": "Box",
            "shape": [1],
            "dtype": "float32",
            "low": -2.0,
            "high": 2.0,
        },
        "observations_normalized_inside": True,
        "actions_scaled_inside": {
            "clip_low": [-1.0],
            "clip_high": [1.0],
            "half_width": [2.0],
            "center": [0.0],
        },
        "control_step": 0.05,
        "observation_names": ["cos(angle)", "sin(angle)", "angular velocity"],
        "action_names": ["torque"],
        "robot": {},
        "algorithm": "ppo",
        "env": "pendulum",
        "env_options": described["env_options"],
        "steps": 64,
        "gpurl": gpurl.__version__,
        "torch": torch.__version__,
    }
    # the model says the same of itself
    properties = {each.key: each.value for each in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert properties["algorithm"] == "ppo"
    assert json.loads(properties["steps"]) == 64
    assert json.loads(properties["action_space"]) == described["action_space"]
    assert properties.keys() >= described.keys()


def test_the_description_of_a_memory_and_of_no_limits(tmp_path: Path) -> None:
    exported = export_run(make_run(tmp_path / "gru", "ppo_gru"), "torchscript")
    described = json.loads(exported.description.read_text())
    assert exported.file == tmp_path / "gru" / "run" / "policy.torchscript.pt"
    assert [each["name"] for each in described["inputs"]] == ["obs", "memory"]
    assert described["outputs"][1] == {
        "name": "memory_out",
        "shape": ["batch", 6],
        "dtype": "float32",
    }
    assert described["memory"]["initial_value"] == 0.0
    assert "zeros again whenever the episode of that row has ended" in described["memory"]["reset"]
    exported = export_run(make_run(tmp_path / "box", "ppo_half_bounded"), "torchscript")
    described = json.loads(exported.description.read_text())
    assert described["action_space"]["high"] == [[1.0, 5.0], ["inf", "inf"]]
    assert described["actions_scaled_inside"]["center"] == [0.0, 2.5, 0.0, 0.0]


class Robot(RandomWalk):
    """Its simulator knows a robot."""

    control_step = 0.02

    def robot(self) -> dict[str, object]:
        return {"joint_names": ["hip", "knee"], "action_scale": [0.5, 0.25]}


def test_what_a_robots_controller_reads(tmp_path: Path) -> None:
    trained = train("ppo", Robot, run_dir=str(tmp_path / "run"), **small_settings("ppo"))
    exported = export_run(trained.folder)
    described = json.loads(exported.description.read_text())
    assert described["robot"] == {"joint_names": ["hip", "knee"], "action_scale": [0.5, 0.25]}
    assert described["control_step"] == 0.02
    properties = {each.key: each.value for each in onnx.load(exported.file).metadata_props}
    # as mjlab's own files have them
    assert properties["joint_names"] == "hip,knee"
    assert properties["action_scale"] == "0.5,0.25"
    assert json.loads(properties["robot"]) == described["robot"]


def test_images_of_bytes_go_in_as_bytes(tmp_path: Path) -> None:
    exported = export_run(make_run(tmp_path, "ppo_images"), "pt2")
    described = json.loads(exported.description.read_text())
    assert described["inputs"][0] == {"name": "obs", "shape": ["batch", 2, 6, 6], "dtype": "uint8"}


def test_named_observations_are_described_one_by_one(tmp_path: Path) -> None:
    exported = export_run(make_run(tmp_path, "ppo_named"), "pt2")
    described = json.loads(exported.description.read_text())
    assert described["observation_space"] is None
    assert len(described["inputs"]) > 1


def test_a_checkpoint_is_exported_into_its_run(run: Path) -> None:
    (step,) = (run / "checkpoints").glob("step_*")
    assert export_run(step, "torchscript").file == run / "policy.torchscript.pt"
    gpurl.load(run)  # still intact
    with pytest.raises(UsageError, match="is inside a checkpoint"):
        export_run(run, "torchscript", step / "policy.pt")


def test_nested_observations_are_flattened_as_by_gymnasium() -> None:
    """As docs/export.md says."""
    from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, flatten

    space = Dict({"b": Discrete(3, start=1), "a": Box(-1, 1, (2,)), "c": MultiDiscrete([2, 3])})
    samples = [space.sample() for _ in range(4)]
    batch = {name: np.stack([each[name] for each in samples]) for name in space.spaces}
    expected = np.stack([flatten(space, each) for each in samples])
    np.testing.assert_allclose(make_encoder(space).encode(batch), expected)


def test_names_of_groups_are_inputs_of_their_own(tmp_path: Path) -> None:
    settings = {**SMALL, "total_steps": 1}
    train("ppo", f"{OWN}:Colliding", **settings, run_dir=str(tmp_path / "colliding"))
    exported = export_run(tmp_path / "colliding", "onnx")
    session = onnxruntime.InferenceSession(exported.file, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["obs_obs_action", "obs_action"]
    train("ppo", f"{OWN}:Unnamed", **settings, run_dir=str(tmp_path / "unnamed"))
    with pytest.raises(UsageError, match="a group of observations is called ''"):
        export_run(tmp_path / "unnamed", "onnx")
    export_run(tmp_path / "unnamed", "torchscript")


# ---- the check can fail ----


def test_a_file_without_the_normaliser_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gpurl.load(run).module()
    monkeypatch.setattr("gpurl.policy.Policy.module", lambda self: module)
    monkeypatch.setattr(Normalize, "forward", lambda self, x: x)
    with pytest.raises(UsageError, match=r"the exported a\.onnx differs from the policy: by"):
        export_run(run, "onnx", tmp_path / "a.onnx")
    assert nothing_left(tmp_path)


def test_a_file_of_a_fixed_number_of_rows_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace holds the number of its two rows."""
    forward = Normalize.forward

    def fixed(self: Normalize, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x).reshape(len(x), -1) if torch.jit.is_tracing() else forward(self, x)

    monkeypatch.setattr(Normalize, "forward", fixed)
    with pytest.raises(UsageError, match="cannot act at 1 observations, which is exported for any"):
        export_run(run, "torchscript", tmp_path / "a.pt")
    assert nothing_left(tmp_path)


def test_an_act_of_ones_own_is_not_exported_as_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(f"{OWN}:OwnActPPO", "pendulum", **{**SMALL, "total_steps": 1, "run_dir": str(folder)})
    with pytest.raises(UsageError, match="the module of OwnActPPO differs from the policy"):
        gpurl.load(folder).module()


@pytest.mark.parametrize("name", ["ppo", f"{OWN}:OwnActPPO"])
def test_rounding_of_large_observations_is_no_difference(name: str, tmp_path: Path) -> None:
    """But an act that is another one is found there, too."""
    network = {"hidden": [256, 256], "activation": "elu"}
    settings = {**SMALL, "total_steps": 1, "network": network, "normalize_obs": False}
    train(name, f"{OWN}:Wide", **settings, run_dir=str(tmp_path / "run"))
    policy: Any = gpurl.load(tmp_path / "run")
    # large terms that nearly cancel at the first observation of the check
    space = policy.algorithm.observation_space
    first = torch.from_numpy(random_observations(space, None, 1, np.random.default_rng(0)))
    actor = policy.algorithm.network.actor
    with torch.no_grad():
        actor.weight.mul_(1000.0)
        actor.bias.sub_(policy.act(first))
    if name == "ppo":
        policy.module()
    else:
        with pytest.raises(UsageError, match="the module of OwnActPPO differs from the policy"):
            policy.module()


def test_an_algorithm_that_does_not_say_what_acts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(f"{OWN}:Unknown", "pendulum", **{**SMALL, "total_steps": 1, "run_dir": str(folder)})
    with pytest.raises(UsageError, match=r"Unknown cannot be exported, .* define actor_modules"):
        export_run(folder)


def test_the_suffix_decides_where_no_format_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "a.pt2")]) == 0
    torch.export.load(tmp_path / "a.pt2")
    torch.jit.load(export_run(run, out=tmp_path / "a.pt").file)
    capsys.readouterr()
    words = ["--format", "torchscript", "--out", str(tmp_path / "b.onnx")]
    assert main(["export", str(run), *words]) == 2
    message = "b.onnx has the suffix of onnx, the format is torchscript: leave out --format"
    assert message in capsys.readouterr().err
    assert main(["export", str(run), "--format", "onyx"]) == 2
    assert "--format is 'onyx'; did you mean onnx? it must" in capsys.readouterr().err
    assert nothing_left(tmp_path, "a.pt2", "a.pt2.json", "a.pt", "a.pt.json")


# ---- what is refused ----


def test_one_sentence_for_each_mistake(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no format 'onyx'; did you mean onnx"):
        export_run(run, "onyx")
    with pytest.raises(UsageError, match="no checkpoint to load in"):
        export_run(tmp_path)
    with pytest.raises(UsageError, match="is a folder: name a file in it"):
        export_run(run, "onnx", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file"):
        export_run(run, "torchscript", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(UsageError, match=r"there is no folder .*/no; make it, or choose"):
        export_run(run, "torchscript", tmp_path / "no" / "a.pt")
    for name in ("onnx", "onnxscript"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(UsageError, match=rf"needs {name}, .*\[export\]"):
                export_run(run, "onnx", tmp_path / "a.onnx")
    assert nothing_left(tmp_path, "pipe")


def test_without_onnxruntime_the_command_says_that_nothing_was_compared(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(run), "--out", str(tmp_path / "a.onnx")]) == 0
    assert "was not compared" in capsys.readouterr().out


def test_a_full_disk_leaves_the_old_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.pt"
    export_run(run, "torchscript", file)
    before = file.read_bytes()

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpurl.export.run.write_regular", full)
    with pytest.raises(
        UsageError, match=r"No space left on device \(\d+ bytes are needed, .* choose another place"
    ):
        export_run(run, "torchscript", file)
    assert file.read_bytes() == before
    assert nothing_left(tmp_path, "a.pt", "a.pt.json")


# ---- tracing anything else ----


class Wrapped(nn.Module):
    """What somebody would write to trace a policy."""

    def __init__(self, policy: gpurl.Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor) -> Any:
        return self.policy.act(obs)


def test_tracing_act_names_the_module(run: Path) -> None:
    policy, obs = gpurl.load(run), torch.randn(2, 3)
    by_name = r"policy\.module\(\).*gpurl export RUN"
    for trace in (
        lambda: torch.jit.trace(policy.act, obs),
        lambda: torch.jit.trace(policy.value, obs),
        lambda: torch.jit.trace(Wrapped(policy), obs),
        lambda: torch.jit.trace(policy.algorithm, obs),
        lambda: torch.export.export(Wrapped(policy), (obs,)),
        lambda: torch.export.export(Wrapped(policy), (obs,), strict=True),
        lambda: torch.onnx.export(Wrapped(policy), (obs,), dynamo=True, verbose=False),
    ):
        with pytest.raises(Exception) as raised:
            trace()
        texts = list[str]()
        error: BaseException | None = raised.value
        while error is not None:
            texts.append(str(error))
            error = error.__cause__ or error.__context__
        assert re.search(by_name, "\n".join(texts)), texts
    torch.testing.assert_close(torch.jit.trace(policy.module(), obs)(obs), policy.act(obs))
