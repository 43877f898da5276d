"""What a user gives in place of a name: a class or an instance of an environment, a maker of
Gymnasium environments, a class of an algorithm."""

from collections.abc import Callable
from typing import Any

import gymnasium
import torch

from gpurl.algorithms.base import Algorithm
from gpurl.discovery import name_of_class
from gpurl.envs.registry import resolve_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

Given = str | type | gymnasium.Env | gymnasium.vector.VectorEnv | Callable[[], gymnasium.Env]


def name_of_algorithm(algorithm: Any) -> str:
    """The name of an algorithm that is given by name or as a class."""
    if isinstance(algorithm, str):
        return algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return name_of_class(algorithm)
    raise UsageError(f"an algorithm is a name or a class of gpurl's Algorithm, got {algorithm!r}")


def name_of_env(env: Given) -> tuple[str, VecEnv | None]:
    """(the name that stands for `env`, the environments themselves where they were given)."""
    if isinstance(env, str):
        return env, None
    if isinstance(env, VecEnv):
        return name_of_class(type(env)), env
    if isinstance(env, type) and issubclass(env, VecEnv):
        return name_of_class(env), None
    if isinstance(env, gymnasium.vector.VectorEnv):
        made = _adapter()(env.num_envs, env=env)
        return name_of_class(type(made)), made
    if isinstance(env, gymnasium.Env):
        single = _adapter()(1, env=lambda: env, vectorization="sync")  # it cannot be copied
        return name_of_class(type(single)), single
    if callable(env):
        return name_of_class(_copies_of(env)), None
    raise UsageError(
        "an environment is a name, a Gymnasium id, a class or an instance of VecEnv or VectorEnv, "
        f"or a function that makes a gymnasium.Env, got {env!r}"
    )


def _adapter() -> Any:
    """What makes tensor environments of Gymnasium's."""
    return resolve_env("gymnasium_cpu")[0]


def _copies_of(make: Any) -> type[VecEnv]:
    """Copies of what `make()` makes, a gymnasium.Env, as a VecEnv class of its name."""
    adapter = _adapter()

    def initialise(
        self: VecEnv, num_envs: int, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        adapter.__init__(self, num_envs, device, seed, env=make)

    name = getattr(make, "__name__", type(make).__name__)
    copies = type(name, (adapter,), {"__init__": initialise})
    copies.__qualname__ = getattr(make, "__qualname__", name)
    copies.__module__ = getattr(make, "__module__", __name__)
    return copies
