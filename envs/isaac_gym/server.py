"""Isaac Gym in a process of its own, under its own Python 3.6 to 3.8: makes one task and steps it
for a trainer, in tensors both share.

The interpreter that runs it has no gpurl, so this file stands alone, in the language of Python 3.6
and for any torch. Only the standard library is imported at the top, since isaacgym must come before
torch; so the trainer can import it too, for the tensors that both share.
The trainer asks in lines of JSON over a socket that this process was born with.
"""

import ast
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
from typing import Any, Callable, Dict, List, Optional, Tuple

FAMILIES = ("isaacgymenvs", "legged_gym")
IN_SHARED_TENSORS = ("reset", "restart", "set_clocks", "step")  # calls that read or write there
ALIGNMENT = 256  # bytes, as CUDA's own allocations
Layout = Dict[str, Tuple[str, Tuple[int, ...]]]


class WrongUse(Exception):
    """What the user can set right: a name, a setting, an installation."""


# ---- what both processes share ----


def layout_of(num_envs: int, num_obs: int, num_states: int, num_actions: int) -> Layout:
    """name: (numpy's type, shape) of what the processes exchange."""
    layout: Layout = {
        "action": ("<f4", (num_envs, num_actions)),
        "obs": ("<f4", (num_envs, num_obs)),
        "reward": ("<f4", (num_envs,)),
        "done": ("|b1", (num_envs,)),
        "timed_out": ("|b1", (num_envs,)),  # as the task says
        "clock": (
            "<i8",
            (num_envs,),
        ),  # the task's, before the step; or what the trainer sets it to
        "mask": ("|b1", (num_envs,)),  # which environments the trainer restarts
    }
    if num_states:
        layout["state"] = ("<f4", (num_envs, num_states))
    return layout


def places_of(layout: Layout) -> Tuple[Dict[str, int], int]:
    """({name: first byte}, bytes in all)."""
    places, size = {}, 0
    for name, (kind, shape) in layout.items():
        places[name] = size
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        size += -(-count * int(kind[2:]) // ALIGNMENT) * ALIGNMENT
    return places, size


class HostTensors:
    """Tensors in a memory file that both processes map; the messages alone order who writes
    when.
    """

    def __init__(self, layout: Layout, memory_file: int) -> None:
        import numpy as np
        import torch

        places, size = places_of(layout)
        if os.fstat(memory_file).st_size < size:
            os.ftruncate(memory_file, size)
        memory = mmap.mmap(memory_file, size)
        self.tensors = {}
        for name, (kind, shape) in layout.items():
            count = int(np.prod(shape))
            self.tensors[name] = torch.from_numpy(
                np.frombuffer(memory, kind, count, places[name]).reshape(shape)
            )

    def handles(self) -> List[str]:
        """What the other side opens; here it has the memory file already."""
        return []

    def hand_over(self) -> None:
        """What this side has written is there after the other side's `take_over`."""

    def take_over(self) -> None:
        """Wait for what the other side handed over."""

    def close(self) -> None:
        """Nothing may use the tensors any more."""
        self.tensors.clear()


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t: 64 bytes, passed by value."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


class _CudaArray:
    """Memory of a GPU in the form that torch.as_tensor takes without a copy, whatever the
    version.
    """

    def __init__(self, address: int, kind: str, shape: Tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "typestr": kind,
            "shape": shape,
            "strides": None,
            "version": 2,
        }


class CudaTensors:
    """Tensors in memory of one GPU, allocated by the side that has no `handles`, opened by the
    other; CUDA events order who writes when.

    The host waits for nothing: work of this process on torch's current stream waits, on the GPU,
    for the other process's.
    """

    def __init__(self, layout: Layout, device: Any, handles: Optional[List[str]] = None) -> None:
        import torch

        places, size = places_of(layout)
        self._torch, self.device, self._owns = torch, torch.device(device), not handles
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # this process has its CUDA context now
            self._runtime = ctypes.CDLL(_cuda_runtime())
            self._address = ctypes.c_void_p()
            self._events = (
                ctypes.c_void_p(),
                ctypes.c_void_p(),
            )  # recorded by the owner, by the other
            if handles:
                memory, *events = [
                    _Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(text))) for text in handles
                ]
                self._call(
                    "cudaIpcOpenMemHandle", ctypes.byref(self._address), memory, ctypes.c_uint(1)
                )  # 1: the only flag there is
                for event, handle in zip(self._events, events):
                    self._call("cudaIpcOpenEventHandle", ctypes.byref(event), handle)
            else:
                self._call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(size))
                self._call("cudaMemset", self._address, ctypes.c_int(0), ctypes.c_size_t(size))
                # the host does not wait for it, and the other side may write before it
                torch.cuda.synchronize()
                for event in self._events:
                    self._call(
                        "cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(2 | 4)
                    )  # without times, between processes
            base = int(self._address.value or 0)
            arrays = {
                name: _CudaArray(base + places[name], kind, shape)
                for name, (kind, shape) in layout.items()
            }
            self.tensors = {
                name: torch.as_tensor(array, device=self.device) for name, array in arrays.items()
            }

    def handles(self) -> List[str]:
        """Memory and the two events, as the other process opens them."""
        found = [_Handle(), _Handle(), _Handle()]
        with self._torch.cuda.device(self.device):
            self._call("cudaIpcGetMemHandle", ctypes.byref(found[0]), self._address)
            for handle, event in zip(found[1:], self._events):
                self._call("cudaIpcGetEventHandle", ctypes.byref(handle), event)
        return [bytes(handle).hex() for handle in found]

    def hand_over(self) -> None:
        """What this side's stream has written so far is there after the other side's
        `take_over`.
        """
        with self._torch.cuda.device(self.device):  # stream 0 is that of the device that is current
            self._call("cudaEventRecord", self._events[0 if self._owns else 1], self._stream())

    def take_over(self) -> None:
        """This side's stream goes on when the other side's has reached what it handed over last."""
        with self._torch.cuda.device(self.device):
            self._call(
                "cudaStreamWaitEvent",
                self._stream(),
                self._events[1 if self._owns else 0],
                ctypes.c_uint(0),
            )

    def close(self) -> None:
        """Nothing may use the tensors any more."""
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
    """Path of the CUDA runtime that torch has loaded; a name for the linker where torch has it
    built in.
    """
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*libcudart[^/\s]*\.so[.\d]*", maps.read())
    return found.group() if found else "libcudart.so"


