"""The worker processes of a numpy vector environment: why one of them ended, and an end of all
that leaves nothing behind.
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
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.vec_env import Info, Options
from gpurl.errors import EnvError

PR_SET_PDEATHSIG = 1  # sys/prctl.h
ORPHAN_SECONDS = 1.0  # between two checks whether the trainer still runs
EXIT_SECONDS = 2.0  # for a worker to end after it has closed its pipe
TOGETHER_SECONDS = 0.1  # for others to die of the same cause
MAX_CRASH_LOG = 1 << 20  # bytes
# Gymnasium's loop in a worker; the frames around it are the trainer's, from before the fork
OUTERMOST = " in _async_worker"


class Workers(AsyncVectorEnv):
    """Gymnasium's environments in processes; one that crashes leaves its traceback, one that hangs
    is an error after `timeout` seconds.
    """

    def __init__(
        self, makers: Sequence[Callable[[], gymnasium.Env]], timeout: float | None
    ) -> None:
        self.timeout = timeout
        # open as long as the workers, and without a name that could be left behind
        self._crash_log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        # only a forked process has the file; one that was started otherwise has its own stderr
        is_fork = multiprocessing.get_start_method() == "fork"
        log = self._crash_log.fileno() if is_fork else sys.stderr.fileno()
        is_main = threading.current_thread() is threading.main_thread()
        started = [partial(_in_worker, make, os.getpid(), log, is_main) for make in makers]
        try:
            super().__init__(started, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        except Exception as error:
            if not hasattr(self, "processes"):  # the one in the trainer, for its spaces, failed
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
        """Give back the file descriptors; the processes have ended."""
        for process in self.processes:
            process.close()
        self.processes = []
        self._crash_log.close()
        del self.error_queue  # its pipe is closed with it

    def last_traceback(self) -> str:
        """What faulthandler wrote when the last worker crashed, innermost call first; empty where
        none did.
        """
        written = os.pread(self._crash_log.fileno(), MAX_CRASH_LOG, 0).decode(errors="replace")
        _, fatal, text = written.rpartition("Fatal Python error: ")
        return fatal + text.partition(OUTERMOST)[0].rpartition("\n")[0]


def _in_worker(
    make: Callable[[], gymnasium.Env], trainer_pid: int, crash_log: int, is_main: bool
) -> gymnasium.Env:
    """The environment. In a worker, signals are set up first: a fork inherits the trainer's
    handlers.

    is_main: whether the trainer's main thread forked. A worker that hangs would outlive a trainer
    that was killed, so the kernel ends it with its parent; but it counts the thread that forked as
    the parent, and a thread that ends before the trainer must not end its workers.
    """
    if os.getpid() != trainer_pid:  # Gymnasium makes one in the trainer too, for its spaces
        # a terminal sends it to all processes; the trainer handles it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable(crash_log, all_threads=False)
        if is_main and hasattr(libc := ctypes.CDLL(None), "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    return make()


def _end_with(parent: int) -> None:
    """End this process soon after its parent, unless C code holds Python's lock."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def explain_failure(env: VectorEnv, call: str, error: Exception) -> EnvError:
    """The error to raise when `env` raised `error` in `call`; finds worker processes that ended or
    hang.
    """
    if isinstance(error, EnvError):
        return EnvError(str(error))
    inner: Any = env.unwrapped
    processes = getattr(inner, "processes", [])
    if isinstance(error, multiprocessing.TimeoutError) and processes:
        late = [index for index, pipe in enumerate(inner.parent_pipes) if not pipe.poll()]
        seconds = getattr(inner, "timeout", None)
        return EnvError(
            f"{_environments(late)} did not answer in {call} within {seconds} s; worker_timeout "
            f"sets how long they may take"
        )
    if isinstance(error, (EOFError, OSError)) and processes:
        sentinels = [process.sentinel for process in processes]
        wait(sentinels, timeout=EXIT_SECONDS)  # for the first
        time.sleep(TOGETHER_SECONDS)
        closed = wait(sentinels, timeout=0.0)
        gone = dict[str, list[int]]()
        for index, process in enumerate(processes):
            if process.sentinel in closed:
                # its pipe closes a moment before it has an exit code
                process.join(timeout=EXIT_SECONDS)
                gone.setdefault(_cause(process.exitcode), []).append(index)
        named = [f"{_environments(indices)} ({cause})" for cause, indices in gone.items()]
        text = f"the worker process of {' and '.join(named) or 'an environment'} died in {call}"
        last = inner.last_traceback() if isinstance(inner, Workers) else ""
        return EnvError(f"{text}; its last traceback:\n{last}" if last else text)
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
    """End a vector environment that is broken: its workers may hang."""
    inner: Any = env.unwrapped
    processes = getattr(inner, "processes", None)
    if processes is None:
        env.close()
        return
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
