"""A GPU on a CPU: tensors say that they are on `cuda`, and what a GPU refuses is refused.

Inside `FakeCuda` a tensor made for "cuda" lies in CPU memory, and its `device`, `is_cuda` and
`is_cpu` are those of a GPU's tensor, so that the program takes the GPU's paths. These are errors,
as on a GPU: to compute with tensors of two devices, to hand a kernel a tensor of the host or of
a GPU that is not the current one, to read a tensor as numpy, to wait for the GPU where a graph is
captured or the synchronisation debug mode forbids it. A captured graph is a recorded list of
operations. Streams and events do nothing: there is no order to get wrong.

`python -m tests.fake_cuda train ppo chasing ...` is gpurl's command line with such a GPU.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch import autograd_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from triton.runtime import interpreter

from tests.fake_graphs import WAITING, Recorder, storage, tensors

HOST = torch.device("cpu")
APPLY_RULE = autograd_function.custom_function_call_vmap_helper
ENGINE: Any = torch.autograd.Variable._execution_engine
# tensors on a GPU, by storage; a weak reference keeps its number from being used again
PLACES: dict[int, tuple[StorageWeakRef, torch.device]] = {}
# properties of a tensor that tell its device
GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
# what copies to a named device, through memory of the host that the GPU waits for
COPIES = {torch.Tensor.to, torch.as_tensor, torch.asarray, torch.tensor, torch.Tensor.new_tensor}
# copies, and rows by an index of the host
MAY_MIX = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_"}
# torch's words
WAITING_FOR = "called a synchronizing CUDA operation"
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
    "operations"
)


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor is, in a block of `FakeCuda`."""
    _, device = PLACES.get(storage(unwrapped(tensor)), (None, HOST))
    return device


