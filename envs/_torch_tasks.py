"""Makes a vector environment in torch by the name of its task, and applies NAME=VALUE overrides to
its configuration.
"""

import difflib
import importlib
import shlex
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import gymnasium
import yaml
from gymnasium.envs.registration import EnvSpec

from gpurl.envs.numpy.vector import explain_construction, find_spec
from gpurl.errors import UsageError, did_you_mean

# arguments of ManiSkill's vector environment; all others are the task's
MANI_SKILL_VECTOR = ("auto_reset", "ignore_terminations", "record_metrics")


def make_torch_task(task: str, num_envs: int, device: str, seed: int, overrides: str) -> Any:
    """`num_envs` environments of PACKAGE:ID, or of an ID that Gymnasium knows; importing PACKAGE
    registers it with Gymnasium or mjlab.

    overrides: NAME=VALUE words, arguments of the constructor; for mjlab paths in its configuration.
    """
    # importing the package registers the task
    package, _, name = task.rpartition(":")
    values = parse_overrides(overrides)
    if package:
        with explain_construction(task):
            importlib.import_module(package)
    # mjlab has its own registry; everything else is in Gymnasium's
    registry = sys.modules.get("mjlab.tasks.registry")
    if registry is not None and name not in gymnasium.registry:
        return _make_mjlab(registry, name, num_envs, device, seed, values)
    spec = find_spec(task)
    mani_skill = sys.modules.get("mani_skill.utils.registration")
    if mani_skill is not None and spec.id in mani_skill.REGISTERED_ENVS:
        return _make_mani_skill(spec, num_envs, values)
    with explain_construction(spec.id):
        if spec.vector_entry_point is not None:
            return gymnasium.make_vec(spec, num_envs, "vector_entry_point", **values)
        # without Gymnasium's time limit, which is for a single environment
        return gymnasium.make(
            spec, num_envs=num_envs, max_episode_steps=-1, disable_env_checker=True, **values
        )


def _make_mani_skill(spec: EnvSpec, num_envs: int, values: dict[str, Any]) -> Any:
    """A task of ManiSkill, in its own vector environment: Gymnasium's make_vec refuses it. It
    records the metrics of episodes.
    """
    of_vector = {name: values.pop(name) for name in MANI_SKILL_VECTOR if name in values}
    with explain_construction(spec.id):
        wrappers = importlib.import_module("mani_skill.vector.wrappers.gymnasium")
        env = gymnasium.make(spec, num_envs=num_envs, **values)
        vector = wrappers.ManiSkillVectorEnv(env, **{"record_metrics": True} | of_vector)
    # its time limit is one of its own, which its spec does not show
    vector.max_episode_steps = values.get("max_episode_steps", spec.max_episode_steps)
    return vector


def _make_mjlab(
    registry: ModuleType, name: str, num_envs: int, device: str, seed: int, values: dict[str, Any]
) -> Any:
    """A task in mjlab's registry."""
    known = registry.list_tasks()
    if name not in known:
        raise UsageError(
            f"mjlab has no task {name!r}; {did_you_mean(name, known)}it has: {', '.join(known)}"
        )
    # its configuration, with the overrides
    config = registry.load_env_cfg(name)
    config.scene.num_envs = num_envs
    config.seed = seed
    set_values(config, values, name)
    with explain_construction(name):
        return importlib.import_module("mjlab.envs").ManagerBasedRlEnv(config, device=device)


def registered_groups(task: str) -> tuple[list[str], list[str]]:
    """Observation groups of policy and critic with which mjlab trains its own `task`; none of other
    tasks.
    """
    name = task.rpartition(":")[2]
    registry = sys.modules.get("mjlab.tasks.registry")
    if registry is None or name in gymnasium.registry or name not in registry.list_tasks():
        return [], []
    groups = getattr(registry.load_rl_cfg(name), "obs_groups", {})
    return list(groups.get("actor", ())), list(groups.get("critic", ()))


def parse_overrides(text: str) -> dict[str, Any]:
    """{name: value} of words like `sim.dt=0.01 "name=two words"`; values as in YAML."""
    values = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UsageError(
                f"overrides are NAME=VALUE words with spaces between them, got {word!r} in {text!r}"
            )
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"the override {word!r} cannot be read: {error}") from error
    return values


def set_values(config: Any, values: Mapping[str, Any], task: str) -> None:
    """Set the value at each dotted path of `config`, as `sim.dt`; UsageError if there is none, or
    if its type differs.
    """
    for path, value in values.items():
        # the object, dict or list that holds the value
        owner = config
        *parents, last = path.split(".")
        for name in parents:
            owner = _find(owner, name, path, task)
        value = _cast(_find(owner, last, path, task), value, path)
        if isinstance(owner, dict):
            owner[last] = value
        elif isinstance(owner, list):
            owner[int(last)] = value
        else:
            setattr(owner, last, value)


def _find(owner: object, name: str, path: str, task: str) -> Any:
    """The attribute, dict value or list element `name` of `owner`."""
    if isinstance(owner, dict):
        names = {str(key): value for key, value in owner.items()}
    elif isinstance(owner, (list, tuple)):
        names = {str(index): value for index, value in enumerate(owner)}
    else:
        names = {
            key: getattr(owner, key)
            for key in dir(owner)
            if not key.startswith("_") and not callable(getattr(owner, key, None))
        }
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or sorted(names)[:20]
        raise UsageError(
            f"the configuration of {task} has no {path}: there is no {name!r} among "
            f"{', '.join(near) or 'nothing'}"
        )
    return names[name]


def _cast(old: object, value: object, path: str) -> object:
    """`value` converted to the type of `old`; UsageError if it has another type."""
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(old, tuple) and isinstance(value, list):
        return tuple(value)
    is_plain = isinstance(old, (bool, int, float, str))
    if is_plain and value is not None and type(value) is not type(old):
        raise UsageError(
            f"{path} is the {type(old).__name__} {old!r}, it cannot be set to {value!r}"
        )
    return value
