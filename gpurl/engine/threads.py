"""Settings of a CPU host: short waits of OpenMP's threads, memory kept by the allocator, the number
of threads, which a fork lacks.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable

from gpurl.errors import UsageError

SPIN_COUNT = "5000"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TRIALS = 5  # the fastest of them counts: other processes slow some down
MIN_SPEEDUP = 1.05  # that twice the threads must reach
_process_with_threads = 0  # that has trained with several threads
MAX_MMAP_THRESHOLD = 32 << 20  # bytes, glibc's maximum


def wait_briefly() -> None:
    """Let OpenMP's threads sleep soon after their work, unless the user set OMP_WAIT_POLICY. To be
    called before torch is imported.

    The default spins for milliseconds. On a machine with one more busy process two threads then
    wait for each other's time slices: training fell from 160 k to 4 k steps/s. On an idle machine
    the cost is within the noise.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def keep_large_blocks() -> bool:
    """Tell glibc's malloc to keep freed blocks up to 32 MiB; False without glibc.

    By default it returns them to the kernel, and the next tensor faults every page in again: a
    fifth of an update on a CPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(
        libc.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        and libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    )


def fastest_threads(
    max_threads: int, set_threads: Callable[[int], object], work: Callable[[], object]
) -> int:
    """The number of threads, of 1, 2, 4 .. max_threads, with which `work` is fastest; the smaller
    one where twice the threads gain less than MIN_SPEEDUP.
    """
    if max_threads == 1:
        return 1
    counts = sorted({min(1 << power, max_threads) for power in range(max_threads.bit_length() + 1)})
    seconds = dict.fromkeys(counts, float("inf"))
    # in turns, so that a burst of another process does not hit one count alone
    for threads in counts * TRIALS:
        set_threads(threads)
        start = time.perf_counter()
        work()
        seconds[threads] = min(seconds[threads], time.perf_counter() - start)
    return min(counts, key=lambda threads: seconds[threads] * MIN_SPEEDUP ** counts.index(threads))


def refuse_fork(threads: int, trains: bool = True) -> None:
    """UsageError in a fork of a process that has trained with several threads, unless it uses one:
    it lacks OpenMP's threads, and would wait for them forever. trains: this process does from now.
    """
    global _process_with_threads
    if threads == 1:
        return
    if _process_with_threads not in (0, os.getpid()):
        raise UsageError(
            f"this process is a fork of one that has trained with {threads} threads, which a fork "
            f"lacks: start it by multiprocessing.get_context('spawn'), or call "
            f"torch.set_num_threads(1) in it first"
        )
    if trains:
        _process_with_threads = os.getpid()
