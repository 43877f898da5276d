"""The fused step of every task that has one against the torch step: same states, same random bits,
everything a step returns.
"""

from typing import Any

import pytest
import torch

from gpurl.envs.pendulum import Pendulum
from gpurl.envs.registry import env_names, make_env, resolve_env
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import Timestep
from gpurl.kernels import backend
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.env_step import TritonTask
from gpurl.kernels.random import CounterRandom
from tests.kernels.triton.conftest import DEVICE

CASES: list[tuple[str, dict[str, Any]]] = [
    ("chasing", {}),
    ("chasing", {"dim": 3, "bonus": False}),
    ("chasing", {"dim": 1, "discrete": True}),
    ("chasing", {"dim": 8, "discrete": True, "bonus": False}),
    ("cart_pole", {}),
    ("cart_pole", {"velocities": False}),
    ("pendulum", {}),
]
STEPS, NUM_ENVS = 20, 77


def play(
    name: str, options: dict[str, Any], choice: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Timestep], dict[str, Any]]:
    """The timesteps of one run and the state at its end; episodes of 9 steps at most, begun at
    different clocks.
    """
    monkeypatch.setattr(backend, "choice", choice)
    with no_host_syncs():
        env = make_env(name, NUM_ENVS, DEVICE, 3, max_episode_steps=9, **options)
        env.reset(seed=5)
        env.stagger(torch.arange(NUM_ENVS) % 9)
        env.action_space.seed(0)
        if name == "chasing":  # some are near enough to be captured
            target, _, chaser, _ = env._state["obs"][::3].split(env.dim, 1)
            target.copy_(
                chaser
                + torch.linspace(0.9, 1.02, len(chaser)).unsqueeze(1)
                * env.capture_radius
                / env.dim**0.5
            )
        if name == "cart_pole":
            env._state["motion"][::3, 2] = 0.2
        steps = [env.step(env.action_space.sample()) for _ in range(STEPS)]
        return steps, env.state_dict()


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_one_launch_does_what_the_torch_step_does(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (got, state), (expected, expected_state) = (
        play(name, options, choice, monkeypatch) for choice in ("triton", "torch")
    )
    ends = torch.zeros(2)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one[:4], other[:4], rtol=2e-5, atol=2e-5)
        assert one.info.keys() == other.info.keys()
        torch.testing.assert_close(one.info, other.info, rtol=2e-5, atol=2e-5)
        ends += torch.stack((other.terminated.sum(), other.truncated.sum()))
    torch.testing.assert_close(state, expected_state, rtol=2e-5, atol=2e-5)
    assert bool(ends[1] > 20)
    assert bool(ends[0] > 5) or name == "pendulum"


def test_every_fused_task_stands_in_the_table() -> None:
    fused = {
        name
        for name in env_names()
        if issubclass(resolve_env(name)[0], TorchEnv)
        and resolve_env(name)[0].triton_task is not TorchEnv.triton_task
    }
    assert fused == {name for name, _ in CASES}


def test_without_a_time_limit_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        env = make_env("pendulum", 3, DEVICE, 0)
        env.max_episode_steps = None
        env.reset(seed=0)
        env.episode_length_buf.fill_(2**40)
        assert not bool(env.step(torch.zeros(3, 1)).truncated.any())
        assert env.episode_length_buf.tolist() == [2**40 + 1] * 3


class ColumnsFirst(Pendulum):
    """Pendulum, whose first observations lie in memory column by column."""

    def initial_state(self, rng: CounterRandom) -> State:
        state = super().initial_state(rng)
        return state | {"obs": state["obs"].t().contiguous().t()}

    def triton_task(self) -> TritonTask:
        """The same: only the place in memory differs."""
        return super().triton_task()


def test_a_state_that_is_transposed_in_memory_is_read_in_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    observed = []
    with no_host_syncs():
        for kind in (Pendulum, ColumnsFirst):
            env = kind(5, DEVICE, 3)
            env.reset(seed=5)
            assert env.in_triton() is not None
            observed.append(env.step(torch.full((5, 1), 0.3)).obs.clone())
    torch.testing.assert_close(*observed)


class Dear(Pendulum):
    """Every step costs 7, whatever the state."""

    def transition(
        self, state: State, action: torch.Tensor, rng: CounterRandom
    ) -> tuple[State, torch.Tensor, torch.Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return next_state, torch.full_like(reward, -7.0), terminated


class Plain(Pendulum):
    """Another time limit and another picture, the same step."""

    max_episode_steps = 9

    def draw(self, *arguments: object) -> None:
        """Nothing."""


class Costly:
    """A mixin that knows no base."""

    def transition(self, *arguments: Any) -> Any:
        next_state, reward, terminated = super().transition(*arguments)  # type: ignore[misc]
        return next_state, torch.full_like(reward, -7.0), terminated


class Mixed(Costly, Pendulum):
    """Another way to override."""


def test_a_subclass_is_stepped_by_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton functions of its base do not know them."""
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        dear, mixed, plain = Dear(5, DEVICE), Mixed(5, DEVICE), Plain(5, DEVICE)
        for env in (dear, mixed, plain):
            env.reset(seed=5)
        for env, owner in ((dear, "Dear"), (mixed, "Costly")):
            assert env.in_triton() is None
            assert env.triton_obstacle == f"{owner}.transition is not in Triton"
            assert env.step(torch.zeros(5, 1)).reward.tolist() == [-7.0] * 5
        assert plain.in_triton() is not None
