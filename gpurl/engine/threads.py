"""What a process asks of a CPU host: short waits of OpenMP's threads, memory that is kept instead
of given back, how many threads.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable

SPIN_COUNT = "5000"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TRIALS, MORE_MUST_GAIN = (
    5,
    1.05,
    # the quickest of so many counts, the others met a neighbour; twice the threads must gain a
    # twentieth
)
LARGEST_KEPT = 32 << 20  # bytes, glibc's own maximum of the mmap threshold


def wait_briefly() -> None:
    """Let OpenMP's threads sleep soon after a piece of work, unless the user chose a way. Takes
    effect only before torch is imported.

    Its default spins for milliseconds; on a machine with one more busy process two threads then
    wait for each other's time slices, and training was seen to fall from 160 k to 4 k steps/s. The
    price where nothing else runs is within the noise.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def keep_large_blocks() -> bool:
    """Tell glibc's malloc to reuse freed blocks up to 32 MiB, which it hands back by default, so
    that the next tensor faults every page in again (a fifth of an update on a CPU); False where
    there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    )


def fastest_threads(
    most: int, set_threads: Callable[[int], object], work: Callable[[], object]
) -> int:
    """The number of threads, 1, 2, 4 .. most, under which `work` takes least time; fewer where more
    gain nothing.
    """
    counts = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
    least = dict.fromkeys(counts, float("inf"))
    for threads in (
        counts * TRIALS if most > 1 else []
    ):  # in turns: a neighbour's burst must not fall on one of them
        set_threads(threads)
        began = time.perf_counter()
        work()
        least[threads] = min(least[threads], time.perf_counter() - began)
    return min(counts, key=lambda threads: least[threads] * MORE_MUST_GAIN ** counts.index(threads))
