"""MuJoCo's physics on N worlds by mujoco-warp: one model, its fields as torch tensors, and its
steps captured in Warp's graphs.

The simulators are imported inside functions, so that tasks and their options can be listed without
them.
"""

import contextlib
import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import torch
from torch import Tensor

from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EnvError, UsageError, did_you_mean

log = logging.getLogger("gpurl")
# the folder of Gymnasium's models; its MuJoCo tasks are never imported
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
CONES = ("pyramidal", "elliptic")
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
class Simulators:
    """The three packages that MuJoCo tasks need."""

    mujoco: ModuleType
    mujoco_warp: ModuleType
    warp: ModuleType


def load_simulators() -> Simulators:
    """Import them, without their output. UsageError that names the missing one."""
    try:
        warp = importlib.import_module("warp")
        if hasattr(warp, "LOG_WARNING"):  # from Warp 1.14
            warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
        else:
            warp.config.quiet = True
        loaded = Simulators(
            importlib.import_module("mujoco"), importlib.import_module("mujoco_warp"), warp
        )
    except ImportError as error:
        missing = error.name or str(error)
        raise UsageError(
            f"MuJoCo tasks need mujoco, mujoco-warp and warp, {missing} is missing: pip install "
            f"'gpurl[mujoco]'"
        ) from error
    # MuJoCo would write its warnings into a file in the working directory
    if loaded.mujoco.get_mju_user_warning() is None:
        loaded.mujoco.set_mju_user_warning(log.info)
    return loaded


def find_model(task: type, model_file: str) -> str:
    """The file of a model: a path, relative to the working directory or to the file of `task`, or
    the name of one of Gymnasium's models.
    """
    candidates = [
        Path(model_file).expanduser(),
        Path(inspect.getfile(task)).parent / model_file,
        ASSETS / model_file,
    ]
    for path in candidates:
        if path.is_file():
            return str(path)
    hint = did_you_mean(model_file, [path.name for path in ASSETS.glob("*.xml")])
    raise UsageError(
        f"{task.__name__} needs the MuJoCo model {model_file!r}, {hint}none of these files exists: "
        f"{', '.join(dict.fromkeys(map(str, candidates)))}"
    )


def load_model(simulators: Simulators, task: type, model_file: str, cone: str | None) -> Any:
    """mujoco.MjModel of a file, or of XML text that begins with <, with options that mujoco-warp
    supports.
    """
    mujoco = simulators.mujoco
    before = mujoco.get_mju_user_warning()
    # otherwise MuJoCo writes a MUJOCO_LOG.TXT into the working directory
    mujoco.set_mju_user_warning(lambda text: log.info("%s: %s", task.__name__, text))
    try:
        if model_file.lstrip().startswith("<"):
            model = mujoco.MjModel.from_xml_string(model_file)
        else:
            model = mujoco.MjModel.from_xml_path(find_model(task, model_file))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{task.__name__}: MuJoCo cannot read the model {model_file[:80]!r}: {error}"
        ) from error
    finally:
        mujoco.set_mju_user_warning(before)
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        # mujoco-warp lacks it; Newton finds the same minimum
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    if cone is not None:
        if cone not in CONES:
            raise UsageError(
                f"cone must be one of {', '.join(CONES)}, or none for that of the model, got "
                f"{cone!r}"
            )
        model.opt.cone = CONES.index(cone)
    return model


