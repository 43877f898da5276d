"""The list of environments that `gpurl envs` prints: what each is, and what a simulator that is
missing needs.
"""

import inspect

from gpurl.envs.registry import env_names, env_options, make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv

Options = dict[str, inspect.Parameter]


def env_table() -> str:
    """Groups of environments: tensor tasks, adapters that take a task's name, the tasks of each
    simulator's folder.
    """
    classes = {name: resolve_env(name)[0] for name in env_names()}
    tensor = {
        name: env_class for name, env_class in classes.items() if issubclass(env_class, TorchEnv)
    }
    adapters = {
        name: env_class
        for name, env_class in classes.items()
        if name not in tensor and not _folder(env_class)
    }
    lines = ["tensor tasks, built in", *map(_made, tensor), "adapters"]
    for name, env_class in adapters.items():
        lines.append(f"  {name}:TASK\n      {_summary(env_class)}")
        lines += [f"      {state}" for state in [_state(env_class)] if state != "there"]
    for folder in dict.fromkeys(
        _folder(env_class) for env_class in classes.values() if _folder(env_class)
    ):
        tasks = {
            name: env_class for name, env_class in classes.items() if _folder(env_class) == folder
        }
        shared = set.intersection(*(set(env_options(env_class)) for env_class in tasks.values()))
        lines.append(
            f"{folder}: {_state(next(iter(tasks.values())))}; options of all: "
            f"{', '.join(sorted(shared))}"
        )
        for name, env_class in tasks.items():
            own = {
                key: option for key, option in env_options(env_class).items() if key not in shared
            }
            lines.append(f"  {name}\n      {_summary(env_class)}{_options(own)}")
    return "\n".join(
        [*lines, "or the module path of your own (README: an environment of your own)"]
    )


def simulators() -> list[str]:
    """A line for each simulator of which environments here say whether it is there."""
    found: dict[str, str] = {}
    for name in env_names():
        env_class, _ = resolve_env(name)
        if "missing" in {
            key for base in env_class.__mro__ if base is not VecEnv for key in vars(base)
        }:
            found[_folder(env_class) or name] = _state(env_class)
    return [f"{name}: {text}" for name, text in found.items()]


def _folder(env_class: type[VecEnv]) -> str:
    """mujoco of gpurl.envs.mujoco.ant, nothing of gpurl.envs.pendulum."""
    return env_class.__module__.removeprefix("gpurl.envs.").rpartition(".")[0]


def _state(env_class: type[VecEnv]) -> str:
    missing = env_class.missing()
    return f"missing: {missing}" if missing else "there"


def _summary(env_class: type[VecEnv]) -> str:
    """The first paragraph of its docstring, as one line."""
    paragraph = (env_class.__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def _made(name: str) -> str:
    """A tensor task with its spaces, which take making it."""
    env = make_env(name, 1)
    agents = f"{env.num_agents} agents, " if env.num_agents > 1 else ""
    limit = "no time limit" if env.max_episode_steps is None else f"{env.max_episode_steps} steps"
    spaces = f"observation {env.single_observation_space.shape}, action {env.single_action_space}"
    own = {
        key: option for key, option in env_options(type(env)).items() if key != "max_episode_steps"
    }
    return f"  {name}\n      {agents}{spaces}, {limit}{_options(own)}"


def _options(own: Options) -> str:
    return (
        f", options: {', '.join(f'{key}={option.default}' for key, option in own.items())}"
        if own
        else ""
    )
