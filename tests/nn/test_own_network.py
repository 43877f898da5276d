"""Trunks of one's own: trained, resumed, on the command line, and what is wrong with them named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpurl
from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.algorithms.sac import SAC
from gpurl.api import evaluate_run, resume
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.run.test_given import Pictures
from tests.small_runs import ITERATION, SMALL, exit_code, small_run

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


class Normed(nn.Module):
    """Batch normalisation, which computes otherwise in train mode, and notes its modes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], 8)
        self.norm = nn.BatchNorm1d(8)
        self.calls: list[tuple[bool, bool]] = []  # (train mode, with gradient)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.norm(self.layer(x).tanh())


class Centred(nn.Module):
    """Subtracts the mean: in train mode that of the batch, in eval mode a running one."""

    mean: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        if not self.training:
            return h - self.mean
        mean = h.mean(0)
        self.mean.lerp_(mean.detach(), 0.1)
        return h - mean


class Dropped(nn.Module):
    """Dropout, after a part that its author keeps in eval mode."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(shape[0], 8), nn.Dropout(0.5)
        self.pretrained = AlwaysEval(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.pretrained(self.layer(x).tanh()))


class AlwaysEval(nn.BatchNorm1d):
    """Batch normalisation with fixed statistics."""

    def train(self, mode: bool = True) -> "AlwaysEval":
        return super().train(False)


class Lazy(nn.Module):
    """Layers that learn their width from the first batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Typed(nn.Module):
    """A layer of another dtype, and features of another dtype."""

    def __init__(
        self, shape: tuple[int, ...], inside: str = "float32", outside: str = "float32"
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], 8, dtype=getattr(torch, inside))
        self.frozen = nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)
        self.outside = getattr(torch, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.layer(x).double()).to(self.outside)


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


@pytest.mark.parametrize("shared", [False, True])
def test_trunks_are_in_train_mode_while_a_loss_is_computed_only(
    tmp_path: Path, shared: bool
) -> None:
    network = {"trunk": f"{__name__}:Normed", "shared": shared}
    run = small_run(tmp_path / "run", 2, network=network, epochs=3)
    algorithm = gpurl.load(run.folder, best=False).algorithm
    for trunk in algorithm.network.trunks:
        assert int(trunk.norm.num_batches_tracked) == 2 * 3 * SMALL["minibatches"]
        assert bool(trunk.norm.running_mean.any())
    assert not any(module.training for module in algorithm.modules())
    # acting and valuing leave the statistics, and compute one row as part of any batch
    state = {name: value.clone() for name, value in algorithm.state_dict().items()}
    obs = torch.randn(5, 3)
    policy = gpurl.load(run.folder, best=False)
    actions, values = policy.act(obs), policy.value(obs)
    rows = torch.stack([policy.act(row) for row in obs])
    torch.testing.assert_close(rows, actions, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor([policy.value(row) for row in obs]), values)
    for name, value in policy.algorithm.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_mode_of_every_call_while_training() -> None:
    settings = make_settings(
        "ppo", "pendulum", num_envs=8, horizon=4, minibatches=2, epochs=2, device="cpu",
        network={"trunk": f"{__name__}:Normed"},
    )  # fmt: skip
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    trainer.iterate()
    calls = trainer.algorithm.network.trunks[0].calls
    assert set(calls) == {(False, False), (True, True)}
    assert calls.count((True, True)) == 4
    # a loss that raises leaves nothing in train mode
    trainer.algorithm.loss = lambda batch: 1 // 0
    with pytest.raises(ZeroDivisionError):
        trainer.iterate()
    assert not any(module.training for module in trainer.algorithm.modules())


def test_dropout_is_for_learning_and_a_trunk_decides_about_its_parts(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2, network={"trunk": f"{__name__}:Dropped"})
    algorithm = gpurl.load(run.folder).algorithm
    trunk = algorithm.network.trunks[0]
    obs = torch.randn(64, 3)
    assert torch.equal(algorithm.network(obs)[0], algorithm.network(obs)[0])
    first, second = (evaluate_run(run.folder, 4, device="cpu") for _ in range(2))
    assert first["eval/mean_reward"] == second["eval/mean_reward"]
    with algorithm.train_mode():
        assert trunk.dropout.training
        assert not trunk.pretrained.training
        assert not torch.equal(algorithm.network(obs)[0], algorithm.network(obs)[0])
    assert int(trunk.pretrained.num_batches_tracked) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_lazy_layers_get_their_shape_when_the_trunk_is_made(tmp_path: Path, shared: bool) -> None:
    network = {"trunk": f"{__name__}:Lazy", "shared": shared}
    run = small_run(tmp_path / "run", 2, network=network)
    trunks = gpurl.load(run.folder).algorithm.network.trunks
    assert [trunk.layers[0].weight.shape for trunk in trunks] == [(8, 3)] * (2 - shared)
    assert resume(run.folder, total_steps=3 * ITERATION).outcome.steps == 3 * ITERATION