# ---- making a task ----


def task_names(family: str) -> List[str]:
    """What can be asked for; ImportError where the family is not installed."""
    if family == "isaacgymenvs":
        spec = importlib.util.find_spec(family)
        if spec is None or not spec.origin:
            raise ImportError("it is not installed")
        return sorted(
            name[:-5]
            for name in os.listdir(_config_folder(spec.origin, "task"))
            if name.endswith(".yaml")
        )
    importlib.import_module("legged_gym.envs")  # registers its tasks
    return sorted(importlib.import_module("legged_gym.utils").task_registry.task_classes)


def _config_folder(package_file: str, *parts: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(package_file)), "cfg", *parts)


def find_family(task: str, family: str) -> str:
    """The family that has `task`; WrongUse with near names."""
    problems, known = [], []
    wanted = FAMILIES if family == "auto" else (family,)
    for name in wanted:
        try:
            names = task_names(name)
        except Exception as error:
            problems.append("{} cannot be used, {}: {}".format(name, type(error).__name__, error))
            continue
        if task in names:
            return name
        known += names
    near = difflib.get_close_matches(task, known, 3, 0.5)
    hint = "did you mean {}? ".format(" or ".join(near)) if near else ""
    listed = (
        "Known: {}".format(", ".join(known))
        if known
        else "install {} into this Python".format(" or ".join(wanted))
    )
    raise WrongUse(
        "there is no Isaac Gym task {!r}; {}{}".format(task, hint, "; ".join(problems + [listed]))
    )


