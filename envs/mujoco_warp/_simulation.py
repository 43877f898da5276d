"""MuJoCo's physics on N worlds by mujoco-warp: one model, its fields as torch tensors, and its
steps captured in Warp's graphs.

The simulators are imported by the functions here, so that a task can be found, listed and asked for
its options without them.
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
ASSETS = (
    Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
)  # where Gymnasium's own models lie, which is never imported
CONES = ("pyramidal", "elliptic")
# what kinematics, com_pos and com_vel write: all that follows from qpos and qvel without forces
KINEMATIC = {
    *(
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
    ),
    *("subtree_com", "cinert", "cdof", "cvel", "cdof_dot"),
}
# what a step hands to the next one besides the state: delays of sensors and actuators, what yielded
# for good, stiffness once computed
CARRIED = ("history", "plastic", "flex_hessian_valid", "flexvert_hessian", "flexedge_hessian")


@dataclasses.dataclass(frozen=True)
class Simulators:
    """The three packages."""

    mujoco: ModuleType
    mujoco_warp: ModuleType
    warp: ModuleType


def load_simulators() -> Simulators:
    """Import them, quietly. UsageError that names the missing one."""
    try:
        warp = importlib.import_module("warp")
        if hasattr(warp, "LOG_WARNING"):  # before 1.14 there is only quiet
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
        loaded.mujoco.set_mju_user_warning(logging.getLogger("gpurl").info)
    return loaded


def find_model(task: type, model_file: str) -> str:
    """The file of a model: a path, seen from here or from beside the file of `task`, or the name of
    one of Gymnasium's own.
    """
    places = [
        Path(model_file).expanduser(),
        Path(inspect.getfile(task)).parent / model_file,
        ASSETS / model_file,
    ]
    for place in places:
        if place.is_file():
            return str(place)
    near = did_you_mean(model_file, [path.name for path in ASSETS.glob("*.xml")])
    raise UsageError(
        f"{task.__name__} needs the MuJoCo model {model_file!r}, {near}there is none of: "
        f"{', '.join(dict.fromkeys(map(str, places)))}"
    )


def load_model(simulators: Simulators, task: type, model_file: str, cone: str | None) -> Any:
    """mujoco.MjModel of a file, or of a text that begins with <, in a form that mujoco-warp
    takes.
    """
    mujoco = simulators.mujoco
    is_text, warnings = model_file.lstrip().startswith("<"), mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(
        lambda text: log.info("%s: %s", task.__name__, text)
    )  # else it leaves a MUJOCO_LOG.TXT wherever we are
    try:
        model = (
            mujoco.MjModel.from_xml_string(model_file)
            if is_text
            else mujoco.MjModel.from_xml_path(find_model(task, model_file))
        )
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{task.__name__}: MuJoCo cannot read the model {model_file[:80]!r}: {error}"
        ) from error
    finally:
        mujoco.set_mju_user_warning(warnings)
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        model.opt.solver = (
            mujoco.mjtSolver.mjSOL_NEWTON
        )  # the other finds the same minimum, mujoco-warp lacks it
    if cone is not None:
        if cone not in CONES:
            raise UsageError(
                f"cone must be one of {', '.join(CONES)}, or none for what the model says, got "
                f"{cone!r}"
            )
        model.opt.cone = CONES.index(cone)
    return model


class Fields:
    """MuJoCo's fields by their names in mjData, as tensors [N, ...] in the simulator's own memory:
    the next step changes them in place.
    """

    def __init__(self, simulators: Simulators, data: Any) -> None:
        self._warp, self._data = simulators.warp, data

    def __getattr__(self, name: str) -> Tensor:
        """Made at the first use; from then on a plain attribute."""
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
        """The names of those that were looked at."""
        return sorted(name for name in vars(self) if not name.startswith("_"))


class Model:
    """A model on a device; `worlds` makes the data of as many worlds."""

    def __init__(self, simulators: Simulators, model: Any, device: torch.device) -> None:
        self.simulators, self.host_model, self.device = simulators, model, device
        warp = simulators.warp
        warp.init()
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"MuJoCo tasks run on cpu and cuda, got {device}")
        indexed = (
            torch.device("cuda", torch.cuda.current_device())
            if device.type == "cuda" and device.index is None
            else device
        )
        self.warp_device = warp.device_from_torch(indexed)
        try:
            with self.on_device():
                self.warp_model = simulators.mujoco_warp.put_model(model)
        except NotImplementedError as error:
            raise UsageError(f"mujoco-warp cannot simulate this model: {error}") from error
        if device.type == "cuda" and not warp.is_conditional_graph_supported():
            self.warp_model.opt.graph_conditional = (
                False  # drivers before CUDA 12.4: the solver's loop takes all its iterations
            )
        if hasattr(self.warp_model.opt, "warn_overflow"):
            self.warp_model.opt.warn_overflow = 0  # a print a step; ours is said once

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where Warp allocates and launches inside."""
        return self.simulators.warp.ScopedDevice(self.warp_device)

    def worlds(self, count: int, njmax: int | None, nconmax: int | None) -> Any:
        """mujoco_warp.Data of `count` worlds: njmax constraints a world, nconmax contacts a world
        on average.
        """
        with self.on_device():
            data = self.simulators.mujoco_warp.make_data(
                self.host_model, nworld=count, njmax=njmax, nconmax=nconmax
            )
            if self.device.type == "cuda":
                self.simulators.warp.synchronize_device(
                    self.warp_device
                )  # written on Warp's stream, read on torch's
        return data