def test_frozen_weights_may_have_any_dtype(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2, network={"trunk": f"{__name__}:Typed"})
    assert gpurl.load(run.folder).algorithm.network.trunks[0].frozen.weight.dtype == torch.float64


class OwnNetwork(PPO):
    """PPO with a module of `make`."""

    make: Any = None

    def make_networks(self) -> None:
        super().make_networks()
        self.extra = self.make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda self: nn.Linear(3, 8).half(),
            r"parameter extra.weight of OwnNetwork: wanted torch.float32, got torch.float16; .*"
            r"--precision bf16",
        ),
        (
            lambda self: nn.LazyLinear(8),
            r"parameter extra.weight of OwnNetwork: wanted a shape, got none yet; .*once in "
            r"make_networks",
        ),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(
    make: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnNetwork, "make", make)
    env = make_env("pendulum", 4)
    spaces = env.single_observation_space, env.single_action_space
    with pytest.raises(UsageError, match=words):
        OwnNetwork(PPOConfig(), *spaces, 4, torch.device("cpu"))


def test_networks_of_gpurl_are_not_switched() -> None:
    env = make_env("pendulum", 4)
    for name in ("ppo", "sac", "redq"):
        config = config_class(resolve_algorithm(name))()
        spaces = env.single_observation_space, env.single_action_space
        algorithm = make_algorithm(name, config, *spaces, 4)
        with algorithm.train_mode():
            assert not any(module.training for module in algorithm.modules())


class NormedCritic(nn.Module):
    """Two critics with batch normalisation: [B, D] -> [2, B, 1]."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(num_inputs, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).t().unsqueeze(2)


class NormedSAC(SAC):
    """SAC with such critics."""

    def make_critics(self, count: int) -> Any:
        return NormedCritic(self.num_inputs + self.num_actions)


def test_the_statistics_of_a_target_are_those_of_its_network(tmp_path: Path) -> None:
    run = gpurl.train(
        NormedSAC, "pendulum", run_dir=str(tmp_path / "run"), num_envs=8, horizon=4, updates=3,
        batch_size=16, learning_starts=32, total_steps=128, eval_episodes=0, device="cpu",
        quiet=True,
    )  # fmt: skip
    algorithm = gpurl.load(run.folder, best=False).algorithm
    norm, target = algorithm.critic.norm, algorithm.target_critic.norm
    # both losses pass through the critics in an update; the target follows the step between them
    updates = 4 * 3
    assert int(norm.num_batches_tracked) == 2 * updates
    assert int(target.num_batches_tracked) == 2 * updates - 1
    assert bool(target.running_mean.any())
    assert algorithm.value(torch.zeros(1, 3)).isfinite()


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


def test_sizes_of_hidden_layers_that_a_module_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--network", RESIDUAL, "network.hidden=8", "--network.activation", "elu"]
    assert exit_code(["train", "ppo", "pendulum", *words]) == UsageError.exit_code
    error = capsys.readouterr().err
    assert "--network.activation and --network.hidden would change nothing" in error


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
        (
            {"trunk": f"{__name__}:Typed", "options": {"inside": "bfloat16"}},
            r"parameter layer.weight of Typed: wanted torch.float32, got torch.bfloat16; .*"
            r"--precision bf16",
        ),
        (
            {"trunk": f"{__name__}:Typed", "options": {"inside": "float64"}},
            r"parameter layer.weight of Typed: wanted torch.float32, got torch.float64",
        ),
        (
            {"trunk": f"{__name__}:Typed", "options": {"outside": "bfloat16"}},
            r"Typed: wanted features of torch.float32, got torch.bfloat16",
        ),
        ({"trunk": RESIDUAL, "memory": "gru"}, r"and memory gru cannot be combined"),
    ],
)
def test_what_is_wrong_is_named(network: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        small_run(tmp_path / "run", 1, network=network)
