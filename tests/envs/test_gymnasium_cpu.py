"""Gymnasium environments behind the tensor contract: compared with one environment stepped by hand,
in every way of resetting.
"""

import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    Sequence,
    Text,
    Tuple,
)
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from gpurl.cli.check_env import check_env
from gpurl.envs import make_env
from gpurl.envs.gymnasium_cpu import GymnasiumCpu, send_packed
from gpurl.envs.numpy.spaces import make_decoder, make_encoder, stack_rows
from gpurl.envs.registry import env_options, resolve_env
from gpurl.errors import EnvError, UsageError
from tests.numpy_envs import Batch, Tour, second_step

MODES = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)


def act(obs: np.ndarray) -> np.ndarray:
    """The actions [N, 1] all tests take: a function of obs [N, 2], so that a step that does not
    count shifts nothing.
    """
    return np.sin(obs.sum(-1, keepdims=True)).astype(np.float32)


def by_hand(seed: int, index: int, steps: int) -> list[tuple[float, ...]]:
    """The transitions of environment `index`, flat: obs, reward, next obs, terminated,
    truncated.
    """
    env = Tour()
    seeds = np.random.SeedSequence(seed).generate_state(index + 1)
    obs, _ = env.reset(seed=int(seeds[index]))
    rows = []
    for _ in range(steps):
        next_obs, reward, terminated, truncated, _ = env.step(act(obs.astype(np.float32)))
        rows.append((*obs, reward, *next_obs, terminated, truncated and not terminated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    return rows


def played(env: GymnasiumCpu, seed: int, steps: int) -> list[list[tuple[float, ...]]]:
    """The transitions of every environment that the adapter calls real."""
    rows: list[list[tuple[float, ...]]] = [[] for _ in range(env.num_envs)]
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        timestep = env.step(torch.from_numpy(act(obs.numpy())))
        valid = timestep.info.get("valid", torch.ones(env.num_envs, dtype=torch.bool))
        columns = (
            obs,
            timestep.reward[:, None],
            timestep.info["final_obs"],
            timestep.terminated[:, None],
            timestep.truncated[:, None],
        )
        table = torch.cat([column.float() for column in columns], dim=1).tolist()
        for index in valid.nonzero().squeeze(1).tolist():
            rows[index].append(tuple(table[index]))
        obs = timestep.obs
    return rows


def assert_true_transitions(env: GymnasiumCpu, steps: int = 60, seed: int = 3) -> None:
    for index, rows in enumerate(played(env, seed, steps)):
        assert (
            len(rows) == steps
            if env.autoreset_mode == AutoresetMode.SAME_STEP
            else steps * 0.5 < len(rows) < steps
        )
        np.testing.assert_allclose(rows, by_hand(seed, index, len(rows)), rtol=1e-6, atol=1e-6)
        assert any(row[5] for row in rows)
        assert any(row[6] for row in rows)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_own_vector_environments_give_the_true_transitions(vectorization: str) -> None:
    env = GymnasiumCpu(3, env=Tour, vectorization=vectorization)
    assert_true_transitions(env)
    env.close()


class OneBuffer(gymnasium.Env):
    """Counts its steps in one array, which it returns and resets; numbers are arrays of one."""

    observation_space = Box(-9.0, 9.0, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.steps = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        self.steps[:] = 0.0
        return self.steps, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, Any, Any, Any]:
        self.steps += 1.0
        end = self.steps == 3.0
        return self.steps, -(self.steps**2), end & (action > 0), end & (action <= 0), {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_reset_in_place_does_not_change_the_final_observation(vectorization: str) -> None:
    env = GymnasiumCpu(2, env=OneBuffer, vectorization=vectorization)
    env.reset(seed=0)
    steps = [env.step(torch.tensor([[0.5], [-0.5]])) for _ in range(4)]
    env.close()
    assert [one.reward.tolist() for one in steps] == [
        [-1.0] * 2,
        [-4.0] * 2,
        [-9.0] * 2,
        [-1.0] * 2,
    ]
    assert steps[2].info["final_obs"].tolist() == [[3.0], [3.0]]
    assert steps[2].obs.tolist() == [[0.0], [0.0]]
    assert steps[2].terminated.tolist() == [True, False]
    assert steps[2].truncated.tolist() == [False, True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_foreign_vector_environments_give_the_true_transitions(
    kind: type, mode: AutoresetMode
) -> None:
    env = GymnasiumCpu(3, env=kind([Tour] * 3, autoreset_mode=mode))
    assert_true_transitions(env)
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_contract_holds_in_every_mode(mode: AutoresetMode) -> None:
    assert (
        check_env(GymnasiumCpu(4, env=SyncVectorEnv([Tour] * 4, autoreset_mode=mode, copy=False)))
        == []
    )


@pytest.mark.parametrize("mode", MODES)
def test_statistics_count_true_steps_only(mode: AutoresetMode) -> None:
    env = GymnasiumCpu(2, env=SyncVectorEnv([Tour] * 2, autoreset_mode=mode))
    obs, _ = env.reset(seed=3)
    episodes: list[list[tuple[float, int]]] = [[], []]
    for _ in range(80):
        obs, _, _, _, info = env.step(torch.from_numpy(act(obs.numpy())))
        for index in info["_episode"].nonzero().squeeze(1).tolist():
            episodes[index].append(
                (float(info["episode"]["r"][index]), int(info["episode"]["l"][index]))
            )
    for index, found in enumerate(episodes):
        rewards: list[float] = []
        expected = []
        for row in by_hand(3, index, 80):
            rewards.append(row[2])
            if row[5] or row[6]:
                expected.append((sum(rewards), len(rewards)))
                rewards = []
        assert len(found) >= 8
        for (episode_return, length), (expected_return, expected_length) in zip(found, expected):
            assert length == expected_length
            assert episode_return == pytest.approx(expected_return, rel=1e-5, abs=1e-4)


def test_a_step_that_only_resets_says_so() -> None:
    env = GymnasiumCpu(3, env=SyncVectorEnv([Tour] * 3, autoreset_mode=AutoresetMode.NEXT_STEP))
    assert env.autoreset_mode == env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    env.reset(seed=3)
    ended = torch.zeros(3, dtype=torch.bool)
    for _ in range(30):
        timestep = env.step(torch.zeros(3, 1))
        assert torch.equal(timestep.info["valid"], ~ended)
        assert not timestep.reward[ended].any()
        assert not (timestep.terminated | timestep.truncated)[ended].any()
        assert not timestep.obs[ended][:, 1].any()  # the first observation of an episode
        ended = timestep.terminated | timestep.truncated


def test_both_flags_become_terminated() -> None:
    class Both(Tour):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return *super().step(action)[:2], True, True, {}

    env = GymnasiumCpu(2, env=Both)
    env.reset(seed=0)
    timestep = env.step(torch.zeros(2, 1))
    assert timestep.terminated.tolist() == [True, True]
    assert timestep.truncated.tolist() == timestep.info["time_outs"].tolist() == [False, False]


def test_a_time_limit_truncates_and_shows_the_true_successor() -> None:
    env = make_env("gymnasium_cpu:Pendulum-v1", 2, seed=5, max_episode_steps=4)
    assert env.max_episode_steps == 4
    obs, _ = env.reset()
    single = gymnasium.make("Pendulum-v1").unwrapped
    single.reset()
    single.state = np.array(
        [np.arctan2(float(obs[1, 1]), float(obs[1, 0])), float(obs[1, 2])], np.float64
    )
    for step in range(4):
        timestep = env.step(torch.full((2, 1), 0.5))
        expected = single.step(np.array([0.5], np.float32))[0]
        np.testing.assert_allclose(timestep.info["final_obs"][1], expected, atol=1e-5)
        assert timestep.truncated.tolist() == [step == 3] * 2
    assert timestep.info["episode"]["l"].tolist() == [4, 4]
    assert not torch.allclose(timestep.obs[1], timestep.info["final_obs"][1])
    assert torch.equal(timestep.info["_final_obs"], timestep.truncated)
    assert env.episode_length_buf.tolist() == [0, 0]
    env.close()


def test_a_time_limit_around_a_function() -> None:
    class Endless(Tour):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return *super().step(action)[:2], False, False, {}

    env = GymnasiumCpu(2, env=Endless, max_episode_steps=3)
    env.reset()
    assert [bool(env.step(torch.zeros(2, 1)).truncated.all()) for _ in range(6)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


# ---- vector environments that are not Gymnasium's own ----


def test_final_obs_as_a_whole_array() -> None:
    timestep = second_step(
        Batch(AutoresetMode.SAME_STEP, lambda: {"final_obs": np.full((2, 1), 2.0)})
    )
    assert timestep.info["final_obs"].tolist() == [[2.0], [2.0]]
    assert timestep.obs.tolist() == [[0.0], [0.0]]


def test_a_missing_final_obs_is_named() -> None:
    with pytest.raises(
        EnvError,
        match=r"no info\['final_obs'\] at the end of an episode, only \['final_observation'\]",
    ):
        second_step(Batch(AutoresetMode.SAME_STEP, lambda: {"final_observation": None}))
    with pytest.raises(EnvError, match=r"no info\['final_obs'\] for environments \[1\]"):
        second_step(
            Batch(
                AutoresetMode.SAME_STEP,
                lambda: {"final_obs": np.array([np.ones(1), None], dtype=object)},
            )
        )


@pytest.mark.parametrize("mode", [None, "SameStep"])
def test_an_unknown_way_of_resetting_is_refused(mode: Any) -> None:
    batch = Batch(mode)
    with pytest.raises(
        UsageError,
        match=r"set env.metadata\['autoreset_mode'\] to gymnasium.vector.AutoresetMode.SAME_STEP, "
        r"NEXT_STEP or",
    ):
        GymnasiumCpu(2, env=batch)
    assert batch.was_closed


def test_closing_closes_the_wrapped_environment() -> None:
    batch = Batch(AutoresetMode.NEXT_STEP)
    env = GymnasiumCpu(2, env=batch)
    env.close()
    env.close()
    assert batch.was_closed


def test_a_task_s_own_vector_version() -> None:
    env = make_env("gymnasium_cpu:CartPole-v1", 3, vectorization="vector", max_episode_steps=6)
    assert check_env(env, steps=20)[:1] == [
        f"{env._env} cannot reset some environments only: it ignores options['reset_mask'] and has "
        f"reset all of them"
    ]
    env.reset(seed=0)
    valid = [bool(env.step(torch.tensor([0, 1, 0])).info["valid"].all()) for _ in range(8)]
    assert valid == [True] * 6 + [False, True]
    with pytest.raises(UsageError, match="Pendulum-v1 has no vector version"):
        make_env("gymnasium_cpu:Pendulum-v1", 2, vectorization="vector")


def test_envpool() -> None:
    pytest.importorskip("envpool")
    env = make_env(
        "gymnasium_cpu:Pendulum-v1", 3, seed=4, vectorization="envpool", max_episode_steps=5
    )
    assert check_env(env) == []
    first, _ = env.reset(seed=4)
    assert not torch.equal(env.reset(seed=5)[0], first)
    assert torch.equal(env.reset(seed=4)[0], first)
    valid = [env.step(torch.zeros(3, 1)).info["valid"].tolist() for _ in range(7)]
    assert valid == [[True] * 3] * 5 + [[False] * 3, [True] * 3]
    env.close()
    with pytest.raises(
        UsageError, match="EnvPool has no task 'Pendlum-v1'; did you mean Pendulum-v1"
    ):
        make_env("gymnasium_cpu:Pendlum-v1", 2, vectorization="envpool")


# ---- spaces ----

NESTED = Dict(
    {
        "place": Discrete(3, start=5),
        "hand": Tuple((MultiDiscrete([2, 3], start=[1, -1]), Box(-1.0, 2.0, (2, 2), np.float64))),
        "lamps": MultiBinary([2, 2]),
        "level": Box(0, 200, (1,), np.int32),
        "bytes": Box(0, 255, (3,), np.uint8),
    }
)


@pytest.mark.parametrize(
    "space",
    [NESTED, *NESTED.spaces.values(), NESTED["hand"][0], Box(-1.0, 1.0, ())],
    ids=lambda space: type(space).__name__,
)
def test_batches_flatten_as_gymnasium_flattens_one(space: gymnasium.Space) -> None:
    space.seed(0)
    rows = [space.sample() for _ in range(5)]
    encoder = make_encoder(space)
    expected = [
        row if isinstance(space, Box) and space.shape else gymnasium.spaces.flatten(space, row)
        for row in rows
    ]
    encoded = encoder.encode(stack_rows(space, rows))
    assert encoded.dtype == encoder.space.dtype == np.float32
    np.testing.assert_array_equal(encoded, np.array(expected, np.float32))
    assert all(row in encoder.space for row in encoded)


class Dream(gymnasium.Env):
    """Ends after two steps; shows samples of a space, and keeps the actions it got."""

    def __init__(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space = NESTED["level"]
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.actions: list[Any] = []
        self.shown: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.observation_space.seed(seed)
        self.shown.append(self.observation_space.sample())
        self.steps = 0
        return self.shown[-1], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        self.actions.append(action)
        self.shown.append(self.observation_space.sample())
        return self.shown[-1], 0.0, self.steps == 2, False, {}


def test_nested_observations_and_final_observations() -> None:
    env = GymnasiumCpu(2, env=lambda: Dream(NESTED))
    dreams: Any = [watched.unwrapped for watched in env._env.envs]
    obs, _ = env.reset(seed=0)
    env.step(torch.zeros(2, 1))
    timestep = env.step(torch.zeros(2, 1))
    flat = [[gymnasium.spaces.flatten(NESTED, shown) for shown in dream.shown] for dream in dreams]
    np.testing.assert_array_equal(obs, np.array([rows[0] for rows in flat], np.float32))
    np.testing.assert_array_equal(
        timestep.info["final_obs"], np.array([rows[2] for rows in flat], np.float32)
    )
    np.testing.assert_array_equal(timestep.obs, np.array([rows[3] for rows in flat], np.float32))


def test_images_stay_bytes() -> None:
    env = GymnasiumCpu(2, env=lambda: Dream(Box(0, 255, (4, 5, 3), np.uint8)))
    obs, _ = env.reset(seed=0)
    assert obs.dtype == torch.uint8
    assert obs.shape == (2, 4, 5, 3)
    assert env.single_observation_space == Box(0, 255, (4, 5, 3), np.uint8)
    assert check_env(env, steps=4) == []


REFUSED = [
    (Graph(Box(0, 1, (1,)), None), "the observation: it is Graph"),
    (Dict({"a": Dict({"words": Text(4)})}), r"the observation\['a'\]\['words'\]: it is Text"),
    (Tuple((Discrete(2), Sequence(Discrete(2)))), r"the observation\[1\]: it is Sequence"),
    (
        Dict({"a": Dict({"eye": Box(0, 255, (8, 8), np.uint8), "x": Discrete(2)})}),
        r"in no other space: the observation\['a'\]\['eye'\] is Box",
    ),
    (Dict({}), "this space is empty"),
]


@pytest.mark.parametrize(("space", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_observations_that_cannot_be_flattened_are_named(
    space: gymnasium.Space, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_encoder(space)


def test_a_refused_space_leaves_no_process() -> None:
    with pytest.raises(UsageError, match="cannot flatten the observation"):
        GymnasiumCpu(2, env=lambda: Dream(Text(3)), vectorization="sync")
    with pytest.raises(
        UsageError,
        match=r"needs a Box of .*, a Discrete, MultiDiscrete or MultiBinary action space, this "
        r"one is Text",
    ):
        GymnasiumCpu(2, env=lambda: Dream(Discrete(2), Text(3)), vectorization="async")
    assert multiprocessing.active_children() == []


ACTIONS = [
    (Discrete(3, start=-1), [0, 2], [-1, 1], Discrete(3)),
    (
        MultiDiscrete([2, 3], start=[1, 0]),
        [[0, 0], [1, 2]],
        [[1, 0], [2, 2]],
        MultiDiscrete([2, 3]),
    ),
    (
        MultiDiscrete([[2, 3], [4, 5]]),
        [[1, 2, 3, 4], [0, 0, 1, 1]],
        [[[1, 2], [3, 4]], [[0, 0], [1, 1]]],
        MultiDiscrete([2, 3, 4, 5]),
    ),
    (MultiBinary([2, 1]), [[1, 0], [0, 1]], [[[1], [0]], [[0], [1]]], MultiDiscrete([2, 2])),
    (Box(-2.0, 2.0, (), np.float32), [[0.5], [9.0]], [0.5, 2.0], Box(-2.0, 2.0, (1,), np.float32)),
    (
        Box(-2.0, 2.0, (1, 2), np.float64),
        [[[0.5, 1.0]], [[9.0, -9.0]]],
        [[[0.5, 1.0]], [[2.0, -2.0]]],
        Box(-2.0, 2.0, (1, 2), np.float32),
    ),
    (Box(0, 9, (1,), np.int32), [[3.6], [9.7]], [[4], [9]], Box(0.0, 9.0, (1,), np.float32)),
]


@pytest.mark.parametrize(
    ("space", "sent", "got", "shown"), ACTIONS, ids=[str(case[0]) for case in ACTIONS]
)
def test_actions_arrive_in_the_space(
    space: gymnasium.Space, sent: list, got: list, shown: gymnasium.Space
) -> None:
    env = GymnasiumCpu(2, env=lambda: Dream(Discrete(2), space))
    assert env.single_action_space == shown
    env.reset(seed=0)
    env.step(torch.tensor(sent))
    dreams: Any = [watched.unwrapped for watched in env._env.envs]
    assert [np.asarray(dream.actions[0]).tolist() for dream in dreams] == got
    assert (
        make_decoder(space)
        .decode(np.array(sent, np.float32 if isinstance(space, Box) else np.int64))
        .dtype
        == space.dtype
    )


# ---- seeds and partial resets ----


def test_seeds() -> None:
    first, _ = make_env("gymnasium_cpu:Pendulum-v1", 4, seed=1).reset()
    env = make_env("gymnasium_cpu:Pendulum-v1", 4, seed=0)
    start, _ = env.reset()
    again, _ = env.reset()
    assert torch.equal(env.reset(seed=1)[0], first)
    assert torch.equal(env.reset(seed=0)[0], start)
    rows = torch.cat((first, start, again)).tolist()
    assert (
        len({tuple(row) for row in rows}) == 12
    )  # no two environments alike, no seed the neighbour of another


@pytest.mark.parametrize("mode", MODES)
def test_some_environments_can_be_reset(mode: AutoresetMode) -> None:
    env = GymnasiumCpu(3, env=SyncVectorEnv([Tour] * 3, autoreset_mode=mode))
    env.reset(seed=0)
    obs = env.step(torch.zeros(3, 1)).obs
    mask = torch.tensor([True, False, True])
    after, _ = env.reset(options={"reset_mask": mask})
    assert torch.equal(after[1], obs[1])
    assert (after[mask] != obs[mask]).any(1).all()
    assert after[mask][:, 1].tolist() == [0.0, 0.0]
    assert torch.equal(
        env.reset(options={"reset_mask": torch.zeros(3, dtype=torch.bool)})[0], after
    )


def test_task_options_reach_the_task() -> None:
    env: Any = make_env("gymnasium_cpu:Pendulum-v1", 2, task_options={"g": 1.5})
    assert [single.unwrapped.g for single in env._env.envs] == [1.5, 1.5]
    assert env.max_episode_steps == 200


def test_arguments_of_the_task_are_options_by_their_names() -> None:
    # given by name, which wins over task_options
    env: Any = make_env("Pendulum-v1", 2, g=1.5, task_options={"g": 3.0})
    assert [single.unwrapped.g for single in env._env.envs] == [1.5, 1.5]
    assert env.task_options == {"g": 1.5}
    # what the registry gives is the default, and the adapter's options stay
    lander = env_options(resolve_env("LunarLanderContinuous-v3")[0])
    assert lander["continuous"].default is True
    assert lander["gravity"].default == -10.0
    assert {"vectorization", "max_episode_steps", "task_options"} <= lander.keys()
    # a wrong one is told the options that a user gives
    has = "render_mode, g, vectorization, max_episode_steps, restart_workers, worker_timeout"
    with pytest.raises(UsageError, match=f"no option gravity; it has: {has}$"):
        make_env("Pendulum-v1", 2, gravity=1.5)


def test_where_arguments_are_not_known_task_options_hold_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = EnvSpec("Hidden-v0", lambda **given: gymnasium.make("Pendulum-v1", **given))
    monkeypatch.setitem(gymnasium.registry, "Hidden-v0", spec)
    with pytest.raises(UsageError, match=r"no option g; it has: vectorization.*, task_options"):
        make_env("Hidden-v0", 2, g=1.5)
    env: Any = make_env("Hidden-v0", 2, task_options={"g": 1.5})
    assert [single.unwrapped.g for single in env._env.envs] == [1.5, 1.5]
    with pytest.raises(UsageError, match=r"task_options must be a dict .* got 'g=1.5'"):
        make_env("Hidden-v0", 2, task_options="g=1.5")


@pytest.mark.parametrize(
    ("vectorization", "method"), [("sync", "fork"), ("async", "fork"), ("async", "spawn")]
)
def test_mujoco_says_nothing_of_the_model_of_half_cheetah(
    vectorization: str, method: str, tmp_path: Path
) -> None:
    """In a process of its own, which has not imported MuJoCo."""
    pytest.importorskip("mujoco")
    code = (
        "import multiprocessing\n"
        f"multiprocessing.set_start_method({method!r})\n"
        "from gpurl.envs import make_env\n"
        f"env = make_env('HalfCheetah-v5', 2, vectorization={vectorization!r})\n"
        "print(env.reset()[0].shape)\n"
        "env.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "torch.Size([2, 17])\n")
    assert not list(tmp_path.iterdir())  # no MUJOCO_LOG.TXT


def test_other_warnings_of_mujoco_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mujoco = pytest.importorskip("mujoco")
    own = mujoco.get_mju_user_warning()
    told: list[str] = []

    def make_cheetah() -> gymnasium.Env:
        env = gymnasium.make("HalfCheetah-v5")
        unwrapped: Any = env.unwrapped
        unwrapped.data.qpos[0] = np.nan
        mujoco.mj_checkPos(unwrapped.model, unwrapped.data)
        return env

    try:
        # to the handler that was there; without one to our log
        mujoco.set_mju_user_warning(told.append)
        GymnasiumCpu(2, env=make_cheetah)
        assert mujoco.get_mju_user_warning() == told.append
        mujoco.set_mju_user_warning(None)
        with caplog.at_level(logging.WARNING, "gpurl"):
            GymnasiumCpu(2, env=make_cheetah)
        assert mujoco.get_mju_user_warning() is None
    finally:
        mujoco.set_mju_user_warning(own)
    for texts in (told, caplog.messages):
        assert len(texts) == 2
        assert all("QPOS" in text for text in texts)


def test_packed_transfer_keeps_every_array() -> None:
    tensors = [
        torch.rand(3, 5),
        torch.tensor([True, False, True]),
        torch.arange(3),
        torch.arange(7, dtype=torch.uint8),
        torch.zeros(0, 2),
    ]
    sent: list[Tensor] = send_packed(tensors, torch.device("cpu"))
    for tensor, other in zip(tensors, sent):
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other)
