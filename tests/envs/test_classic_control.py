"""The classic control tasks against Gymnasium's own classes: spaces, step by step from copied
states, time limits, first states.
"""

import math
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.envs import acrobot, make_env
from gpurl.envs.torch_env import State, TorchEnv

IDS = {
    "cart_pole": "CartPole-v1",
    "pendulum": "Pendulum-v1",
    "mountain_car": "MountainCar-v0",
    "mountain_car_continuous": "MountainCarContinuous-v0",
    "acrobot": "Acrobot-v1",
}


def spread(bounds: list[tuple[float, float]], num_envs: int) -> list[Tensor]:
    """One [N] tensor a pair of bounds, uniform between them."""
    return [torch.rand(num_envs) * (high - low) + low for low, high in bounds]


def wild_state(name: str, n: int) -> State:
    """States over the whole space, beyond the border of termination too: [n, ...] tensors as the
    task holds them.
    """
    if name == "cart_pole":
        return {
            "motion": torch.stack(
                spread([(-2.42, 2.42), (-3, 3), (-0.215, 0.215), (-3, 3)], n), dim=1
            )
        }
    if name == "pendulum":
        angle, velocity = spread([(-math.pi, math.pi), (-8, 8)], n)
        return {"obs": torch.stack((angle.cos(), angle.sin(), velocity), dim=1), "angle": angle}
    if name == "acrobot":
        return acrobot.make_state(
            *spread([(-math.pi, math.pi), (-math.pi, math.pi), (-5, 5), (-9, 9)], n)
        )
    state = torch.stack(spread([(-1.2, 0.6), (-0.07, 0.07)], n), dim=1)
    state[: n // 4, 0] = torch.rand(n // 4) * 0.02 + (
        0.44 if name == "mountain_car_continuous" else 0.49
    )  # at the goal
    state[n // 4 : n // 2, 0] = -1.2 + torch.rand(n // 4) * 0.02  # at the left wall
    return {"obs": state}


def physical(name: str, state: State) -> np.ndarray:
    """[n, k] float64 what Gymnasium's `state` attribute holds."""
    if name == "cart_pole":
        columns = [state["motion"]]
    elif name == "pendulum":
        columns = [state["angle"][:, None], state["obs"][:, 2:]]
    elif name == "acrobot":
        columns = [state["angle_1"][:, None], state["angle_2"][:, None], state["obs"][:, 4:]]
    else:
        columns = [state["obs"]]
    return torch.cat(columns, dim=1).double().numpy()


def random_actions(env: TorchEnv, n: int) -> Tensor:
    space = env.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return torch.randint(0, int(space.n), (n,))
    return (torch.rand(n, 1) * 3 - 1.5) * float(
        space.high[0]
    )  # half as much again as allowed: clipping shows


@pytest.mark.parametrize("name", IDS)
def test_is_the_same_task(name: str) -> None:
    env, peer = make_env(name, 2), gymnasium.make(IDS[name])
    assert env.single_observation_space == peer.observation_space
    assert env.single_action_space == peer.action_space
    assert env.reward_threshold == peer.spec.reward_threshold
    assert env.max_episode_steps == peer.spec.max_episode_steps


@pytest.mark.parametrize("name", IDS)
def test_step_equals_gymnasium_from_the_same_state(name: str) -> None:
    torch.manual_seed(1)
    n = 16
    env = make_env(name, n)
    peers = [gymnasium.make(IDS[name]).unwrapped for _ in range(n)]
    for peer in peers:
        peer.reset(seed=0)
    env.reset()
    ended = 0
    for step in range(300):
        if step % 5 == 0:
            env._state = wild_state(name, n)
        before, actions = physical(name, env._state), random_actions(env, n)
        got = env.step(actions)
        for i, peer in enumerate(peers):
            peer.state = before[i].copy()
            peer.steps_beyond_terminated = None
            obs, reward, terminated, _, _ = peer.step(
                actions[i].numpy() if actions.dim() > 1 else int(actions[i])
            )
            np.testing.assert_allclose(got.info["final_obs"][i].numpy(), obs, rtol=0, atol=1e-5)
            assert float(got.reward[i]) == pytest.approx(float(reward), abs=1e-5)
            assert bool(got.terminated[i]) == terminated
            ended += terminated
    assert ended > 100 or name == "pendulum"


@pytest.mark.parametrize("name", ["pendulum", "acrobot"])
def test_angles_stay_small_however_long_it_turns(name: str) -> None:
    env = make_env(name, 64)
    env.reset()
    env._state = wild_state(name, 64)
    for _ in range(60):
        env.step(torch.full_like(random_actions(env, 64), 2))
        angles = physical(name, env._state)[:, : 1 if name == "pendulum" else 2]
        assert np.abs(angles).max() < math.pi + 1e-6


def test_fast_acrobot_is_cut_to_gymnasiums_speeds() -> None:
    n = 200
    env, peer = make_env("acrobot", n), gymnasium.make("Acrobot-v1").unwrapped
    env.reset()
    peer.reset(seed=0)
    env._state = acrobot.make_state(
        *spread([(-math.pi, math.pi), (-math.pi, math.pi), (8, 12.5), (-28, -16)], n)
    )
    before, actions = physical("acrobot", env._state), random_actions(env, n)
    got = env.step(actions).info["final_obs"].numpy()
    want = []
    for state, action in zip(before, actions.tolist()):
        peer.state = state
        want.append(peer.step(action)[0])
    np.testing.assert_allclose(
        got, want, rtol=0, atol=1e-3
    )  # at 28 rad/s a step of 0.2 s magnifies float32 rounding
    bounds = env.single_observation_space.high[4:]
    assert (np.abs(got[:, 4:]) == bounds).sum(axis=0).min() > 10


@pytest.mark.parametrize("name", IDS)
def test_truncates_at_the_same_step(name: str) -> None:
    env, peer = make_env(name, 3), gymnasium.make(IDS[name], disable_env_checker=True)
    env.reset()
    peer.reset(seed=0)
    pinned = {key: value.clone() for key, value in env._state.items()}
    action = torch.zeros(
        3,
        *env.single_action_space.shape,
        dtype=torch.int64 if env.single_action_space.shape == () else torch.float32,
    )
    numpy_action = action[0].numpy() if action.dim() > 1 else 0
    for step in range(env.max_episode_steps + 2):
        env._state = pinned  # never at an end, so only time can end it
        peer.unwrapped.state = physical(name, pinned)[0]
        truncated = peer.step(numpy_action)[3]
        assert env.step(action).truncated.tolist() == [truncated] * 3, step
        if truncated:
            break
    assert truncated


@pytest.mark.parametrize("name", IDS)
def test_first_states_are_distributed_as_gymnasiums(name: str) -> None:
    ours = make_env(name, 4096, seed=3).reset()[0].double().numpy()
    peer = gymnasium.make(IDS[name]).unwrapped
    peer.reset(seed=5)
    theirs = np.stack([peer.reset()[0] for _ in range(3000)])
    for mine, other in zip(ours.T, theirs.T):
        if other.std() == 0:
            assert np.all(mine == other[0])
            continue
        assert kolmogorov(mine, other) < 1.95  # probability 0.1 %
        width = other.max() - other.min()
        assert abs(mine.min() - other.min()) < 0.005 * width
        assert abs(mine.max() - other.max()) < 0.005 * width


def kolmogorov(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sample Kolmogorov-Smirnov statistic, scaled by sqrt(n m / (n + m))."""
    grid = np.concatenate((a, b))
    gap = np.abs(
        np.searchsorted(np.sort(a), grid, "right") / len(a)
        - np.searchsorted(np.sort(b), grid, "right") / len(b)
    ).max()
    return gap * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


def test_cart_pole_can_hide_its_velocities() -> None:
    full, partial = (
        make_env("cart_pole", 8, seed=2),
        make_env("cart_pole", 8, seed=2, velocities=False),
    )
    assert partial.single_observation_space.shape == (2,)
    pairs: list[Callable[[TorchEnv], Tensor]] = [lambda env: env.reset()[0]] + [
        lambda env: env.step(torch.ones(8).long()).obs
    ] * 15
    for observe in pairs:
        assert torch.equal(observe(full)[:, [0, 2]], observe(partial))
