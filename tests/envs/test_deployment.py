"""What a controller outside of the simulator is told: times, names, and the joints of a robot."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpurl.envs import make_env
from gpurl.envs._managed_robot import action_names, describe_robot, observation_names
from gpurl.envs.deployment import deployment
from tests.tiny_envs import RandomWalk


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("cart_pole", 0.02),
        ("CartPole-v1", 0.02),
        ("pendulum", 0.05),
        ("Pendulum-v1", 0.05),
        ("acrobot", 0.2),
        ("hopper", 0.008),
        ("Hopper-v5", 0.008),
        ("mountain_car", None),
    ],
)
def test_the_time_between_two_actions(name: str, seconds: float | None) -> None:
    env = make_env(name, 1)
    assert deployment(env)["control_step"] == pytest.approx(seconds)
    env.close()


def test_plain_values_for_every_kind_of_task() -> None:
    told = deployment(make_env("hopper", 1))
    assert told["action_names"] == ["thigh_joint", "leg_joint", "foot_joint"]
    assert len(told["observation_names"]) == 11
    assert json.loads(json.dumps(told)) == told
    assert deployment(make_env("cart_pole", 1))["action_names"] == ["left", "right"]
    assert deployment(RandomWalk(1))["observation_names"] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["catch", "tests.picture_envs:Seen"])
def test_pixels_have_no_names(name: str) -> None:
    told = deployment(make_env(name, 1))
    assert told["observation_names"] == []
    assert told["action_names"] == [str(choice) for choice in range(len(told["action_names"]))]


class Wrong(RandomWalk):
    action_names = ("one",)


def test_names_that_do_not_fit_cost_no_run() -> None:
    told = deployment(Wrong(1))
    assert (told["observation_names"], told["action_names"], told["robot"]) == ([], [], {})


class Manager:
    """Of actions or observations, as mjlab and Isaac Lab have them."""

    def __init__(self, terms: dict[str, Any], **more: Any) -> None:
        self.active_terms = more.get("groups", list(terms))
        self.terms = terms
        self.group_obs_term_dim = more.get("shapes")

    def get_term(self, name: str) -> Any:
        return self.terms[name]


def managed(legs: Any, hand: Any) -> Any:
    """An environment of two action terms."""
    return SimpleNamespace(
        observation_manager=Manager(
            {},
            groups={"critic": ["height"], "policy": ["speed", "joints"]},
            shapes={"critic": [(1,)], "policy": [(1,), (2, 2)]},
        ),
        action_manager=Manager({"legs": legs, "hand": hand}),
    )


def test_a_robot_of_managers() -> None:
    joints = ["knee", "hip", "finger"]
    columns = {"default_joint_pos": [[0.1, 0.2, 0.3], [9.0, 9.0, 9.0]]}
    data = SimpleNamespace(**{name: torch.tensor(rows) for name, rows in columns.items()})
    # Isaac Lab 3 wraps arrays of Warp
    data.joint_stiffness = SimpleNamespace(torch=torch.tensor([[20.0, 30.0, 1.0]]))
    robot = SimpleNamespace(joint_names=joints, data=data)
    legs = SimpleNamespace(
        _entity=robot,
        _target_names=["hip", "knee"],
        action_dim=2,
        _scale=torch.tensor([[0.5, 0.25], [0.5, 0.25]]),
        _offset=torch.tensor([[0.2, 0.1], [0.2, 0.1]]),
    )
    hand = SimpleNamespace(_asset=robot, action_dim=1, _scale=2.0, _joint_names=["finger"])
    env = managed(legs, hand)
    assert observation_names(env) == ["speed", *(f"joints {place}" for place in range(4))]
    assert action_names(env) == ["hip", "knee", "finger"]
    assert describe_robot(env) == {
        "action_scale": [0.5, 0.25, 2.0],
        "action_offset": pytest.approx([0.2, 0.1, 0.0]),
        "joint_names": joints,
        "default_joint_pos": pytest.approx([0.1, 0.2, 0.3]),
        "joint_stiffness": [20.0, 30.0, 1.0],
    }


def test_what_is_no_joint_and_two_robots() -> None:
    legs = SimpleNamespace(_entity=object(), action_dim=2)
    hand = SimpleNamespace(_entity=object(), action_dim=1, _target_names=["a", "b"])
    env = managed(legs, hand)
    assert action_names(env) == ["legs 0", "legs 1", "hand"]  # names of another number
    assert describe_robot(env) == {
        "action_scale": [1.0, 1.0, 1.0],
        "action_offset": [0.0, 0.0, 0.0],
    }
    plain = SimpleNamespace()
    assert observation_names(plain) is None
    assert action_names(plain) is None
    assert describe_robot(plain) == {}
