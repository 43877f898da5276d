"""Which errors mean that memory ran out: by their type, or by the words of an allocator that raises
a plain RuntimeError.
"""

import re

import torch

WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"  # torch on a CPU
    # torch beside its own allocator; a worker's, sent as text
    r"|CUDA (?:driver )?error: out of memory|CUDA out of memory\."
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"
    r"|Failed to allocate \d+ bytes (?:with \w+ )?on device"  # Warp
)


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """`error`, or what it comes from, if that is memory that ran out; else None."""
    found, seen = error, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, (torch.OutOfMemoryError, MemoryError)):
            return found
        if isinstance(found, RuntimeError) and WORDS.search(str(found)):
            return found
        context = found.__context__
        # a graph whose capture breaks off tells of the capture alone; other contexts are mostly
        # what was being dealt with
        behind_capture = (
            isinstance(found, RuntimeError)
            and isinstance(context, RuntimeError)
            and not found.__suppress_context__
        )
        found = found.__cause__ or (context if behind_capture else None) or found
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what went wrong, here or where `error` comes from."""
    return find_out_of_memory(error) is not None
