"""Trunks of one's own: trained, resumed, on the command line, and what is wrong with them named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpurl
from gpurl.api import resume
from gpurl.errors import UsageError
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.run.test_given import Pictures
from tests.small_runs import ITERATION, exit_code, small_run

CNN, RESIDUAL = f"{__name__}:SmallCnn", f"{__name__}:ResidualTrunk"


class SmallCnn(nn.Module):
    """A convolution over pictures [B, 4, 4, 3]."""

    def __init__(self, shape: tuple[int, ...], channels: int = 4) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(shape[2], channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.permute(0, 3, 1, 2) / 255.0).relu().flatten(1)


class ResidualTrunk(nn.Module):
    """A layer and a residual block."""

    def __init__(self, shape: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(shape[0], width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return h + self.block(h).tanh()


class WrongRows(nn.Module):
    """Gives features of no batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Unregistered(nn.Module):
    """Keeps its layer in a list, where torch does not find it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = [nn.Linear(shape[0], 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@pytest.mark.parametrize("shared", [False, True])
def test_a_residual_trunk_is_trained_and_resumed(tmp_path: Path, shared: bool) -> None:
    network = {"trunk": RESIDUAL, "options": {"width": 8}, "shared": shared}
    run = small_run(tmp_path / "run", 2, network=network)
    algorithm = run.policy().algorithm
    assert len(algorithm.network.trunks) == 2 - shared
    assert algorithm.network.trunks[0].block.weight.shape == (8, 8)
    fresh = make_trainer(
        make_settings("ppo", "pendulum", num_envs=8, minibatches=1, device="cpu", network=network),
        torch.device("cpu"),
    )
    before = fresh.algorithm.network.trunks[0].block.weight  # of the same seed
    assert not torch.equal(before, algorithm.network.trunks[0].block.weight)
    assert "it does not know the network OwnTrunks" in fresh.engine.notes[0]
    assert resume(run.folder, total_steps=3 * ITERATION).outcome.steps == 3 * ITERATION
    assert gpurl.load(run.folder).act(torch.zeros(2, 3)).shape == (2, 1)


def test_a_convolution_reads_pictures(tmp_path: Path) -> None:
    env = f"{Pictures.__module__}:Pictures"
    run = small_run(tmp_path / "run", 2, "ppo", env, network={"trunk": CNN}, eval_episodes=0)
    weight = gpurl.load(run.folder).algorithm.network.trunks[0].convolution.weight
    assert weight.shape == (4, 3, 3, 3)


def test_the_command_line_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("network:\n  options: {width: 8}\n")
    words = ["num_envs=4", "horizon=8", "minibatches=1", "total_steps=32", "device=cpu"]
    words += ["eval_episodes=0", f"run_dir={tmp_path / 'run'}", "quiet=true"]
    words += ["--network", RESIDUAL, "--network.options", "width", "8"]
    assert exit_code(["train", "ppo", "pendulum", *words]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "width: 8" in config
    assert f"trunk: {RESIDUAL}" in config
    again = ["--config", str(tmp_path / "run" / "config.yaml"), f"run_dir={tmp_path / 'again'}"]
    assert exit_code(["train", "ppo", "pendulum", *again]) == 0


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            {"trunk": f"{__name__}:WrongRows"},
            r"wanted features \[2, F\] of 2 observations, got \(\)",
        ),
        ({"trunk": RESIDUAL, "options": {"depth": 3}}, r"cannot be made of .* 'depth'"),
        (
            {"trunk": f"{__name__}:Nothing"},
            r"has no public Module class Nothing, found SmallCnn, Residual",
        ),
        (
            {"trunk": __name__},
            r"must define one public Module class, found SmallCnn, Residual.*; name it as",
        ),
        ({"trunk": f"{__name__}:Unregistered"}, r"has no parameters to train"),
        ({"options": {"width": 3}}, r"needs network.trunk"),
        ({"trunk": RESIDUAL, "memory": "gru"}, r"and memory gru cannot be combined"),
    ],
)
def test_what_is_wrong_is_named(network: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        small_run(tmp_path / "run", 1, network=network)