def unwrapped(tensor: Tensor) -> Tensor:
    """The one with memory, of what torch.func hands a function."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """Make the memory of `tensor` that of `device`."""
    memory = unwrapped(tensor)
    key = storage(memory)
    PLACES.pop(key, None)
    if device.type == "cuda":
        PLACES[key] = StorageWeakRef(memory.untyped_storage()), device
    if len(PLACES) > 10_000:
        for key in [key for key, (memory, _) in PLACES.items() if memory.expired()]:
            del PLACES[key]
    return tensor


class FakeCuda:
    """A `with` block in which torch has `count` GPUs."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.current = 0
        self.debug_mode = "default"
        self.stream = Stream()
        self.backward_device = HOST  # where autograd makes tensors; no call names it
        self.recorder: Recorder | None = None  # of the capture under way
        self.captures: list[object] = []  # pools that the allocator believes to be captured
        self._closing = ExitStack()

    def __enter__(self) -> "FakeCuda":
        for owner, name, value in self._replacements():
            self._closing.enter_context(patch.object(owner, name, value, create=True))
        self._closing.enter_context(self._watched_launches())
        self._closing.enter_context(_Operations(self))
        self._closing.enter_context(_Calls(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def named(self, device: Any) -> torch.device | None:
        """The device that a caller asks for, with its index; None if `device` names none."""
        if isinstance(device, str) and device.partition(":")[0] in ("cpu", "cuda"):
            device = torch.device(device)
        if not isinstance(device, torch.device):
            return None
        if device.type != "cuda":
            return HOST if device.type == "cpu" else None
        return torch.device("cuda", self.current if device.index is None else device.index)

    # ---- what waits ----

    def wait(self, what: str) -> None:
        """The host waits for the GPU."""
        if self.recorder is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        if self.debug_mode == "error":
            raise RuntimeError(f"{WAITING_FOR}: {what}")
        if self.debug_mode == "warn":
            warnings.warn(f"{WAITING_FOR}: {what}", stacklevel=2)

    # ---- calls of torch ----

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function`, with CPU memory for a GPU's."""
        if function in GETTERS:
            return GETTERS[function](device_of(args[0]))
        if function in (torch.Tensor.numpy, torch.Tensor.__array__):
            if device_of(args[0]) != HOST:
                raise TypeError("can't convert cuda device type tensor to numpy")
            return function(*args, **kwargs)
        # what reads a device and moves nothing, the latter for Module.to
        if function is torch.device or getattr(function, "__name__", "") == "_parse_to":
            return function(*args, **kwargs)
        if isinstance(function, torch._ops.OpOverload):  # another mode hands on an operation
            return function(*args, **kwargs)
        if function is torch.Tensor.cpu:
            function, args = torch.Tensor.to, (args[0], HOST)
        elif function is torch.Tensor.cuda:
            function, args = torch.Tensor.to, (args[0], *(args[1:] or ("cuda",)))
        # the device that the call names, or that of the `with torch.device` around it
        is_named = [self.named(value) for value in (*args, *kwargs.values())]
        device = next((each for each in is_named if each is not None), None)
        if function is torch.Tensor.to and isinstance(args[1], Tensor):
            device = device_of(args[1])
        args = tuple(HOST if self.named(value) else value for value in args)
        kwargs = {name: HOST if self.named(value) else value for name, value in kwargs.items()}
        if device is None and function in _device._device_constructors():
            device = self.named(_device.CURRENT_DEVICE)
            kwargs["device"] = HOST
        if kwargs.pop("pin_memory", False) and device not in (None, HOST):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        outer, self.backward_device = self.backward_device, HOST
        try:
            result = function(*args, **kwargs)
        finally:
            self.backward_device = outer
        if device is None:
            return result
        if function in COPIES:
            return self._copied(result, args[0], device, kwargs.get("non_blocking", False))
        for tensor in tensors(result):
            place(tensor, device)
        return result

    def _copied(
        self, result: Tensor, source: Any, device: torch.device, non_blocking: bool
    ) -> Tensor:
        """`result` of a function that copies `source`, in memory of its own on `device`."""
        if device == device_of(result):
            return result
        if not non_blocking:
            self.wait(f"a copy to {device}")
        shares = not isinstance(source, Tensor) or storage(source) == storage(result)
        return place(result.clone() if shares else result, device)

    def operate(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of torch on tensors of one device; its results are there too."""
        name = function.overloadpacket.__name__
        given = tensors((args, kwargs))
        devices = {device_of(tensor) for tensor in given}
        on_gpu = devices - {HOST}
        if not on_gpu:
            result = function(*args, **kwargs)
            if not given:  # memory that autograd makes
                for tensor in tensors(result):
                    place(tensor, self.backward_device)
            return result
        (device, *others) = on_gpu
        # a single number of the host passes as an argument
        arrays = {device_of(tensor) for tensor in given if tensor.dim()}
        if others or (HOST in arrays and name not in MAY_MIX):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{sorted(map(str, devices))}: {name}"
            )
        is_mixed = HOST in devices and name in MAY_MIX
        if name in WAITING or (is_mixed and not ("copy" in name and args[2:] == (True,))):
            self.wait(name)
        known = {storage(tensor) for tensor in given}
        result = function(*args, **kwargs)
        for tensor in tensors(result):
            if storage(tensor) not in known:
                place(tensor, device)
        return result

    # ---- Triton ----

    @contextmanager
    def _watched_launches(self) -> Iterator[None]:
        """Launches of interpreted kernels, on tensors of the current GPU only."""
        launch = interpreter.GridExecutor.__call__

        def run(executor: Any, *args: Any, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                launch(executor, *args, **kwargs)

        def watched(executor: Any, *args: Any, **kwargs: Any) -> None:
            for tensor in tensors((args, kwargs)):
                device = device_of(tensor)
                if device == HOST:
                    raise ValueError(
                        f"{executor.fn.__name__}: pointer argument of shape {list(tensor.shape)} "
                        f"cannot be accessed from Triton (cpu tensor?)"
                    )
                if device.index != self.current:
                    raise RuntimeError(
                        f"{executor.fn.__name__}: an illegal memory access: launched on "
                        f"cuda:{self.current} with a tensor of {device}"
                    )
            if self.recorder is not None:
                self.recorder.record_launch(functools.partial(run, executor), args, kwargs)
            run(executor, *args, **kwargs)

        with patch.object(interpreter.GridExecutor, "__call__", watched):
            yield

    # ---- torch.cuda ----

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, stand-in) of what the program uses of torch.cuda."""
        gpu = SimpleNamespace(
            name="a CPU", total_memory=64 << 30, major=9, minor=0, multi_processor_count=4
        )
        values: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: False,
            "device_count": lambda: self.count,
            "current_device": lambda: self.current,
            "set_device": self._set_device,
            "device": functools.partial(CurrentDevice, self),
            "synchronize": lambda device=None: None,
            "get_device_name": lambda device=None: gpu.name,
            "get_device_properties": lambda device=None: gpu,
            "mem_get_info": lambda device=None: (gpu.total_memory, gpu.total_memory),
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "get_sync_debug_mode": lambda: self.debug_mode,
            "set_sync_debug_mode": self._set_debug_mode,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda device=None: self.stream,
            "set_stream": functools.partial(setattr, self, "stream"),
            "stream": self._on_stream,
            "graph_pool_handle": object,
            "CUDAGraph": functools.partial(Graph, self),
            "graph": self._capture,
        }
        engine = SimpleNamespace(
            run_backward=self._run_backward, queue_callback=ENGINE.queue_callback
        )
        return [
            *((torch.cuda, name, value) for name, value in values.items()),
            (torch._C, "_cuda_endAllocateToPool", self._end_allocation),
            (torch.autograd.Variable, "_execution_engine", engine),
            (autograd_function, "custom_function_call_vmap_helper", self._apply_rule),
        ]

    def _run_backward(self, roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Watch backward functions too: the call of autograd that runs them is not watched."""
        stack = _get_current_function_mode_stack()
        is_watched = any(isinstance(mode, _Calls) for mode in stack)
        outer, self.backward_device = self.backward_device, device_of(roots[0])
        try:
            with nullcontext() if is_watched else _Calls(self):
                return ENGINE.run_backward(roots, *args, **kwargs)
        finally:
            self.backward_device = outer

    def _apply_rule(self, *args: Any, **kwargs: Any) -> Any:
        """What a Function has for torch.func.vmap: torch leaves all modes before it gets there."""
        with _Calls(self):
            return APPLY_RULE(*args, **kwargs)

    def _set_device(self, device: Any) -> None:
        place = self.named(f"cuda:{device}" if isinstance(device, int) else device)
        if place is None or place.index is None or place.index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current = place.index

    def _set_debug_mode(self, mode: str) -> None:
        warnings.warn(PROTOTYPE, stacklevel=2)
        self.debug_mode = mode

    @contextmanager
    def _on_stream(self, stream: "Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _capture(
        self, captured: "Graph", pool: object, stream: "Stream", capture_error_mode: str
    ) -> Iterator[None]:
        """Like torch 2.11: a capture that fails leaves its stream current, and leaves the allocator
        in the capture.
        """
        if self.captures:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        before, self.stream = self.stream, stream
        self.captures.append(pool)
        self.recorder = captured.recorder
        try:
            with captured.recorder:
                yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            self.recorder = None
            captured.recorder.put_back()
        self.stream = before
        self.captures.remove(pool)

    def _end_allocation(self, device: int, pool: object) -> None:
        if pool not in self.captures:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures.remove(pool)


class CurrentDevice:
    """torch.cuda.device."""

    def __init__(self, gpu: FakeCuda, device: Any) -> None:
        self.gpu = gpu
        self.device = device

    def __enter__(self) -> None:
        self.before = self.gpu.current
        self.gpu._set_device(self.device)

    def __exit__(self, *_: object) -> None:
        self.gpu.current = self.before


class Stream:
    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, stream: "Stream") -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu = gpu
        self.recorder = Recorder()

    def replay(self) -> None:
        self.recorder.replay()


class _Calls(TorchFunctionMode):
    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.gpu.call(function, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self.gpu.operate(function, args, kwargs or {})


if __name__ == "__main__":
    from gpurl.cli.main import main
    from tests.quick_interpreter import quicken

    quicken()
    with FakeCuda():
        sys.exit(main(sys.argv[1:]))
