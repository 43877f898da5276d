"""Encoders of images and of named observations: shapes, which pixel goes where, what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.bc import StudentConfig
from gpurl.algorithms.ppo import PPO
from gpurl.api import train
from gpurl.buffers.minibatches import PackedRows
from gpurl.cli.main import main
from gpurl.engine.eager import Eager
from gpurl.engine.obstacles import policy_obstacle
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.errors import UsageError
from gpurl.nn.encoders import (
    Convolution,
    EncodedCritics,
    Encoder,
    EncoderConfig,
    image_shape,
    make_convolutions,
    to_image,
)
from gpurl.nn.mlp import Dense
from gpurl.policy import load
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.export.own import Rows
from tests.small_runs import small_settings
from tests.tiny_envs import RandomWalk

ENVS = "tests.picture_envs"


def picture(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def numbers(*shape: int) -> Box:
    return Box(-np.inf, np.inf, shape, np.float32)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84, 4), (4, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((3, 16, 12), (3, 16, 12)),
        ((16, 12, 3), (3, 16, 12)),
        ((8, 8, 8), (8, 8, 8)),
        ((84, 80), (1, 84, 80)),
        ((4, 96, 96, 3), (12, 96, 96)),
        ((4, 1, 16, 16), (4, 16, 16)),
    ],
)
def test_the_shorter_end_is_the_axis_of_channels(
    shape: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert image_shape(shape) == expected
    x = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    assert tuple(to_image(x, shape).shape) == (5, *expected)


def test_the_same_picture_in_every_layout() -> None:
    first = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    expected = first.double() / 255.0
    last = first.permute(0, 2, 3, 1).contiguous()
    frames = torch.stack((last, 255 - last), dim=1)
    for x, shape in ((first, (3, 5, 7)), (last, (5, 7, 3))):
        torch.testing.assert_close(to_image(x, shape).double(), expected, rtol=0, atol=1e-7)
    both = to_image(frames, (2, 5, 7, 3)).double()
    torch.testing.assert_close(both[:, :3], expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(both[:, 3:], 1.0 - expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "shape", "features"),
    [
        ("cnn", (4, 84, 84), 3136),  # 64 x 7 x 7, Mnih et al. 2015
        ("cnn", (96, 96, 3), 4096),
        ("cnn", (36, 36, 1), 64),
        ("cnn", (1, 8, 8), 256),
        ("cnn", (3, 16, 16), 256),
        ("cnn", (1, 2, 2), 256),
        ("impala", (4, 84, 84), 3872),  # 32 x 11 x 11, Espeholt et al. 2018
        ("impala", (1, 8, 8), 128),
        ("impala", (16, 16, 3), 128),
    ],
)
def test_convolutions_fit_large_and_small_images(
    kind: str, shape: tuple[int, ...], features: int
) -> None:
    layers = make_convolutions(kind, shape)
    assert layers(torch.rand(2, *image_shape(shape))).shape == (2, features)


def test_nature_cnn_has_the_weights_of_the_paper() -> None:
    layers = make_convolutions("cnn", (4, 84, 84))
    sizes = [parameter.numel() for parameter in layers.parameters()]
    assert sizes == [32 * 4 * 64, 32, 64 * 32 * 16, 64, 64 * 64 * 9, 64]


def test_layer_norm_stands_between_convolution_and_activation() -> None:
    layers = list(make_convolutions("cnn", (1, 8, 8), layer_norm=True).children())
    assert [type(layer) for layer in layers[:3]] == [Convolution, nn.GroupNorm, nn.ReLU]
    x = layers[1](torch.randn(3, 32, 4, 4) * 5.0 + 2.0)
    torch.testing.assert_close(x.mean((1, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4, 7, 256, 1023])
def test_packed_rows_carry_every_byte(size: int) -> None:
    """Also those that are NaN as a float32, quiet, signalling and negative."""
    pixels = torch.randint(0, 256, (4, 6, size), dtype=torch.uint8)
    nan = torch.tensor([1, 0, 0x80, 0x7F, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0x80, 0xFF])
    pixels[0, 0] = nan.to(torch.uint8).repeat(-(-size // 12))[:size]
    columns = {"obs": pixels, "value": torch.randn(4, 6), "action": torch.randint(9, (4, 6))}
    rows = PackedRows(columns)
    packed = rows.pack(columns)
    assert packed.shape == (24, rows.width)
    order = torch.randperm(24)
    unpacked = rows.unpack(packed.index_select(0, order))
    assert unpacked["obs"].dtype == torch.uint8
    assert torch.equal(unpacked["obs"], pixels.flatten(0, 1)[order])
    assert torch.equal(unpacked["value"], columns["value"].flatten()[order])
    assert torch.equal(unpacked["action"], columns["action"].flatten()[order])
    assert packed.shape[1] <= size / 4 + 6  # four bytes a float


def test_an_encoder_reads_each_group_by_its_name() -> None:
    space = GroupedBox.of({"eye": picture(2, 3), "b": numbers(2), "a": numbers(1, 2)})
    assert [group.name for group in space.groups] == ["b", "a", "eye"]  # floats first
    parts = {
        "eye": torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8),
        "b": torch.randn(5, 2),
        "a": torch.randn(5, 1, 2),
    }
    rows = space.join(parts)
    assert (rows.dtype, tuple(rows.shape)) == (torch.uint8, (5, 24))  # 16 + 6, to a multiple of 4
    for name, part in space.split(rows).items():
        assert torch.equal(part, parts[name]), name
    features = Encoder(2, space, EncoderConfig())(rows)
    expected = torch.cat(
        (parts["b"], parts["a"].flatten(1), parts["eye"].flatten(1).float() / 255.0), dim=1
    )
    torch.testing.assert_close(features, expected.expand(2, -1, -1))


def test_own_encoders_by_name() -> None:
    env = make_env(f"{ENVS}:Seen", 4)
    obs, _ = env.reset(seed=0)
    config = EncoderConfig(encoders={"camera": f"{ENVS}:SumOfPixels"})
    space = env.single_observation_space
    assert isinstance(space, GroupedBox)
    parts = space.split(obs)
    features = Encoder(1, space, config)(obs)[0]
    torch.testing.assert_close(features[:, :2], parts["speed"])
    torch.testing.assert_close(features[:, 2:], parts["camera"].float().mean((1, 2)) / 255.0)


OWN = "tests.export.own:Rows"


def test_an_own_encoder_of_numbers() -> None:
    """Each member's is its own."""
    space = make_env("pendulum", 4).single_observation_space
    assert isinstance(space, Box)
    encoder = Encoder(2, space, EncoderConfig(encoder=OWN))
    rows = torch.randn(5, 3)
    first, second = features = encoder(rows)
    assert features.shape == (2, 5, 9)
    assert torch.equal(features[..., :3], rows.expand(2, -1, -1))
    assert not torch.equal(first, second)
    weight, bias = encoder.members[1].parameters()
    torch.testing.assert_close(second[:, 3:], torch.sin(rows @ weight.T + bias))


