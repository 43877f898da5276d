"""MuJoCo's physics by mujoco-warp, on a GPU or a CPU: steps are captured in Warp's graphs.

The simulator is imported inside functions, so that tasks and their options can be listed without
it.
"""

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpurl.envs._counting_env import select
from gpurl.envs.mujoco._worlds import (
    FORCES,
    INPUTS,
    STATE,
    Fields,
    Simulator,
    Worlds,
    zeros_at_rest,
)
from gpurl.errors import UsageError, install_extra
from gpurl.native_output import dropped_lines

log = logging.getLogger("gpurl")
# of its native code, which knows no log level
NO_DRIVER = "Warp CUDA warning: Could not find or load the NVIDIA CUDA driver."
# fields that kinematics, com_pos and com_vel write: those that depend on qpos and qvel only
KINEMATIC = {
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "xanchor",
    "xaxis",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "subtree_com",
    "cinert",
    "cdof",
    "cvel",
    "cdof_dot",
}
# fields that carry over from step to step besides the state: delays of sensors and actuators,
# plastic deformation, stiffness that is computed once
CARRIED = ("history", "plastic", "flex_hessian_valid", "flexvert_hessian", "flexedge_hessian")


@dataclasses.dataclass(frozen=True)
class Packages:
    """The packages of this simulator."""

    mujoco: ModuleType
    mujoco_warp: ModuleType
    warp: ModuleType


def start_warp(warp: ModuleType) -> None:
    """Start Warp without its greeting, and without its warning that there is no CUDA driver where
    torch needs none either.
    """
    if hasattr(warp, "LOG_WARNING"):  # from Warp 1.14
        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
    else:
        warp.config.quiet = True
    expected = () if torch.cuda.is_available() else (NO_DRIVER,)
    with dropped_lines(*expected):
        warp.init()


def load_packages(mujoco: ModuleType) -> Packages:
    """Import them, without their output. UsageError that names the missing one."""
    try:
        warp = importlib.import_module("warp")
        start_warp(warp)
        return Packages(mujoco, importlib.import_module("mujoco_warp"), warp)
    except ImportError as error:
        missing = error.name or str(error)
        raise UsageError(
            f"MuJoCo tasks on a GPU, or with simulator warp, need mujoco-warp and warp, {missing} "
            f"is missing: {install_extra('mujoco')}"
        ) from error


