"""Named groups of observations side by side in one row, so that everything that stores and sends
observations holds one tensor a step; networks read the groups by their names.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from gpurl.errors import EnvError, UsageError, first_line

FLOAT_BYTES = 4
MAX_IMAGE_AXES = 4  # frames, height, width and channels


class Group(NamedTuple):
    """One group of a row."""

    name: str
    shape: tuple[int, ...]
    is_image: bool  # uint8; other groups are float32
    start: int  # its first number in the row: floats of a row of floats, bytes of a row of bytes

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class GroupedBox(Box):
    """A row of named groups. Without images it is float32, the groups one after the other. With
    images it is bytes: first the floats, viewed as 4 bytes each, then the images, then zeros up to
    a multiple of 4 bytes.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, groups: Iterable[Group]) -> None:
        """low, high: [D] float32, or uint8 of a row of bytes."""
        super().__init__(low, high, low.shape, low.dtype.type)
        self.groups = tuple(groups)

    def __repr__(self) -> str:
        texts = [
            f"{group.name} {group.shape} {'uint8' if group.is_image else 'float32'}"
            for group in self.groups
        ]
        return f"Dict({', '.join(texts)})"

    def __eq__(self, other: object) -> bool:
        """As of a Box; of two rows with names, these too: equal limits are no equal numbers."""
        has_same_groups = not isinstance(other, GroupedBox) or self.groups == other.groups
        return has_same_groups and super().__eq__(other)

    @classmethod
    def of(cls, parts: Mapping[str, Box]) -> "GroupedBox":
        """The row of these groups, float32 or uint8 images, in their order."""
        images = {name: part for name, part in parts.items() if part.dtype == np.uint8}
        floats = {name: part for name, part in parts.items() if name not in images}
        width = FLOAT_BYTES if images else 1
        groups, start = [], 0
        for name, part in (floats | images).items():
            groups.append(Group(name, part.shape, name in images, start))
            start += part.low.size * (1 if name in images else width)
        if images:
            size = start + -start % FLOAT_BYTES
            return cls(np.zeros(size, np.uint8), np.full(size, 255, np.uint8), groups)
        limits = [
            np.concatenate([limit.reshape(-1) for limit in side])
            for side in zip(*((part.low, part.high) for part in floats.values()))
        ]
        return cls(limits[0], limits[1], groups)

    @property
    def has_images(self) -> bool:
        """Whether the row is bytes."""
        return bool(self.dtype == np.uint8)

    @property
    def num_floats(self) -> int:
        """Numbers in all groups that are no images."""
        return sum(group.size for group in self.groups if not group.is_image)

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """[N, *shape] of each group by its name -> rows [N, D], in new memory."""
        rows = [parts[group.name].reshape(-1, group.size) for group in self.groups]
        if not self.has_images:
            return torch.cat(rows, dim=1)
        count = sum(not group.is_image for group in self.groups)
        if count:  # in new memory, whose strides a view as bytes can take
            rows = [torch.cat(rows[:count], dim=1).view(torch.uint8), *rows[count:]]
        size = sum(row.shape[1] for row in rows)
        rows.append(rows[0].new_zeros(len(rows[0]), self.shape[0] - size))
        return torch.cat(rows, dim=1)

    def floats(self, rows: Tensor) -> Tensor:
        """rows [..., D] -> [..., F] float32, a view of all groups that are no images."""
        if not self.has_images:
            return rows
        return rows[..., : FLOAT_BYTES * self.num_floats].view(torch.float32)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """rows [B, D] -> [B, *shape] of each group by its name, float32 or uint8; views."""
        # without floats nothing is viewed: then a row may have any number of bytes
        floats, parts, start = self.floats(rows) if self.num_floats else rows, {}, 0
        for group in self.groups:
            if group.is_image:
                part = rows[:, group.start : group.start + group.size]
            else:
                part = floats[:, start : start + group.size]
                start += group.size
            parts[group.name] = part.unflatten(1, group.shape) if group.shape else part.squeeze(1)
        return parts

    def checked(self, parts: object, where: str) -> Mapping[str, Tensor]:
        """`parts` if it has a tensor [N, *shape] of each group, else an EnvError that begins with
        `where`.
        """
        names = sorted(group.name for group in self.groups)
        if not isinstance(parts, Mapping) or sorted(parts) != names:
            got = sorted(parts) if isinstance(parts, Mapping) else f"a {type(parts).__name__}"
            raise EnvError(f"{where}: wanted a dict of the observations {names}, got {got}")
        for group in self.groups:
            part = parts[group.name]
            dtype = torch.uint8 if group.is_image else torch.float32
            if not isinstance(part, Tensor):
                got = f"a {type(part).__name__}"
            elif tuple(part.shape[1:]) != group.shape or part.dim() != len(group.shape) + 1:
                got = f"shape {tuple(part.shape)}"
            elif part.dtype != dtype:
                got = str(part.dtype)
            else:
                continue
            wanted = ("N", *group.shape)
            raise EnvError(
                f"{where}: {group.name}: wanted a tensor of shape ({', '.join(map(str, wanted))}), "
                f"{dtype}, got {got}"
            )
        return parts


