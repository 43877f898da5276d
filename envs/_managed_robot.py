"""What a manager-based environment (mjlab, Isaac Lab) knows of its robot: names of the numbers in
observations and actions, and how an action becomes a target of joints.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from gpurl.envs._torch_spaces import POLICY_GROUPS
from gpurl.envs.vec_env import Info

# of joints, as Isaac Lab and mjlab call them
JOINT_COLUMNS = ("default_joint_pos", "joint_stiffness", "joint_damping")
GAINS = {"joint_stiffness": "stiffness", "joint_damping": "damping"}  # of an actuator
# class of the terms by which a target position is scale * action + offset
POSITION_TERM = "JointPositionAction"


def observation_names(env: Any, group: str | None = None) -> list[str] | None:
    """[D] of `group`, by default that of the policy, TERM or TERM 0, TERM 1, ...; None without
    managers.
    """
    manager = getattr(env, "observation_manager", None)
    if manager is None:
        return None
    if group is None:
        group = next((name for name in POLICY_GROUPS if name in manager.active_terms), None)
    if group not in manager.active_terms:
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
    simulator has them; `action_terms` [A], the class of what moves by each action of
    `action_names`. If all are joint positions, also `action_scale` and `action_offset` [A]:
    target = scale * action + offset; with limits of that, `action_low` and `action_high` [A].
    {} without a robot.
    """
    terms = [term for _, term in _action_terms(env)]
    if not terms:
        return {}
    robot: Info = {
        "action_terms": [type(term).__name__ for term in terms for _ in range(term.action_dim)]
    }
    if all(_is_a(term, POSITION_TERM) for term in terms):
        robot["action_scale"] = [each for term in terms for each in _row(term, "_scale", 1.0)]
        robot["action_offset"] = [each for term in terms for each in _row(term, "_offset", 0.0)]
        robot |= _target_limits(terms)
    entity = _entity(terms)
    if entity is None:
        return robot
    robot["joint_names"] = [str(name) for name in entity.joint_names]
    rows = {}
    for name in JOINT_COLUMNS:
        values = _torch(getattr(entity.data, name, None))
        if isinstance(values, torch.Tensor) and values.ndim == 2:
            rows[name] = values[0].cpu()
    rows |= _gains(entity, rows)
    return robot | {name: row.tolist() for name, row in rows.items()}


def _gains(entity: Any, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gains [J] of the robot's actuators; where these do not say theirs, those among `rows`,
    which the simulator has. They differ where an actuator computes torques by itself: Isaac Lab
    then sets the simulator's to 0.
    """
    names = [str(name) for name in entity.joint_names]
    gains = {name: rows.get(name, torch.zeros(len(names))).clone() for name in GAINS}
    known = set(rows)
    actuators = getattr(entity, "actuators", ())
    for actuator in actuators.values() if isinstance(actuators, dict) else actuators:
        joints = _joints_of(actuator, names)
        if not len(joints):
            continue
        for name, source in GAINS.items():
            values = _torch(getattr(actuator, source, None))
            if not isinstance(values, torch.Tensor):
                values = getattr(getattr(actuator, "cfg", None), source, None)
            if isinstance(values, torch.Tensor):
                gains[name][joints] = values[0].cpu()
            elif isinstance(values, float | int):
                gains[name][joints] = float(values)
            else:
                continue
            known.add(name)
    return {name: row for name, row in gains.items() if name in known}


def _joints_of(actuator: Any, names: list[str]) -> torch.Tensor:
    """[A] the places among `names` of the joints that it moves, none if it moves other things."""
    if hasattr(actuator, "joint_indices"):  # Isaac Lab's: a slice, a list or an array
        joints = _torch(actuator.joint_indices)
        if not isinstance(joints, slice):
            joints = torch.as_tensor(joints).cpu().long()
        return torch.arange(len(names))[joints]
    targets = [str(name) for name in getattr(actuator, "target_names", ())]  # mjlab's
    return torch.tensor([names.index(name) for name in targets if name in names], dtype=torch.int64)


def _target_limits(terms: list[Any]) -> Info:
    """The limits [A] of the targets, {} if there are none."""
    rows = []
    for term in terms:
        clip = getattr(term, "_clip", None)  # [N, A, 2], only where it is configured
        unlimited = torch.tensor([-math.inf, math.inf]).expand(term.action_dim, 2)
        rows.append(unlimited if clip is None else clip[0].cpu())
    limits = torch.cat(rows)
    if bool(limits.isinf().all()):
        return {}
    low, high = ([x if math.isfinite(x) else str(x) for x in row.tolist()] for row in limits.T)
    return {"action_low": low, "action_high": high}


def _action_terms(env: Any) -> list[tuple[str, Any]]:
    """(name, term) in the order of the action."""
    manager = getattr(env, "action_manager", None)
    return [(name, manager.get_term(name)) for name in manager.active_terms] if manager else []


def _targets(name: str, term: Any) -> Iterator[str]:
    """The joints that a term moves, else its name and their places: what controls an end effector
    has joints too, perhaps as many as the numbers of a pose.
    """
    for key in ("_target_names", "_joint_names"):  # mjlab's, Isaac Lab's
        targets = getattr(term, key, None)
        is_theirs = key == "_target_names" or "Joint" in type(term).__name__
        if targets is not None and is_theirs and len(targets) == term.action_dim:
            yield from map(str, targets)
            return
    yield from _numbered(name, term.action_dim)


def _is_a(term: Any, name: str) -> bool:
    """Whether the class of the term, or one of its bases, has this name."""
    return any(kind.__name__ == name for kind in type(term).__mro__)


def _torch(values: Any) -> Any:
    """Arrays of Warp, as Isaac Lab 3 has them, as tensors; others as they are."""
    return getattr(values, "torch", values)


def _row(term: Any, name: str, default: float) -> list[float]:
    """[A] a number for each action of the term, which has one for all or a tensor [N, A]."""
    value = getattr(term, name, default)
    if isinstance(value, torch.Tensor):
        return [float(each) for each in value[0].expand(term.action_dim)]
    return [float(value)] * term.action_dim


def _entity(terms: list[Any]) -> Any:
    """The robot that the terms move; None if there is none, or several."""
    owners = [getattr(term, "_entity", getattr(term, "_asset", None)) for term in terms]
    return owners[0] if all(owner is owners[0] for owner in owners) else None


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {index}" for index in range(count)]