def make_isaacgymenvs(
    task: str, num_envs: int, seed: int, device: str, overrides: List[str]
) -> Any:
    """The task, headless. Its configuration is made here: without one `make` takes the GPU pipeline
    whatever the devices.
    """
    import isaacgymenvs
    from hydra import compose, initialize_config_dir

    folder = _config_folder(isaacgymenvs.__file__)
    settings = [
        "task=" + task,
        "num_envs={}".format(num_envs),
        "headless=True",
        "pipeline=" + ("cpu" if device == "cpu" else "gpu"),
    ]
    settings += ["sim_device=" + device, "rl_device=" + device]
    trainings = sorted(os.listdir(os.path.join(folder, "train")))
    if task + "PPO.yaml" not in trainings:  # what is in it is not used, but it must be there
        settings.append("train=" + trainings[0][:-5])
    for override in overrides:  # of the task, unless it chooses a file of a group
        sign, text = re.match(r"([+~]*)(.*)", override).groups()  # type: ignore[union-attr]
        settings.append(override if "/" in text.split("=")[0] else sign + "task." + text)
    try:
        with initialize_config_dir(config_dir=folder):
            config = compose(config_name="config", overrides=settings)
    except Exception as error:
        raise WrongUse(
            "{} with {}: {}; overrides name what is in the task, +NAME=VALUE adds".format(
                task, settings, error
            )
        )
    options = dict(
        seed=seed,
        task=task,
        num_envs=num_envs,
        sim_device=device,
        rl_device=device,
        graphics_device_id=0,
        headless=True,
    )
    options.update(multi_gpu=False, virtual_screen_capture=False, force_render=False, cfg=config)
    known = inspect.signature(isaacgymenvs.make).parameters  # older versions have fewer
    return isaacgymenvs.make(**{name: value for name, value in options.items() if name in known})


def make_legged_gym(task: str, num_envs: int, seed: int, device: str, overrides: List[str]) -> Any:
    """The task, headless, by legged_gym's own reading of a command line."""
    utils = importlib.import_module("legged_gym.utils")
    sys.argv = [
        "legged_gym",
        "--task=" + task,
        "--num_envs={}".format(num_envs),
        "--seed={}".format(seed),
        "--headless",
    ]
    sys.argv += [
        "--sim_device=" + device,
        "--rl_device=" + device,
        "--pipeline=" + ("cpu" if device == "cpu" else "gpu"),
    ]
    config = utils.task_registry.get_cfgs(task)[0]
    config.seed = seed
    for override in overrides:
        path, _, text = override.partition("=")
        part, names = config, path.split(".")
        for name in names[:-1]:
            part = getattr(part, name, None)
        if not hasattr(part, names[-1]):
            known = [name for name in dir(part or config) if not name.startswith("_")]
            raise WrongUse(
                "the configuration of {} has no {!r}; known there: {}".format(
                    task, path, ", ".join(known)
                )
            )
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        setattr(part, names[-1], value)
    return utils.task_registry.make_env(name=task, args=utils.get_args(), env_cfg=config)[0]


