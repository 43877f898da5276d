"""A policy of a Gymnasium task acts on what the task returns, and its actions are the task's."""

import copy
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import gpurl
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.checkpoints.spaces import space_from_dict, space_to_dict
from gpurl.envs.numpy.spaces import stack_rows
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError
from tests.small_runs import SMALL, small_run

SEED = 0
OBSERVATIONS: dict[str, gymnasium.Space] = {
    "number": Box(-1.0, 1.0, (), np.float64),
    "box": Box(-np.inf, np.inf, (3,), np.float64),
    "image": Box(0, 255, (8, 8, 3), np.uint8),
    "choice": Discrete(4, start=3),
    "choices": MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 0], [0, -5]])),
    "bits": MultiBinary((2, 2)),
    "dict": Dict({"goal": Discrete(3), "place": Box(-1.0, 1.0, (2,), np.float32)}),
    "dict with an image": Dict({"eye": Box(0, 255, (8, 8, 3), np.uint8), "goal": Discrete(3)}),
    "dict in a dict": Dict({"arm": Dict({"x": Box(0.0, 1.0, (2,)), "n": Discrete(2)})}),
    "tuple": Tuple((Box(0.0, 1.0, (2,), np.float32), Discrete(2), MultiBinary(3))),
}
ACTIONS: dict[str, gymnasium.Space] = {
    "box": Box(-2.0, 1.0, (2,), np.float64),
    "whole numbers": Box(np.array([-3, 0]), np.array([5, 9]), dtype=np.int64),
    "choice": Discrete(3, start=-7),
    "choices": MultiDiscrete(np.array([[2, 3], [4, 2]]), dtype=np.int32, start=[[1, 0], [0, -5]]),
    "bits": MultiBinary((2, 2)),
}


class Samples(gymnasium.Env[Any, Any]):
    """Shows samples of its space, and takes nothing that its action space does not contain."""

    def __init__(self, observation: str = "box", action: str = "box") -> None:
        self.observation_space = copy.deepcopy(OBSERVATIONS[observation])
        self.action_space = copy.deepcopy(ACTIONS[action])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


def policy_of(folder: Path, observation: str = "box", action: str = "box") -> gpurl.Policy:
    options = {"observation": observation, "action": action}
    run = gpurl.train(
        "ppo",
        Samples,
        **SMALL | {"num_envs": 2, "total_steps": 16, "eval_episodes": 0},
        env_options=options,
        run_dir=str(folder),
    )
    return gpurl.load(run.folder)


@pytest.mark.parametrize(
    ("observation", "action"),
    [*((name, "choice") for name in OBSERVATIONS), *(("box", name) for name in ACTIONS)],
)
def test_a_policy_plays_in_the_gymnasium_environment(
    observation: str, action: str, tmp_path: Path
) -> None:
    """One observation and a batch of them give the actions that the encoded tensors give."""
    policy = policy_of(tmp_path / "run", observation, action)
    env = Samples(observation, action)
    rows = [env.reset(seed=SEED)[0]]
    for _ in range(3):
        rows.append(env.step(policy.act(rows[-1]))[0])
    vector = make_env(f"{__name__}:Samples", 4, observation=observation, action=action)
    batch = stack_rows(env.observation_space, rows)
    encoded = torch.from_numpy(vector._encoder.encode(batch))  # type: ignore[attr-defined]
    decode = vector._decoder.decode  # type: ignore[attr-defined]
    expected = decode(policy.act(encoded).numpy())
    actions = policy.act(batch)
    np.testing.assert_array_equal(actions, expected)
    assert actions.dtype == env.action_space.dtype
    for row, action_of_row in zip(rows, actions):
        np.testing.assert_array_equal(policy.act(row), action_of_row)
    assert isinstance(policy.value(rows[0]), float)
    np.testing.assert_allclose(policy.value(batch), policy.value(encoded), rtol=1e-6)
    vector.close()


