"""One algorithm a file, found by file name."""

import sys

import gymnasium
import torch
from gymnasium.spaces import Discrete

from gpurl.algorithms.base import Algorithm, AlgorithmConfig, global_stream
from gpurl.discovery import NOT_ALGORITHMS, algorithm_names, find_class

__all__ = ["algorithm_names", "config_class", "make_algorithm", "resolve_algorithm"]


def resolve_algorithm(name: str) -> type[Algorithm]:
    """The class of `ppo`, or of anybody's module path; UsageError names near names."""
    return find_class(name, sys.modules[__name__], Algorithm, "algorithm", NOT_ALGORITHMS)


def config_class(algorithm_class: type[Algorithm]) -> type[AlgorithmConfig]:
    """The dataclass from which the command line is made."""
    for base in algorithm_class.__mro__:  # a subclass may leave it as it is
        if "config" in vars(base).get("__annotations__", {}):
            return base.__annotations__["config"]
    raise TypeError(f"{algorithm_class.__name__} has no annotation `config: MyConfig`")


def make_algorithm(
    name: str,
    config: AlgorithmConfig,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    num_envs: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    state_space: gymnasium.Space | None = None,
) -> Algorithm:
    """Build the algorithm `name` for these spaces, its weights drawn from `seed`, whatever has been
    drawn before.

    state_space: of what only critics see, where the environment has one.
    """
    with global_stream(seed):
        kind = resolve_algorithm(name)
        if isinstance(action_space, Discrete) and "discrete_form" in vars(kind):
            kind = resolve_algorithm(kind.discrete_form)
        algorithm = kind(
            config,
            observation_space,
            action_space,
            num_envs,
            torch.device(device),
            seed,
            state_space,
        )
    algorithm.name = name
    return algorithm
