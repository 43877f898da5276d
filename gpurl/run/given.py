"""What a user gives in place of a name: a class or an instance of an environment, a function that
makes Gymnasium environments, a class of an algorithm."""

import sys
from collections.abc import Callable

import gymnasium

from gpurl.algorithms.base import Algorithm
from gpurl.discovery import name_of_class, public_classes
from gpurl.envs.registry import GIVEN, class_of_copies, class_of_env, resolve_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

EnvMaker = Callable[[], gymnasium.Env]
EnvOrName = str | type | gymnasium.Env | gymnasium.vector.VectorEnv | EnvMaker


def name_of_algorithm(algorithm: object) -> str:
    """The name of an algorithm given by name or as a class."""
    if isinstance(algorithm, str):
        return algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return name_of_class(algorithm)
    raise UsageError(f"an algorithm is a name or a class of gpurl's Algorithm, got {algorithm!r}")


def name_of_env(env: EnvOrName) -> tuple[str, VecEnv | None]:
    """(the name that stands for `env`, the environments themselves if they were given)."""
    # what has a name of its own
    if isinstance(env, str):
        return env, None
    if isinstance(env, type) and issubclass(env, VecEnv):
        return name_of_class(env), None
    if isinstance(env, type) and issubclass(env, gymnasium.Env):
        return _name_of_single(env), None
    # what exists, and what makes copies
    instance = _as_vec_env(env)
    if instance is not None:
        return _name_of_instance(env, instance), instance
    if callable(env):
        return name_of_class(class_of_copies(env)), None
    raise UsageError(
        "an environment is a name, a Gymnasium id, a class or an instance of VecEnv or VectorEnv, "
        f"or a function that makes a gymnasium.Env, got {env!r}"
    )


def _name_of_single(kind: type[gymnasium.Env]) -> str:
    """The name of a class whose instances are copied: that of its module, where `resolve_env` finds
    it, also in other processes.
    """
    module = sys.modules.get(kind.__module__)
    known = {} if module is None else public_classes(module, gymnasium.Env)
    if known.get(kind.__qualname__) is kind and kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}"
    return name_of_class(class_of_env(kind))


def _name_of_instance(env: object, instance: VecEnv) -> str:
    """The name of the class of `instance`; an adapter's tells no task, so the id of `env` or its
    class does.
    """
    adapter = _adapter()
    # a task by its name, as of `make_env`
    task = getattr(instance, "task", "") if adapter in type(instance).__mro__ else ""
    if task:
        return f"{GIVEN}{task}"
    if type(instance) is not adapter:
        return name_of_class(type(instance))
    if instance.spec is not None:
        return f"{GIVEN}{instance.spec.id}"
    return f"{GIVEN}{type(getattr(env, 'unwrapped', env)).__name__}"


def _as_vec_env(env: object) -> VecEnv | None:
    """An instance as a VecEnv; None for anything else."""
    if isinstance(env, VecEnv):
        return env
    if isinstance(env, gymnasium.vector.VectorEnv):
        return _adapter()(env.num_envs, env=env)
    if isinstance(env, gymnasium.Env):  # it cannot be copied into a worker process
        return _adapter()(1, env=lambda: env, vectorization="sync")
    return None


def _adapter() -> Callable[..., VecEnv]:
    """The class that makes tensor environments of Gymnasium's."""
    return resolve_env("gymnasium_cpu")[0]
