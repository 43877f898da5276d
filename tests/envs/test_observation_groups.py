"""Named observations: one row holds all groups, from every kind of environment to the policy."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

import gpurl
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checkpoints.spaces import space_from_dict, space_to_dict
from gpurl.cli.check_env import check_env
from gpurl.engine.cpu_ppo import CpuPpo
from gpurl.envs._torch_spaces import make_groups, torch_arrays
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.numpy.spaces import make_encoder, stack_rows
from gpurl.envs.observation_groups import Group, GroupedBox
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.errors import EnvError, UsageError
from gpurl.guards.finite import FiniteGuard
from gpurl.kernels import c_library
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.picture_envs import GroupTrunk, Named, Seen
from tests.small_runs import small_run

ENVS = "tests.picture_envs"
MIXED = Dict(
    {
        "eye": Box(0, 255, (4, 5, 3), np.uint8),
        "place": Discrete(3, start=5),
        "hand": Tuple((Box(-1.0, 2.0, (2, 2), np.float64), Discrete(2))),
        "bytes": Box(0, 255, (3,), np.uint8),
    }
)


def encoded_parts(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What each group of MIXED is to be, [N, *group]."""
    floats = {
        name: np.array([gymnasium.spaces.flatten(MIXED[name], row[name]) for row in rows])
        for name in ("place", "hand", "bytes")
    }
    parts = {name: part.astype(np.float32) for name, part in floats.items()}
    return parts | {"eye": np.stack([row["eye"] for row in rows])}


def test_images_and_numbers_of_a_gymnasium_dict() -> None:
    MIXED.seed(0)
    rows = [MIXED.sample() for _ in range(5)]
    batch = stack_rows(MIXED, rows)
    encoder = make_encoder(MIXED)
    space = encoder.space
    assert isinstance(space, GroupedBox)
    encoded = encoder.encode(batch)
    assert (encoded.dtype, encoded.shape) == (np.uint8, (5, 4 * (3 + 6 + 3) + 60))
    parts = space.split(torch.from_numpy(encoded))
    for name, expected in encoded_parts(rows).items():
        np.testing.assert_array_equal(parts[name].numpy(), expected, err_msg=name)
    # the same of tensors
    in_torch = torch.utils._pytree.tree_map(torch.as_tensor, batch)
    groups = make_groups(MIXED, torch_arrays(torch.device("cpu"), False))
    assert groups.policy.space == space
    np.testing.assert_array_equal(groups.policy.encode(in_torch).numpy(), encoded)


class Dream(gymnasium.Env):
    """Shows samples of MIXED; ends after two steps."""

    observation_space = MIXED
    action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            MIXED.seed(seed)
        self.shown = [MIXED.sample()]
        return self.shown[-1], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.shown.append(MIXED.sample())
        return self.shown[-1], float(action), len(self.shown) == 3, False, {}


def test_a_gymnasium_environment_of_images_and_numbers_trains(tmp_path: Path) -> None:
    env = GymnasiumCpu(2, env=Dream)
    obs, _ = env.reset(seed=0)
    dreams: Any = [watched.unwrapped for watched in env._env.envs]
    shown = [dream.shown[-1] for dream in dreams]
    space = env.single_observation_space
    assert isinstance(space, GroupedBox)
    for name, expected in encoded_parts(shown).items():
        np.testing.assert_array_equal(space.split(obs)[name].numpy(), expected, err_msg=name)
    run = gpurl.train(
        "ppo",
        Dream,
        num_envs=4,
        horizon=4,
        minibatches=2,
        total_steps=32,
        network={"hidden": [8]},
        eval_episodes=2,
        quiet=True,
        device="cpu",
        run_dir=str(tmp_path / "run"),
    )
    assert run.outcome.steps == 32
    # as the environment gives them, and encoded
    action = run.policy().act(stack_rows(MIXED, shown))
    parts = {name: torch.from_numpy(part) for name, part in encoded_parts(shown).items()}
    assert action.tolist() == run.policy().act(parts).tolist()
    assert run.policy().act(shown[0]) == action[0]


