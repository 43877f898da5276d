"""Names of a MuJoCo task's observations and actions, from its model: an observation is named by the
field that it copies, which made-up numbers in all fields show.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpurl.envs.mujoco._worlds import Fields

FREE, BALL = 0, 1  # mjtJoint
QUATERNION = ("qw", "qx", "qy", "qz")
AXES = ("x", "y", "z")
# MuJoCo's spatial vectors [6] have the rotation first
ROTATION = ("x rotation", "y rotation", "z rotation", *AXES)
WRENCH = ("torque x", "torque y", "torque z", "force x", "force y", "force z")
JOINT = 0  # mjtTrn
# what a field is called in names, where not by its own name
LABELS = {
    **dict.fromkeys(("qpos", "xpos", "site_xpos", "geom_xpos", "sensordata"), ""),
    **{"qvel": "velocity", "qacc": "acceleration", "cvel": "velocity", "ctrl": "control"},
    **{"cfrc_ext": "contact", "cinert": "inertia", "xipos": "centre", "xquat": "rotation"},
    **{"qfrc_actuator": "motor", "qfrc_constraint": "constraint"},
}
FUNCTIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("{}", lambda value: value),
    ("cos({})", torch.cos),
    ("sin({})", torch.sin),
)
DRAWS = 2  # two numbers that agree once by chance do not agree twice
TOLERANCE = 1e-6


def observation_names(
    model: Any, fields: Fields, observe: Callable[[Fields], Tensor]
) -> list[str] | None:
    """A name for each observation [D] that is an element of a field, or its sine or cosine, as
    "bthigh velocity" or "cos(joint0)"; the others keep their places. None if `observe` cannot take
    made-up numbers.

    model: mujoco.MjModel; fields: of any worlds, which are not changed.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(name: str) -> Tensor:
        field = getattr(fields, name)
        numbers = torch.rand(DRAWS, *field.shape[1:], generator=generator) * 0.9 + 0.05
        return numbers.to(field)

    made_up = Fields(draw, lambda: [])
    try:
        obs = observe(made_up)
    except Exception:
        return None  # only the names are lost
    # candidates [DRAWS, C] and their names
    values, names = [], []
    for field in made_up.used():
        flat = getattr(made_up, field).float().flatten(1)
        elements = list(_element_names(model, field, tuple(getattr(made_up, field).shape[1:])))
        for form, function in FUNCTIONS:
            values.append(function(flat))
            names += [form.format(element) for element in elements]
    candidates = torch.cat(values, 1)
    same = (obs.float().unsqueeze(2) - candidates.unsqueeze(1)).abs() < TOLERANCE
    is_copy = same.all(0)  # [D, C]
    return [
        names[int(row.int().argmax())] if bool(row.any()) else str(place)
        for place, row in enumerate(is_copy)
    ]


def action_names(model: Any) -> list[str]:
    """[A] the names of the actuators, or of the joints that they move."""
    names = []
    for index in range(model.nu):
        name = model.actuator(index).name
        if not name and model.actuator_trntype[index] == JOINT:
            name = _joint_name(model, int(model.actuator_trnid[index, 0]))
        names.append(name or f"actuator {index}")
    return names


def _element_names(model: Any, field: str, shape: tuple[int, ...]) -> Iterator[str]:
    """A name for each element of a field [N, *shape], flattened."""
    label = LABELS.get(field, field)
    rows = _row_names(model, field, shape[0]) if shape else [""]
    width = 1
    for size in shape[1:]:
        width *= size
    spatial = WRENCH if field.startswith("cfrc") else ROTATION
    columns: tuple[str, ...] = {1: ("",), 3: AXES, 4: QUATERNION, 6: spatial}.get(
        width, tuple(map(str, range(width)))
    )
    for row in rows:
        for column in columns:
            yield " ".join(word for word in (row, label, column) if word)


def _row_names(model: Any, field: str, number: int) -> list[str]:
    """Names along the first axis of a field, from what MuJoCo counts there."""
    if field == "qpos":
        return list(_coordinates(model, AXES + QUATERNION, QUATERNION))
    if field == "sensordata":
        sensors = [model.sensor(index) for index in range(model.nsensor)]
        names = [each.name or f"sensor {index}" for index, each in enumerate(sensors)]
        return [
            f"{name} {place}" if size > 1 else name
            for name, size in zip(names, map(int, model.sensor_dim))
            for place in range(size)
        ]
    if number == model.nv and field.startswith("q"):
        turns = tuple(f"{axis} rotation" for axis in AXES)
        return list(_coordinates(model, AXES + turns, turns))
    if field == "ctrl" or field.startswith("actuator_"):
        return action_names(model)
    prefix = field.partition("_")[0]
    kinds = {"site": (model.nsite, model.site), "geom": (model.ngeom, model.geom)}
    count, access = kinds.get(prefix, (model.nbody, model.body))
    if number != count:
        return [str(index) for index in range(number)]
    kind = prefix if prefix in kinds else "body"
    return [access(index).name or f"{kind} {index}" for index in range(number)]


def _coordinates(model: Any, free: tuple[str, ...], ball: tuple[str, ...]) -> Iterator[str]:
    """A name for each coordinate of the joints; free, ball: of joints with several."""
    for joint in range(model.njnt):
        name = _joint_name(model, joint)
        several = {FREE: free, BALL: ball}.get(int(model.jnt_type[joint]))
        if several is None:
            yield name
        else:
            yield from (f"{name} {coordinate}" for coordinate in several)


def _joint_name(model: Any, joint: int) -> str:
    return str(model.joint(joint).name or f"joint {joint}")
