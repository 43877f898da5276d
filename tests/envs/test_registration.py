"""gpurl's tasks under Gymnasium: `make_vec` gives the tensor environment, `make` a plain one that
passes Gymnasium's own checker.
"""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from gpurl.envs import env_names, make_env, resolve_env
from gpurl.envs.mean_reward import MeanReward
from gpurl.envs.single_env import SingleEnv
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import UsageError
from gpurl.registration import register, tasks
from tests.tiny_envs import Walkers

TASKS = list(tasks())
every_id = pytest.mark.parametrize("env_id", [f"gpurl/{class_name}-v0" for _, class_name in TASKS])


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def test_every_torch_env_of_the_folder_is_registered() -> None:
    registered = set()
    for name in env_names():
        try:
            env_class = resolve_env(name)[0]
        except (ImportError, UsageError):
            continue
        if TorchEnv in env_class.__bases__:
            registered.add((name, env_class.__name__))
    assert registered == set(TASKS)
    assert ("mountain_car_continuous", "MountainCarContinuous") in registered


def test_registering_imports_no_torch_and_twice_changes_nothing() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error'); import gymnasium; from "
        "gpurl.registration import register; register();"
        "first = dict(gymnasium.registry); register();"
        "assert first == dict(gymnasium.registry) and all(first[key] is gymnasium.registry[key] "
        "for key in first);"
        "assert 'gpurl/Chasing-v0' in first and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@every_id
def test_make_vec_gives_the_tensor_environment(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec(env_id, num_envs=3, device="cpu", seed=7, max_episode_steps=1)
    task = env.unwrapped
    assert isinstance(task, TorchEnv)
    assert (env is task) == (task.num_agents == 1)
    assert env.spec.id == env_id
    assert task.max_episode_steps == 1
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape
    for _ in range(2):
        _, reward, _, truncated, _ = env.step(torch.as_tensor(env.action_space.sample()))
        assert reward.shape == (3,)
        assert bool(truncated.all())
    env.close()


def test_make_vec_gives_the_mean_over_agents() -> None:
    env = gymnasium.make_vec("gpurl/TwoStepGame-v0", num_envs=4)
    env.reset(seed=0)
    env.step(np.ones((4, 2), np.int64))
    _, reward, terminated, _, info = env.step(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]))
    assert reward.tolist() == info["episode"]["r"].tolist() == [0.0, 1.0, 1.0, 8.0]
    assert bool(terminated.all())
    unlike, alone = MeanReward(Walkers(4)), Walkers(4)
    for each in (unlike, alone):
        each.reset(seed=0)
    rewards = alone.step(torch.zeros(4, 3, 1)).reward
    assert rewards.unique().numel() == 12
    torch.testing.assert_close(unlike.step(torch.zeros(4, 3, 1))[1], rewards.sum(1) / 3)


@pytest.mark.parametrize("env_id", ["gpurl/Chasing-v0", "gpurl/CartPole-v0", "gpurl/Pendulum-v0"])
def test_make_vec_takes_gymnasiums_own_actions(env_id: str) -> None:
    env = gymnasium.make_vec(env_id, num_envs=4)
    env.reset(seed=0)
    env.action_space.seed(0)
    action = env.action_space.sample()
    assert isinstance(action, np.ndarray)
    assert env.step(action)[1].shape == (4,)


def test_make_vec_hands_options_on() -> None:
    assert (
        gymnasium.make_vec(
            "gpurl/Chasing-v0", num_envs=8, dim=3, discrete=True
        ).single_action_space.n
        == 27
    )
    assert gymnasium.make_vec(
        "gpurl/CartPole-v0", num_envs=8, velocities=False
    ).single_observation_space.shape == (2,)


def test_make_vec_can_wrap_single_environments() -> None:
    envs = gymnasium.make_vec(
        "gpurl/CartPole-v0", num_envs=2, vectorization_mode="sync", velocities=False
    )
    obs, _ = envs.reset(seed=1)
    assert isinstance(obs, np.ndarray)
    assert obs.shape == (2, 2)


@every_id
def test_make_passes_gymnasiums_checker(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(env_id)
    assert isinstance(env.unwrapped, SingleEnv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in (
            "A Box observation space (min|max)imum value is -?infinity",
            "we recommend using a symmetric and normalized space",
        ):
            warnings.filterwarnings(
                "ignore", message=f".*{known}"
            )  # true of Gymnasium's CartPole-v1 and Pendulum-v1 too
        check_env(env.unwrapped)


@every_id
def test_a_single_env_returns_what_the_tensor_environment_does(env_id: str) -> None:
    name = dict((f"gpurl/{class_name}-v0", module) for module, class_name in TASKS)[env_id]
    env, peer = gymnasium.make(env_id, max_episode_steps=-1).unwrapped, make_env(name, 1)
    env.action_space.seed(0)
    for seed in (11, None):  # None: the next episode of the same stream
        obs, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(obs, peer.reset(seed=seed)[0][0].numpy())
        for _ in range(20):
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            want = peer.step(torch.as_tensor(action).unsqueeze(0))
            np.testing.assert_array_equal(obs, want.info["final_obs"][0].numpy())
            assert (reward, terminated, truncated) == (
                float(want.reward.mean()),
                bool(want.terminated),
                bool(want.truncated),
            )
            assert [type(value) for value in (reward, terminated, truncated)] == [float, bool, bool]
            if terminated:
                break


def test_a_single_env_returns_the_last_observation_of_an_episode() -> None:
    env = gymnasium.make("gpurl/CartPole-v0")
    obs, _ = env.reset(seed=1)
    terminated = False
    while not terminated:
        obs, _, terminated, _, _ = env.step(0)
    assert abs(obs[2]) > np.radians(12)


def test_without_a_seed_no_two_environments_start_alike() -> None:
    first, second = (gymnasium.make("gpurl/Pendulum-v0").reset()[0] for _ in range(2))
    assert not np.array_equal(first, second)


def test_a_callers_change_to_an_observation_does_not_reach_the_environment() -> None:
    env, peer = (gymnasium.make("gpurl/Pendulum-v0").unwrapped for _ in range(2))
    obs, _ = env.reset(seed=1)
    peer.reset(seed=1)
    obs[:] = 5.0
    np.testing.assert_array_equal(
        env.step(np.zeros(1, np.float32))[0], peer.step(np.zeros(1, np.float32))[0]
    )


def test_two_environments_have_two_action_generators() -> None:
    first, second = gymnasium.make("gpurl/Pendulum-v0"), gymnasium.make("gpurl/Pendulum-v0")
    first.action_space.seed(0)
    want = first.action_space.sample()
    first.action_space.seed(0)
    second.action_space.sample()
    np.testing.assert_array_equal(first.action_space.sample(), want)


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="pendulum"):
        SingleEnv("pendulm")