def test_a_task_of_numbers(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1, env="FrozenLake-v1", eval_episodes=0)
    policy, env = run.policy(), gymnasium.make("FrozenLake-v1")
    obs, _ = env.reset(seed=0)
    for _ in range(20):
        obs, _, terminated, truncated, _ = env.step(policy.act(obs))
        if terminated or truncated:
            break
    assert policy.act([obs]).shape == (1,)
    assert policy.act(np.arange(16)).tolist() == policy.act(torch.eye(16)).tolist()
    for wrong, message in (
        (16, r"as Discrete\(16\) has them, got int64 from 16 to 16"),
        (0.0, r"as Discrete\(16\) has them, got float64"),
        (np.eye(16, dtype=np.float32), r"of shape \(\) or \(N,\), got \(16, 16\)"),
        ([], r"got \(0,\)"),
        ([[0], [0, 1]], "observations as numbers: "),
        (None, "observations as numbers, got a NoneType"),
        ({"obs": 0}, "observations as numbers, got a dict"),
        ("0", "observations as numbers, got a str"),
    ):
        with pytest.raises(UsageError, match=message):
            policy.act(wrong)


def test_what_nested_observations_must_be(tmp_path: Path) -> None:
    named = policy_of(tmp_path / "dict", "dict in a dict")
    pair = policy_of(tmp_path / "tuple", "tuple")
    image = policy_of(tmp_path / "image", "image")
    x = np.zeros(2)
    for policy, wrong, message in (
        (named, {"arm": {"x": x}}, r"observations\['arm'\], a dict of n, x; got \['x'\]"),
        (named, {"arm": x}, r"observations\['arm'\], a dict of n, x; got a ndarray"),
        (named, {"arm": {"x": x, "n": [0]}}, "one observation, or N of every part; got parts of"),
        (named, {"arm": {"x": torch.zeros(2), "n": torch.zeros(())}}, "takes arrays of numbers"),
        (pair, x, "a tuple of 3 parts; got a ndarray"),
        (pair, (x, 0), "a tuple of 3 parts; got 2"),
        (image, np.zeros((8, 8, 3)), "observations of uint8, 0 to 255"),
    ):
        with pytest.raises(UsageError, match=message):
            policy.act(wrong)


@pytest.mark.parametrize("space", [*OBSERVATIONS.values(), *ACTIONS.values()], ids=str)
def test_a_description_in_json_is_the_space(space: gymnasium.Space) -> None:
    described = json.loads(json.dumps(space_to_dict(space)))
    read = space_from_dict(described)
    assert read == space
    assert (read.dtype, read.shape) == (space.dtype, space.shape)
    spaces = zip(getattr(read, "spaces", ()), getattr(space, "spaces", ()))
    assert all(mine == other for mine, other in spaces)  # the order of a Dict


def test_a_checkpoint_without_the_description_acts_as_before(tmp_path: Path) -> None:
    """And one whose description is damaged says so; another program's is not followed."""
    folder = small_run(tmp_path / "run", 1, env="FrozenLake-v1", eval_episodes=0).folder
    parts, manifest = load_checkpoint(folder)
    task = parts["meta"].pop("task_spaces")

    def saved(**changes: Any) -> gpurl.Policy:
        meta = parts["meta"] | changes
        save_checkpoint(folder / "checkpoints", manifest["step"], parts | {"meta": meta})
        return gpurl.load(folder)

    expected = saved(task_spaces=task).act(3)
    old = saved()
    assert old.act(np.eye(16, dtype=np.float32)[3]) == expected
    with pytest.raises(UsageError, match=r"shape \(16,\) or \(N, 16\), got \(\)"):
        old.act(3)
    huge = {"kind": "Discrete", "n": 10**15, "start": 0}
    for other in (task | {"observation": huge}, task | {"action": task["observation"]}):
        assert saved(task_spaces=other).task is None
    for wrong in ({}, 1, task | {"action": {"kind": "Text"}}, task | {"action": []}):
        with pytest.raises(CheckpointError):
            saved(task_spaces=wrong)


def test_tensor_tasks_have_no_description(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    assert "task_spaces" not in load_checkpoint(folder)[0]["meta"]
    policy = gpurl.load(folder)
    for wrong in (({"a": 1},), [torch.zeros(2), torch.zeros(3)], "text", [[0.0], [0.0, 1.0]]):
        with pytest.raises(UsageError, match="takes arrays of numbers, got a"):
            policy.act(wrong)
