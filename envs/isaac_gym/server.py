"""The simulator process of Isaac Gym, under Python 3.6 to 3.8: makes one task and steps it for a
trainer, in tensors that both processes share.

Its interpreter has no gpurl, so this file imports nothing else of gpurl, uses Python 3.6 only and
works with any torch. Only the standard library is imported at the top, since isaacgym must be
imported before torch; so the trainer can import this file too, for the shared tensors. The trainer
sends calls as lines of JSON over a socket that this process inherits.
"""

import ast
import contextlib
import ctypes
import difflib
import faulthandler
import fcntl
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

FAMILIES = ("isaacgymenvs", "legged_gym")
WITHOUT_TENSORS = (
    "describe",
    "try_sharing",
    "make",
    "share",
    "get_curriculum",
    "set_curriculum",
)
IN_SHARED_TENSORS = ("reset", "restart", "set_clocks", "step")  # calls that read or write them
ALIGNMENT = 256  # bytes, as in CUDA's allocations
MAX_LOGGED = 256  # numbers that a task may log in a step
NOT_LOGGED = ("time_outs", "amp_obs", "terminate")  # extras that are no metrics
Layout = Dict[str, Tuple[str, Tuple[int, ...]]]


class WrongUse(Exception):
    """An error that the user can fix: a name, a setting, an installation."""


class NotJson(Exception):
    """A value that JSON does not hold."""


# ---- shared tensors ----


def layout_of(num_envs: int, num_obs: int, num_states: int, num_actions: int) -> Layout:
    """name -> (numpy type, shape) of the tensors that the processes exchange."""
    layout: Layout = {
        "action": ("<f4", (num_envs, num_actions)),
        "obs": ("<f4", (num_envs, num_obs)),
        "reward": ("<f4", (num_envs,)),
        "done": ("|b1", (num_envs,)),
        "timed_out": ("|b1", (num_envs,)),  # as reported by the task
        # of the task before the step; or the values that the trainer sets
        "clock": ("<i8", (num_envs,)),
        "mask": ("|b1", (num_envs,)),  # environments that the trainer restarts
        "log": ("<f4", (MAX_LOGGED,)),  # what the task logs; the reply to a step has the names
    }
    if num_states:
        layout["state"] = ("<f4", (num_envs, num_states))
    return layout


