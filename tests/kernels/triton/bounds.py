"""What compute-sanitizer's memcheck sees on a GPU, in Triton's interpreter: it is an error if a
kernel reads or writes outside of its tensors.

A tensor reaches from its first element to its last, holes of its strides included; what of its
storage lies before or behind is not the kernel's. An address that runs out of one tensor and into
another one of the same launch is not seen.
"""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.fake_graphs import tensors


def check_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every address of interpreted kernels from here on."""
    executor = interpreter.GridExecutor
    builder = type(interpreter.interpreter_builder)
    read_arguments = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    exchange, update = builder.create_atomic_cas, builder.create_atomic_rmw
    starts, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)  # of the launch under way, sorted

    def note_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal starts, ends
        on_host = read_arguments(self, args, kwargs)
        extents = sorted(extent(x) for x in tensors(on_host))
        starts = np.array([start for start, _ in extents], np.uint64)
        # of two tensors that overlap the later one may end first
        ends = np.maximum.accumulate(np.array([end for _, end in extents], np.uint64))
        return on_host

    def check(pointers: Any, mask: Any, verb: str) -> None:
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        # some masks are integers
        addresses = pointers.data if mask is None else pointers.data[mask.data.astype(bool)]
        if not addresses.size:
            return
        index = np.searchsorted(starts, addresses, side="right") - 1
        inside = (index >= 0) & (addresses + size <= ends[index])
        if not inside.all():
            wrong = int(addresses[~inside].flat[0])
            nearest = [f"{wrong - int(e):+d} of the end at {e:#x}" for e in ends]
            raise IndexError(
                f"a kernel {verb} {(~inside).sum()} of {addresses.size} elements outside its "
                f"tensors, the first at {wrong:#x}; in bytes: {', '.join(nearest)}"
            )

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    def checked_exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        check(pointers, None, "exchanges")
        return exchange(self, pointers, *rest)

    def checked_update(
        self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        check(pointers, mask, "updates")
        return update(self, kind, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", note_arguments)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_cas", checked_exchange)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_update)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends, in bytes."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()