class Bytes(RandomWalk):
    """Shows bytes in a row, which are no image."""

    single_observation_space = Box(0, 255, (6,), np.uint8)

    def observe(self, state: State) -> Tensor:
        x = super().observe(state)
        return (100 + 20 * torch.cat((x, -x), 1)).clamp(0, 255).byte()


OWN_NETWORKS: dict[str, dict[str, Any]] = {
    "ppo": {"network": {"encoder": OWN}, "minibatches": 1},
    "sac": {"actor_network": {"encoder": OWN}, "critic_network": {"encoder": OWN}},
}


@pytest.mark.parametrize("algorithm", OWN_NETWORKS)
def test_an_own_encoder_reads_scaled_bytes_of_any_shape(algorithm: str, tmp_path: Path) -> None:
    settings = small_settings(algorithm) | {"num_envs": 8, "horizon": 4, "total_steps": 64}
    settings |= {"quiet": True, "device": "cpu", "eval_episodes": 0} | OWN_NETWORKS[algorithm]
    run = train(algorithm, f"{__name__}:Bytes", run_dir=str(tmp_path / "run"), **settings)
    policy = load(run.folder)
    made = next(each for each in policy.algorithm.modules() if isinstance(each, Encoder))
    rows = torch.randint(0, 256, (5, 6), dtype=torch.uint8)
    torch.testing.assert_close(made(policy.algorithm.inputs(rows))[0, :, :6], rows / 255.0)
    torch.testing.assert_close(policy.module()(rows), policy.act(rows))


