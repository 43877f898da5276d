"""Which errors mean that memory ran out: by their type, or by the words of an allocator that raises a plain RuntimeError."""

import re

import torch

WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"  # torch on a CPU
    r"|CUDA (?:driver )?error: out of memory|CUDA out of memory\."  # torch beside its own allocator; a worker's, sent as text
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"
    r"|Failed to allocate \d+ bytes (?:with \w+ )?on device"  # Warp
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what went wrong, here or where `error` comes from: a graph whose capture breaks off tells of the capture alone."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