def offsets_of(layout: Layout) -> Tuple[Dict[str, int], int]:
    """({name: first byte}, total bytes)."""
    offsets = {}
    size = 0
    for name, (kind, shape) in layout.items():
        offsets[name] = size
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        size += -(-count * int(kind[2:]) // ALIGNMENT) * ALIGNMENT
    return offsets, size


class HostTensors:
    """Tensors in a memory file that both processes map. Calls and their replies alone order the
    writes of the two processes.
    """

    def __init__(self, layout: Layout, memory_file: int) -> None:
        import numpy as np
        import torch

        offsets, size = offsets_of(layout)
        # the first process that opens the file gives it its size
        if os.fstat(memory_file).st_size < size:
            os.ftruncate(memory_file, size)
        memory = mmap.mmap(memory_file, size)
        self.tensors = {}
        for name, (kind, shape) in layout.items():
            count = int(np.prod(shape))
            self.tensors[name] = torch.from_numpy(
                np.frombuffer(memory, kind, count, offsets[name]).reshape(shape)
            )

    def handles(self) -> List[str]:
        """Handles for the other process; it needs none, as it has the memory file."""
        return []

    def hand_over(self) -> None:
        """Does nothing: after a call or reply the writes of this process are visible."""

    def take_over(self) -> None:
        """Does nothing, as `hand_over`."""

    def close(self) -> None:
        """Free the memory; the tensors must not be used any more."""
        self.tensors.clear()


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t: 64 bytes, passed by value."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


class _CudaArray:
    """GPU memory in the form that torch.as_tensor of any version takes without a copy."""

    def __init__(self, address: int, kind: str, shape: Tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "typestr": kind,
            "shape": shape,
            "strides": None,
            "version": 2,
        }


class CudaTensors:
    """Tensors in GPU memory, allocated by the process without `handles` and opened by the other
    one. CUDA events order the writes of the two processes.

    The host does not wait: on the GPU, torch's current stream waits for the other process's.
    """

    def __init__(self, layout: Layout, device: Any, handles: Optional[List[str]] = None) -> None:
        import torch

        offsets, size = offsets_of(layout)
        self._torch = torch
        self.device = torch.device(device)
        self._owns = not handles
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # creates the CUDA context of this process
            self._runtime = ctypes.CDLL(_cuda_runtime())
            self._address = ctypes.c_void_p()
            # recorded by the owner of the memory, and by the other process
            self._events = (ctypes.c_void_p(), ctypes.c_void_p())
            if handles:
                # open the memory and the events of the other process
                memory, *events = [
                    _Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(text))) for text in handles
                ]
                self._call(
                    "cudaIpcOpenMemHandle", ctypes.byref(self._address), memory, ctypes.c_uint(1)
                )  # 1: cudaIpcMemLazyEnablePeerAccess, the only flag
                for event, handle in zip(self._events, events):
                    self._call("cudaIpcOpenEventHandle", ctypes.byref(event), handle)
            else:
                # allocate them, zeroed
                self._call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(size))
                self._call("cudaMemset", self._address, ctypes.c_int(0), ctypes.c_size_t(size))
                # memset is asynchronous and must not overwrite the other process's writes
                torch.cuda.synchronize()
                for event in self._events:
                    self._call(
                        "cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(2 | 4)
                    )  # without timing, for use between processes
            # the memory as tensors
            base = int(self._address.value or 0)
            arrays = {
                name: _CudaArray(base + offsets[name], kind, shape)
                for name, (kind, shape) in layout.items()
            }
            self.tensors = {
                name: torch.as_tensor(array, device=self.device) for name, array in arrays.items()
            }

    def handles(self) -> List[str]:
        """Handles with which the other process opens the memory and the two events."""
        handles = [_Handle(), _Handle(), _Handle()]
        with self._torch.cuda.device(self.device):
            self._call("cudaIpcGetMemHandle", ctypes.byref(handles[0]), self._address)
            for handle, event in zip(handles[1:], self._events):
                self._call("cudaIpcGetEventHandle", ctypes.byref(handle), event)
        return [bytes(handle).hex() for handle in handles]

    def hand_over(self) -> None:
        """Make the writes of this process's stream visible after the other process's
        `take_over`.
        """
        with self._torch.cuda.device(self.device):  # stream 0 belongs to the current device
            self._call("cudaEventRecord", self._events[0 if self._owns else 1], self._stream())

    def take_over(self) -> None:
        """Let this process's stream wait for the last `hand_over` of the other process."""
        with self._torch.cuda.device(self.device):
            self._call(
                "cudaStreamWaitEvent",
                self._stream(),
                self._events[1 if self._owns else 0],
                ctypes.c_uint(0),
            )

    def close(self) -> None:
        """Free the memory; the tensors must not be used any more."""
        self.tensors.clear()
        if self._address.value:
            with self._torch.cuda.device(self.device):
                self._call("cudaFree" if self._owns else "cudaIpcCloseMemHandle", self._address)
                for event in self._events:
                    self._call("cudaEventDestroy", event)
            self._address.value = None

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(
                "{} failed: {}".format(name, self._runtime.cudaGetErrorString(code).decode())
            )


def _cuda_runtime() -> str:
    """Path of the CUDA runtime that torch has loaded; if it is linked statically, a name that the
    dynamic linker searches for.
    """
    with open("/proc/self/maps") as maps:
        match = re.search(r"/\S*libcudart[^/\s]*\.so[.\d]*", maps.read())
    return match.group() if match else "libcudart.so"


# ---- making a task ----


def task_names(family: str) -> List[str]:
    """Names of the tasks of a family; ImportError if it is not installed."""
    if family == "isaacgymenvs":
        spec = importlib.util.find_spec(family)
        if spec is None or not spec.origin:
            raise ImportError("it is not installed")
        folder = _config_folder(spec.origin, "task")
        names = [name[:-5] for name in sorted(os.listdir(folder)) if name.endswith(".yaml")]
        return [name for name in names if _names_a_task(folder, name)]
    importlib.import_module("legged_gym.envs")  # registers its tasks
    return sorted(importlib.import_module("legged_gym.utils").task_registry.task_classes)


