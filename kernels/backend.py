"""The one place that decides between Triton, C and torch, and whether the host may look at a
tensor.

`GPURL_BACKEND=auto|triton|torch`, read when gpurl is imported: auto takes Triton for CUDA tensors.
`triton` on CPU tensors needs `TRITON_INTERPRET=1`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpurl.kernels import c_library

CHOICES = ("auto", "triton", "torch")
choice = os.environ.get("GPURL_BACKEND", "auto")
_host_sync_is_free = True


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels on `tensor` go through Triton."""
    if choice == "auto":
        return tensor.is_cuda
    if choice not in CHOICES:
        raise ValueError(f"GPURL_BACKEND is {choice!r}; it must be {', '.join(CHOICES)}")
    if choice == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "GPURL_BACKEND=triton on CPU tensors needs TRITON_INTERPRET=1, set before Python starts"
        )
    return choice == "triton"


def host_sync_is_free(device: torch.device) -> bool:
    """Whether reading a value of a tensor on `device` costs nothing: true on a CPU, where work on a
    few rows beats a masked full batch.
    """
    return device.type == "cpu" and _host_sync_is_free


def use_c(tensor: Tensor) -> bool:
    """Whether work on `tensor` goes to the C kernels: on a CPU where they could be built. Fake
    tensors have no memory to give them, and what is traced or compiled would keep no trace of them.
    """
    return (
        type(tensor) is Tensor
        and host_sync_is_free(tensor.device)
        and not torch.jit.is_tracing()
        and not torch.compiler.is_compiling()
        and c_library.load().functions is not None
    )


def refuse_second_derivative() -> None:
    """For the backward pass of a kernel: RuntimeError where somebody will differentiate what it
    gives, which would be taken for a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the kernels have no second derivative (create_graph=True); GPURL_CPU_KERNEL=0 and "
            "GPURL_BACKEND=torch turn them off"
        )


@contextmanager
def no_host_syncs() -> Iterator[None]:
    """Take the GPU's code paths on any device: no tensor is read by the host inside. Tests use it
    to prove that nothing syncs.
    """
    global _host_sync_is_free
    before, _host_sync_is_free = _host_sync_is_free, False
    try:
        yield
    finally:
        _host_sync_is_free = before
