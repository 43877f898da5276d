"""The worker processes of a numpy vector environment: the reason why one of them ended, and the
cleanup of all of them.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.vec_env import Info, Options
from gpurl.errors import EnvError

PR_SET_PDEATHSIG = 1  # sys/prctl.h
ORPHAN_SECONDS = 1.0  # between two checks that the trainer still runs
EXIT_SECONDS = 2.0  # for a worker to end after it has closed its pipe
TOGETHER_SECONDS = 0.1  # for other workers to die of the same cause
MAX_CRASH_LOG = 1 << 20  # bytes
# Gymnasium's loop in a worker; the frames around it are the trainer's, from before the fork
OUTERMOST = " in _async_worker"


class Workers(AsyncVectorEnv):
    """Gymnasium's environments in processes. A crash leaves a traceback, and hanging is an error
    after `timeout` seconds.
    """

    def __init__(
        self, makers: Sequence[Callable[[], gymnasium.Env]], timeout: float | None
    ) -> None:
        self.timeout = timeout
        # an unnamed file, which disappears with the processes that have it open
        self._crash_log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        # a forked process inherits the file; otherwise the traceback goes to stderr
        is_fork = multiprocessing.get_start_method() == "fork"
        log = self._crash_log.fileno() if is_fork else sys.stderr.fileno()
        is_main = threading.current_thread() is threading.main_thread()
        worker_makers = [partial(_in_worker, make, os.getpid(), log, is_main) for make in makers]
        try:
            super().__init__(worker_makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        except Exception as error:
            # the environment that Gymnasium makes in this process, for its spaces, failed
            if not hasattr(self, "processes"):
                self._crash_log.close()
                self.closed = True
                raise
            if not isinstance(error, (EOFError, OSError)):
                kill(self)
                raise
            explained = explain_failure(self, "its constructor", error)
            kill(self)
            raise explained from error

    def reset(self, *, seed: Any = None, options: Options | None = None) -> tuple[Batch, Info]:
        self.reset_async(seed=seed, options=options)
        return self.reset_wait(self.timeout)

    def step(self, actions: Batch) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, Info]:
        self.step_async(actions)
        return self.step_wait(self.timeout)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        super().close_extras(timeout, terminate)
        self.release()

    def release(self) -> None:
        """Close the file descriptors, after the processes have ended."""
        for process in self.processes:
            process.close()
        self.processes = []
        self._crash_log.close()
        del self.error_queue  # its pipe is closed with it

    def last_traceback(self) -> str:
        """The traceback of the last worker that crashed, innermost call first; "" if none did."""
        log = os.pread(self._crash_log.fileno(), MAX_CRASH_LOG, 0).decode(errors="replace")
        _, fatal, text = log.rpartition("Fatal Python error: ")
        return fatal + text.partition(OUTERMOST)[0].rpartition("\n")[0]


def _in_worker(
    make: Callable[[], gymnasium.Env], trainer_pid: int, crash_log: int, is_main: bool
) -> gymnasium.Env:
    """Makes the environment. In a worker, sets up signals first, since a fork inherits the
    trainer's handlers.

    is_main: whether the trainer's main thread forked. A hanging worker would outlive a trainer that
    was killed, so the kernel ends it with its parent. The kernel takes the forking thread for the
    parent, and the end of another thread than the main one must not end the workers.
    """
    if os.getpid() != trainer_pid:  # Gymnasium makes one in the trainer too, for its spaces
        # these reach all processes of a terminal or a job; only the trainer handles them
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # OpenMP's threads of the trainer are not in a fork, and waiting for them would never end
        torch.set_num_threads(1)
        faulthandler.enable(crash_log, all_threads=False)
        if is_main and hasattr(libc := ctypes.CDLL(None), "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    return make()


def _end_with(parent: int) -> None:
    """End this process soon after its parent ends, unless C code holds Python's lock."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def explain_failure(env: VectorEnv, call: str, error: Exception) -> EnvError:
    """The error to raise when `env` raised `error` in `call`; names worker processes that died or
    hang.
    """
    if isinstance(error, EnvError):
        return EnvError(str(error))
    inner: Any = env.unwrapped
    processes = getattr(inner, "processes", [])
    # workers that hang
    if isinstance(error, multiprocessing.TimeoutError) and processes:
        late = [index for index, pipe in enumerate(inner.parent_pipes) if not pipe.poll()]
        seconds = getattr(inner, "timeout", None)
        return EnvError(
            f"{_environments(late)} did not return from {call} within {seconds} s, the limit that "
            f"worker_timeout sets"
        )
    if isinstance(error, (EOFError, OSError)) and processes:
        sentinels = [process.sentinel for process in processes]
        # which have died, and of what
        wait(sentinels, timeout=EXIT_SECONDS)  # for the first one
        time.sleep(TOGETHER_SECONDS)
        ended = wait(sentinels, timeout=0.0)
        by_cause = dict[str, list[int]]()
        for index, process in enumerate(processes):
            if process.sentinel in ended:
                # a pipe closes a moment before its process has an exit code
                process.join(timeout=EXIT_SECONDS)
                by_cause.setdefault(_cause(process.exitcode), []).append(index)
        workers = [f"{_environments(indices)} ({cause})" for cause, indices in by_cause.items()]
        text = f"the worker process of {' and '.join(workers) or 'an environment'} died in {call}"
        # of a crash, where
        last = inner.last_traceback() if isinstance(inner, Workers) else ""
        return EnvError(f"{text}; its last traceback:\n{last}" if last else text)
    # an error in this process
    frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
    return EnvError(f"{env} failed in {call}: {type(error).__name__}: {error}\n{frames}")


def _cause(exit_code: int | None) -> str:
    """`exit code 7` or `signal SIGKILL`."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    number = -exit_code
    return f"signal {signal.Signals(number).name if number in set(signal.Signals) else number}"


def _environments(indices: list[int]) -> str:
    """`environment 3`, `environments 0-2, 7`."""
    spans = list[list[int]]()
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"environment{'s' if len(indices) > 1 else ''} {text}"


def kill(env: VectorEnv) -> None:
    """End a vector environment that is broken, whose workers may hang."""
    inner: Any = env.unwrapped
    processes = getattr(inner, "processes", None)
    if processes is None:
        env.close()
        return
    # all are killed first, so that none waits for another
    for process in processes:
        process.kill()
    for process in processes:
        process.join()  # or it stays a zombie
    for pipe in inner.parent_pipes:
        if pipe is not None:
            pipe.close()
    inner.closed = True
    if isinstance(inner, Workers):
        inner.release()