def _names_a_task(folder: str, config: str) -> bool:
    """Whether a configuration is that of a task: it has a name, of its own or from one that it
    extends, as AllegroKukaLSTM does. Parts of others, as FactoryBase, have none.
    """
    path = os.path.join(folder, config + ".yaml")
    if not os.path.isfile(path):
        return False
    with open(path) as file:
        text = file.read()
    if re.search(r"""^[ ]*["']?name["']?[ ]*:""", text, re.MULTILINE):
        return True
    return any(_names_a_task(folder, name) for name in _extended_configs(text) if name != config)


def _extended_configs(text: str) -> List[str]:
    """The plain words in the list of defaults of a configuration: files of the same folder."""
    _, _, rest = ("\n" + text).partition("\ndefaults:\n")
    names = []
    for line in rest.splitlines():
        if line.strip() and not re.match(r"[ ]*[-#]", line):
            break  # the list has ended
        names += re.findall(r"^[ ]*-[ ]*(\w+)[ ]*$", line)
    return names


def _config_folder(package_file: str, *parts: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(package_file)), "cfg", *parts)


def find_family(task: str, family: str) -> str:
    """The family that has `task`; WrongUse with similar names."""
    problems = []
    known = []
    families = FAMILIES if family == "auto" else (family,)
    for name in families:
        try:
            names = task_names(name)
        except Exception as error:
            problems.append("{} cannot be used, {}: {}".format(name, type(error).__name__, error))
            continue
        if task in names:
            return name
        known += names
    # no family has it
    similar = difflib.get_close_matches(task, known, 3, 0.5)
    hint = "did you mean {}? ".format(" or ".join(similar)) if similar else ""
    if known:
        advice = "Known: {}".format(", ".join(known))
    else:
        advice = "install {} into this Python".format(" or ".join(families))
    raise WrongUse(
        "there is no Isaac Gym task {!r}; {}{}".format(task, hint, "; ".join(problems + [advice]))
    )


# contexts that last until the process ends
_open_contexts = contextlib.ExitStack()


def make_isaacgymenvs(
    task: str, num_envs: int, seed: int, device: str, overrides: List[str]
) -> Tuple[Any, float]:
    """(the task, headless; the largest action that it is trained with). The configuration is made
    here, as `make` without one takes the GPU pipeline on any device.
    """
    import isaacgymenvs
    from hydra import compose, initialize_config_dir

    sim_device = "cpu:0" if device == "cpu" else device  # AllegroKuka reads the index
    # the configuration: our settings, then the user's
    folder = _config_folder(isaacgymenvs.__file__)
    settings = [
        "task=" + task,
        "num_envs={}".format(num_envs),
        "headless=True",
        "pipeline=" + ("cpu" if device == "cpu" else "gpu"),
        "sim_device=" + sim_device,
        "rl_device=" + device,
    ]
    trainings = sorted(os.listdir(os.path.join(folder, "train")))
    has_training = task + "PPO.yaml" in trainings
    if not has_training:  # a file of this group must exist, but is not used
        settings.append("train=" + trainings[0][:-5])
    for override in overrides:  # of the task, unless it selects a file of a group
        sign, text = re.match(r"([+~]*)(.*)", override).groups()  # type: ignore[union-attr]
        settings.append(override if "/" in text.split("=")[0] else sign + "task." + text)
    try:
        # it stays open: Factory and IndustReal tasks compose more files while they are made
        _open_contexts.enter_context(initialize_config_dir(config_dir=folder))
        config = compose(config_name="config", overrides=settings)
    except Exception as error:
        raise WrongUse(
            "{} with {}: {}; overrides set existing values of the task, +NAME=VALUE adds "
            "one".format(task, settings, error)
        )
    # the task
    options = dict(
        seed=seed,
        task=task,
        num_envs=num_envs,
        sim_device=sim_device,
        rl_device=device,
        graphics_device_id=0,
        headless=True,
        multi_gpu=False,
        virtual_screen_capture=False,
        force_render=False,
        cfg=config,
    )
    known = inspect.signature(isaacgymenvs.make).parameters  # older versions have fewer
    env = isaacgymenvs.make(**{name: value for name, value in options.items() if name in known})
    # rl_games clips actions to the action space, which is 1 for all tasks, unless it is told not to
    is_clipped = True
    if has_training:
        is_clipped = config.train["params"]["config"].get("clip_actions", True)
    return env, 1.0 if is_clipped else float(getattr(env, "clip_actions", float("inf")))