def is_image(space: gymnasium.Space) -> bool:
    """Whether `space` is a Box of uint8 with 3 or 4 axes: an image with channels first or last, or
    several of them.
    """
    axes = len(space.shape or ())
    return isinstance(space, Box) and space.dtype == np.uint8 and 3 <= axes <= MAX_IMAGE_AXES


def groups_of(space: Box) -> GroupedBox:
    """The groups of a row; of a space without names one group "obs"."""
    if isinstance(space, GroupedBox):
        return space
    group = Group("obs", space.shape, bool(space.dtype == np.uint8), 0)
    return GroupedBox(space.low.reshape(-1), space.high.reshape(-1), (group,))


def group_spaces(space: Dict, name: str) -> GroupedBox:
    """The row of a Dict of float32 Boxes and images; EnvError, with `name` as its subject, for
    other parts.
    """
    for key, part in space.spaces.items():
        is_float = isinstance(part, Box) and part.dtype == np.float32
        if not is_float and not (isinstance(part, Box) and part.dtype == np.uint8):
            raise EnvError(
                f"{name}[{key!r}]: wanted a Box of float32, or of uint8 for an image, got {part}"
            )
    if not space.spaces:
        raise EnvError(f"{name}: wanted at least one observation, this Dict is empty")
    boxes: dict[str, Any] = dict(space.spaces)
    return GroupedBox.of(boxes)


def grouped_values(space: GroupedBox, values: Mapping[str, object]) -> dict[str, Tensor]:
    """Arrays or tensors by name as tensors of their groups' types; UsageError for other names, and
    for images that are no bytes.
    """
    names = [group.name for group in space.groups]
    if sorted(values) != sorted(names):
        raise UsageError(f"the policy takes a dict of {', '.join(names)}; got {sorted(values)}")
    tensors = {name: tensor_of(values[name]) for name in names}
    return {
        name: bytes_of(tensors[name], name) if is_image else tensors[name].float()
        for name, _, is_image, _ in space.groups
    }


def tensor_of(values: object) -> Tensor:
    """An array or a tensor as a tensor; torch takes no arrays that run backwards. UsageError for
    what is no array of numbers.
    """
    if isinstance(values, np.ndarray) and min(values.strides, default=0) < 0:
        values = np.ascontiguousarray(values)
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the policy takes arrays of numbers, got a {type(values).__name__}: "
            f"{first_line(error)}"
        ) from error


def bytes_of(image: Tensor, name: str = "images") -> Tensor:
    """An image as uint8; UsageError, about `name`, for numbers that are no bytes. Reads whole
    numbers of other types on the host.
    """
    if image.dtype == torch.uint8:
        return image
    got = str(image.dtype)
    if not image.is_floating_point() and image.dtype != torch.bool:
        if not image.numel() or 0 <= int(image.min()) <= int(image.max()) <= 255:
            return image.to(torch.uint8)
        got = f"{int(image.min())} to {int(image.max())}"
    raise UsageError(
        f"the policy takes {name} of uint8, 0 to 255, as the environment gives them; got {got}"
    )
