"""Makes the numpy vector environment behind gymnasium_cpu; its errors name the environment."""

import copy
import importlib
import logging
import numbers as number_kinds
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from gpurl.envs.numpy.envpool import EnvPool
from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.numpy.workers import Workers
from gpurl.envs.vec_env import Info, describe
from gpurl.errors import EnvError, UsageError, did_you_mean, raised_at
from gpurl.kernels.memory_errors import find_out_of_memory

MakeEnv = Callable[[], gymnasium.Env]
# what MuJoCo 4 says of Gymnasium's model of HalfCheetah, which its user cannot change
MASS_WARNING = "compiler attribute 'settotalmass' is deprecated"
VECTORIZATIONS = ("sync", "async", "vector", "envpool")
# what is installed under another name than it is imported
DISTRIBUTIONS = {
    "Box2D": "box2d",
    "PIL": "pillow",
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "hydra": "hydra-core",
    "mani_skill": "mani-skill",
    "yaml": "pyyaml",
}


class Watched(gymnasium.Wrapper):
    """Environment number `index`. An exception in it, or sys.exit, becomes an EnvError that names
    it and can be sent between processes. Running out of memory becomes a MemoryError instead, since
    it is no fault of the environment.
    """

    def __init__(self, make: MakeEnv, index: int) -> None:
        with without_mass_warning():
            env = make()
        super().__init__(env)
        self.index = index
        # called where an episode ended, before Gymnasium resets the environment
        self.watcher: Callable[[int], None] | None = None
        space = self.env.observation_space
        # Gymnasium checks observations of other spaces
        self._shape = space.shape if isinstance(space, Box) else None

    def reset(self, **options: Any) -> tuple[Batch, Info]:
        try:
            result = self.env.reset(**options)
        except (Exception, SystemExit) as error:
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                raise EnvError(
                    f"environment {self.index} failed in reset: wanted reset(self, *, seed=None, "
                    f"options=None), as Gymnasium has it, got {error}"
                ) from None
            raise self._explain("reset", error) from None
        self._check("reset", result, "(obs, info)", 2)
        return result

    def step(self, action: Any) -> tuple[Batch, Any, bool, bool, Info]:
        try:
            result = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise self._explain("step", error) from None
        self._check("step", result, "(obs, reward, terminated, truncated, info)", 5)
        obs, info = result[0], result[4]
        numbers: list[Any] = [*result[1:4]]
        # arrays of one number become that number
        for place, name in enumerate(("reward", "terminated", "truncated")):
            value = numbers[place]
            if getattr(value, "ndim", 0):
                if value.size != 1:
                    raise EnvError(
                        f"environment {self.index} failed in step: wanted a {name} of one number, "
                        f"got shape {tuple(value.shape)}"
                    )
                numbers[place] = value.item()
        reward, terminated, truncated = numbers
        if not isinstance(reward, number_kinds.Real):
            reward = self._as_number(reward)
        if terminated or truncated:
            # the reset that follows may write into the same memory
            obs = copy.deepcopy(obs)
            if self.watcher is not None:
                self.watcher(self.index)
        return obs, reward, terminated, truncated, info

    def _as_number(self, reward: Any) -> Any:
        """What a 0-d array, a tensor or a Decimal holds; a text or nothing is an EnvError."""
        try:
            number = reward.item() if hasattr(reward, "item") else reward
            if isinstance(number, str | bytes):
                raise TypeError
            return float(number)
        except (TypeError, ValueError):
            raise EnvError(
                f"environment {self.index} failed in step: wanted a number as reward, got "
                f"{describe(reward)}"
            ) from None

    def _explain(self, call: str, error: BaseException) -> EnvError | MemoryError:
        if (memory := find_out_of_memory(error)) is not None:
            return MemoryError(f"environment {self.index} in {call}: {memory}")
        summary = f"{type(error).__name__}: {error} ({raised_at(error, type(self.env.unwrapped))})"
        text = f"environment {self.index} failed in {call}: {summary}"
        # the first frame is this wrapper's; a second one is named already
        is_deep = len(traceback.extract_tb(error.__traceback__)) > 2
        return EnvError(f"{text}\n{traceback.format_exc()}" if is_deep else text)

    def _check(self, call: str, result: tuple[Any, ...], form: str, length: int) -> None:
        where = f"environment {self.index} failed in {call}"
        if not isinstance(result, tuple) or len(result) != length:
            raise EnvError(f"{where}: wanted {form}, got {describe(result)}")
        if not isinstance(result[-1], Mapping):
            raise EnvError(f"{where}: wanted a dict as info, got {describe(result[-1])}")
        if self._shape is not None and np.shape(result[0]) != self._shape:
            obs = result[0]
            got = describe(obs) if isinstance(obs, dict) else np.shape(obs)
            raise EnvError(
                f"{where}: wanted an observation of shape {self._shape}, as in the space of "
                f"{self.env}, got {got}"
            )