def make_legged_gym(
    task: str, num_envs: int, seed: int, device: str, overrides: List[str]
) -> Tuple[Any, float]:
    """(the task, headless; infinity, as actions have no limit). legged_gym reads its settings from
    the command line.
    """
    utils = importlib.import_module("legged_gym.utils")
    sys.argv = [
        "legged_gym",
        "--task=" + task,
        "--num_envs={}".format(num_envs),
        "--seed={}".format(seed),
        "--headless",
        "--sim_device=" + device,
        "--rl_device=" + device,
        "--pipeline=" + ("cpu" if device == "cpu" else "gpu"),
    ]
    # overrides, in the nested classes of the configuration
    config = utils.task_registry.get_cfgs(task)[0]
    config.seed = seed
    for override in overrides:
        path, _, text = override.partition("=")
        names = path.split(".")
        owner = config
        for name in names[:-1]:
            owner = getattr(owner, name, None)
        if not hasattr(owner, names[-1]):
            known = [name for name in dir(owner or config) if not name.startswith("_")]
            raise WrongUse(
                "the configuration of {} has no {!r}; known there: {}".format(
                    task, path, ", ".join(known)
                )
            )
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        setattr(owner, names[-1], value)
    env = utils.task_registry.make_env(name=task, args=utils.get_args(), env_cfg=config)[0]
    return env, float("inf")


