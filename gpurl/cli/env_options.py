"""The options of an environment, the settings of a population's members, and the ranges in which
they are explored, as dataclasses, from which the command line is made.
"""

import dataclasses
import typing

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.envs.registry import env_options, option_types, resolve_env
from gpurl.run.members import member_settings

SIMPLE_TYPES = (bool, int, float, str)
CONTAINERS = (list, dict, set)  # a tuple is a flag


def options_class(env: str) -> type:
    """A dataclass of the environment's own options, from its constructor's signature."""
    env_class, given = resolve_env(env)
    hints = option_types(env_class)
    # `given` options are a part of the name, as the task of isaac_gym:Ant; options of other types
    # or without a default are set in YAML or Python only
    fields = []
    for name, parameter in env_options(env_class).items():
        kind = hints.get(name, type(parameter.default))
        members = {*(typing.get_args(kind) or (kind,))} - {type(None), ...}
        is_optional = parameter.default is not parameter.empty
        is_simple = members <= {*SIMPLE_TYPES} and typing.get_origin(kind) not in CONTAINERS
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