class Simulation:
    """N worlds and the two things done to them: `step` with forces and contacts, `place` for what
    follows from a new state.

    `places_all`: `place` makes sensors, accelerations and all else too, as mj_forward does, and not
    KINEMATIC only. `carried` holds what a step hands to the next one besides its state, as it is in
    worlds that no step has made.
    """

    def __init__(
        self,
        model: Model,
        num_worlds: int,
        frame_skip: int,
        njmax: int | None,
        nconmax: int | None,
        graph: bool,
        places_all: bool,
    ) -> None:
        self.model, self.frame_skip, self.wants_graph, self.places_all = (
            model,
            frame_skip,
            graph,
            places_all,
        )
        self.data = model.worlds(num_worlds, njmax, nconmax)
        self.fields = Fields(model.simulators, self.data)
        self.carried = {
            name: getattr(self.fields, name).clone() for name in self._carried_names(num_worlds)
        }
        self.is_ready = False
        self._step_graph: Any = None
        self._place_graph: Any = None
        self._stream: Any = None  # torch's current one, as Warp knows it

    @property
    def is_captured(self) -> bool:
        """Whether steps are replays of a graph."""
        return self._step_graph is not None

    def prepare(self) -> None:
        """Compile or load all kernels and capture the graphs. Leaves the worlds in a state of no
        meaning.
        """
        warp, device = self.model.simulators.warp, self.model.warp_device
        compiled = {".o"} if device.is_cpu else {".cubin", ".ptx"}
        if not any(
            path.suffix in compiled
            for path in Path(warp.config.kernel_cache_dir).glob("*mujoco_warp*/*")
        ):
            log.warning(
                "compiling MuJoCo's kernels, once, about a minute; %s keeps them",
                warp.config.kernel_cache_dir,
            )
        with self.model.on_device():
            self._physics()  # a module that is loaded inside a capture breaks it
            self._placing()
            if self.model.device.type == "cuda":
                warp.synchronize_device(device)
            if self.wants_graph:
                try:
                    self._step_graph, self._place_graph = (
                        self._capture(self._physics),
                        self._capture(self._placing),
                    )
                except Exception as error:
                    self._step_graph = self._place_graph = None
                    log.warning(
                        "MuJoCo's steps are not captured in a graph, which is slower: %s", error
                    )
        self.is_ready = True

    def step(self) -> None:
        """frame_skip steps of physics, and cfrc_ext after the last of them, as Gymnasium has it."""
        self._run(self._step_graph, self._physics)

    def place(self) -> None:
        """What follows from the state in all worlds: KINEMATIC, or all of it."""
        self._run(self._place_graph, self._placing)

    def _carried_names(self, num_worlds: int) -> list[str]:
        warp, opt, enable = (
            self.model.simulators.warp,
            self.model.host_model.opt,
            self.model.simulators.mujoco.mjtEnableBit,
        )
        arrays = {
            field.name: getattr(self.data, field.name) for field in dataclasses.fields(self.data)
        }
        # a body that sleeps is not computed anew, so that there every field is handed on
        names = arrays if opt.enableflags & int(getattr(enable, "mjENBL_SLEEP", 0)) else CARRIED
        found = [name for name in names if isinstance(arrays.get(name), warp.array)]
        return [name for name in found if arrays[name].size and arrays[name].shape[0] == num_worlds]

    def _physics(self) -> None:
        mujoco_warp = self.model.simulators.mujoco_warp
        for _ in range(self.frame_skip):
            mujoco_warp.step(self.model.warp_model, self.data)
        mujoco_warp.rne_postconstraint(self.model.warp_model, self.data)

    def _placing(self) -> None:
        mujoco_warp = self.model.simulators.mujoco_warp
        kinematics = (mujoco_warp.kinematics, mujoco_warp.com_pos, mujoco_warp.com_vel)
        for function in (mujoco_warp.forward,) if self.places_all else kinematics:
            function(self.model.warp_model, self.data)

    def _capture(self, function: Callable[[], None]) -> Any:
        """On Warp's own stream: torch's is often CUDA's legacy one, which cannot be captured.
        Nothing is executed by it.
        """
        warp = self.model.simulators.warp
        if self.model.device.type == "cuda" and not warp.is_mempool_enabled(self.model.warp_device):
            raise RuntimeError("the device has no memory pool, and a step allocates")
        with warp.ScopedCapture(device=self.model.warp_device) as capture:
            function()
        return capture.graph

    def _run(self, graph: Any, function: Callable[[], None]) -> None:
        """On torch's current stream, after what torch has written there and before what it
        reads.
        """
        warp = self.model.simulators.warp
        if self.model.device.type != "cuda":
            if graph is not None:
                warp.capture_launch(graph)
            else:
                with self.model.on_device():
                    function()
            return
        current = torch.cuda.current_stream(self.model.device)
        if self._stream is None or self._stream.cuda_stream != current.cuda_stream:
            self._stream = warp.stream_from_torch(current)
        if graph is not None:
            warp.capture_launch(graph, stream=self._stream)
        else:
            with self.model.on_device(), warp.ScopedStream(self._stream, sync_enter=False):
                function()