class Simulation:
    """One task, with the differences between tasks: how they restart, the name of their clock, the
    values that they return.
    """

    shared: Any  # HostTensors or CudaTensors
    _logged_episode: Any = None  # extras["episode"] of the last step

    def make(
        self,
        task: str,
        family: str,
        num_envs: int,
        seed: int,
        device: str,
        overrides: List[str],
        max_episode_steps: Optional[int],
    ) -> Dict[str, Any]:
        """Make the task; returns its sizes and how it restarts."""
        # the task
        torch = self._import()
        family = find_family(task, family)
        if device != "cpu" and not torch.cuda.is_available():
            raise WrongUse(
                "torch {} of {} sees no CUDA device; pipeline cpu needs none".format(
                    torch.__version__, sys.executable
                )
            )
        # the same task for the same seed
        self.seed(seed)  # isaacgymenvs.make takes a seed and ignores it
        is_legged = family == "legged_gym"
        make: Callable[..., Any] = make_legged_gym if is_legged else make_isaacgymenvs
        self.env, max_action = make(task, num_envs, seed, device, overrides)
        self.device = torch.device(device)
        if getattr(self.env, "use_dict_obs", False):
            raise WrongUse(
                "{}: tasks with a dict of observations (Dextreme) are not supported, only those "
                "with one tensor obs; its observations: {}".format(
                    task, ", ".join(sorted(getattr(self.env, "obs_dims", {}))) or "unknown"
                )
            )
        if hasattr(self.env, "fetch_amp_obs_demo") or getattr(self.env, "num_agents", 1) != 1:
            raise WrongUse(
                "{}: tasks of AMP, which leave restarting to a trainer, and of several agents are "
                "not supported".format(task)
            )
        self.num_envs = int(self.env.num_envs)
        self.num_actions = int(self.env.num_actions)
        # clock at the first observation of an episode
        self.restarts_later = not is_legged and self._restarts_in_next_step()
        self.first_clock = min(int(self._clock().min()), 1) if self.restarts_later else 0
        self.num_states = self._num_states()
        # an episode ends at the clock max_episode_length + after_limit
        after_limit = 1 if is_legged else -1
        # Factory and IndustReal use the clock of environment 0 for all
        clocks_move_together = hasattr(self.env, "cfg_task")
        if max_episode_steps is not None:
            if clocks_move_together:
                raise WrongUse(
                    "{} has its own time limit: set it by overrides, not by "
                    "max_episode_steps".format(task)
                )
            self.env.max_episode_length = max_episode_steps + self.first_clock - after_limit
        last_clock = int(self.env.max_episode_length) + after_limit
        # limits of observations
        if is_legged:
            clip_obs = self.env.cfg.normalization.clip_observations
        else:
            clip_obs = getattr(self.env, "clip_obs", float("inf"))
        return {
            "sizes": [self.num_envs, int(self.env.num_obs), self.num_states, self.num_actions],
            "clip_obs": float(clip_obs),
            "max_action": max_action,
            "restarts_later": self.restarts_later,
            "clocks_move_together": clocks_move_together,
            "last_clock": last_clock,
            "max_episode_steps": last_clock - self.first_clock,
        }

    def describe(self) -> Dict[str, Any]:
        """The versions in this Python, on one line, and whether it sees a GPU."""
        torch = self._import()
        versions = [
            "Python " + sys.version.split()[0],
            "torch {}, CUDA {}".format(torch.__version__, torch.cuda.is_available()),
        ]
        for family in FAMILIES:
            try:
                versions.append("{} with {} tasks".format(family, len(task_names(family))))
            except Exception as error:
                versions.append("no {} ({})".format(family, error))
        return {"text": ", ".join(versions), "sees_gpu": torch.cuda.is_available()}

    def try_sharing(self, sizes: List[int], memory_file: int, handles: List[str]) -> None:
        """Open the shared tensors without a task, and write twice the action into obs. Needs no
        isaacgym.
        """
        layout = layout_of(*sizes)
        if handles:
            self.shared = CudaTensors(layout, "cuda:0", handles)
        else:
            self.shared = HostTensors(layout, memory_file)
        self.shared.take_over()
        self.shared.tensors["obs"].copy_(2 * self.shared.tensors["action"])
        self.shared.hand_over()

    def _import(self) -> Any:
        """Import isaacgym, then torch; returns torch."""
        packages = (
            ("isaacgym", "Isaac Gym Preview 4, which is for Python 3.6 to 3.8"),
            ("torch", "torch"),
        )
        for name, package in packages:
            try:
                module = importlib.import_module(name)
            except Exception as error:
                path = os.environ.get("PYTHONPATH")
                note = "; PYTHONPATH, which is searched first, is {}".format(path) if path else ""
                raise WrongUse(
                    "Python {} at {} cannot import {}: {}: {}; install {} into it{}".format(
                        sys.version.split()[0],
                        sys.executable,
                        name,
                        type(error).__name__,
                        error,
                        package,
                        note,
                    )
                )
        self.torch = module
        module.set_grad_enabled(False)
        return module

    def seed(self, seed: int) -> None:
        """Seed all random generators that tasks use."""
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        self.torch.manual_seed(seed)

    def _num_states(self) -> int:
        """Size of the critic's observations, after at least one step of the task; 0 if it only
        declares them: AllegroKuka never writes its states, and NVIDIA's critic of it sees obs.
        """
        written = getattr(self.env, "states_buf", None)
        if written is not None and not bool(written.any()):
            return 0
        for name in ("num_states", "num_privileged_obs"):
            if getattr(self.env, name, None):
                return int(getattr(self.env, name))
        return 0

    def _clock(self) -> Any:
        """[N] clock of the task; tasks may replace the tensor."""
        name = "progress_buf" if hasattr(self.env, "progress_buf") else "episode_length_buf"
        return getattr(self.env, name)

    def _idle(self) -> Any:
        """A step with zero actions."""
        return self.env.step(self.torch.zeros(self.num_envs, self.num_actions, device=self.device))

    def _restarts_in_next_step(self) -> bool:
        """Whether the task restarts in the step after the end of an episode, so that the end shows
        the terminal observation; otherwise it restarts in the same step.

        A task that restarts in the same step ignores what reset_buf held before, so it restarts
        only environments whose episodes end in this step.
        """
        # count the environments in each call of reset_idx
        counts = []
        reset_idx = self.env.reset_idx

        def counting_reset_idx(*arguments: Any, **named: Any) -> Any:
            rows = [each for each in [*arguments, *named.values()] if hasattr(each, "__len__")]
            counts.append(len(rows[0]))
            return reset_idx(*arguments, **named)

        self.env.reset_idx = counting_reset_idx
        # if all environments end in this very step, both kinds of tasks restart all: try again
        for _ in range(4):
            counts.clear()
            self.env.reset_buf[:] = 1
            done = self._idle()[2]
            if self.num_envs not in counts or not bool(done.all()):
                break
        del self.env.reset_idx
        return self.num_envs in counts

    def share(self, memory_file: int, handles: List[str]) -> None:
        """Open the tensors that the trainer shares."""
        layout = layout_of(self.num_envs, int(self.env.num_obs), self.num_states, self.num_actions)
        if self.device.type == "cuda":
            self.shared = CudaTensors(layout, self.device, handles)
        else:
            self.shared = HostTensors(layout, memory_file)
        self.tensors = self.shared.tensors

    def reset(self, seed: Optional[int]) -> None:
        """Restart all environments and write the first observations. The task's reset() does not
        restart them and returns zeros.
        """
        if seed is not None:
            self.seed(seed)
        if self.restarts_later:
            self.env.reset_buf[:] = 1
        else:
            self.env.reset_idx(self.torch.arange(self.num_envs, device=self.device))
        result = self._idle()
        if not self.restarts_later:
            self._clock()[:] = 0  # the idle step does not count
        self._write(result)

    def restart(self) -> None:
        """Restart the environments in the mask, now or within the next step."""
        if self.restarts_later:
            self.env.reset_buf[self.tensors["mask"]] = 1
            return
        # restarted now; there is no later step of the task that would do it
        rows = self.tensors["mask"].nonzero().flatten()
        if len(rows):
            self.env.reset_idx(rows)

    def set_clocks(self) -> None:
        """Set the task's clocks to the trainer's, which are 0 at the first observation."""
        self._clock()[:] = self.tensors["clock"] + self.first_clock

    def step(self, env_steps: int) -> List[str]:
        """One step of all environments, after `env_steps` steps in all of this training. Returns
        the names of what the task logs; their values are in the shared tensor log.
        """
        if hasattr(self.env, "set_train_info"):
            self.env.set_train_info(env_steps)
        # before the step: a task that restarts in it zeroes its clock
        self.tensors["clock"].copy_(self._clock())
        result = self.env.step(self.tensors["action"].to(self.device, copy=True))
        self._write(result)
        return self._write_log(result[-1])

    def _write(self, result: Tuple[Any, ...]) -> None:
        """Copy the results of a step into the shared tensors; the task may overwrite them later."""
        # legged_gym also returns the critic's observations, or None
        obs, *states, reward, done, extras = result
        state = states[0] if states else None
        if isinstance(obs, dict):
            state = obs.get("states") if self.num_states else None
            obs = obs["obs"]
        values = {
            "obs": obs,
            "state": state,
            "reward": reward,
            "done": done,
            "timed_out": extras.get("time_outs"),
        }
        for name, value in values.items():
            if value is not None:
                self.tensors[name].copy_(value.reshape(self.tensors[name].shape))
            elif name == "timed_out":
                self.tensors[name].zero_()

    def _write_log(self, extras: Dict[str, Any]) -> List[str]:
        """Copy the metrics in `extras` into the shared tensor log; returns their names."""
        # the same dict of means over ended episodes stays until the next ones end
        episode = extras.get("episode")
        is_old = episode is not None and episode is self._logged_episode
        self._logged_episode = episode
        skipped = NOT_LOGGED + (("episode",) if is_old else ())
        metrics = {name: each for name, each in extras.items() if name not in skipped}
        values = dict(list(_numbers(metrics, self.num_envs, self.torch))[:MAX_LOGGED])
        if values:
            rows = [
                self.torch.as_tensor(each, dtype=self.torch.float32, device=self.device).mean()
                for each in values.values()
            ]
            self.tensors["log"][: len(rows)] = self.torch.stack(rows)
        return list(values)

    def get_curriculum(self) -> Tuple[Any, str]:
        """(what the task keeps between its episodes, as JSON, None if it keeps nothing; why that
        cannot be saved, "" if it can).
        """
        if not hasattr(self.env, "get_env_state"):
            return None, ""
        # no reason to end: the task can be trained on without it
        try:
            return to_json(self.env.get_env_state(), self.torch), ""
        except NotJson as error:
            return None, str(error)
        except Exception as error:
            traceback.print_exc()
            return None, "get_env_state failed: {}: {}".format(type(error).__name__, error)

    def set_curriculum(self, state: Any) -> None:
        """Continue from `get_curriculum`."""
        if state is not None and hasattr(self.env, "set_env_state"):
            self.env.set_env_state(from_json(state, self.torch))