class Simulation:
    """One task, and what differs between tasks: how they restart, what they call their clock, what
    they return.
    """

    shared: Any  # tensors

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
        torch = self._import()
        family = find_family(task, family)
        if device != "cpu" and not torch.cuda.is_available():
            raise WrongUse(
                "torch {} of {} sees no CUDA device; pipeline cpu needs none".format(
                    torch.__version__, sys.executable
                )
            )
        self.seed(seed)  # isaacgymenvs.make takes a seed and ignores it
        make: Callable[..., Any] = (
            make_isaacgymenvs if family == "isaacgymenvs" else make_legged_gym
        )
        self.env, self.device = make(task, num_envs, seed, device, overrides), torch.device(device)
        if hasattr(self.env, "fetch_amp_obs_demo") or getattr(self.env, "num_agents", 1) != 1:
            raise WrongUse(
                "{}: tasks of AMP, which leave restarting to a trainer, and of several agents are "
                "not supported".format(task)
            )
        is_legged = family == "legged_gym"
        self.num_envs, self.num_actions = int(self.env.num_envs), int(self.env.num_actions)
        self.restarts_later = not is_legged and self._watch_a_restart()
        first = (
            min(int(self._clock().min()), 1) if self.restarts_later else 0
        )  # clock at an episode's first observation
        self.first_clock, after_limit = (
            first,
            1 if is_legged else -1,
        )  # an episode ends at the clock max_episode_length + after_limit
        moves_together = hasattr(
            self.env, "cfg_task"
        )  # Factory and IndustReal: the clock of environment 0 counts for all
        if max_episode_steps is not None:
            if moves_together:
                raise WrongUse(
                    "{} reads its own limit: set it by overrides, not by max_episode_steps".format(
                        task
                    )
                )
            self.env.max_episode_length = max_episode_steps + first - after_limit
        last = int(self.env.max_episode_length) + after_limit
        clip = (
            self.env.cfg.normalization.clip_observations
            if is_legged
            else getattr(self.env, "clip_obs", float("inf"))
        )
        return {
            "sizes": [self.num_envs, int(self.env.num_obs), self._num_states(), self.num_actions],
            "clip_obs": float(clip),
            "max_action": float("inf")
            if is_legged
            else 1.0,  # legged_gym's policies are not limited
            "restarts_later": self.restarts_later,
            "clocks_move_together": moves_together,
            "last_clock": last,
            "max_episode_steps": last - first,
        }

    def describe(self) -> Dict[str, Any]:
        """What this Python has, on one line, and whether it sees a GPU."""
        torch = self._import()
        parts = [
            "Python " + sys.version.split()[0],
            "torch {}, CUDA {}".format(torch.__version__, torch.cuda.is_available()),
        ]
        for family in FAMILIES:
            try:
                parts.append("{} with {} tasks".format(family, len(task_names(family))))
            except Exception as error:
                parts.append("no {} ({})".format(family, error))
        return {"text": ", ".join(parts), "sees_gpu": torch.cuda.is_available()}

    def try_sharing(self, sizes: List[int], memory_file: int, handles: List[str]) -> None:
        """Open what a trainer shares, as `share` does without a task, to answer in obs with twice
        the action. This needs no isaacgym.
        """
        self.shared = (
            CudaTensors(layout_of(*sizes), "cuda:0", handles)
            if handles
            else HostTensors(layout_of(*sizes), memory_file)
        )
        self.shared.take_over()
        self.shared.tensors["obs"].copy_(2 * self.shared.tensors["action"])
        self.shared.hand_over()

    def _import(self) -> Any:
        """torch, after isaacgym."""
        here, path = (
            "Python {} at {}".format(sys.version.split()[0], sys.executable),
            os.environ.get("PYTHONPATH"),
        )
        also = "; PYTHONPATH, where it looks first, is {}".format(path) if path else ""
        for name in ("isaacgym", "torch"):
            try:
                module = importlib.import_module(name)
            except Exception as error:
                how = (
                    "Isaac Gym Preview 4, which is for Python 3.6 to 3.8"
                    if name == "isaacgym"
                    else "torch"
                )
                what = "{}: {}".format(type(error).__name__, error)
                raise WrongUse(
                    "{} cannot import {}: {}; install {}, into it{}".format(
                        here, name, what, how, also
                    )
                )
        self.torch = module
        module.set_grad_enabled(False)
        return module

    def seed(self, seed: int) -> None:
        """Everything a task draws from."""
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        self.torch.manual_seed(seed)

    def _num_states(self) -> int:
        for name in ("num_states", "num_privileged_obs"):
            if getattr(self.env, name, None):
                return int(getattr(self.env, name))
        return 0

    def _clock(self) -> Any:
        """[N] of the task's own; tasks may put another tensor in its place."""
        return (
            self.env.progress_buf
            if hasattr(self.env, "progress_buf")
            else self.env.episode_length_buf
        )

    def _idle(self) -> Any:
        """A step without an action."""
        return self.env.step(self.torch.zeros(self.num_envs, self.num_actions, device=self.device))

    def _watch_a_restart(self) -> bool:
        """Whether a task restarts in the step after an end, so that the end shows the terminal
        observation, or in the same step.

        One that restarts in the same step does not look at what reset_buf was before it, and so
        restarts only those that end in this step.
        """
        counts, restart = [], self.env.reset_idx

        def watched(*rows: Any, **named: Any) -> Any:
            counts.append(
                next(len(given) for given in [*rows, *named.values()] if hasattr(given, "__len__"))
            )
            return restart(*rows, **named)

        self.env.reset_idx = watched
        for _ in range(
            4
            # all may end in the very step, a single one easily: then it restarted in either way,
            # and the next step tells
        ):
            counts.clear()
            self.env.reset_buf[:] = 1
            done = self._idle()[2]
            if self.num_envs not in counts or not bool(done.all()):
                break
        del self.env.reset_idx
        return self.num_envs in counts

    def share(self, memory_file: int, handles: List[str]) -> None:
        """Open what the trainer shares."""
        layout = layout_of(
            self.num_envs, int(self.env.num_obs), self._num_states(), self.num_actions
        )
        on_gpu = self.device.type == "cuda"
        self.shared = (
            CudaTensors(layout, self.device, handles)
            if on_gpu
            else HostTensors(layout, memory_file)
        )
        self.tensors = self.shared.tensors

    def reset(self, seed: Optional[int]) -> None:
        """Restart everything and show the first observations; the task's own reset() restarts
        nothing and shows zeros.
        """
        if seed is not None:
            self.seed(seed)
        if self.restarts_later:
            self.env.reset_buf[:] = 1
        else:
            self.env.reset_idx(self.torch.arange(self.num_envs, device=self.device))
        result = self._idle()
        if not self.restarts_later:
            self._clock()[:] = 0  # the idle step is not of the episode
        self._show(result)

    def restart(self) -> None:
        """Restart the environments in the mask, at the latest within the next step."""
        if self.restarts_later:
            self.env.reset_buf[self.tensors["mask"]] = 1
            return
        rows = self.tensors["mask"].nonzero().flatten()
        if len(rows):
            self.env.reset_idx(rows)

    def set_clocks(self) -> None:
        """Take the trainer's clocks, which count from an episode's first observation."""
        self._clock()[:] = self.tensors["clock"] + self.first_clock

    def step(self) -> None:
        """One step of all environments."""
        self.tensors["clock"].copy_(
            self._clock()
        )  # now: a task that restarts in this step zeroes it
        self._show(self.env.step(self.tensors["action"].to(self.device, copy=True)))

    def _show(self, result: Tuple[Any, ...]) -> None:
        """Copy what the task returned, parts of which it changes in place later, to where the
        trainer sees it.
        """
        observed, *states, reward, done, extras = (
            result  # legged_gym gives the critic's observations too, or None
        )
        state = states[0] if states else None
        if isinstance(observed, dict):
            observed, state = observed["obs"], observed.get("states")
        shown = {
            "obs": observed,
            "state": state,
            "reward": reward,
            "done": done,
            "timed_out": extras.get("time_outs"),
        }
        for name, value in shown.items():
            if value is not None:
                self.tensors[name].copy_(value.reshape(self.tensors[name].shape))
            elif name == "timed_out":
                self.tensors[name].zero_()


