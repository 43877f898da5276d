"""What a manager-based environment (mjlab, Isaac Lab) knows of its robot: names of the numbers in
observations and actions, and how an action becomes a target of joints.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from gpurl.envs.vec_env import Info

POLICY_GROUPS = ("policy", "actor")  # of the observations that the policy gets
# of joints, by the name here: the names in mjlab's and Isaac Lab's data
JOINT_COLUMNS = {
    "default_joint_pos": "default_joint_pos",
    "joint_stiffness": "joint_stiffness",
    "joint_damping": "joint_damping",
}


def observation_names(env: Any) -> list[str] | None:
    """[D] of the group of the policy, TERM or TERM 0, TERM 1, ...; None without managers."""
    manager = getattr(env, "observation_manager", None)
    if manager is None:
        return None
    group = next((name for name in POLICY_GROUPS if name in manager.active_terms), None)
    if group is None:
        return None
    terms = zip(manager.active_terms[group], manager.group_obs_term_dim[group])
    return [name for term, shape in terms for name in _numbered(term, math.prod(shape))]


def action_names(env: Any) -> list[str] | None:
    """[A] the joints that the numbers of an action move; None without managers."""
    terms = _action_terms(env)
    return [name for term in terms for name in _targets(*term)] if terms else None


def describe_robot(env: Any) -> Info:
    """What a controller of the robot reads, as plain values: `joint_names` [J] in the robot's
    order, their `default_joint_pos`, `joint_stiffness` and `joint_damping` [J] as far as the
    simulator has them, and `action_scale` and `action_offset` [A] of the joints of `action_names`:
    target = scale * action + offset. {} without a robot.
    """
    terms = _action_terms(env)
    if not terms:
        return {}
    robot: Info = {
        "action_scale": [each for term in terms for each in _row(term[1], "_scale", 1.0)],
        "action_offset": [each for term in terms for each in _row(term[1], "_offset", 0.0)],
    }
    entity = _entity(terms)
    if entity is None:
        return robot
    robot["joint_names"] = [str(name) for name in entity.joint_names]
    for name, source in JOINT_COLUMNS.items():
        values = getattr(entity.data, source, None)
        values = getattr(values, "torch", values)  # Isaac Lab 3 has arrays of Warp
        if isinstance(values, torch.Tensor) and values.ndim == 2:
            robot[name] = values[0].tolist()
    return robot


def _action_terms(env: Any) -> list[tuple[str, Any]]:
    """(name, term) in the order of the action."""
    manager = getattr(env, "action_manager", None)
    return [(name, manager.get_term(name)) for name in manager.active_terms] if manager else []


def _targets(name: str, term: Any) -> Iterator[str]:
    """The joints that a term moves, else its name and their places."""
    for key in ("_target_names", "_joint_names"):  # mjlab's, Isaac Lab's
        targets = getattr(term, key, None)
        if targets is not None and len(targets) == term.action_dim:
            yield from map(str, targets)
            return
    yield from _numbered(name, term.action_dim)


def _row(term: Any, name: str, default: float) -> list[float]:
    """[A] a number for each action of the term, which has one for all or a tensor [N, A]."""
    value = getattr(term, name, default)
    if isinstance(value, torch.Tensor):
        return [float(each) for each in value[0].expand(term.action_dim)]
    return [float(value)] * term.action_dim


def _entity(terms: list[tuple[str, Any]]) -> Any:
    """The robot that the terms move; None if there is none, or several."""
    owners = [getattr(term, "_entity", getattr(term, "_asset", None)) for _, term in terms]
    return owners[0] if all(owner is owners[0] for owner in owners) else None


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {index}" for index in range(count)]