def _numbers(values: Dict[str, Any], num_envs: int, torch: Any) -> Iterator[Tuple[str, Any]]:
    """(name, number, tensor of one number or of one for each environment) in nested dicts."""
    for name, value in values.items():
        if isinstance(value, dict):
            for inner, each in _numbers(value, num_envs, torch):
                yield "{}/{}".format(name, inner), each
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1 or tuple(value.shape) == (num_envs,):
                yield name, value
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def to_json(value: Any, torch: Any, key: str = "") -> Any:
    """`value` of dicts, lists, numbers, text, tensors and arrays of numpy, as JSON holds it.

    NotJson for anything else, and for keys that are no text; it names the key, as in ranges.mass.
    """
    import numpy

    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                kind = type(name).__name__
                raise NotJson("key {!r}: {}, wanted text".format(key + str(name), kind))
        return {name: to_json(each, torch, key + name + ".") for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each, torch, "{}{}.".format(key, k)) for k, each in enumerate(value)]
    held = value
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).split(".")[-1]
        held = {"tensor": value.cpu().tolist(), "dtype": kind, "device": str(value.device)}
    elif isinstance(value, numpy.ndarray):
        held = {"array": value.tolist(), "dtype": str(value.dtype)}
    elif isinstance(value, numpy.generic):
        held = value.item()
    try:
        json.dumps(held)
    except TypeError:
        kind = getattr(value, "dtype", type(value).__name__)
        raise NotJson("key {!r}: {}, which JSON does not hold".format(key[:-1], kind)) from None
    return held


