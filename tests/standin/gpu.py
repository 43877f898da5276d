"""A GPU that computes nothing: its tensors have a shape and an address but no memory, and Triton's
own binder, compiler and launcher run over a driver that launches nothing.

torch's fake tensors say that they are on "cuda:0", so that the program takes the paths of a GPU: a
tensor left on the CPU, a host that waits for the device, a kernel that does not bind, compile or
launch is an error. Results are not computed.

Triton and torch look for a driver when they are imported, so `load` comes before both, in a process
of its own.
"""

import ctypes
import importlib.util
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
DRIVER, TORCH_CUDA = "libcuda.so.1", "libtorch_cuda_stand_in.so"
ON_DEVICE = 1 << 62  # in the address of a tensor
WATCHER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_void_p,
)


def torch_folder() -> Path:
    """Where torch is installed; does not import it."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def build(folder: Path) -> None:
    """Compile both libraries into `folder`: a second of C++."""
    torch = torch_folder()
    c = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", str(HERE / "libcuda.c")]
    cpp = ["c++", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}"]
    cpp += [str(HERE / "torch_cuda.cpp"), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    for command, name in ((c, DRIVER), (cpp, TORCH_CUDA)):
        subprocess.run([*command, "-o", str(folder / name)], check=True)


def load(folder: Path) -> None:
    """Load both libraries; torch and Triton must not be imported yet."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(folder / DRIVER), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / TORCH_CUDA))


@dataclass(frozen=True)
class Launch:
    """A kernel as it arrived at the driver."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    stream: int

    @property
    def what(self) -> tuple[str, tuple[int, ...], int]:
        """All but the stream."""
        return self.kernel, self.grid, self.threads


@dataclass
class StandIn:
    """The one GPU."""

    launches: list[Launch] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # kernels, when they were compiled and loaded
    stream: int = 0  # the current one
    graph: "Graph | None" = None  # the one that is being captured
    may_wait: bool = False  # whether the host may read a tensor

    def launched(self, name: bytes, grid: Any, block: Any, _: int, stream: int | None) -> None:
        launch = Launch(name.decode(), tuple(grid[:3]), block[0] * block[1] * block[2], stream or 0)
        (self.launches if self.graph is None else self.graph.launches).append(launch)

    def load(self, name: bytes, *_: Any) -> None:
        self.loaded.append(name.decode())

    def count(self) -> int:
        """Launches so far."""
        return len(self.launches if self.graph is None else self.graph.launches)

    def reset(self) -> None:
        """Forget the launches."""
        self.launches.clear()
        self.stream, self.graph, self.may_wait = 0, None, False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which the host may read tensors; all numbers are 1."""
        with mock.patch.object(self, "may_wait", True):
            yield


gpu = StandIn()


class Event:
    """Never waited for."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Stream:
    """The default stream has number 0, each other one its own."""

    numbers = itertools.count(1)

    def __init__(self, device: Any = None, number: int | None = None) -> None:
        self.cuda_stream = next(Stream.numbers) if number is None else number

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass


class Graph:
    """The launches that were captured."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def replay(self) -> None:
        gpu.launches += self.launches


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    with mock.patch.object(gpu, "stream", stream.cuda_stream):
        yield


@contextmanager
def capturing(graph: Graph, *, stream: Stream, **_: Any) -> Iterator[None]:
    """torch.cuda.graph: launches go into the graph, none of them on the default stream, and no
    kernel is loaded meanwhile.
    """
    loaded = len(gpu.loaded)
    with on_stream(stream), mock.patch.object(gpu, "graph", graph):
        yield
    assert gpu.loaded[loaded:] == [], "compiled during a capture, not before"
    assert all(launch.stream for launch in graph.launches), "launched beside the capture"


TORCH_CUDA_FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=0: (9, 0),
    "get_device_properties": lambda device=0: SimpleNamespace(
        major=9, minor=0, multi_processor_count=132
    ),
    "get_device_name": lambda device=0: "a GPU that computes nothing",
    "device": lambda device: nullcontext(),
    "current_stream": lambda device=None: Stream(number=gpu.stream),
    "default_stream": lambda device=None: Stream(number=0),
    "stream": on_stream,
    "set_stream": lambda stream: setattr(gpu, "stream", stream.cuda_stream),
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": capturing,
    "graph_pool_handle": lambda: (0, 0),
    "get_sync_debug_mode": lambda: 0,
    "set_sync_debug_mode": lambda mode: None,
    "synchronize": lambda device=None: None,
    "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
}


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """torch and Triton with the stand-in; every new tensor is a fake one."""
    import torch
    import triton
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class Mode(FakeTensorMode):
        avoid_device_init = True  # of CUDA, though it is available

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                assert gpu.may_wait or not args[0].is_cuda, "the host waits for the device"
                return True if args[0].dtype is torch.bool else 1
            return super().dispatch(func, types, args, kwargs or {})

    def begin_of(storage: torch.UntypedStorage) -> int:
        return storage._cdata << 5  # 512-byte aligned, as torch's allocator's

    def data_ptr(tensor: FakeTensor) -> int:
        if not tensor.numel():
            return 0
        offset = tensor.storage_offset() * tensor.element_size()
        address = begin_of(tensor.untyped_storage()) + offset
        return address | (ON_DEVICE if tensor.is_cuda else 0)

    shapes = _shapes_of_gru_cell()
    run = triton.runtime.jit.JITFunction.run

    def counted_run(kernel: Any, *args: Any, **options: Any) -> Any:
        before = gpu.count()
        result = run(kernel, *args, **options)
        launched = gpu.count() - before
        assert launched == 1, f"{kernel.fn.__name__}: an empty grid, {options['grid']}"
        return result

    watchers = WATCHER(gpu.launched), WATCHER(gpu.load)
    driver = ctypes.CDLL(str(Path(os.environ["TRITON_LIBCUDA_PATH"]) / DRIVER))
    driver.watch(*watchers)
    with (
        mock.patch.multiple(torch.cuda, **TORCH_CUDA_FUNCTIONS),
        mock.patch.object(FakeTensor, "data_ptr", data_ptr),
        mock.patch.object(torch.UntypedStorage, "data_ptr", begin_of),
        mock.patch.object(triton.runtime.jit.JITFunction, "run", counted_run),
        mock.patch.object(torch.nn.Module, "_apply", _move),
        Mode(),
    ):
        yield gpu
    driver.watch(None, None)
    del shapes


def _shapes_of_gru_cell() -> Any:
    """What CUDA's GRU cell returns, which torch does not tell fake tensors; as long as the result
    lives.
    """
    import torch

    def cell(input_gates: Any, hidden_gates: Any, hx: Any, *biases: Any) -> Any:
        return torch.empty_like(hx), hx.new_empty(len(hx), 5 * hx.shape[1])

    def backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
        gates = gradient.new_empty(len(gradient), 3 * gradient.shape[1])
        biases = (gates[0], gates[0]) if has_bias else (None, None)
        return torch.empty_like(gates), gates, torch.empty_like(gradient), *biases

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_thnn_fused_gru_cell", cell)
    library.impl("_thnn_fused_gru_cell_backward", backward)
    return library


def _move(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` for fake tensors, which torch cannot swap."""
    import torch

    for child in module.children():
        _move(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = function(parameter.detach())
            module._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
    for name, tensor in module._buffers.items():
        module._buffers[name] = None if tensor is None else function(tensor)
    return module
