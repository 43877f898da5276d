"""Recognises errors that mean that memory ran out: by their type, or by the message of an allocator
that raises a plain RuntimeError.
"""

import re

import torch

WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"  # torch on a CPU
    # torch outside its own allocator; an error of a worker process, sent as text
    r"|CUDA (?:driver )?error: out of memory|CUDA out of memory\."
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"
    r"|Failed to allocate \d+ bytes (?:with \w+ )?on device"  # Warp
)


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """The first error among `error` and its causes which says that memory ran out, or None."""
    current: BaseException | None = error
    seen = set[int]()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, (torch.OutOfMemoryError, MemoryError)):
            return current
        if isinstance(current, RuntimeError) and WORDS.search(str(current)):
            return current
        # a graph capture that fails raises an error about the capture only, with the real one as
        # its context; the contexts of other errors are mostly unrelated
        context = current.__context__ if not current.__suppress_context__ else None
        is_capture = isinstance(current, RuntimeError) and isinstance(context, RuntimeError)
        current = current.__cause__ or (context if is_capture else None)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` or one of its causes says that memory ran out."""
    return find_out_of_memory(error) is not None
