"""Chooses between Triton, C and torch for every kernel, and decides where reading a tensor on the
host is free.

`GPURL_BACKEND=auto|triton|torch`, read when gpurl is imported: auto takes Triton for CUDA tensors.
`triton` on CPU tensors needs `TRITON_INTERPRET=1`.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from gpurl.errors import UsageError
from gpurl.kernels import c_library
from gpurl.kernels.optional_triton import is_installed, triton

Kernel = TypeVar("Kernel", bound=Callable[..., object])

CHOICES = ("auto", "triton", "torch")
# read once: a run does not change its kernels
choice = os.environ.get("GPURL_BACKEND", "auto")


class _Thread(threading.local):
    """What each thread has of its own: trainings in two threads do not change each other's."""

    host_sync_is_free = True


_thread = _Thread()


def choose_kernel(
    tensor: Tensor, *, triton: Kernel, reference: Kernel, c: Kernel | None = None
) -> Kernel:
    """The form of a kernel that computes on `tensor`: Triton where it is chosen, C on a CPU where
    there is a C form and a library, else the reference.
    """
    if use_triton(tensor):
        return triton
    return c if c is not None and use_c(tensor) else reference


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels on `tensor` run in Triton; see `_is_for_triton`."""
    # tensors of torch.func.vmap have no memory to pass to a kernel
    return not transforms_are_active() and _is_for_triton(tensor)


def use_triton_for_members(tensor: Tensor) -> bool:
    """Whether inside torch.func.vmap a kernel runs in Triton that has a rule of its own for it: for
    one axis of members.
    """
    if not transforms_are_active() or not _is_for_triton(tensor):
        return False
    kinds = [each.key() for each in retrieve_all_functorch_interpreters()]
    return kinds.count(TransformType.Vmap) == 1


class ForMembers(torch.autograd.Function):
    """A kernel inside torch.func.vmap: `forward` of a subclass takes the tensors of one member, or
    those of all with an axis of members in front. Nothing that it returns has a gradient, unless
    the subclass says which.
    """

    takes_strides = False  # within a member; without, each one's part must be contiguous

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*((output,) if isinstance(output, Tensor) else output))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)

    @classmethod
    def vmap(cls, info: Any, dims: Sequence[int | None], *given: Any) -> tuple[Any, Any]:
        def in_front(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            if dim is None:  # the same for all
                return value.expand(info.batch_size, *value.shape)
            value = value.movedim(dim, 0)
            # most kernels know no other strides than that from member to member
            is_known = cls.takes_strides or value[0].is_contiguous()
            assert is_known, (tuple(value.shape), value.stride())
            return value

        result = cls.apply(*map(in_front, given, dims))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)


class MembersAsRows(torch.autograd.Function):
    """An operation along the first axis of its tensors. Inside torch.func.vmap the axis of members
    is joined with it, [M, B, ...] -> [M B, ...], which takes one operation for all members.
    """

    @classmethod
    def vmap(cls, info: Any, dims: Sequence[Any], *given: Any) -> tuple[Any, Any]:
        count = info.batch_size

        def as_rows(value: Any, dim: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if dim is None:  # the same for all
                return value.expand(count, *value.shape).flatten(0, 1)
            return value.movedim(dim, 0).flatten(0, 1)

        def apart(rows: Tensor) -> Tensor:
            return rows.unflatten(0, (count, len(rows) // count))

        result = cls.apply(*map(as_rows, given, dims))
        if isinstance(result, Tensor):
            return apart(result), 0
        return tuple(map(apart, result)), (0,) * len(result)


def check_written(*tensors: Tensor) -> None:
    """AssertionError unless each of the members, tensors [M, ...], has memory of its own that a
    kernel can write.
    """
    for tensor in tensors:
        is_shared = tensor.stride(0) == 0 and len(tensor) > 1
        assert not is_shared, "members need memory of their own to write to"
        assert tensor[0].is_contiguous(), (tuple(tensor.shape), tensor.stride())


def dense(tensor: Tensor, have_members: bool) -> Tensor:
    """`tensor`, copied unless it or, of tensors [M, ...], each member's part is contiguous."""
    part = tensor[0] if have_members else tensor
    return tensor if part.is_contiguous() else tensor.contiguous()


