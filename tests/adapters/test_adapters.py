"""Our environments for other trainers, as far as it needs no other trainer; with them: the files
beside this one.
"""

import logging
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

from benchmarks.results_table import ROOT
from gpurl import adapters
from gpurl.adapters.transfer import action_limiter, to_arrays
from gpurl.envs.registry import env_names, make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import UsageError
from tests.outward_truth import assert_same, env_of, truth
from tests.picture_envs import Seen
from tests.tiny_envs import RandomWalk, Walkers


def test_tensors_of_all_kinds_come_as_arrays_of_their_own() -> None:
    tensors = [
        torch.rand(3, 5),
        torch.tensor([True, False, True]),
        torch.arange(3),
        torch.arange(6, dtype=torch.uint8).reshape(3, 2)[:, :1],
    ]
    arrays = to_arrays(tensors)
    for tensor, array in zip(tensors, arrays):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())
        assert array.flags.writeable
        assert array.flags.aligned
        assert not np.shares_memory(array, tensor.numpy())


@pytest.mark.parametrize("name", [name for name in vars(adapters) if name.startswith("to_")])
def test_an_environment_whose_workers_may_be_started_again_is_refused(name: str) -> None:
    env = make_env("gymnasium_cpu:CartPole-v1", 2)
    env.restart_workers = 1  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError,
        match=r"GymnasiumCpu: wanted restart_workers 0, got 1: the step in which workers .* is no "
        r"transition",
    ):
        getattr(adapters, name)(env)


def test_gymnasium_numpy_is_what_gymnasium_gives_of_the_same_environments() -> None:
    def make() -> gymnasium.Env:
        return RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=15))

    theirs = SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = adapters.to_gymnasium_numpy(
        make_env("gymnasium_cpu:CartPole-v1", 3, max_episode_steps=15)
    )
    assert (ours.metadata["autoreset_mode"], ours.observation_space) == (
        AutoresetMode.SAME_STEP,
        theirs.observation_space,
    )
    obs, _ = ours.reset(seed=7)
    seeds = (
        np.random.SeedSequence(7).generate_state(3).tolist()
    )  # as gymnasium_cpu makes them of one
    np.testing.assert_array_equal(obs, theirs.reset(seed=seeds)[0])
    ends, random = 0, np.random.default_rng(0)
    for _ in range(60):
        action = random.integers(0, 2, 3)
        (*ours_step, ours_info), (*theirs_step, theirs_info) = (
            ours.step(action),
            theirs.step(action),
        )
        theirs_step[3] &= ~theirs_step[2]  # ours never say both
        for got, expected in zip(ours_step, theirs_step, strict=True):
            np.testing.assert_allclose(got, expected)
        ends += bool(theirs_info)
        assert_same_info(ours_info, theirs_info)
    assert ends > 3


def assert_same_info(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(got) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_info(got[key], value)
        elif value.dtype == object:
            assert [row is None for row in got[key]] == [row is None for row in value]
            for row, expected_row in zip(got[key], value):
                assert row is None or np.array_equal(row, expected_row)
        elif key != "t":
            assert got[key].dtype == value.dtype
            np.testing.assert_allclose(got[key], value)


@pytest.mark.parametrize("name", ["chasing", "cart_pole"])
def test_gymnasiums_statistics_count_our_episodes(name: str) -> None:
    env = RecordVectorStatistics(adapters.to_gymnasium_numpy(env_of(name)))
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(14)]
    played = truth(name, actions)
    obs, _ = env.reset()
    for step, action in enumerate(actions):
        assert_same(obs, played["obs"][step])
        obs, _, _, _, info = env.step(action)
        done = played["terminated"][step] | played["truncated"][step]
        assert ("episode" in info) == bool(done.any())
        if done.any():
            assert_same(info["episode"]["l"][done.numpy()], played["length"][step][done])
            assert_same(info["episode"]["r"][done.numpy()], played["return"][step][done])
            assert_same(np.stack(info["final_obs"][done.numpy()]), played["final_obs"][step][done])
    assert env.episode_count >= 4


def test_the_autoreset_mode_shows_that_a_reset_comes_a_step_later() -> None:
    cart_pole = make_env(
        "gymnasium_cpu:CartPole-v1", 2, vectorization="vector", max_episode_steps=9
    )
    env = RecordVectorStatistics(adapters.to_gymnasium_numpy(cart_pole))
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    env.reset(seed=0)
    for step in range(12):
        obs, reward, _, truncated, info = env.step(np.array([step % 2] * 2))
        assert "final_obs" not in info
        if truncated.any():
            before = obs
            assert info["episode"]["l"].tolist() == [9, 9]
            obs, reward, _, truncated, _ = env.step(np.zeros(2, np.int64))
            assert reward.tolist() == [0.0, 0.0]
            assert not truncated.any()
            assert np.abs(obs).max() <= 0.05 < np.abs(before).max()  # where episodes begin
    assert env.episode_count == 2