def test_an_algorithm_without_encoders_says_so() -> None:
    for encoder in (OWN, "cnn"):
        with pytest.raises(UsageError, match="VDN has no encoder of observations"):
            make("vdn", "two_step_game", network=network_of("vdn", encoder=encoder))


@pytest.mark.parametrize(
    ("algorithm", "env", "flags"),
    [
        ("sac", "pendulum", ["--actor-network", OWN, "--critic-network", OWN]),
        ("td3", "pendulum", ["--critic-network", OWN]),
        ("dqn", "cart_pole", ["--network", OWN]),
        ("ppo", "pendulum", ["--network.encoder", OWN]),
    ],
)
def test_an_own_encoder_is_trained(
    algorithm: str, env: str, flags: list[str], tmp_path: Path
) -> None:
    words = ["num_envs=8", "horizon=4", "total_steps=64", "device=cpu", "eval_episodes=0"]
    words += [f"run_dir={tmp_path / 'run'}", "quiet=true", "preset=none"]
    words += ["minibatches=1"] if algorithm == "ppo" else ["batch_size=8", "learning_starts=16"]
    assert main(["train", algorithm, env, *words, *flags]) == 0
    trained = load(tmp_path / "run").algorithm
    modules = [each for each in trained.modules() if isinstance(each, Rows)]
    assert len(modules) == {"sac": 3, "td3": 2, "dqn": 2, "ppo": 2}[algorithm]  # with targets
    # both are learned, and go on where they were
    again = ["train", "--resume", str(tmp_path / "run"), "total_steps=96", "quiet=true"]
    assert main(again) == 0
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    after = load(tmp_path / "run", best=False).algorithm.state_dict()
    moved = [name for name in before if "linear.weight" in name]
    assert moved
    assert all(bool((after[name] != before[name]).any()) for name in moved)


