"""MuJoCo tasks that go wrong: mistakes in a task, packages that are missing, worlds that break,
constraints without room.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.cli.env_table import env_table
from gpurl.envs import make_env, resolve_env
from gpurl.errors import EnvError, UsageError, install_extra
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.settings import make_settings
from tests.envs.test_mujoco import SLIDER, Slider, actions_of

pytest.importorskip("mujoco_warp")


@pytest.fixture(scope="module", params=["mujoco", "warp"])
def ant(request: pytest.FixtureRequest) -> Any:
    return make_env("ant", 6, seed=4, simulator=request.param)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_file": "no_such.xml"}, UsageError, "needs the MuJoCo model 'no_such.xml'"),
        ({"model_file": "anti.xml"}, UsageError, "did you mean ant.xml"),
        (
            {"model_file": "<mujoco><nonsense/></mujoco>"},
            UsageError,
            "MuJoCo cannot read the model",
        ),
        ({"model_file": "<mujoco/>"}, UsageError, "has no actuators"),
        (
            {"observe": lambda self, data: data.qposs},
            EnvError,
            "MuJoCo has no field 'qposs'; did you mean qpos",
        ),
        (
            {"observe": lambda self, data: data.qpos.double()},
            EnvError,
            "observe: wanted a tensor of shape",
        ),
        (
            {"reward": lambda self, data, before, action: data.qpos},
            EnvError,
            r"reward: wanted a tensor of shape \(1,\)",
        ),
        (
            {"terminated": lambda self, data: data.qpos[:, 0]},
            EnvError,
            "terminated: wanted a tensor of shape .*bool",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said_at_once(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        type("Wrong", (Slider,), change)(2)


def test_looking_at_other_fields_of_before_than_first_is_an_error() -> None:
    class Fickle(Slider):
        looks_further = False

        def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
            return before.qvel[:, 0] if self.looks_further else before.qpos[:, 0]

    env: Any = Fickle(2)
    env.reset()
    env.step(torch.zeros(2, 1))
    env.looks_further = True
    with pytest.raises(EnvError, match=r"read before\.qvel, but read qpos in"):
        env.step(torch.zeros(2, 1))


def test_a_missing_simulator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.import_module
    lacking = {"mujoco_warp"}

    def missing(name: str, *arguments: Any) -> Any:
        if name in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert resolve_env("ant")[0].__name__ == "Ant"
    make_settings("ppo", "ant")
    make_env("ant", 2)
    with pytest.raises(UsageError, match=r"mujoco_warp is missing: pip install -e '.*\[mujoco\]'"):
        make_env("ant", 2, simulator="warp")
    lacking.add("mujoco")
    with pytest.raises(UsageError, match=r"need mujoco, mujoco is missing: pip install"):
        make_env("ant", 2)
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "mujoco" else there(name, *more),
    )
    assert f"mujoco: missing: mujoco; {install_extra('mujoco')}\n" in env_table()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e12])
def test_a_world_that_breaks_ends_alone_and_recovers(ant: Any, bad: float) -> None:
    actions = actions_of(ant, 8)
    runs = []
    for breaks in (False, True):
        ant.reset(seed=6)
        ant.step(actions[0])
        if breaks:
            ant.data.qvel[2, 3] = bad
        runs.append([ant.step(action) for action in actions[1:]])
    plain, broken = runs[0][0], runs[1][0]
    others = torch.arange(6) != 2
    assert (
        broken.terminated.tolist()
        == broken.info["_final_obs"].tolist()
        == [False, False, True, False, False, False]
    )
    assert torch.equal(broken.info["valid"], others)
    assert float(broken.reward[2]) == 0.0
    assert not bool(broken.info["final_obs"][2].any())
    assert int(broken.info["log"]["non_finite_worlds"]) == 1
    assert broken.info["episode"]["l"].tolist() == [2, 2, 1, 2, 2, 2]  # it was no step
    for left, right in zip(*runs):
        assert torch.equal(left.obs[others], right.obs[others])
        assert torch.equal(left.reward[others], right.reward[others])
    assert bool(plain.info["valid"].all())
    assert bool(broken.obs.isfinite().all())
    for step in runs[1][1:]:
        assert bool(step.info["valid"].all())
        assert bool(step.obs.isfinite().all() & step.reward.isfinite().all())
    assert runs[1][1].info["episode"]["l"].tolist() == [3, 3, 1, 3, 3, 3]


@pytest.mark.parametrize("simulator", ["mujoco", "warp"])
@pytest.mark.parametrize(("field", "bad"), [("qpos", float("nan")), ("qvel", 1e12)])
def test_a_broken_world_ends_where_the_task_would_not_see_it(
    field: str, bad: float, simulator: str
) -> None:
    env: Any = Slider(
        3, simulator=simulator
    )  # NaN is not more than 2 m away, and 1e12 m/s is a number
    env.reset()
    getattr(env.data, field)[1] = bad
    step = env.step(torch.zeros(3, 1))
    assert step.terminated.tolist() == [False, True, False]
    assert step.info["valid"].tolist() == [True, False, True]
    assert bool(env.step(torch.zeros(3, 1)).obs.isfinite().all())


def test_constraints_without_room_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    env: Any = make_env("ant", 2, njmax=2)
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        env.reset()
        counts = [
            int(env.step(action).info["log"]["worlds_lacking_room"])
            for action in actions_of(env, 20)
        ]
        env.close()
    assert max(counts) == 2
    warnings = [record.message for record in caplog.records if "dropped" in record.message]
    assert len(warnings) == 1
    assert "njmax is 2" in warnings[0]


def crowd(memory: str) -> type[Slider]:
    """Five boxes inside each other on a plane, in so much memory."""
    boxes = "".join(
        f'<body pos="{place} 0 0.05"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>'
        for place in range(5)
    )
    model = SLIDER.replace("<mujoco>", f'<mujoco><size memory="{memory}"/>')
    model = model.replace("</worldbody>", f'<geom type="plane" size="5 5 1"/>{boxes}</worldbody>')
    return type("Crowd", (Slider,), {"model_file": model})


def test_an_error_of_mujoco_ends_a_world_and_not_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env: Any = crowd("4K")(3, simulator="mujoco")
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        env.reset()
        steps = [env.step(action) for action in actions_of(env, 4)]
    broken = [int(step.info["log"]["non_finite_worlds"]) for step in steps]
    assert max(broken) > 0
    assert all(bool(step.obs.isfinite().all()) for step in steps)
    assert all(torch.equal(step.terminated, ~step.info["valid"]) for step in steps)
    # contacts that found no room are counted, too; each is said once
    assert max(int(step.info["log"]["worlds_lacking_room"]) for step in steps) > 0
    messages = [record.message for record in caplog.records]
    assert sum("out of memory" in message for message in messages) == 1
    assert sum("dropped contacts or constraints" in message for message in messages) == 1
    # Python's own errors are still exceptions
    with pytest.raises(UsageError, match="MuJoCo cannot read the model"):
        crowd("1K")(3, simulator="mujoco")


def test_counts_are_marked_as_sent_on_the_stream_that_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current device may be another than the environment's: an event without a stream would be
    recorded there, and say nothing.
    """

    class Event:
        streams: list[Any] = []

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            self.streams.append(stream)

    env: Any = make_env("inverted_pendulum", 2, simulator="warp")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    env._worlds.dropped._event, env._worlds.dropped.READ_EVERY = Event(), 1
    with no_host_syncs():
        env.reset()
        env.step(torch.zeros(2, 1))
    env.close()
    assert Event.streams == ["stream of cpu"] * 2


def test_there_is_room_under_random_actions(ant: Any) -> None:
    ant.reset(seed=1)
    for action in actions_of(ant, 60):
        assert int(ant.step(action).info["log"]["worlds_lacking_room"]) == 0
