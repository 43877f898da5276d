"""Tensors that two processes share without copies: in a memory file on a CPU, by CUDA IPC on a GPU; Isaac Gym's process and the trainer's.

Both run this file, so it is written for Python 3.6 and any torch, and imports torch inside functions: isaacgym must come before it.
"""

import ctypes
import mmap
import os
import re
from typing import Any, Dict, List, Optional, Tuple

ALIGNMENT = 256  # bytes, as CUDA's own allocations
Layout = Dict[str, Tuple[str, Tuple[int, ...]]]


def layout_of(num_envs: int, num_obs: int, num_states: int, num_actions: int) -> Layout:
    """name: (numpy's type, shape) of what the processes exchange."""
    layout: Layout = {
        "action": ("<f4", (num_envs, num_actions)),
        "obs": ("<f4", (num_envs, num_obs)),
        "reward": ("<f4", (num_envs,)),
        "done": ("|b1", (num_envs,)),
        "timed_out": ("|b1", (num_envs,)),  # as the task says
        "clock": ("<i8", (num_envs,)),  # the task's, before the step; or what the trainer sets it to
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
    """Tensors in a memory file that both processes map; the messages alone order who writes when."""

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
            self.tensors[name] = torch.from_numpy(np.frombuffer(memory, kind, count, places[name]).reshape(shape))

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
    """Memory of a GPU in the form that torch.as_tensor takes without a copy, whatever the version."""

    def __init__(self, address: int, kind: str, shape: Tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "typestr": kind, "shape": shape, "strides": None, "version": 2}


class CudaTensors:
    """Tensors in memory of one GPU, allocated by the side that has no `handles`, opened by the other; CUDA events order who writes when.

    The host waits for nothing: work of this process on torch's current stream waits, on the GPU, for the other process's.
    """

    def __init__(self, layout: Layout, device: Any, handles: Optional[List[str]] = None) -> None:
        import torch

        places, size = places_of(layout)
        self._torch, self.device, self._owns = torch, torch.device(device), not handles
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # this process has its CUDA context now
            self._runtime = ctypes.CDLL(_cuda_runtime())
            self._address = ctypes.c_void_p()
            self._events = (ctypes.c_void_p(), ctypes.c_void_p())  # recorded by the owner, by the other
            if handles:
                memory, *events = [_Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(text))) for text in handles]
                self._call("cudaIpcOpenMemHandle", ctypes.byref(self._address), memory, ctypes.c_uint(1))  # 1: the only flag there is
                for event, handle in zip(self._events, events):
                    self._call("cudaIpcOpenEventHandle", ctypes.byref(event), handle)
            else:
                self._call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(size))
                self._call("cudaMemset", self._address, ctypes.c_int(0), ctypes.c_size_t(size))
                for event in self._events:
                    self._call("cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(2 | 4))  # without times, between processes
            base = int(self._address.value or 0)
            arrays = {name: _CudaArray(base + places[name], kind, shape) for name, (kind, shape) in layout.items()}
            self.tensors = {name: torch.as_tensor(array, device=self.device) for name, array in arrays.items()}

    def handles(self) -> List[str]:
        """Memory and the two events, as the other process opens them."""
        found = [_Handle(), _Handle(), _Handle()]
        with self._torch.cuda.device(self.device):
            self._call("cudaIpcGetMemHandle", ctypes.byref(found[0]), self._address)
            for handle, event in zip(found[1:], self._events):
                self._call("cudaIpcGetEventHandle", ctypes.byref(handle), event)
        return [bytes(handle).hex() for handle in found]

    def hand_over(self) -> None:
        """What this side's stream has written so far is there after the other side's `take_over`."""
        self._call("cudaEventRecord", self._events[0 if self._owns else 1], self._stream())

    def take_over(self) -> None:
        """This side's stream goes on when the other side's has reached what it handed over last."""
        self._call("cudaStreamWaitEvent", self._stream(), self._events[1 if self._owns else 0], ctypes.c_uint(0))

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
            raise RuntimeError("{} failed: {}".format(name, self._runtime.cudaGetErrorString(code).decode()))


def _cuda_runtime() -> str:
    """Path of the CUDA runtime that torch has loaded; a name for the linker where torch has it built in."""
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*libcudart[^/\s]*\.so[.\d]*", maps.read())
    return found.group() if found else "libcudart.so"