@pytest.mark.parametrize(
    ("env", "encoder", "named"),
    [
        (
            "pendulum",
            "cmn",
            "encoder is 'cmn'; it must be one of auto, none, cnn, impala, MODULE:CLASS",
        ),
        ("pendulum", "tests.export.own:Nothing", "tests.export.own"),
        (f"{ENVS}:Seen", OWN, r"reads one tensor, .*: name an encoder for each, network.encoders"),
        (
            "pendulum",
            f"{__name__}:Indexing",
            r"Indexing cannot be made of the shape \(3,\) of a group: IndexError: tuple index .*"
            r"\(.*test_encoders.py:\d+: self.rows = shape\[1\]\)",
        ),
        (
            "pendulum",
            f"{__name__}:Raising",
            r"Raising cannot read a group of shape \(3,\): KeyError: 'speed' \(.*test_encoders.py",
        ),
        ("pendulum", f"{__name__}:Doubling", "wanted features of torch.float32, got torch.float64"),
    ],
)
def test_wrong_encoders_are_named(
    env: str, encoder: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--network.encoder", encoder, "total_steps=64", "num_envs=4", "device=cpu"]
    assert main(["train", "ppo", env, *words]) == 2
    said = capsys.readouterr().err
    assert re.search(named, said)
    assert "╭" not in said


def test_a_word_that_is_no_encoder_is_named_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm, env, flag in (("sac", "pendulum", "actor-network"), ("dqn", "catch", "network")):
        assert main(["train", algorithm, env, f"--{flag}", "impal"]) == 2
        said = capsys.readouterr().err
        assert f"--{flag}.encoder is 'impal'; did you mean impala?" in said


class Indexing(nn.Linear):
    """Reads observations of two dimensions only."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape[0], 4)
        self.rows = shape[1]


class Raising(nn.Linear):
    """Wants a dict."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape[0], 4)

    def forward(self, x: Tensor) -> Tensor:
        names = {"place": x}
        return super().forward(names["speed"])


class Doubling(Raising):
    """Computes in float64 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).double()


def make(name: str, env: str, **settings: Any) -> Algorithm:
    made = make_env(env, 4)
    config = config_class(resolve_algorithm(name))(**settings)
    return make_algorithm(name, config, made.single_observation_space, made.single_action_space, 4)


def network_of(algorithm: str, **settings: Any) -> Any:
    kind = config_class(resolve_algorithm(algorithm)).__dataclass_fields__["network"]
    default = kind.default_factory()
    return type(default)(**{"hidden": (8,), **settings})


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn", "rainbow", "pqn"])
def test_images_have_convolutions_by_default(algorithm: str) -> None:
    chosen = make(algorithm, "catch", network=network_of(algorithm))
    convolutions = [each for each in chosen.network.modules() if isinstance(each, Convolution)]
    assert len(convolutions) == (6 if algorithm in ("ppo", "a2c") else 3)
    assert chosen.normalizer is None
    obs, _ = make_env("catch", 4).reset(seed=0)
    assert chosen.inputs(obs).dtype == torch.uint8
    assert chosen.act(obs, explore=False).action.shape == (4,)


def test_shared_is_one_encoder() -> None:
    chosen = make("ppo", "catch", network=network_of("ppo", shared=True))
    assert sum(isinstance(each, Convolution) for each in chosen.network.modules()) == 3


def test_members_of_an_ensemble_have_encoders_of_their_own() -> None:
    chosen = make("dqn", "catch", num_critics=2, network=network_of("dqn"))
    values = chosen.outputs(chosen.network, chosen.inputs(make_env("catch", 4).reset(seed=0)[0]))
    assert values.shape == (2, 4, 1, 3, 1)
    first, second = (next(member.parameters()) for member in chosen.network.layers[0].members)
    assert not torch.equal(first, second)


def test_encoder_none_flattens() -> None:
    chosen = make("ppo", "catch", network=network_of("ppo", encoder="none"))
    assert not any(isinstance(each, Convolution) for each in chosen.network.modules())
    assert chosen.normalizer is not None
    assert chosen.inputs(make_env("catch", 4).reset()[0]).dtype == torch.float32


def test_only_numbers_are_normalised() -> None:
    chosen = make("ppo", f"{ENVS}:Seen", network=network_of("ppo"))
    space = chosen.groups
    assert chosen.normalizer is not None
    assert chosen.normalizer.mean.shape == (2,)
    rollout = torch.stack([make_env(f"{ENVS}:Seen", 4).reset(seed=seed)[0] for seed in range(9)])
    chosen.update_normalizer(rollout, None)
    before = space.split(rollout.flatten(0, 1))
    after = space.split(chosen.inputs(rollout.flatten(0, 1)))
    assert torch.equal(after["camera"], before["camera"])
    speed = before["speed"]
    expected = (speed - speed.mean(0)) / speed.std(0, correction=0)
    torch.testing.assert_close(after["speed"], expected, rtol=1e-4, atol=1e-4)
    # what is packed is what acting reads
    packed = chosen.inputs_to_pack(rollout)
    assert isinstance(packed, Tensor)
    assert torch.equal(packed.flatten(0, 1), chosen.inputs(rollout.flatten(0, 1)))


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("env", [f"{ENVS}:Pixels", f"{ENVS}:Seen"])
def test_fast_engines_step_aside_and_the_run_says_what_reads_images(
    algorithm: str, env: str
) -> None:
    settings = make_settings(algorithm, env, num_envs=4, horizon=4, device="cpu")
    engine = make_trainer(settings, torch.device("cpu")).engine
    assert type(engine) is Eager
    if isinstance(engine.algorithm, PPO):  # those that a GPU has too
        assert policy_obstacle(engine.algorithm) == "it does not know the layer Encoder"
    name = "camera" if "Seen" in env else "obs"
    assert engine.notes[-1] == f"images: {name} (8, 8, 3): cnn of 3 channels of 8 x 8"


def test_a_rollout_of_images_cannot_be_learnt_from_later() -> None:
    settings = make_settings("ppo", "catch", num_envs=4, horizon=4, device="cpu", asynchronous=True)
    with pytest.raises(UsageError, match="asynchronous is not possible: of images no final obs"):
        make_trainer(settings, torch.device("cpu"))


@pytest.mark.parametrize(
    ("algorithm", "env", "network", "message"),
    [
        ("ppo", "cart_pole", {"encoder": "cnn"}, r"encoder cnn needs an image, a uint8 Box"),
        ("ppo", f"{ENVS}:Seen", {"encoders": {"camra": "cnn"}}, r"'camra'.*speed, camera; did"),
        ("ppo", f"{ENVS}:Seen", {"encoders": {"speed": "cnn"}}, r"speed has shape \(2,\), float32"),
        ("ppo", "catch", {"encoders": {"obs": "cnn"}}, r"has 'obs', the observation has no names"),
        ("ppo", "catch", {"trunk": f"{ENVS}:GroupTrunk", "encoder": "cnn"}, "leave out encoder"),
        # images that are too small
        (
            "ppo",
            f"{ENVS}:Seen",
            {"encoders": {"camera": f"{ENVS}:LargeKernel"}},
            r"encoder .*LargeKernel cannot read a group of shape \(8, 8, 3\): .*smaller kernels",
        ),
        (
            "ppo",
            f"{ENVS}:Pixels",
            {"trunk": f"{ENVS}:LargeKernel"},
            r"network .*LargeKernel cannot read observations of shape \(8, 8, 3\): .*Kernel size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    algorithm: str, env: str, network: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(algorithm, env, network=network_of(algorithm, **network))


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "td3"])
def test_a_critic_of_privileged_observations_has_no_encoders(algorithm: str) -> None:
    env = make_env(f"{ENVS}:{'Seen' if algorithm == 'ppo' else 'Pointing'}", 4)
    spaces = env.single_observation_space, env.single_action_space
    config = config_class(resolve_algorithm(algorithm))()
    state = Box(-1.0, 1.0, (3,), np.float32)
    with pytest.raises(UsageError, match=r"have encoders or images: .* take --asymmetric False"):
        make_algorithm(algorithm, config, *spaces, 4, state_space=state)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_images_are_not_mirrored(algorithm: str) -> None:
    chosen = make(algorithm, "catch", network=network_of(algorithm))
    with pytest.raises(UsageError, match=r"my_task:mirror mirrors rows of numbers, .* images"):
        chosen.set_symmetry(lambda obs, action: (obs, action), "my_task:mirror")


class WholeNetwork(nn.Module):
    """Reads rows of numbers."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.actor = nn.Linear(num_inputs, num_outputs)
        self.critic = nn.Linear(num_inputs, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs), self.critic(obs).squeeze(1)


class WithWholeNetwork(PPO):
    def make_networks(self) -> None:
        super().make_networks()
        self.network = WholeNetwork(self.num_inputs, self.head.num_outputs)  # type: ignore[assignment]


def test_a_whole_network_of_ones_own_reads_pixels_as_numbers(tmp_path: Path) -> None:
    settings: dict[str, Any] = small_settings("ppo") | {"normalize_obs": True, "quiet": True}
    settings |= {"num_envs": 4, "total_steps": 64, "eval_episodes": 0}
    run = train(WithWholeNetwork, "catch", run_dir=str(tmp_path / "run"), **settings)
    policy = load(run.folder)
    assert policy.algorithm.normalizer is not None
    assert policy.act(np.zeros((3, 1, 8, 8), np.uint8)).shape == (3,)
    config = config_class(resolve_algorithm("ppo"))()
    space = GroupedBox.of({"eye": picture(8, 8, 3), "speed": numbers(2)})
    with pytest.raises(UsageError, match=r"network without encoders, .* speed, eye have images"):
        WithWholeNetwork(config, space, Box(-1.0, 1.0, (2,)), 4, torch.device("cpu"))


@pytest.mark.parametrize("images", ["alone", "mixed"])
def test_flash_sac_says_that_it_has_none(images: str) -> None:
    space = picture(8, 8, 3)
    if images == "mixed":
        space = GroupedBox.of({"eye": space, "speed": numbers(2)})
    config = config_class(resolve_algorithm("flash_sac"))()
    with pytest.raises(UsageError, match=r"has no convolutional network .* take ppo, sac, dqn"):
        make_algorithm("flash_sac", config, space, Box(-1.0, 1.0, (2,)), 4)


POINTING = f"{ENVS}:Pointing"
SMALL = {name: EncoderConfig(hidden=(8,)) for name in ("actor_network", "critic_network")}


def test_critics_of_actions_share_an_encoder_which_the_actor_does_not_read() -> None:
    chosen = make("sac", POINTING, num_critics=3, batch_size=4, **SMALL)
    obs = chosen.inputs(make_env(POINTING, 4).reset(seed=0)[0])
    assert obs.dtype == torch.uint8
    critic, actor = chosen.critic, chosen.actor
    assert isinstance(critic, EncodedCritics)
    for network in (critic, actor):
        assert sum(isinstance(each, Convolution) for each in network.modules()) == 3
    # the features of the one encoder and the action go through the layers of each critic
    action = torch.rand(4, 1)
    x = torch.cat((critic.encoder(obs)[0], action), 1)
    expected = x.expand(3, -1, -1)
    for layer in (each for each in critic.modules() if isinstance(each, Dense)):
        expected = expected @ layer.weight.mT + layer.bias
        expected = expected.relu() if layer.activation == "relu" else expected
    torch.testing.assert_close(chosen.q_outputs(obs, action), expected)
    # the actor's loss moves the actor's encoder, and no weight of the critics
    chosen.actor_loss({"obs": obs, "weight": torch.ones(4)})[0].backward()
    grads = [parameter.grad for parameter in actor.layers[0].parameters()]
    assert all(grad is not None and grad.any() for grad in grads)
    assert all(each.grad is None or not each.grad.any() for each in critic.parameters())


def test_updates_move_the_encoders_and_polyak_averaging_that_of_the_target() -> None:
    chosen = make("td3", POINTING, batch_size=4, tau=0.25, policy_delay=1, **SMALL)
    rows = chosen.inputs(make_env(POINTING, 4).reset(seed=0)[0])
    before = {name: value.clone() for name, value in chosen.state_dict().items()}
    batch = {"obs": rows, "next_obs": rows, "action": torch.rand(4, 1)}
    batch |= {name: torch.ones(4) for name in ("reward", "discount", "weight")}
    chosen.update_step(batch, 0)
    after = chosen.state_dict()
    moved = [name for name in before if ".encoder." in name and "target" not in name]
    moved += [name for name in before if name.startswith("actor.layers.0.")]
    assert len(moved) == 12  # weights and biases of three convolutions each
    for name in moved:
        assert not torch.equal(before[name], after[name]), name
        target = f"target_{name}"
        expected = before[target].lerp(after[name], 0.25)
        torch.testing.assert_close(after[target], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("env", [POINTING, "catch"])
def test_drawn_target_critics_read_what_all_of_them_read(env: str) -> None:
    chosen = make("sac", env, num_critics=5, target_subset=2, **SMALL)
    obs = chosen.inputs(make_env(env, 4).reset(seed=0)[0])
    action = torch.rand(4, 1) if env == POINTING else None
    with torch.no_grad():
        inputs = chosen.critic_inputs(chosen.target_critic, obs, action)
        drawn, every = chosen.target_outputs(inputs), chosen.target_critic(inputs)
    assert len(drawn) == 2
    for values in drawn:
        assert any(torch.allclose(values, each, atol=1e-6) for each in every)


def test_actor_and_critics_read_images_in_one_form() -> None:
    networks = {"actor_network": EncoderConfig(encoder="none"), "critic_network": EncoderConfig()}
    with pytest.raises(
        UsageError, match=r"actor_network.encoder none and critic_network.encoder auto"
    ):
        make("sac", "catch", **networks)
    both = make("sac", "catch", **dict.fromkeys(networks, EncoderConfig(encoder="none")))
    assert both.inputs(make_env("catch", 4).reset()[0]).dtype == torch.float32


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_a_student_reads_images(memory: str) -> None:
    student = make("bc", "catch", actor_network=StudentConfig(hidden=(8,), memory=memory))
    assert sum(isinstance(each, Convolution) for each in student.actor.modules()) == 3
    obs = make_env("catch", 4).reset(seed=0)[0]
    state = student.initial_policy_state(4)
    assert student.act(obs, state, explore=False).action.shape == (4,)


def test_bf16_computes_convolutions_in_low_precision() -> None:
    chosen = make("ppo", "catch", network=network_of("ppo"))
    obs = make_env("catch", 4).reset(seed=0)[0]
    before = chosen.network(chosen.inputs(obs))[1]
    chosen.set_precision("bf16")
    convolution = next(each for each in chosen.network.modules() if isinstance(each, Convolution))
    x = torch.rand(2, 1, 8, 8)
    low = nn.functional.conv2d(
        x.bfloat16(), convolution.weight.bfloat16(), convolution.bias.bfloat16(), 2, 1
    )
    assert torch.equal(convolution(x), low.float())
    after = chosen.network(chosen.inputs(obs))[1]
    assert not torch.equal(before, after)
    torch.testing.assert_close(before, after, rtol=0.1, atol=0.1)
