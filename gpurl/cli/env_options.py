"""The options of an environment, the settings of a population's members, and the ranges in which
they are explored, as dataclasses, from which the command line is made.
"""

import dataclasses
import types
import typing

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.envs.registry import env_options, option_types, resolve_env
from gpurl.run.members import member_settings

SIMPLE_TYPES = (bool, int, float, str)
FORMS = (None, tuple, typing.Union, types.UnionType)  # of a flag, not list, dict or Callable
NOTHING = (type(None), ...)


def options_class(env: str) -> type:
    """A dataclass of the environment's own options, from its constructor's signature."""
    env_class, given = resolve_env(env)
    hints = option_types(env_class)
    # `given` options are a part of the name, as the task of isaac_gym:Ant; options of other types
    # or without a default are set in YAML or Python only
    fields = []
    for name, parameter in env_options(env_class).items():
        kind = hints.get(name, type(parameter.default))
        if isinstance(kind, str):  # an annotation that could not be evaluated
            kind = type(parameter.default)
        members = [each for each in typing.get_args(kind) or (kind,) if each not in NOTHING]
        is_optional = parameter.default is not parameter.empty
        is_simple = bool(members) and all(each in SIMPLE_TYPES for each in members)
        is_simple = is_simple and typing.get_origin(kind) in FORMS
        if name not in given and is_optional and is_simple:
            fields.append((name, kind, dataclasses.field(default=parameter.default)))
    return dataclasses.make_dataclass("EnvOptions", fields)


def members_class(config: type[AlgorithmConfig]) -> type:
    """A dataclass of the settings in which members of a population may differ: lists, by default
    empty.
    """
    fields = [
        (name, tuple[float, ...], dataclasses.field(default=())) for name in member_settings(config)
    ]
    return dataclasses.make_dataclass("MemberSettings", fields)


def ranges_class(config: type[AlgorithmConfig]) -> type:
    """A dataclass of the settings that population based training may explore: ranges, by default
    empty.
    """
    fields = [
        (name, tuple[float, ...], dataclasses.field(default=())) for name in config.changeable
    ]
    return dataclasses.make_dataclass("ExploredRanges", fields)