TORCH_ENVS = [name for name in env_names() if issubclass(resolve_env(name)[0], TorchEnv)]


@pytest.mark.parametrize("name", TORCH_ENVS)
def test_every_task_is_what_its_spaces_say(name: str) -> None:
    env = adapters.to_gymnasium_numpy(make_env(name, 3, max_episode_steps=2))
    env.action_space.seed(0)
    assert env.reset()[0] in env.observation_space
    for _ in range(2):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert obs in env.observation_space
        assert reward.shape == terminated.shape == truncated.shape == (3,)
    assert (terminated | truncated).all()
    assert np.stack(info["final_obs"]) in env.observation_space


def test_several_agents_are_given_as_one() -> None:
    env = adapters.to_gymnasium_numpy(Walkers(4, seed=0))
    obs, _ = env.reset()
    _, reward, _, _, _ = env.step(np.zeros((4, 3, 1), np.float32))
    np.testing.assert_allclose(reward, -np.abs(obs[:, :, 0]).mean(1), rtol=1e-6)


def test_some_environments_are_reset_and_options_left_alone() -> None:
    env = adapters.to_gymnasium_numpy(env_of("chasing"))
    before, _ = env.reset(seed=1)
    options = {"reset_mask": np.array([True, False, False, True])}
    after, _ = env.reset(options=options)
    assert (before != after).any(1).tolist() == [True, False, False, True]
    assert list(options) == ["reset_mask"]


def test_arrays_that_were_written_to_do_not_reach_the_environments() -> None:
    """On a CPU an observation of CartPole is its state."""
    env, untouched = adapters.to_gymnasium_numpy(env_of("cart_pole")), env_of("cart_pole")
    untouched.reset()
    env.reset()[0][:] = 0.0
    for _ in range(3):
        obs, reward, *_ = env.step(np.ones(4, np.int64))
        np.testing.assert_array_equal(obs, untouched.step(torch.ones(4, dtype=torch.int64)).obs)
        obs[:] = reward[:] = 9.0


def test_actions_are_clipped_into_a_box_and_only_there() -> None:
    action = torch.tensor([[-3.0, 0.5], [2.0, -1.5]])
    assert action_limiter(env_of("chasing"))(action).tolist() == [[-1.0, 0.5], [1.0, -1.0]]
    choice = torch.tensor([5])
    assert action_limiter(env_of("cart_pole"))(choice) is choice


@pytest.mark.parametrize("name", list(adapters.LIBRARIES))
def test_a_missing_library_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "stable_baselines3" if name == "sb3" else name
    for known in [
        known
        for known in sys.modules
        if known == f"gpurl.adapters.{name}" or known.partition(".")[0] == module
    ]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)  # importing it is an ImportError
    library, extra = adapters.LIBRARIES[name]
    with pytest.raises(
        UsageError, match=rf"to_{name} needs {library}: pip install -e '.*\[{extra}\]'"
    ):
        getattr(adapters, f"to_{name}")(env_of("chasing"))


def test_every_extra_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for library, extra in adapters.LIBRARIES.values():
        assert f'\n{extra} = ["{library}' in text


def test_what_cannot_be_taken_is_refused() -> None:
    class FromOne(RandomWalk):
        single_action_space = Discrete(3, start=1)

    with pytest.raises(
        UsageError,
        match=r"wanted an environment, as make_env\(name, num_envs\) makes it, got a str: "
        r"'chasing'",
    ):
        adapters.to_sb3("chasing")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="number their actions from 0"):
        adapters.to_torchrl(FromOne(2))
    with pytest.raises(UsageError, match=r"bytes of Dict\(speed .*camera .* as numbers"):
        adapters.to_sb3(Seen(2))


def test_a_library_that_learns_from_reset_steps_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Adapters:
        Sb3Env = TorchRlEnv = staticmethod(lambda env: "adapted")

    monkeypatch.setattr(adapters, "_module", lambda name: Adapters)
    late = make_env("gymnasium_cpu:CartPole-v1", 2, vectorization="vector")
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        assert adapters.to_torchrl(late) == adapters.to_sb3(env_of("chasing")) == "adapted"
        assert not caplog.records
        monkeypatch.setattr(late, "resets_late", True)  # as Isaac Gym
        adapters.to_torchrl(late)
        assert "one step after the end of an episode, which TorchRL does not know" in caplog.text
        adapters.to_sb3(late)
    assert (
        "GymnasiumCpu resets one step after the end of an episode, which stable-baselines3 does "
        "not know" in caplog.text
    )