# ---- the process ----


def die_with_the_trainer(lifeline: int) -> None:
    """End when the other end of the pipe closes, however busy or stuck: the kernel sends SIGIO,
    which ends who does not handle it.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before that
        os._exit(1)


def serve(channel: socket.socket) -> None:
    """Answer calls, a line of JSON each, until one says close or the trainer is gone."""
    simulation, lines = Simulation(), channel.makefile("rb")
    calls = {
        name: getattr(simulation, name)
        for name in ("describe", "try_sharing", "make", "share", *IN_SHARED_TENSORS)
    }
    for line in lines:
        request = json.loads(line.decode())
        name = request.pop("call")
        if name == "close":
            return
        try:
            if name in IN_SHARED_TENSORS:
                simulation.shared.take_over()
            answer = {"result": calls[name](**request)}
            if (
                name in IN_SHARED_TENSORS
            ):  # also where it only read: the trainer may write there again
                simulation.shared.hand_over()
        except WrongUse as error:
            answer = {"wrong_use": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": "{}: {}".format(type(error).__name__, error)}
        channel.sendall(json.dumps(answer).encode() + b"\n")


def main(channel: int, lifeline: int) -> None:
    """Serve over the socket `channel`."""
    die_with_the_trainer(lifeline)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # of a terminal or a batch system: the trainer saves first, then ends this process
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the trainer asks where a step hangs
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        path for path in sys.path if os.path.abspath(path) != folder
    ]  # the files beside this one are no modules here
    serve(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=channel))
    sys.stdout.flush()
    os._exit(0)  # a simulator's own end may hang or crash


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
