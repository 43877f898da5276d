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


class Term:
    """Of actions."""

    def __init__(self, **more: Any) -> None:
        vars(self).update(more)


class JointPositionAction(Term):
    pass


class SlowJointPositionAction(JointPositionAction):
    pass


class JointVelocityAction(Term):
    pass


class DifferentialInverseKinematicsAction(Term):
    pass


def robot_of(**data: Any) -> Any:
    return SimpleNamespace(joint_names=["knee", "hip", "finger"], data=SimpleNamespace(**data))


def test_a_robot_of_managers() -> None:
    # Isaac Lab 3 wraps arrays of Warp
    robot = robot_of(
        default_joint_pos=torch.tensor([[0.1, 0.2, 0.3], [9.0, 9.0, 9.0]]),
        joint_stiffness=SimpleNamespace(torch=torch.tensor([[20.0, 30.0, 1.0]])),
    )
    legs = JointPositionAction(
        _entity=robot,
        _target_names=["hip", "knee"],
        action_dim=2,
        _scale=torch.tensor([[0.5, 0.25], [0.5, 0.25]]),
        _offset=torch.tensor([[0.2, 0.1], [0.2, 0.1]]),
    )
    hand = SlowJointPositionAction(_asset=robot, action_dim=1, _scale=2.0, _joint_names=["finger"])
    env = managed(legs, hand)
    assert observation_names(env) == ["speed", *(f"joints {place}" for place in range(4))]
    assert observation_names(env, "critic") == ["height"]
    assert observation_names(env, "camera") is None
    assert action_names(env) == ["hip", "knee", "finger"]
    assert describe_robot(env) == {
        "action_terms": ["JointPositionAction"] * 2 + ["SlowJointPositionAction"],
        "action_scale": [0.5, 0.25, 2.0],
        "action_offset": pytest.approx([0.2, 0.1, 0.0]),
        "joint_names": ["knee", "hip", "finger"],
        "default_joint_pos": pytest.approx([0.1, 0.2, 0.3]),
        "joint_stiffness": [20.0, 30.0, 1.0],
    }


@pytest.mark.parametrize("joints", [[2, 0], torch.tensor([2, 0])])
def test_gains_of_actuators_that_compute_torques(joints: Any) -> None:
    """As Isaac Lab's DCMotor: the simulator has none."""
    zeros = torch.zeros(1, 3)
    robot = robot_of(joint_stiffness=zeros, joint_damping=zeros)
    robot.actuators = {
        "legs": SimpleNamespace(
            joint_indices=joints,
            stiffness=torch.tensor([[25.0, 30.0]]),
            damping=SimpleNamespace(torch=torch.tensor([[0.5, 0.75]])),
        )
    }
    term = JointPositionAction(_asset=robot, action_dim=3)
    described = describe_robot(managed(term, Term(_asset=robot, action_dim=0)))
    assert described["joint_stiffness"] == [30.0, 0.0, 25.0]
    assert described["joint_damping"] == [0.75, 0.0, 0.5]
    robot.actuators["legs"].joint_indices = slice(None)
    robot.actuators["legs"].stiffness = torch.tensor([[1.0, 2.0, 3.0]])
    robot.actuators["legs"].damping = None
    described = describe_robot(managed(term, Term(_asset=robot, action_dim=0)))
    assert described["joint_stiffness"] == [1.0, 2.0, 3.0]
    assert described["joint_damping"] == [0.0, 0.0, 0.0]


def test_gains_of_mjlabs_actuators() -> None:
    """Its data has none: those of an ideal controller are tensors, others stand in `cfg`."""
    robot = robot_of()
    builtin = SimpleNamespace(stiffness=20.0, damping=2)
    robot.actuators = [
        SimpleNamespace(target_names=["finger", "knee"], cfg=builtin),
        SimpleNamespace(target_names=["hip"], stiffness=torch.tensor([[7.0]]), cfg=None),
        SimpleNamespace(target_names=["tendon"], stiffness=torch.tensor([[9.0]]), cfg=builtin),
    ]
    term = JointPositionAction(_entity=robot, action_dim=3)
    described = describe_robot(managed(term, Term(_entity=robot, action_dim=0)))
    assert described["joint_stiffness"] == [20.0, 7.0, 20.0]
    assert described["joint_damping"] == [2.0, 0.0, 2.0]


def test_targets_that_are_clipped() -> None:
    clip = torch.tensor([[[-1.0, 2.0], [-float("inf"), 0.5]]])
    legs = JointPositionAction(_asset=None, action_dim=2, _clip=clip)
    described = describe_robot(managed(legs, JointPositionAction(_asset=None, action_dim=1)))
    assert described["action_low"] == [-1.0, "-inf", "-inf"]
    assert described["action_high"] == [2.0, 0.5, "inf"]


def test_what_is_no_position_of_joints() -> None:
    legs = JointVelocityAction(_entity=object(), action_dim=2, _joint_names=["a", "b"])
    hand = Term(_entity=object(), action_dim=1, _target_names=["a", "b"])
    env = managed(legs, hand)
    assert action_names(env) == ["a", "b", "hand"]  # names of another number
    assert describe_robot(env) == {"action_terms": ["JointVelocityAction"] * 2 + ["Term"]}
    # a pose of as many numbers as the arm has joints
    joints = {"_joint_names": ["a", "b"]}
    arm = DifferentialInverseKinematicsAction(_asset=object(), action_dim=2, **joints)
    assert action_names(managed(arm, hand)) == ["legs 0", "legs 1", "hand"]
    plain = SimpleNamespace()
    assert observation_names(plain) is None
    assert action_names(plain) is None
    assert describe_robot(plain) == {}
