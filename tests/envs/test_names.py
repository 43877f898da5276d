"""Names of observations and actions: declared, known by a simulator, or places; and that they are
those of the numbers at their places.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch import Tensor

from gpurl.cli.check_env import check_env
from gpurl.envs import make_env
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.names import names_of
from gpurl.envs.numpy.spaces import column_names, make_encoder
from gpurl.errors import EnvError
from tests.tiny_envs import RandomWalk, Walkers


@pytest.mark.parametrize(
    "name", ["cart_pole", "pendulum", "acrobot", "mountain_car", "mountain_car_continuous"]
)
def test_classic_tasks_and_gymnasiums_are_named_alike(name: str) -> None:
    names = names_of(make_env(name, 1))
    assert not any(each.isdecimal() for each in names.observation)
    gymnasium_ids = {
        "cart_pole": "CartPole-v1",
        "pendulum": "Pendulum-v1",
        "acrobot": "Acrobot-v1",
        "mountain_car": "MountainCar-v0",
        "mountain_car_continuous": "MountainCarContinuous-v0",
    }
    env = make_env(gymnasium_ids[name], 1)
    assert names_of(env) == names
    env.close()


def test_options_change_names() -> None:
    names = names_of(make_env("cart_pole", 1, velocities=False))
    assert names.observation == ["position", "angle"]
    names = names_of(make_env("chasing", 1, dim=1))
    assert names.observation == ["target x", "target velocity x", "chaser x", "chaser velocity x"]
    assert names.action == ["force x"]
    names = names_of(make_env("chasing", 1, dim=4, discrete=True))
    assert names.observation[3] == "target 3"
    assert names.choices == [str(choice) for choice in range(81)]


def test_a_task_without_names_has_places() -> None:
    names = names_of(RandomWalk(1))
    assert (names.observation, names.action, names.choices) == (["0", "1", "2"], ["0", "1"], [])
    assert names_of(Walkers(1)).observation == ["0", "1"]  # of one agent


class Named(RandomWalk):
    observation_names = ("left", "middle", "right")
    action_names = ("push", "turn")


class TooFew(RandomWalk):
    observation_names = ("left", "right")


class OneText(RandomWalk):
    action_names = "ab"


class OneNumber(RandomWalk):
    observation_names = 3


class ChoicesOfOther(RandomWalk):
    single_action_space = Discrete(3)
    action_names = ("left",)


class SeesLess(Named):
    """Observes two of the three numbers of its base."""

    single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, state: dict[str, Tensor]) -> Tensor:
        return super().observe(state)[:, :2]


def test_names_of_a_base_need_not_fit_a_task_that_sees_less() -> None:
    env = SeesLess(8)
    assert names_of(env).observation == ["0", "1"]
    assert names_of(env).action == ["push", "turn"]
    assert check_env(env, steps=8) == []


def test_declared_names_count_and_are_checked() -> None:
    names = names_of(Named(1))
    assert (names.observation, names.action) == (["left", "middle", "right"], ["push", "turn"])
    assert check_env(Named(8), steps=8) == []
    wrong = [
        (
            TooFew,
            "TooFew.observation_names: wanted 3, one for each number of an agent's observation, "
            "got 2: left, right",
        ),
        (OneNumber, "OneNumber.observation_names: wanted a tuple of 3 texts, got 3"),
        (OneText, "OneText.action_names: wanted a tuple of 2 texts, got 'ab'"),
        (
            ChoicesOfOther,
            "ChoicesOfOther.action_names: wanted 3, one for each choice of an agent's action, got "
            "1: left",
        ),
    ]
    for env_class, message in wrong:
        assert check_env(env_class(8), steps=8) == [message]
        with pytest.raises(EnvError) as caught:
            names_of(env_class(1))
        assert str(caught.value) == message


# ---- Gymnasium ----

SPACE = Dict(
    {
        "camera": Box(-1.0, 1.0, (2, 2), np.float32),
        "gear": Discrete(3, start=-1),
        "inner": Tuple((Box(0.0, 1.0, (1,), np.float32), MultiBinary(2))),
        "levers": MultiDiscrete([2, 3]),
    }
)


def test_columns_of_a_dict_are_named_by_their_keys() -> None:
    names = column_names(SPACE)
    expected = ["camera[0, 0]", "camera[0, 1]", "camera[1, 0]", "camera[1, 1]"]
    expected += ["gear = -1", "gear = 0", "gear = 1", "inner 0", "inner 1[0]", "inner 1[1]"]
    expected += [f"levers {place}" for place in ("0 = 0", "0 = 1", "1 = 0", "1 = 1", "1 = 2")]
    assert names == expected
    # at the places where the encoder puts them
    encoder = make_encoder(SPACE)
    assert len(names) == encoder.space.shape[0]
    batch = {
        "camera": np.zeros((1, 2, 2), np.float32),
        "gear": np.array([1]),
        "inner": (np.zeros((1, 1), np.float32), np.zeros((1, 2), np.int8)),
        "levers": np.array([[1, 2]]),
    }
    (row,) = encoder.encode(batch)
    ones = [name for name, value in zip(names, row) if value == 1.0]
    assert ones == ["gear = 1", "levers 0 = 1", "levers 1 = 2"]


class OwnGym(gymnasium.Env[Any, Any]):
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)
    observation_names = ("heat", "light")
    action_names: ClassVar = ["off", "on"]


def test_a_gymnasium_environment_of_ones_own_may_declare_names() -> None:
    names = names_of(GymnasiumCpu(1, env=OwnGym))
    assert (names.observation, names.choices) == (["heat", "light"], ["off", "on"])


# ---- MuJoCo ----


@pytest.fixture
def mujoco() -> Any:
    return pytest.importorskip("mujoco")


def test_names_of_the_model(mujoco: Any) -> None:
    names = names_of(make_env("half_cheetah", 1))
    joints = ["bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]
    assert names.observation[:8] == ["rootz", "rooty", *joints]
    assert names.observation[8:11] == ["rootx velocity", "rootz velocity", "rooty velocity"]
    assert names.observation[11:] == [f"{joint} velocity" for joint in joints]
    assert names.action == joints


@pytest.mark.parametrize(
    "name",
    [
        *("ant", "hopper", "humanoid", "humanoid_standup", "inverted_double_pendulum"),
        *("inverted_pendulum", "pusher", "reacher", "swimmer", "walker2d"),
    ],
)
def test_every_number_of_every_task_has_a_name_of_its_own(mujoco: Any, name: str) -> None:
    names = names_of(make_env(name, 1))
    assert not [each for each in [*names.observation, *names.action] if each.isdecimal()]
    assert len(set(names.observation)) == len(names.observation)
    if name == "ant":
        assert names.observation[:5] == ["root z", "root qw", "root qx", "root qy", "root qz"]
        assert names.observation[13:19] == [
            *("root x velocity", "root y velocity", "root z velocity"),
            *(f"root {axis} rotation velocity" for axis in "xyz"),
        ]
        assert names.observation[27] == "torso contact torque x"
        assert names.action[:2] == ["hip_4", "ankle_4"]  # of motors without names
    if name == "inverted_double_pendulum":
        assert names.observation[:5] == [
            *("slider", "sin(hinge)", "sin(hinge2)", "cos(hinge)", "cos(hinge2)"),
        ]


SLED = """<mujoco><worldbody><body name="sled"><joint name="rail" type="slide"/><geom size="1"/>
<body><joint type="ball"/><geom size="1"/></body></body></worldbody>
<actuator><motor joint="rail" ctrlrange="-1 1" ctrllimited="true"/></actuator>
<sensor><jointpos name="place" joint="rail"/><framepos objtype="body" objname="sled"/></sensor>
</mujoco>"""


def make_sled(observe: Any) -> Any:
    from gpurl.envs.mujoco.base import MujocoEnv

    class Sled(MujocoEnv):
        model_file = SLED

        def observe(self, data: Any) -> Tensor:
            return observe(data)

        def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
            return data.qpos[:, 0]

    return Sled(1)


def test_a_mujoco_task_of_ones_own_is_named_too(mujoco: Any) -> None:
    env = make_sled(
        lambda data: torch.cat(
            (data.qpos, data.qvel, data.sensordata, data.qpos[:, :1] * 2.0, data.xpos[:, 1]), 1
        )
    )
    assert names_of(env).observation == [
        *("rail", "joint 1 qw", "joint 1 qx", "joint 1 qy", "joint 1 qz"),
        *("rail velocity", "joint 1 x rotation velocity"),
        *("joint 1 y rotation velocity", "joint 1 z rotation velocity"),
        *("place", "sensor 1 0", "sensor 1 1", "sensor 1 2"),
        "13",  # twice a position is none
        *("sled x", "sled y", "sled z"),
    ]
    assert names_of(env).action == ["rail"]
    # the worlds are not touched
    assert bool((env.data.qpos[:, 0] == 0).all())


def test_a_task_that_refuses_made_up_numbers_has_places(mujoco: Any) -> None:
    def observe(data: Any) -> Tensor:
        if bool((data.qpos[:, 0] != 0).any()):
            raise ValueError("far from home")
        return data.qpos[:, :1]

    assert names_of(make_sled(observe)).observation == ["0"]
