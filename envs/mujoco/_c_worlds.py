"""MuJoCo's physics by MuJoCo's own C, on a CPU's threads: bit for bit what Gymnasium steps.

A world is a row of doubles (mjSTATE_INTEGRATION), and fields are float32 copies of it and of what a
step derives; `kernels/cpu/worlds_cpu.c` moves between them.
"""

import ctypes
import logging
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.envs.mujoco._worlds import (
    FORCES,
    INPUTS,
    STATE,
    Fields,
    Simulator,
    Worlds,
    zeros_at_rest,
)
from gpurl.errors import UsageError
from gpurl.kernels import c_library

log = logging.getLogger("gpurl")
# what `run_worlds` calls, in the order of the struct Mujoco
FUNCTIONS = (
    "mj_step",
    "mj_forward",
    "mj_rnePostConstraint",
    "mj_subtreeVel",
    "mj_resetData",
    "mj_setState",
    "mj_getState",
)
# fields of the row besides STATE and INPUTS, by the end of their names in mjtState
CARRIED = ("history", "plugin_state", "plastic")
OF_RNE = ("cfrc_ext", "cfrc_int", "cacc")  # mj_rnePostConstraint writes them
OF_SUBTREES = ("subtree_linvel", "subtree_angmom")  # mj_subtreeVel writes them
# not written by a step, or sparse matrices whose form differs from mujoco-warp's
NOT_SHOWN = {
    *("qfrc_inverse", "M", "qLD", "qH", "qDeriv", "qLU", "actuator_moment", "ten_J", "flexedge_J"),
    *("plugin", "plugin_data", "solver_niter", "solver_nnz", "solver_fwdinv", "bvh_active"),
    *("moment_rownnz", "moment_rowadr", "moment_colind"),
}
FLOAT, INTEGER, BYTE = range(3)  # kinds in C
KINDS = {
    np.dtype(np.float64): (FLOAT, torch.float32),
    np.dtype(np.int32): (INTEGER, torch.int32),
    np.dtype(np.bool_): (BYTE, torch.bool),
    np.dtype(np.uint8): (BYTE, torch.uint8),
}
FAILED, LACKS_ROOM = 1, 2  # outcomes of a world in C
MESSAGE = 256  # bytes


class _Mujoco(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in FUNCTIONS]


class _StateField(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
    ]


