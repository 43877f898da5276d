"""The numpy vector environment behind gymnasium_cpu: how it is made, how it is closed, and what went wrong in which environment."""

import importlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from gpurl.envs._envpool import EnvPool
from gpurl.errors import EnvError, UsageError, did_you_mean

MakeEnv = Callable[[], gymnasium.Env]
VECTORIZATIONS = ("sync", "async", "vector", "envpool")


class Watched(gymnasium.Wrapper):
    """Environment number `index`; an exception in it becomes an EnvError that says so and can travel between processes.

    In a process of its own it leaves Ctrl-C, which a terminal sends to all processes, to the trainer.
    """

    def __init__(self, make: MakeEnv, index: int, trainer_pid: int) -> None:
        if os.getpid() != trainer_pid:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        super().__init__(make())
        self.index = index
        space = self.env.observation_space
        self._shape = space.shape if isinstance(space, Box) else None  # of other spaces Gymnasium itself tells what does not fit

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        try:
            result = self.env.reset(**options)
        except Exception:
            raise EnvError(f"environment {self.index} failed in reset:\n{traceback.format_exc()}") from None
        self._check("reset", result, "(obs, info)", 2)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            result = self.env.step(action)
        except Exception:
            raise EnvError(f"environment {self.index} failed in step:\n{traceback.format_exc()}") from None
        self._check("step", result, "(obs, reward, terminated, truncated, info)", 5)
        return result

    def _check(self, call: str, result: Any, wanted: str, length: int) -> None:
        where = f"environment {self.index} failed in {call}"
        if not isinstance(result, tuple) or len(result) != length:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise EnvError(f"{where}: wanted {wanted}, got {got}")
        if self._shape is not None and np.shape(result[0]) != self._shape:
            raise EnvError(f"{where}: wanted an observation of shape {self._shape}, as {self.env} says, got {np.shape(result[0])}")


def find_spec(task: str) -> EnvSpec:
    """What Gymnasium knows of `task`; UsageError with near names. PACKAGE:ID imports the package that registers it."""
    package, colon, name = task.rpartition(":")
    try:
        if colon:
            importlib.import_module(package)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        where = " PACKAGE:ID imports the package that registers a task, as in ale_py:ALE/Pong-v5." if "/" in name and not colon else ""
        raise UsageError(f"Gymnasium has no task {task!r}; {did_you_mean(name, gymnasium.registry)}{error}{where}") from error


def make_pool(task: str, num_envs: int, seed: int, options: dict[str, Any]) -> EnvPool:
    """`num_envs` environments of EnvPool's `task`."""
    with explained(task):
        return EnvPool(task, num_envs, seed, options)


def make_task(spec: EnvSpec, num_envs: int, vectorization: str, options: dict[str, Any]) -> VectorEnv:
    """`num_envs` environments of a task in Gymnasium's registry; `options` go to its constructor."""
    if vectorization in ("sync", "async"):
        return make_copies(partial(gymnasium.make, spec, disable_env_checker=True, **options), spec.id, num_envs, vectorization)
    if spec.vector_entry_point is None:
        raise UsageError(f"{spec.id} has no vector version of its own; take vectorization sync or async")
    with explained(spec.id):
        return gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options)


def make_copies(make: MakeEnv, name: str, num_envs: int, vectorization: str) -> VectorEnv:
    """`num_envs` environments of what `make` returns, in this process or in one each."""
    makers = [partial(Watched, make, index, os.getpid()) for index in range(num_envs)]
    with explained(name):
        if vectorization == "sync":
            return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        return AsyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Whatever a simulator's constructor raises becomes a UsageError that says what to install, where that is the reason."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        package = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
        hint = f"; pip install {package}" if package else ""
        raise UsageError(f"{name} cannot be made: {type(error).__name__}: {error}{hint}") from error


def failure(env: VectorEnv, call: str, error: Exception) -> EnvError:
    """What to raise when `env` raised `error` in `call`; looks for worker processes that are gone."""
    if isinstance(error, EnvError):
        return EnvError(str(error))
    processes = getattr(env.unwrapped, "processes", [])
    if isinstance(error, (EOFError, OSError)) and processes:
        closed = wait([process.sentinel for process in processes], timeout=2.0)
        gone = [(index, process) for index, process in enumerate(processes) if process.sentinel in closed]
        for _, process in gone:
            process.join(timeout=2.0)  # its pipe closes a moment before it has an exit code
        named = ", ".join(f"environment {index} (exit code {process.exitcode})" for index, process in gone)
        return EnvError(f"the worker process of {named or 'an environment'} died in {call}")
    return EnvError(f"{env} failed in {call}: {type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}")


def kill(env: VectorEnv) -> None:
    """End a vector environment that is broken: its workers may never answer again."""
    inner: Any = env.unwrapped
    processes = getattr(inner, "processes", None)
    if processes is None:
        env.close()
        return
    for process in processes:
        process.kill()
        process.join()
    for pipe in inner.parent_pipes:
        if pipe is not None:
            pipe.close()
    inner.closed = True