class DroppedConstraints:
    """Sees, without a host sync, when contacts or constraints did not fit into njmax and nconmax
    and were dropped; warns once.
    """

    READ_EVERY = 1024  # steps: so late the host of a GPU learns of it

    def __init__(self, env: VecEnv, simulation: Simulation) -> None:
        self._name, self._device, self._data = type(env).__name__, env.device, simulation.data
        fields = simulation.fields
        self._nefc, self._nacon = fields.nefc, fields.nacon
        self._bits = (
            fields.overflow if hasattr(simulation.data, "overflow") else None
        )  # of every substep, from mujoco-warp 4 on
        kinds = getattr(simulation.model.simulators.mujoco_warp, "OverflowType", None)
        self._kinds = (
            0
            if kinds is None
            else int(kinds.NEFC | kinds.NJMAX_NNZ | kinds.BROADPHASE | kinds.NARROWPHASE)
        )
        self.peak = torch.zeros(
            3, dtype=torch.int64, device=self._device
        )  # constraints a world, contacts of all, worlds that lacked room
        self._on_host, self._event, self._steps = self.peak, None, 0
        if self._device.type == "cuda":
            self._on_host, self._event = (
                torch.zeros(3, dtype=torch.int64, pin_memory=True),
                torch.cuda.Event(),
            )
        self._has_warned = False

    def begin(self) -> None:
        """Before a step."""
        if self._bits is not None:
            self._bits.zero_()

    def look(self, host_sync_is_free: bool) -> Tensor:
        """After a step: how many worlds lacked room, 0-d."""
        lacks = (self._nefc > self._data.njmax) | (self._nacon > self._data.naconmax)
        if self._bits is not None:
            lacks = lacks | ((self._bits & self._kinds) != 0)
        count = lacks.sum()
        torch.maximum(
            self.peak, torch.stack((self._nefc.max(), self._nacon[0], count)), out=self.peak
        )
        self._steps += 1
        if host_sync_is_free:
            self.warn()
        elif self._event is not None and self._steps % self.READ_EVERY == 0:
            self.warn()  # what was sent a thousand steps ago has long come
            self._on_host.copy_(self.peak, non_blocking=True)
            self._record(self._event)
        return count

    def warn(self) -> None:
        """Once, if the host knows of a world that lacked room."""
        if self._has_warned or (self._event is not None and not self._event.query()):
            return
        constraints, contacts, worlds = self._on_host.tolist()
        if worlds:
            self._has_warned = True
            log.warning(
                "%s: MuJoCo dropped contacts or constraints in up to %d worlds: up to %d "
                "constraints a world, njmax is %d; %d contacts in "
                "all worlds, there is room for %d (nconmax a world). Raise --env.njmax or "
                "--env.nconmax",
                *(self._name, worlds, constraints, self._data.njmax, contacts, self._data.naconmax),
            )

    def close(self) -> None:
        """Read what is not read yet; waits for the device."""
        if self._event is not None:
            self._on_host.copy_(self.peak)
            self._record(self._event)
            self._event.synchronize()
        self.warn()

    def _record(self, event: torch.cuda.Event) -> None:
        """On the stream of the environment's device, where the copy runs: the current device may be
        another.
        """
        event.record(torch.cuda.current_stream(self._device))