def find_spec(task: str) -> EnvSpec:
    """The entry of `task` in Gymnasium's registry; UsageError with similar names. PACKAGE:ID
    imports the package that registers it.
    """
    package, colon, name = task.rpartition(":")
    try:
        if colon:
            importlib.import_module(package)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        hint = ""
        if "/" in name and not colon:
            hint = (
                " PACKAGE:ID imports the package that registers a task, as in ale_py:ALE/Pong-v5."
            )
        near = "" if isinstance(error, ImportError) else did_you_mean(name, gymnasium.registry)
        # Gymnasium's own suggestion comes last in its error
        why = str(error).partition(" Did you mean")[0] if near else error
        hint += _how_to_install(error)
        raise UsageError(f"Gymnasium has no task {task!r}; {near}{why}{hint}") from error


def constructor_of(task: str) -> tuple[Callable[..., object], dict[str, Any]]:
    """(what makes an environment of `task`, the arguments that the registry gives it); a function
    without parameters where that cannot be found, since making the task says why.
    """
    try:
        spec = find_spec(task)
        entry: Any = spec.entry_point
        return load_env_creator(entry) if isinstance(entry, str) else entry or dict, spec.kwargs
    except Exception:  # of any type: it imports the modules of the task
        return (lambda: None), {}


def check_task_options(task_options: object) -> None:
    """UsageError for what is no dict."""
    if not isinstance(task_options, (dict, NoneType)):
        raise UsageError(
            f"task_options must be a dict of the task's options, as "
            f"task_options={{g: 3.7}}, got {task_options!r}"
        )


def make_pool(task: str, num_envs: int, seed: int, options: dict[str, Any]) -> EnvPool:
    """`num_envs` environments of EnvPool's `task`."""
    with explain_construction(task):
        return EnvPool(task, num_envs, seed, options)


def make_task(
    spec: EnvSpec, num_envs: int, vectorization: str, options: dict[str, Any], timeout: float | None
) -> VectorEnv:
    """`num_envs` environments of a task in Gymnasium's registry; `options` go to its
    constructor.
    """
    # single environments, or the vector environment that the task brings
    if vectorization in ("sync", "async"):
        return make_copies(
            partial(_make_registered, spec, options),
            spec.id,
            num_envs,
            vectorization,
            timeout,
        )
    if spec.vector_entry_point is None:
        raise UsageError(f"{spec.id} has no vector version; take vectorization sync or async")
    with explain_construction(spec.id):
        return gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options)


def _make_registered(spec: EnvSpec, options: dict[str, Any]) -> gymnasium.Env:
    """A single environment of the task; `options` go to its constructor."""
    if isinstance(spec.entry_point, str):
        load_env_creator(spec.entry_point)  # imports MuJoCo if the task needs it
    with without_mass_warning():
        return gymnasium.make(spec, disable_env_checker=True, **options)


def make_copies(
    make: MakeEnv, name: str, num_envs: int, vectorization: str, timeout: float | None
) -> VectorEnv:
    """`num_envs` environments made by `make`, in this process or in a process each; timeout:
    seconds after which a process counts as hanging.
    """
    makers = [partial(Watched, make, index) for index in range(num_envs)]
    with explain_construction(name):
        if vectorization == "sync":
            return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        return Workers(makers, timeout)


@contextmanager
def without_mass_warning() -> Iterator[None]:
    """A `with` block in which MASS_WARNING, which would come with each environment, is logged at
    the level info only. Other warnings of MuJoCo go where they went, or to our log; before MuJoCo
    is imported nothing changes.
    """
    mujoco: Any = sys.modules.get("mujoco")
    if not hasattr(mujoco, "set_mju_user_warning"):
        yield
        return
    before = mujoco.get_mju_user_warning()
    log = logging.getLogger("gpurl")

    def tell(text: str) -> None:
        level = logging.INFO if MASS_WARNING in text else logging.WARNING
        if before is not None and level == logging.WARNING:
            before(text)
        else:
            log.log(level, "MuJoCo: %s", text)

    mujoco.set_mju_user_warning(tell)
    try:
        yield
    finally:
        if mujoco.get_mju_user_warning() is tell:  # the environment has set none of its own
            mujoco.set_mju_user_warning(before)


@contextmanager
def explain_construction(name: str) -> Iterator[None]:
    """Turns errors of a simulator's constructor into a UsageError, which says what to install if a
    module is missing. Errors of running out of memory pass unchanged.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if find_out_of_memory(error) is not None:
            raise
        hint = _how_to_install(error)
        raise UsageError(f"{name} cannot be made: {type(error).__name__}: {error}{hint}") from error


def _how_to_install(error: Exception) -> str:
    """The command for a module that is missing, "" for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    module = error.name.partition(".")[0]
    return f"; pip install {DISTRIBUTIONS.get(module, module)}"
