"""What a MuJoCo task sees of its simulator: N worlds of one model, and their fields as tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gpurl.envs._counting_env import select
from gpurl.errors import EnvError, did_you_mean

STATE = ("qpos", "qvel", "act", "time", "qacc_warmstart", "ctrl")  # inputs of a step
# zero at rest, until mj_forward or a step computes them
FORCES = ("cfrc_ext", "qfrc_actuator", "qfrc_constraint")
# fields that no step changes
INPUTS = (
    "qfrc_applied",
    "xfrc_applied",
    "eq_active",
    "mocap_pos",
    "mocap_quat",
    "userdata",
)


class Fields:
    """MuJoCo's fields by their names in mjData, tensors [N, ...]: the next step changes them in
    place.

    find: the tensor of a field, None if there is none of that name; names: all there are.
    """

    def __init__(
        self, find: Callable[[str], Tensor | None], names: Callable[[], Iterable[str]]
    ) -> None:
        self._find = find
        self._all = names

    def __getattr__(self, name: str) -> Tensor:
        """Find the tensor at its first use; then it is a plain attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        tensor = self._find(name)
        if tensor is None:
            known = sorted(self._all())
            raise EnvError(
                f"MuJoCo has no field {name!r}; {did_you_mean(name, known)}it has: "
                f"{', '.join(known)}"
            )
        self.__dict__[name] = tensor
        return tensor

    def used(self) -> list[str]:
        """The names of the fields that were read so far."""
        return sorted(name for name in vars(self) if not name.startswith("_"))


class FieldsBefore(Fields):
    """Copies of the fields before the step, of those that `reward` reads."""

    def __init__(self, fields: Fields, names: Iterable[str]) -> None:
        self.__dict__.update({name: getattr(fields, name).clone() for name in names})

    def __getattr__(self, name: str) -> Tensor:
        known = ", ".join(vars(self)) or "nothing"
        raise EnvError(
            f"reward read before.{name}, but read {known} in its first call: it must read the same "
            f"fields in every call"
        )


class RecordedFields(Fields):
    """Fields that record which of them were read."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._names = set[str]()

    def __getattr__(self, name: str) -> Tensor:
        value = getattr(self._fields, name)
        self._names.add(name)
        return value

    def names(self) -> list[str]:
        """Of the fields that were read, sorted."""
        return sorted(self._names)


class Worlds(ABC):
    """N worlds, `fields`, and `at_rest`: the values that fields take when a world restarts, by
    name.
    """

    fields: Fields
    at_rest: dict[str, Tensor]
    is_ready = False  # after `prepare`
    is_captured = False  # whether steps are replays of a graph
    threads: int | None = None  # of physics on a CPU; None: as many as torch has

    @abstractmethod
    def prepare(self) -> None:
        """Make ready for steps; leaves the worlds in a meaningless state."""

    @abstractmethod
    def step(self) -> None:
        """frame_skip steps of physics, and cfrc_ext after the last of them, as in Gymnasium."""

    @abstractmethod
    def forward(self, mask: Tensor) -> None:
        """Update the fields that depend on the state where mask [N] bool; no others change."""

    def restart(self, mask: Tensor) -> None:
        """Where mask [N] bool, after the first qpos and qvel of new episodes were written: forget
        all else, and update the fields that depend on them.
        """
        for name, value in self.at_rest.items():
            field = getattr(self.fields, name)
            field.copy_(select(mask, value, field))
        self.forward(mask)

    @abstractmethod
    def count_lacking_room(self, host_sync_is_free: bool) -> Tensor:
        """The number of worlds in which contacts or constraints were dropped in the last step, 0-d;
        to be called once after each step. Warns once.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The fields that the next step starts from or that the task reads, except empty ones."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there; a state of another simulator has some of the fields."""
        for name in self.state_dict():
            if name in state:
                self.load_field(name, state[name])

    def load_field(self, name: str, value: Tensor) -> None:
        """One of `state_dict`."""
        getattr(self.fields, name).copy_(value)

    def close(self) -> None:  # noqa: B027 - nothing to close is the common case
        """Say what there is to warn of."""


class Simulator(ABC):
    """One model in one simulator on one device."""

    @abstractmethod
    def worlds(self, count: int, used: Iterable[str]) -> Worlds:
        """`count` worlds for a task that reads the fields `used`."""


def zeros_at_rest(fields: Fields, names: Iterable[str]) -> dict[str, Tensor]:
    """0 for each of the fields that is not empty."""
    found = {name: getattr(fields, name) for name in names}
    return {name: torch.zeros_like(field) for name, field in found.items() if field.numel()}