def from_json(value: Any, torch: Any) -> Any:
    """The inverse of `to_json`, but tuples become lists."""
    import numpy

    if isinstance(value, list):
        return [from_json(each, torch) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tensor", "dtype", "device"}:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype, device=value["device"])
    if value.keys() == {"array", "dtype"}:
        return numpy.array(value["array"], dtype=value["dtype"])
    return {name: from_json(each, torch) for name, each in value.items()}


# ---- the process ----


def die_with_the_trainer(lifeline: int) -> None:
    """End this process, however busy, when the other end of the pipe closes: the kernel then sends
    SIGIO, whose default action is to terminate.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it is closed already
        os._exit(1)


def serve(channel: socket.socket) -> None:
    """Execute calls, a line of JSON each, until the call "close" or the end of the trainer."""
    simulation = Simulation()
    calls = {name: getattr(simulation, name) for name in (*WITHOUT_TENSORS, *IN_SHARED_TENSORS)}
    for line in channel.makefile("rb"):
        request = json.loads(line.decode())
        name = request.pop("call")
        if name == "close":
            return
        try:
            if name in IN_SHARED_TENSORS:
                simulation.shared.take_over()
            reply = json.dumps({"result": calls[name](**request)})
            # also after a call that only read them: the trainer will overwrite them
            if name in IN_SHARED_TENSORS:
                simulation.shared.hand_over()
        except WrongUse as error:
            reply = json.dumps({"wrong_use": str(error)})
        except Exception as error:
            traceback.print_exc()
            reply = json.dumps({"error": "{}: {}".format(type(error).__name__, error)})
        channel.sendall(reply.encode() + b"\n")


def main(channel: int, lifeline: int) -> None:
    """Serve over the socket `channel`."""
    die_with_the_trainer(lifeline)
    # from a terminal or a batch system: the trainer saves first, then ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # tracebacks, of a crash or on request of the trainer when a step hangs
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # the other files of this folder must not be imported as top-level modules
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    serve(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=channel))
    sys.stdout.flush()
    os._exit(0)  # the exit handlers of a simulator may hang or crash


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
