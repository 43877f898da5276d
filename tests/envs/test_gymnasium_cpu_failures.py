"""What goes wrong in a Gymnasium environment or with its options, and that the error says where."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gpurl.envs import make_env
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.numpy.vector import explain_construction
from gpurl.errors import EnvError, UsageError
from tests.numpy_envs import Batch, Tour, second_step


class Crashing(Tour):
    """The environment whose seed is even fails at its second step, in the way it is told."""

    def __init__(self, failure: Callable[[], Any]) -> None:
        self.failure = failure

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.fails = seed is not None and seed == int(
            np.random.SeedSequence(0).generate_state(2)[1]
        )  # of environment 1
        return super().reset(seed=seed)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.fails and self.steps == 1:
            self.failure()
        return *super().step(action)[:2], False, False, {}


def raise_error() -> None:
    raise ZeroDivisionError("the wheel came off")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_exception_names_the_environment_and_the_line(vectorization: str) -> None:
    env = GymnasiumCpu(3, env=lambda: Crashing(raise_error), vectorization=vectorization)
    env.reset(seed=0)
    env.step(torch.zeros(3, 1))
    with pytest.raises(
        EnvError,
        match=r"(?s)environment 1 failed in step:.*self\.failure\(\).*ZeroDivisionError: the "
        r"wheel came off",
    ):
        env.step(torch.zeros(3, 1))
    env.close()
    assert multiprocessing.active_children() == []


def test_an_exception_in_a_foreign_environment() -> None:
    batch = Batch(AutoresetMode.NEXT_STEP, raise_error)
    with pytest.raises(
        EnvError,
        match=r"(?s)Batch\(num_envs=2\) failed in step: ZeroDivisionError: .*raise "
        r"ZeroDivisionError",
    ):
        second_step(batch)


def test_unknown_tasks_and_options_are_named() -> None:
    with pytest.raises(UsageError, match=r"no task 'Pendulm-v1'; did you mean Pendulum-v1"):
        make_env("gymnasium_cpu:Pendulm-v1", 2)
    with pytest.raises(
        UsageError, match=r"no task 'ALE/Nothing-v5'.*PACKAGE:ID imports the package"
    ):
        make_env("gymnasium_cpu:ALE/Nothing-v5", 2)
    for name in ("ALE/Nothing-v5", "ale_py:ALE/Nothing-v5"):
        with pytest.raises(
            UsageError,
            match=r"registers it: gymnasium_cpu:ale_py:ALE/Nothing-v5, after pip install 'gymn",
        ):
            make_env(name, 2)
    with pytest.raises(UsageError, match=r"gymnasium_cpu:PACKAGE:Own/Nothing-v0\. Known: acrobot"):
        make_env("Own/Nothing-v0", 2)
    # of a package that can be imported
    with pytest.raises(UsageError, match=r"found none\. Gymnasium finds .*json:Own/Nothing-v0$"):
        make_env("json:Own/Nothing-v0", 2)
    with pytest.raises(UsageError, match=r"; No module named 'no_such'; pip install no_such$"):
        make_env("gymnasium_cpu:no_such:Own/Nothing-v0", 2)
    with pytest.raises(
        UsageError, match="no task 'no_such_package:X-v0'; No module named 'no_such_package'"
    ):
        make_env("gymnasium_cpu:no_such_package:X-v0", 2)
    with pytest.raises(UsageError, match="unexpected keyword argument 'gravity'"):
        make_env("gymnasium_cpu:Pendulum-v1", 2, task_options={"gravity": 9.0})


def need_simulator() -> gymnasium.Env:
    import a_simulator_that_is_not_here.core  # noqa: F401

    return Tour()


def need_extra() -> gymnasium.Env:
    raise gymnasium.error.DependencyNotInstalled(
        'Box2D is not installed, run `pip install "gymnasium[box2d]"`'
    )


def test_a_missing_simulator_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install a_simulator_that_is_not_here$"):
        GymnasiumCpu(2, env=need_simulator)
    # a package that is installed under another name
    with pytest.raises(UsageError, match=r"pip install hydra-core$"), explain_construction("it"):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra.core")
    with pytest.raises(UsageError, match=r'run `pip install "gymnasium\[box2d\]"`'):
        GymnasiumCpu(2, env=need_extra)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "needs either a task .* or env="),
    ({"task": "Pendulum-v1", "env": Tour}, "either a task"),
    (
        {"task": "Pendulum-v1", "vectorization": "threads"},
        "must be one of sync, async, vector, envpool, got 'threads'",
    ),
    ({"env": Tour, "vectorization": "vector"}, "needs a registered task"),
    ({"env": Tour, "task_options": {"g": 1}}, "give them inside the function env"),
    (
        {"env": Batch(AutoresetMode.NEXT_STEP), "max_episode_steps": 3},
        "leave out vectorization, max_episode_steps",
    ),
    ({"env": SyncVectorEnv([Tour])}, "num_envs is 2, but env has 1 environments"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_combinations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GymnasiumCpu(2, **options)


class Misshapen(gymnasium.Env[np.ndarray, np.ndarray]):
    """Says it shows 3 numbers; shows 2 after `good` calls."""

    observation_space = Box(-1.0, 1.0, (3,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, good: int) -> None:
        self.good = good

    def show(self) -> np.ndarray:
        self.good -= 1
        return np.zeros(3 if self.good >= 0 else 2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return self.show(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.show(), 0.0, False, False, {}


@pytest.mark.parametrize("good", [0, 2])
def test_an_observation_of_another_shape_is_named(good: int) -> None:
    env = make_env("gymnasium_cpu", 2, env=lambda: Misshapen(good))
    call = "reset" if good == 0 else "step"

    def play() -> None:
        env.reset()
        env.step(torch.zeros(2, 1))
        env.step(torch.zeros(2, 1))

    with pytest.raises(
        EnvError,
        match=rf"environment 0 failed in {call}: wanted .* shape \(3,\), as in the space of "
        rf".*Misshapen.*, got \(2,\)",
    ):
        play()


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (np.zeros(3, np.float32), "an ndarray"),
        ((np.zeros(3, np.float32),), "a tuple of 1"),
        (None, "nothing"),
    ],
)
def test_what_is_no_step_is_named(monkeypatch: pytest.MonkeyPatch, returned: Any, got: str) -> None:
    """The mistakes of an environment written for the older Gym."""
    env = make_env("gymnasium_cpu", 2, env=lambda: Misshapen(99))
    monkeypatch.setattr(Misshapen, "reset", lambda self, **options: returned)
    with pytest.raises(
        EnvError, match=rf"environment 0 failed in reset: wanted \(obs, info\), got {got}"
    ):
        env.reset()
    monkeypatch.undo()
    env = make_env("gymnasium_cpu", 2, env=lambda: Misshapen(99))
    env.reset()
    monkeypatch.setattr(Misshapen, "step", lambda self, action: returned)
    with pytest.raises(
        EnvError, match=rf"environment 0 failed in step: wanted \(obs, reward, .*info\), got {got}"
    ):
        env.step(torch.zeros(2, 1))


def test_an_environment_whose_workers_are_gone_closes_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = make_env("gymnasium_cpu:CartPole-v1", 2, vectorization="async")
    env.reset(seed=0)
    for process in env._env.processes:  # type: ignore[attr-defined]
        process.kill()
        process.join()
    env.close()
    assert "did not close" in caplog.text