class _DerivedField(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("is_of_forces", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
    ]


class _Worlds(ctypes.Structure):
    _fields_ = [
        ("mujoco", ctypes.POINTER(_Mujoco)),
        ("model", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("warnings", ctypes.c_void_p),
        ("first_lacking", ctypes.c_int64),
        ("last_lacking", ctypes.c_int64),
        ("first_bad", ctypes.c_int64),
        ("last_bad", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("signature", ctypes.c_int64),
        ("state", ctypes.c_void_p),
        ("state_fields", ctypes.c_int64),
        ("derived", ctypes.c_void_p),
        ("derived_fields", ctypes.c_int64),
        ("frame_skip", ctypes.c_int64),
        ("contact_forces", ctypes.c_int64),
        ("subtree_velocities", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("outcome", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
    ]


def obstacle(mujoco: ModuleType, model: Any, device: torch.device) -> str:
    """Why these worlds cannot be had, empty if they can."""
    if device.type != "cpu":
        return f"it steps on a CPU, not on {device}"
    if int(mujoco.__version__.partition(".")[0]) < 4:
        return f"it needs mujoco 4 or later, this is {mujoco.__version__}"
    if model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP):
        return "the model's bodies may sleep, and a thread's memory serves many worlds"
    library, why = c_library.load()
    return "" if library is not None else why


class CSimulator(Simulator):
    """A model in the memory of a CPU; name: of the task, for warnings."""

    def __init__(
        self,
        name: str,
        mujoco: ModuleType,
        model: Any,
        device: torch.device,
        frame_skip: int,
    ) -> None:
        if why := obstacle(mujoco, model, device):
            raise UsageError(f"simulator mujoco cannot step {name}: {why}")
        self.name = name
        self.mujoco = mujoco
        self.model = model
        self.frame_skip = frame_skip
        # MuJoCo's functions; its library is loaded already
        library = ctypes.CDLL(_path_of_library(mujoco))
        self.functions = _Mujoco(
            *(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in FUNCTIONS)
        )
        self.ours = c_library.functions()
        handler = ctypes.c_void_p.in_dll(library, "mju_user_error")
        self.ours.catch_mujoco_errors(ctypes.byref(handler))

    def worlds(self, count: int, used: Iterable[str]) -> "CWorlds":
        return CWorlds(self, count, used)


class CWorlds(Worlds):
    """N worlds of a CSimulator; `rows` [N, width] float64 are their states."""

    def __init__(self, simulator: CSimulator, count: int, used: Iterable[str]) -> None:
        self.simulator = simulator
        self.count = count
        self.fields = Fields(self._find, self._names)
        self.used = sorted(used)
        # one mjData for each thread; more come when there are more threads
        self._data: list[Any] = []
        self._add_data()
        # the rows, and tensors of their fields
        mujoco = simulator.mujoco
        self.signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self.width = int(mujoco.mj_stateSize(simulator.model, self.signature))
        first = np.empty(self.width)
        mujoco.mj_getState(simulator.model, self._data[0], first, self.signature)
        self._first = torch.from_numpy(first)
        self.rows = self._first.repeat(count, 1)
        self._offsets = self._find_offsets()
        self._is_input = torch.zeros(self.width, dtype=torch.bool)
        for name in INPUTS:
            offset, size = self._offsets[name]
            self._is_input[offset : offset + size] = True
        self._state = {name: self._state_tensor(name) for name in self._offsets}
        self._derived: dict[str, Tensor] = {}
        # what a call reports
        self._outcome = torch.zeros(count, dtype=torch.uint8)
        self._message = ctypes.create_string_buffer(MESSAGE)
        self._has_warned: set[int] = set()
        self._plan: tuple[_Worlds, list[object]] | None = None
        # fields at rest; forces are derived, and only there if the task reads them
        forces = [name for name in FORCES if name in self.used]
        carried = [name for name in CARRIED if name in self._state]
        self.at_rest = zeros_at_rest(self.fields, (*STATE[2:], *forces))
        self.at_rest |= {name: self._state[name].clone() for name in carried}
        for name in self.used:
            getattr(self.fields, name)

    def prepare(self) -> None:
        self.is_ready = True

    def step(self) -> None:
        self._run(self.simulator.frame_skip, None)
        # MuJoCo would go on from a first state: such a world ends
        failed = self._outcome == FAILED
        self._state["qpos"].masked_fill_(failed.unsqueeze(1), torch.nan)

    def forward(self, mask: Tensor) -> None:
        """As mj_forward, so that the next step begins as Gymnasium's does after a reset."""
        self._run(0, mask)

    def restart(self, mask: Tensor) -> None:
        # the doubles of a fresh world: the times in its history would not survive float32, and a
        # double of the old episode may round to what was written
        is_fresh = mask.unsqueeze(1) & ~self._is_input
        self.rows.copy_(torch.where(is_fresh, self._first, self.rows))
        super().restart(mask)

    def count_lacking_room(self, host_sync_is_free: bool) -> Tensor:
        lacks_room = self._outcome == LACKS_ROOM
        if bool(lacks_room.any()) and LACKS_ROOM not in self._has_warned:
            self._has_warned.add(LACKS_ROOM)
            log.warning(
                "%s: MuJoCo dropped contacts or constraints: its memory is full. Raise <size "
                'memory="..."/> of the model, it is %d bytes',
                *(self.simulator.name, self.simulator.model.narena),
            )
        return lacks_room.sum()

    def state_dict(self) -> dict[str, Tensor]:
        """The fields, for other simulators, and the rows, whose doubles are exact."""
        fields = {**self._state, **self._derived}
        saved = {name: field for name, field in sorted(fields.items()) if field.numel()}
        return saved | {"rows": self.rows}

    def load_field(self, name: str, value: Tensor) -> None:
        (self.rows if name == "rows" else getattr(self.fields, name)).copy_(value)

    # ---- fields ----

    def _names(self) -> list[str]:
        """All fields that can be shown."""
        data = self._data[0]
        names = [name for name in data._all_fields if name not in NOT_SHOWN]
        return [name for name in names if name in self._offsets or _array(data, name) is not None]

    def _find(self, name: str) -> Tensor | None:
        if name in self._state:
            return self._state[name]
        if name not in self._names():
            return None
        array = getattr(self._data[0], name)
        shape = array.shape
        if name.endswith("mat") and shape[-1:] == (9,):
            shape = (*shape[:-1], 3, 3)  # as in mujoco-warp
        kept = {key: value.clone() for key, value in self.state_dict().items()}
        self._derived[name] = torch.zeros(self.count, *shape, dtype=KINDS[array.dtype][1])
        self._plan = None
        if self.is_ready and name not in (*FORCES, *OF_RNE):
            # a first use between two steps: the field in the present state
            self._run(0, None)
            self.load_state_dict(kept)
        return self._derived[name]

    def _find_offsets(self) -> dict[str, tuple[int, int]]:
        """(offset, number of doubles) in the row of each of its fields."""
        mujoco, model = self.simulator.mujoco, self.simulator.model
        offsets = {}
        offset = 0
        for bit in range(int(mujoco.mjtState.mjNSTATE)):
            size = int(mujoco.mj_stateSize(model, 1 << bit))
            name = mujoco.mjtState(1 << bit).name.removeprefix("mjSTATE_").lower()
            name = {"warmstart": "qacc_warmstart", "plugin": "plugin_state"}.get(name, name)
            if name not in (*STATE, *INPUTS, *CARRIED):
                raise UsageError(f"mujoco {mujoco.__version__} has an unknown state {name!r}")
            offsets[name] = (offset, size)
            offset += size
        return offsets

    def _state_tensor(self, name: str) -> Tensor:
        """[N, ...] copy of the rows' field."""
        offset, size = self._offsets[name]
        values = self.rows[:, offset : offset + size]
        if name == "time":
            return values[:, 0].float()
        dtype = torch.bool if name == "eq_active" else torch.float32
        shape = getattr(self._data[0], name).shape
        return values.to(dtype).reshape(self.count, *shape).clone()

    # ---- calls of C ----

    def _add_data(self) -> None:
        """An mjData for each thread."""
        mujoco, model = self.simulator.mujoco, self.simulator.model
        while len(self._data) < (self.threads or torch.get_num_threads()):
            data = mujoco.MjData(model)
            mujoco.mj_resetData(model, data)
            self._data.append(data)
            self._plan = None

    def _make_plan(self) -> tuple[_Worlds, list[object]]:
        """(the job for C, all memory that it points to)."""
        data = self._data
        warnings = self.simulator.mujoco.mjtWarning
        state = (_StateField * len(self._state))(
            *(
                _StateField(*self._offsets[name], _kind(tensor), c_library.address(tensor))
                for name, tensor in self._state.items()
            )
        )
        sources = {
            name: _pointers([getattr(one, name).ctypes.data for one in data])
            for name in self._derived
        }
        derived = (_DerivedField * max(1, len(sources)))(
            *(
                _DerivedField(
                    tensor[0].numel(),
                    _kind(tensor),
                    name in OF_RNE,
                    c_library.address(tensor),
                    ctypes.addressof(sources[name]),
                )
                for name, tensor in self._derived.items()
            )
        )
        mjdata = _pointers([one._address for one in data])
        counts = _pointers([one.warning.number.ctypes.data for one in data])
        job = _Worlds(
            mujoco=ctypes.pointer(self.simulator.functions),
            model=self.simulator.model._address,
            data=ctypes.addressof(mjdata),
            warnings=ctypes.addressof(counts),
            first_lacking=int(warnings.mjWARN_CONTACTFULL),
            last_lacking=int(warnings.mjWARN_CNSTRFULL),
            first_bad=int(warnings.mjWARN_BADQPOS),
            last_bad=int(warnings.mjWARN_BADCTRL),
            rows=c_library.address(self.rows),
            width=self.width,
            signature=self.signature,
            state=ctypes.addressof(state),
            state_fields=len(state),
            derived=ctypes.addressof(derived),
            derived_fields=len(sources),
            contact_forces=any(name in self._derived for name in OF_RNE),
            subtree_velocities=any(name in self._derived for name in OF_SUBTREES),
            outcome=c_library.address(self._outcome),
            message=ctypes.addressof(self._message),
        )
        return job, [state, sources, derived, mjdata, counts]

    def _run(self, frame_skip: int, mask: Tensor | None) -> None:
        """Step, or mj_forward with frame_skip 0, all worlds or those where mask [N] bool."""
        self._add_data()
        if self._plan is None:
            self._plan = self._make_plan()
        job, _ = self._plan
        job.frame_skip = frame_skip
        chosen = None if mask is None else mask.contiguous()
        job.mask = None if chosen is None else c_library.address(chosen)
        self._outcome.zero_()
        threads = self.threads or torch.get_num_threads()
        self.simulator.ours.run_worlds(ctypes.byref(job), *c_library.integers(self.count, threads))
        if self._message.value:
            if FAILED not in self._has_warned:
                self._has_warned.add(FAILED)
                message = self._message.value.decode(errors="replace")  # it may be cut
                log.warning("%s: MuJoCo: %s", self.simulator.name, message)
            self._message.value = b""


def _array(data: Any, name: str) -> np.ndarray | None:
    """A field of one world whose size belongs to the model, None for all others."""
    value = getattr(data, name)
    return value if isinstance(value, np.ndarray) and value.dtype in KINDS else None


def _kind(tensor: Tensor) -> int:
    return next(kind for kind, dtype in KINDS.values() if dtype == tensor.dtype)


def _pointers(addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _path_of_library(mujoco: ModuleType) -> str:
    """Of libmujoco, which the package has loaded."""
    folder = Path(str(mujoco.__file__)).parent
    paths = sorted(folder.glob("libmujoco*"))
    if not paths:
        raise UsageError(f"there is no libmujoco in {folder}: reinstall mujoco")
    return str(paths[0])