class WarpSimulator(Simulator):
    """A model on a device.

    njmax: room for constraints in each world; nconmax: for contacts, per world on average; graph:
    whether steps are captured; name: of the task, for warnings.
    """

    def __init__(
        self,
        name: str,
        mujoco: ModuleType,
        model: Any,
        device: torch.device,
        frame_skip: int,
        njmax: int | None,
        nconmax: int | None,
        graph: bool,
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"MuJoCo tasks run on cpu and cuda, got {device}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.name = name
        self.packages = load_packages(mujoco)
        self.host_model = model
        self.device = device
        self.frame_skip = frame_skip
        self.njmax = njmax
        self.nconmax = nconmax
        self.wants_graph = graph
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            # mujoco-warp lacks it; Newton finds the same minimum
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        # the model on the device
        warp = self.packages.warp
        warp.init()
        self.warp_device = warp.device_from_torch(device)
        try:
            with self.on_device():
                self.warp_model = self.packages.mujoco_warp.put_model(model)
        except NotImplementedError as error:
            raise UsageError(f"mujoco-warp cannot simulate this model: {error}") from error
        if device.type == "cuda" and not warp.is_conditional_graph_supported():
            # drivers before CUDA 12.4: the solver's loop does all its iterations
            self.warp_model.opt.graph_conditional = False
        if hasattr(self.warp_model.opt, "warn_overflow"):
            # it would print in each step; DroppedConstraints warns once
            self.warp_model.opt.warn_overflow = 0

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which Warp allocates and launches on this device."""
        return self.packages.warp.ScopedDevice(self.warp_device)

    def worlds(self, count: int, used: Iterable[str]) -> "WarpWorlds":
        return WarpWorlds(self, count, used)

    def make_data(self, count: int) -> Any:
        """mujoco_warp.Data of `count` worlds."""
        with self.on_device():
            data = self.packages.mujoco_warp.make_data(
                self.host_model, nworld=count, njmax=self.njmax, nconmax=self.nconmax
            )
            if self.device.type == "cuda":
                # written on Warp's stream, read on torch's
                self.packages.warp.synchronize_device(self.warp_device)
        return data


class WarpWorlds(Worlds):
    """N worlds. After a restart `forward` computes KINEMATIC fields; if the task reads others, all
    of them, sensors and accelerations too, as mj_forward does.
    """

    def __init__(self, simulator: WarpSimulator, count: int, used: Iterable[str]) -> None:
        self.simulator = simulator
        self.frame_skip = simulator.frame_skip
        self.data = simulator.make_data(count)
        self.arrays = {
            field.name: getattr(self.data, field.name)
            for field in dataclasses.fields(self.data)
            if isinstance(getattr(self.data, field.name), simulator.packages.warp.array)
        }
        self.fields = Fields(self._find, lambda: self.arrays)
        # fields that carry over from step to step besides the state
        self.carried = self._carried_names(count)
        self.at_rest = zeros_at_rest(self.fields, (*STATE[2:], *FORCES))
        for name in self.carried:
            if name not in (*STATE, *INPUTS):
                self.at_rest[name] = getattr(self.fields, name).clone()
        # fields that `forward` writes and the task or the next step reads
        self.used = sorted(used)
        # cfrc_ext is 0 then, as no function of `forward` computes it
        derived = {*self.used} - {*STATE, "cfrc_ext", *INPUTS, *CARRIED}
        self.forward_all = not KINEMATIC.issuperset(derived)
        names = {*self.used, *self.carried}
        names = names - {*STATE, *INPUTS} if self.forward_all else names & KINEMATIC
        written = {name: getattr(self.fields, name) for name in sorted(names)}
        # per world: nacon is one number for all worlds
        self.of_forward = [
            name for name, field in written.items() if field.numel() and len(field) == count
        ]
        self.dropped = DroppedConstraints(self)
        self._step_graph: object = None
        self._forward_graph: object = None
        self._stream: Any = None  # torch's current one, as Warp knows it

    @property
    def is_captured(self) -> bool:  # type: ignore[override]
        return self._step_graph is not None

    def prepare(self) -> None:
        """Compile or load all kernels and capture the graphs."""
        # the first time takes long
        warp = self.simulator.packages.warp
        device = self.simulator.warp_device
        compiled = {".o"} if device.is_cpu else {".cubin", ".ptx"}
        cached = Path(warp.config.kernel_cache_dir).glob("*mujoco_warp*/*")
        if not any(path.suffix in compiled for path in cached):
            log.warning(
                "compiling MuJoCo's kernels, once, about a minute; %s keeps them",
                warp.config.kernel_cache_dir,
            )
        # run before the capture, which fails if a module is loaded in it
        with self.simulator.on_device():
            self._step()
            self._forward()
            if self.simulator.device.type == "cuda":
                warp.synchronize_device(device)
            if self.simulator.wants_graph:
                try:
                    self._step_graph = self._capture(self._step)
                    self._forward_graph = self._capture(self._forward)
                except Exception as error:
                    self._step_graph = self._forward_graph = None
                    log.warning(
                        "MuJoCo's steps are not captured in a graph, which is slower: %s", error
                    )
        self.dropped.peak.zero_()
        self.is_ready = True

    def step(self) -> None:
        self.dropped.begin()
        self._run(self._step_graph, self._step)

    def forward(self, mask: Tensor) -> None:
        # with RK4 the positions of bodies are those of the last stage, not of qpos, so in the
        # other worlds they must not be updated
        if not self.of_forward:
            return
        kept = {name: getattr(self.fields, name).clone() for name in self.of_forward}
        self._run(self._forward_graph, self._forward)
        for name, value in kept.items():
            field = getattr(self.fields, name)
            field.copy_(select(mask, field, value))

    def count_lacking_room(self, host_sync_is_free: bool) -> Tensor:
        return self.dropped.count(host_sync_is_free)

    def state_dict(self) -> dict[str, Tensor]:
        names = sorted({*STATE, *self.carried, *self.used})
        fields = {name: getattr(self.fields, name) for name in names}
        return {name: field for name, field in fields.items() if field.numel()}

    def close(self) -> None:
        self.dropped.close()

    def _find(self, name: str) -> Tensor | None:
        array = self.arrays.get(name)
        return None if array is None else self.simulator.packages.warp.to_torch(array).detach()

    def _carried_names(self, count: int) -> list[str]:
        # with sleeping bodies all fields carry over, as those of a sleeping body are not updated
        sleep = int(getattr(self.simulator.packages.mujoco.mjtEnableBit, "mjENBL_SLEEP", 0))
        names = self.arrays if self.simulator.host_model.opt.enableflags & sleep else CARRIED
        arrays = {name: self.arrays[name] for name in names if name in self.arrays}
        return [name for name, array in arrays.items() if array.size and array.shape[0] == count]

    def _step(self) -> None:
        mujoco_warp = self.simulator.packages.mujoco_warp
        for _ in range(self.frame_skip):
            mujoco_warp.step(self.simulator.warp_model, self.data)
        mujoco_warp.rne_postconstraint(self.simulator.warp_model, self.data)

    def _forward(self) -> None:
        mujoco_warp = self.simulator.packages.mujoco_warp
        functions = [mujoco_warp.kinematics, mujoco_warp.com_pos, mujoco_warp.com_vel]
        if self.forward_all:
            functions = [mujoco_warp.forward]
        for function in functions:
            function(self.simulator.warp_model, self.data)

    def _capture(self, function: Callable[[], None]) -> object:
        """Warp's graph of `function`, which is not executed. On Warp's stream: torch's is often
        CUDA's legacy stream, which cannot be captured.
        """
        warp = self.simulator.packages.warp
        if self.simulator.device.type == "cuda" and not warp.is_mempool_enabled(
            self.simulator.warp_device
        ):
            raise RuntimeError("the device has no memory pool, and a step allocates")
        with warp.ScopedCapture(device=self.simulator.warp_device) as capture:
            function()
        return capture.graph

    def _run(self, graph: object, function: Callable[[], None]) -> None:
        """Run the graph, or else the function, on torch's current stream, in the order of torch's
        reads and writes there.
        """
        warp = self.simulator.packages.warp
        if self.simulator.device.type != "cuda":
            if graph is not None:
                warp.capture_launch(graph)
            else:
                with self.simulator.on_device():
                    function()
            return
        # torch may have another current stream than at the last call
        current = torch.cuda.current_stream(self.simulator.device)
        if self._stream is None or self._stream.cuda_stream != current.cuda_stream:
            self._stream = warp.stream_from_torch(current)
        if graph is not None:
            warp.capture_launch(graph, stream=self._stream)
        else:
            with self.simulator.on_device(), warp.ScopedStream(self._stream, sync_enter=False):
                function()


class DroppedConstraints:
    """Counts the worlds in which contacts or constraints did not fit into njmax and nconmax and
    were dropped; warns once. No host sync.
    """

    READ_EVERY = 1024  # steps after which the host reads what a GPU has counted

    def __init__(self, worlds: WarpWorlds) -> None:
        self._name = worlds.simulator.name
        self._device = worlds.simulator.device
        self._data = worlds.data
        self._nefc = worlds.fields.nefc
        self._nacon = worlds.fields.nacon
        # mujoco-warp 4 counts all substeps; earlier versions show the last one only
        self._overflow = worlds.fields.overflow if "overflow" in worlds.arrays else None
        kinds = getattr(worlds.simulator.packages.mujoco_warp, "OverflowType", None)
        self._kinds = 0
        if kinds is not None:
            self._kinds = int(kinds.NEFC | kinds.NJMAX_NNZ | kinds.BROADPHASE | kinds.NARROWPHASE)
        # maximum of constraints in a world, of contacts in all worlds, of worlds that lacked room
        self.peak = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._on_host = self.peak
        self._event = None
        if self._device.type == "cuda":
            self._on_host = torch.zeros(3, dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()
        self._steps = 0
        self._has_warned = False

    def begin(self) -> None:
        """To be called before a step."""
        if self._overflow is not None:
            self._overflow.zero_()

    def count(self, host_sync_is_free: bool) -> Tensor:
        """The number of worlds that lacked room, 0-d; to be called after a step."""
        # worlds in which something was dropped
        overflows = (self._nefc > self._data.njmax) | (self._nacon > self._data.naconmax)
        if self._overflow is not None:
            overflows = overflows | ((self._overflow & self._kinds) != 0)
        count = overflows.sum()
        # the peak since the start; the host reads that of READ_EVERY steps ago, which has arrived
        current = torch.stack((self._nefc.max(), self._nacon[0], count))
        torch.maximum(self.peak, current, out=self.peak)
        self._steps += 1
        if host_sync_is_free:
            self.warn()
        elif self._event is not None and self._steps % self.READ_EVERY == 0:
            self.warn()
            self._on_host.copy_(self.peak, non_blocking=True)
            self._record(self._event)
        return count

    def warn(self) -> None:
        """Warn once, if the numbers on the host show a world that lacked room."""
        if self._has_warned or (self._event is not None and not self._event.query()):
            return
        constraints, contacts, worlds = self._on_host.tolist()
        if worlds:
            self._has_warned = True
            log.warning(
                "%s: MuJoCo dropped contacts or constraints in up to %d worlds: up to %d "
                "constraints in a world, njmax is %d; %d contacts in all worlds, nconmax gives "
                "room for %d. Raise --env.njmax or --env.nconmax",
                *(self._name, worlds, constraints, self._data.njmax, contacts, self._data.naconmax),
            )

    def close(self) -> None:
        """Read the last counts; waits for the device."""
        if self._event is not None:
            self._on_host.copy_(self.peak)
            self._record(self._event)
            self._event.synchronize()
        self.warn()

    def _record(self, event: torch.cuda.Event) -> None:
        """Record the event on the stream of the copy; the current device may be another one."""
        event.record(torch.cuda.current_stream(self._device))