class Fields:
    """MuJoCo's fields by their names in mjData, as tensors [N, ...] in the simulator's own memory:
    the next step changes them in place.
    """

    def __init__(self, simulators: Simulators, data: Any) -> None:
        self._warp = simulators.warp
        self._data = data

    def __getattr__(self, name: str) -> Tensor:
        """Make the tensor at its first use; then it is a plain attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        array = getattr(self._data, name, None)
        if not isinstance(array, self._warp.array):
            known = [
                field.name
                for field in dataclasses.fields(self._data)
                if isinstance(getattr(self._data, field.name), self._warp.array)
            ]
            raise EnvError(
                f"MuJoCo has no field {name!r}; {did_you_mean(name, known)}it has: "
                f"{', '.join(sorted(known))}"
            )
        tensor = self._warp.to_torch(array).detach()
        self.__dict__[name] = tensor
        return tensor

    def used(self) -> list[str]:
        """The names of the fields that were read so far."""
        return sorted(name for name in vars(self) if not name.startswith("_"))


class Model:
    """A model on a device; `worlds` makes the data of several worlds."""

    def __init__(self, simulators: Simulators, model: Any, device: torch.device) -> None:
        self.simulators = simulators
        self.host_model = model
        self.device = device
        warp = simulators.warp
        warp.init()
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"MuJoCo tasks run on cpu and cuda, got {device}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.warp_device = warp.device_from_torch(device)
        try:
            with self.on_device():
                self.warp_model = simulators.mujoco_warp.put_model(model)
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
        return self.simulators.warp.ScopedDevice(self.warp_device)

    def worlds(self, count: int, njmax: int | None, nconmax: int | None) -> Any:
        """mujoco_warp.Data of `count` worlds with room for njmax constraints in each world and
        nconmax contacts per world on average.
        """
        with self.on_device():
            data = self.simulators.mujoco_warp.make_data(
                self.host_model, nworld=count, njmax=njmax, nconmax=nconmax
            )
            if self.device.type == "cuda":
                # written on Warp's stream, read on torch's
                self.simulators.warp.synchronize_device(self.warp_device)
        return data


class Simulation:
    """N worlds: `step` with forces and contacts, `forward` to update fields after a new state.

    forward_all: `forward` computes all fields, sensors and accelerations too, as mj_forward does;
    otherwise KINEMATIC only. `carried` holds the initial values of the fields that carry over from
    step to step besides the state.
    """

    def __init__(
        self,
        model: Model,
        num_worlds: int,
        frame_skip: int,
        njmax: int | None,
        nconmax: int | None,
        graph: bool,
        forward_all: bool,
    ) -> None:
        self.model = model
        self.frame_skip = frame_skip
        self.wants_graph = graph
        self.forward_all = forward_all
        self.data = model.worlds(num_worlds, njmax, nconmax)
        self.fields = Fields(model.simulators, self.data)
        self.carried = {
            name: getattr(self.fields, name).clone() for name in self._carried_names(num_worlds)
        }
        self.is_ready = False
        self._step_graph: object = None
        self._forward_graph: object = None
        self._stream: Any = None  # torch's current one, as Warp knows it

    @property
    def is_captured(self) -> bool:
        """Whether steps are replays of a graph."""
        return self._step_graph is not None

    def prepare(self) -> None:
        """Compile or load all kernels and capture the graphs. Leaves the worlds in a meaningless
        state.
        """
        # the first time takes long
        warp = self.model.simulators.warp
        device = self.model.warp_device
        compiled = {".o"} if device.is_cpu else {".cubin", ".ptx"}
        cached = Path(warp.config.kernel_cache_dir).glob("*mujoco_warp*/*")
        if not any(path.suffix in compiled for path in cached):
            log.warning(
                "compiling MuJoCo's kernels, once, about a minute; %s keeps them",
                warp.config.kernel_cache_dir,
            )
        # run before the capture, which fails if a module is loaded in it
        with self.model.on_device():
            self._step()
            self._forward()
            if self.model.device.type == "cuda":
                warp.synchronize_device(device)
            if self.wants_graph:
                try:
                    self._step_graph = self._capture(self._step)
                    self._forward_graph = self._capture(self._forward)
                except Exception as error:
                    self._step_graph = self._forward_graph = None
                    log.warning(
                        "MuJoCo's steps are not captured in a graph, which is slower: %s", error
                    )
        self.is_ready = True

    def step(self) -> None:
        """frame_skip steps of physics, and cfrc_ext after the last of them, as in Gymnasium."""
        self._run(self._step_graph, self._step)

    def forward(self) -> None:
        """Update the fields of all worlds from their state: KINEMATIC, or all of them."""
        self._run(self._forward_graph, self._forward)

    def _carried_names(self, num_worlds: int) -> list[str]:
        fields = dataclasses.fields(self.data)
        values = {field.name: getattr(self.data, field.name) for field in fields}
        warp = self.model.simulators.warp
        arrays = {name: value for name, value in values.items() if isinstance(value, warp.array)}
        # with sleeping bodies all fields carry over, as those of a sleeping body are not updated
        sleep = int(getattr(self.model.simulators.mujoco.mjtEnableBit, "mjENBL_SLEEP", 0))
        names = arrays if self.model.host_model.opt.enableflags & sleep else CARRIED
        return [
            name
            for name in names
            if name in arrays and arrays[name].size and arrays[name].shape[0] == num_worlds
        ]

    def _step(self) -> None:
        mujoco_warp = self.model.simulators.mujoco_warp
        for _ in range(self.frame_skip):
            mujoco_warp.step(self.model.warp_model, self.data)
        mujoco_warp.rne_postconstraint(self.model.warp_model, self.data)

    def _forward(self) -> None:
        mujoco_warp = self.model.simulators.mujoco_warp
        functions = [mujoco_warp.kinematics, mujoco_warp.com_pos, mujoco_warp.com_vel]
        if self.forward_all:
            functions = [mujoco_warp.forward]
        for function in functions:
            function(self.model.warp_model, self.data)

    def _capture(self, function: Callable[[], None]) -> object:
        """Warp's graph of `function`, which is not executed. On Warp's stream: torch's is often
        CUDA's legacy stream, which cannot be captured.
        """
        warp = self.model.simulators.warp
        if self.model.device.type == "cuda" and not warp.is_mempool_enabled(self.model.warp_device):
            raise RuntimeError("the device has no memory pool, and a step allocates")
        with warp.ScopedCapture(device=self.model.warp_device) as capture:
            function()
        return capture.graph

    def _run(self, graph: object, function: Callable[[], None]) -> None:
        """Run the graph, or else the function, on torch's current stream, in the order of torch's
        reads and writes there.
        """
        warp = self.model.simulators.warp
        if self.model.device.type != "cuda":
            if graph is not None:
                warp.capture_launch(graph)
            else:
                with self.model.on_device():
                    function()
            return
        # torch may have another current stream than at the last call
        current = torch.cuda.current_stream(self.model.device)
        if self._stream is None or self._stream.cuda_stream != current.cuda_stream:
            self._stream = warp.stream_from_torch(current)
        if graph is not None:
            warp.capture_launch(graph, stream=self._stream)
        else:
            with self.model.on_device(), warp.ScopedStream(self._stream, sync_enter=False):
                function()


class DroppedConstraints:
    """Counts the worlds in which contacts or constraints did not fit into njmax and nconmax and
    were dropped; warns once. No host sync.
    """

    READ_EVERY = 1024  # steps after which the host reads what a GPU has counted

    def __init__(self, env: VecEnv, simulation: Simulation) -> None:
        self._name = type(env).__name__
        self._device = env.device
        self._data = simulation.data
        fields = simulation.fields
        self._nefc = fields.nefc
        self._nacon = fields.nacon
        # mujoco-warp 4 counts all substeps; earlier versions show the last one only
        self._overflow = fields.overflow if hasattr(simulation.data, "overflow") else None
        kinds = getattr(simulation.model.simulators.mujoco_warp, "OverflowType", None)
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