def member_strides(tensors: Iterable[Tensor], have_members: bool) -> list[int]:
    """From member to member of tensors [M, ...]; 0 of those of one."""
    return [tensor.stride(0) if have_members else 0 for tensor in tensors]


def _is_for_triton(tensor: Tensor) -> bool:
    """Whether Triton is chosen for tensors like this one. ValueError for an unknown GPURL_BACKEND,
    RuntimeError for Triton on a CPU without its interpreter.
    """
    if choice == "auto":
        return tensor.is_cuda
    # checked at the first use, so that importing gpurl never fails for it
    if choice not in CHOICES:
        raise ValueError(f"GPURL_BACKEND is {choice!r}; it must be {', '.join(CHOICES)}")
    if choice == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "GPURL_BACKEND=triton on CPU tensors needs TRITON_INTERPRET=1, set before Python starts"
        )
    return choice == "triton"


def find_device(name: torch.device | str) -> torch.device:
    """The device called `name`; UsageError for what is none, or a CUDA device that does not
    exist.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"no device is called {name!r}; it must be auto, cpu, cuda or cuda:N"
        ) from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(
            f"device {device} does not exist: torch sees {count} CUDA devices; gpurl doctor says "
            f"why"
        )
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A `with` block in which `device` is the current GPU: Triton launches there, wherever the
    tensors are. Trainings make theirs the current one for good.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.device(device)


def on_own_device(method: Kernel) -> Kernel:
    """`method`, of an object with a `device`, in a block of `on_device`."""

    @functools.wraps(method)
    def run(owner: Any, *args: Any, **kwargs: Any) -> object:
        device = owner.device
        if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
            return method(owner, *args, **kwargs)
        with on_device(device):
            return method(owner, *args, **kwargs)

    return cast(Kernel, run)


def use_c(tensor: Tensor) -> bool:
    """Whether kernels on `tensor` run in C: on a CPU, where the library could be built. Fake
    tensors and those of torch.func.vmap have no memory to pass to C, and a C call would be missing
    from a trace or a compiled graph.
    """
    return (
        type(tensor) is Tensor
        and not transforms_are_active()
        and host_sync_is_free(tensor.device)
        and not torch.jit.is_tracing()
        and not torch.compiler.is_compiling()
        and c_library.load().functions is not None
    )


def host_sync_is_free(device: torch.device) -> bool:
    """Whether reading a value of a tensor on `device` costs nothing. True on a CPU, where work on a
    few rows is faster than a masked full batch.
    """
    return device.type == "cpu" and _thread.host_sync_is_free and not transforms_are_active()


def refuse_second_derivative() -> None:
    """For the backward pass of a kernel: RuntimeError under create_graph=True, where autograd would
    treat the kernel's gradient as a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the kernels have no second derivative (create_graph=True); GPURL_CPU_KERNEL=0 and "
            "GPURL_BACKEND=torch turn them off"
        )


@contextmanager
def announced_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """A `with` block in which `announce` is called once the first kernel has been compiled that no
    earlier process left in Triton's cache: more will follow.
    """
    if not is_installed:
        yield
        return
    before = triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **said: Any) -> None:
        if not cache_hit:
            triton.knobs.compilation.listener = before
            announce()
        if before is not None:
            before(cache_hit=cache_hit, **said)

    triton.knobs.compilation.listener = listen
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before


@contextmanager
def no_host_syncs() -> Iterator[None]:
    """Take the GPU's code paths on any device, in this thread: the host reads no tensor inside.
    Tests use it to prove that nothing syncs.
    """
    before = _thread.host_sync_is_free
    _thread.host_sync_is_free = False
    try:
        yield
    finally:
        _thread.host_sync_is_free = before