@pytest.mark.parametrize("name", ["Seen", "Named", "WithNumber", "Pixels"])
def test_a_tensor_environment_observes_a_dict(name: str) -> None:
    env = make_env(f"{ENVS}:{name}", 5)
    assert check_env(f"{ENVS}:{name}") == []
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs.numpy())
    if name == "Pixels":
        return
    assert isinstance(env, Seen)
    space = env.single_observation_space
    assert isinstance(space, GroupedBox)
    for key, part in env.observe(env._state).items():
        assert torch.equal(space.split(obs)[key], part), key
    step = env.step(torch.zeros(5, dtype=torch.int64))
    assert step.obs.shape == (5, *space.shape)


def wrong(result: Any) -> type[Seen]:
    class Wrong(Seen):
        def observe(self, state: State) -> Any:
            return result(super().observe(state))

    return Wrong


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda parts: parts["speed"], r"wanted a dict of the observations .*, got a Tensor"),
        (lambda parts: {"speed": parts["speed"]}, r"\['camera', 'speed'\], got \['speed'\]"),
        (
            lambda parts: parts | {"speed": parts["speed"][:, :1]},
            r"Wrong.observe: speed: wanted a tensor of shape \(N, 2\), .* got shape \(5, 1\)",
        ),
        (
            lambda parts: parts | {"camera": parts["camera"].float()},
            r"camera: wanted .* torch.uint8, got torch.float32",
        ),
    ],
)
def test_a_wrong_dict_is_named(result: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        wrong(result)(5).reset()


def test_other_parts_of_a_dict_are_named() -> None:
    class Numbers(Seen):
        single_observation_space = Dict({"choice": Discrete(3)})

    with pytest.raises(EnvError, match=r"Numbers.*\['choice'\]: wanted a Box of float32, or of"):
        Numbers(2)


def test_a_checkpoint_keeps_the_names() -> None:
    for space in (
        GroupedBox.of({"eye": Box(0, 255, (2, 3), np.uint8), "x": Box(-1.0, 1.0, (3,))}),
        GroupedBox.of({"b.c": Box(-1.0, 1.0, (3, 1)), "a": Box(-2.0, np.inf, (1,))}),
    ):
        read = space_from_dict(space_to_dict(space))
        assert isinstance(read, GroupedBox)
        assert read.groups == space.groups
        assert read == space
    assert read.groups[0] == Group("b.c", (3, 1), False, 0)


def test_rows_of_other_names_are_other_rows() -> None:
    parts = {"a": Box(-1.0, 1.0, (3,)), "b": Box(-1.0, 1.0, (2,))}
    space = GroupedBox.of(parts)
    assert space == GroupedBox.of(parts)
    assert space != GroupedBox.of({"c": parts["a"], "b": parts["b"]})
    assert space != GroupedBox.of({"b": parts["b"], "a": parts["a"]})
    assert space == Box(-1.0, 1.0, (5,))  # of no names, as older policies read it
    assert Box(-1.0, 1.0, (5,)) == space
    assert space != Box(-2.0, 1.0, (5,))


def test_named_numbers_are_as_fast_as_a_row() -> None:
    if c_library.load().functions is None:
        pytest.skip("there is no C compiler")
    settings = make_settings("ppo", f"{ENVS}:Named", num_envs=4, horizon=4, device="cpu")
    assert type(make_trainer(settings, torch.device("cpu")).engine) is CpuPpo


@pytest.mark.parametrize("is_gpu", [False, True])
def test_nan_among_bytes_is_found_and_zeroed(is_gpu: bool) -> None:
    space = Seen(3).single_observation_space
    assert isinstance(space, GroupedBox)
    buffer, nobody = RolloutBuffer(4, torch.device("cpu")), torch.zeros(3, dtype=torch.bool)
    env = Seen(3)
    obs, _ = env.reset(seed=1)
    for _ in range(4):
        row = {"obs": obs, "reward": torch.ones(3), "final_value": torch.ones(3)}
        buffer.add({**row, "terminated": nobody, "truncated": nobody})
    space.floats(buffer["obs"])[2, 1, 0] = torch.nan
    camera = space.split(buffer["obs"][2])["camera"].clone()
    guard = FiniteGuard("seen", buffer.device, "skip", None, space)
    if is_gpu:
        with no_host_syncs():
            bad = guard.clean(buffer)
    else:
        bad = guard.clean(buffer)
    assert bad is not None
    assert bad.tolist() == [False, True, False]
    assert [bool(buffer["valid"][t, 1]) for t in range(4)] == [True, False, False, True]
    assert bool(torch.isfinite(space.floats(buffer["obs"])).all())
    assert torch.equal(space.split(buffer["obs"][2])["camera"], camera)


@pytest.mark.parametrize("name", ["Seen", "Named"])
def test_an_own_trunk_gets_the_names(name: str, tmp_path: Path) -> None:
    network = {"trunk": f"{ENVS}:GroupTrunk"}
    run = small_run(tmp_path / "run", 2, env=f"{ENVS}:{name}", network=network)
    trunk = run.policy().algorithm.network.trunks[0]
    assert isinstance(trunk, GroupTrunk)
    shapes = {"camera": (8, 8, 3), "speed": (2,), "place": (3, 1)}
    keys = ["speed", "camera"] if name == "Seen" else ["speed", "place"]
    assert trunk.shapes == {key: shapes[key] for key in keys}
    env = {"Seen": Seen, "Named": Named}[name](3)
    obs, _ = env.reset(seed=0)
    parts = env.observe(env._state)
    policy = run.policy()
    action = policy.act(parts)
    assert torch.equal(action, policy.act(obs))
    given = policy.algorithm.network.trunks[0].given
    assert {key: (dtype, shape) for key, (dtype, shape, _) in given.items()} == {
        key: (torch.float32, shapes[key]) for key in keys
    }
    if name == "Seen":
        assert given["camera"][2] == float(parts["camera"].max()) / 255.0


def test_what_a_policy_of_groups_refuses(tmp_path: Path) -> None:
    policy = small_run(tmp_path / "run", 1, env=f"{ENVS}:Seen", network={"hidden": [8]}).policy()
    speed, camera = np.zeros(2, np.float32), np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(UsageError, match=r"takes a dict of speed, camera; got \['speed'\]"):
        policy.act({"speed": speed})
    with pytest.raises(UsageError, match=r"dict of observations of shapes .* got \{'speed'"):
        policy.act({"speed": speed[None], "camera": camera})
    assert policy.act({"speed": speed, "camera": camera}).shape == ()
    plain = small_run(tmp_path / "plain", 1, env="catch", network={"hidden": [8]}).policy()
    with pytest.raises(UsageError, match=r"takes images of uint8, 0 to 255, .* torch.float32"):
        plain.act(np.zeros((1, 8, 8), np.float32))
    # numbers that are no bytes, of named images and of plain ones
    with pytest.raises(UsageError, match=r"takes camera of uint8, 0 to 255, .* torch.float32"):
        policy.act({"speed": speed, "camera": camera / np.float32(255.0)})
    for wrong in (-1, 256):
        with pytest.raises(UsageError, match=f"takes camera of uint8, .* got {wrong} to {wrong}"):
            policy.act({"speed": speed, "camera": np.full(camera.shape, wrong)})
        with pytest.raises(UsageError, match=f"takes images of uint8, .* got {wrong} to {wrong}"):
            plain.act(np.full((1, 8, 8), wrong))
    assert plain.act(np.full((1, 8, 8), 255)) == plain.act(np.full((1, 8, 8), 255, np.uint8))
