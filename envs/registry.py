"""Finds an environment by name: the files of this folder are the registry, and any module path
works too.
"""

import contextlib
import difflib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import torch

from gpurl.discovery import (
    NOT_ENVS,
    env_names,
    find_class,
    is_importable,
    is_of_session,
    module_names,
    public_classes,
)
from gpurl.envs.numpy.vector import check_task_options, constructor_of
from gpurl.envs.vec_env import Options, VecEnv
from gpurl.errors import EnvError, GpurlError, UsageError, did_you_mean, raised_at
from gpurl.kernels.backend import find_device, on_device
from gpurl.kernels.memory_errors import is_out_of_memory

__all__ = [
    "GIVEN",
    "check_options",
    "class_of_copies",
    "class_of_env",
    "construction_problem",
    "env_names",
    "env_options",
    "make_env",
    "option_help",
    "option_types",
    "picture_options",
    "resolve_env",
    "user_options",
]

# before the id of environments of Gymnasium that were given as an instance: it makes nothing
GIVEN = "gymnasium:"
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_COPIES: dict[type, type[VecEnv]] = {}  # the class that makes tensor environments of each other one


def resolve_env(name: str) -> tuple[type[VecEnv], dict[str, Any]]:
    """(class, options contained in the name) of `pendulum`, `my_project.my_env` or
    `gymnasium_cpu:Pendulum-v1`.

    After the colon comes a task of an adapter that takes `task=`, or one of several classes of a
    module.
    """
    if not isinstance(name, str):
        raise UsageError(
            f"an environment is given by its name or module path, got a {type(name).__name__}: "
            f"{name!r}"
        )
    if name.startswith(GIVEN):
        return resolve_env("gymnasium_cpu")[0], {}
    # the module, and whether it is one of ours
    package = sys.modules["gpurl.envs"]
    module_name, _, task = name.partition(":")
    known = module_names(package, NOT_ENVS)
    if module_name not in known and name in gymnasium.registry:  # an id of Gymnasium
        module_name = "gymnasium_cpu"
        task = name
    # the folder of a simulator is no environment, its files are
    tasks = [
        task_name
        for task_name, full_name in known.items()
        if full_name == f"gpurl.envs.{module_name}.{task_name}" and task_name != module_name
    ]
    if tasks:
        raise UsageError(
            f"name a task of {module_name} without its folder: {', '.join(tasks)}; got {name!r}"
        )
    # an adapter and a task of it
    if task and module_name in known:
        env_class = find_class(module_name, package, VecEnv, "environment", NOT_ENVS)
        if "task" not in env_options(env_class):
            raise UsageError(
                f"environment {module_name!r} has no tasks to choose from; got {name!r}"
            )
        if module_name == "gymnasium_cpu":
            env_class = _class_of_task(task)
        return env_class, {"task": task}
    try:
        return find_class(name, package, VecEnv, "environment", NOT_ENVS, _gymnasium_advice), {}
    except UsageError as error:
        if single := _single_env_class(module_name, task):
            return class_of_env(single), {}
        raise UsageError(f"{error}{_hint(name)}") from error


def _hint(name: str) -> str:
    """What may be meant by a name that is no environment: one of several environments of Gymnasium
    in a module, what was given from Python, or an id of Gymnasium.
    """
    module_name, _, task = name.partition(":")
    module = sys.modules.get(module_name)
    if module is not None and (names := public_classes(module, gymnasium.Env)):
        return f". Its gymnasium.Env classes are {', '.join(names)}: {module_name}:CLASS names one"
    # a function, or a class of a session
    if is_of_session(name) or "<" in task or callable(getattr(module, task, None)):
        return (
            "; from Python it is given itself: gpurl.train(ALGORITHM, env=...), and to its run "
            "gpurl.evaluate_run(RUN, env=...)"
        )
    # of a name that is no module either the error says it already
    advice = _gymnasium_advice(name) if is_importable(module_name) else ""
    return f". {advice.removesuffix('. ')}" if advice else ""


def _gymnasium_advice(name: str) -> str:
    """Which task of Gymnasium an unknown name may mean, as a sentence or ""."""
    # an id whose package is not imported
    package, _, env_id = name.rpartition(":")
    space, slash, _ = env_id.partition("/")
    if slash and not env_id.endswith(".py"):
        package = package or ("ale_py" if space == "ALE" else "PACKAGE")
        install = ", after pip install 'gymnasium[atari]'" if package == "ale_py" else ""
        return (
            f"Gymnasium finds a task by the package that registers it: "
            f"gymnasium_cpu:{package}:{env_id}{install}. "
        )
    # an id of another version or in other letters
    ids = {env_id.lower(): env_id for env_id in gymnasium.registry if "/" not in env_id}
    near = difflib.get_close_matches(name.partition(":")[0].lower(), ids, n=2, cutoff=0.7)
    return f"Gymnasium has {' and '.join(ids[one] for one in near)}. " if near else ""


def _single_env_class(module_name: str, class_name: str) -> type[gymnasium.Env] | None:
    """The gymnasium.Env of an imported module: the one of this name, or the only one of a module
    without a VecEnv.
    """
    module = sys.modules.get(module_name)
    if module is None:
        return None
    classes = public_classes(module, gymnasium.Env)
    if class_name or len(classes) != 1 or public_classes(module, VecEnv):
        return classes.get(class_name)
    return next(iter(classes.values()))


def class_of_env(kind: type[gymnasium.Env]) -> type[VecEnv]:
    """A VecEnv class of copies of `kind`, always the same; the parameters of its constructor are
    options.
    """
    if kind not in _COPIES:
        _COPIES[kind] = class_of_copies(kind, list(_arguments(kind).values()))
    return _COPIES[kind]


@functools.cache
def _class_of_task(task: str) -> type[VecEnv]:
    """The adapter for a task of Gymnasium's registry, always the same class; the parameters of the
    task's constructor are options, besides those in `task_options`.
    """
    adapter = resolve_env("gymnasium_cpu")[0]
    initialise: Callable[..., None] = vars(adapter)["__init__"]
    known = {"num_envs", "device", "seed", *env_options(adapter)}

    def declared_options() -> dict[str, inspect.Parameter]:
        constructor, given = constructor_of(task)
        return {
            name: each.replace(kind=each.KEYWORD_ONLY, default=given.get(name, each.default))
            for name, each in _arguments(constructor).items()
            if name not in known
        }

    def __init__(
        self: VecEnv,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task_options: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        own = {name: given.pop(name) for name in declared_options() if name in given}
        if own:
            check_task_options(task_options)
            task_options = {**(task_options or {}), **own}
        initialise(self, num_envs, device, seed, task_options=task_options, **given)

    functions = {"__init__": __init__, "declared_options": staticmethod(declared_options)}
    of_task = type(adapter.__name__, (adapter,), functions | {"__doc__": adapter.__doc__})
    of_task.__qualname__ = adapter.__qualname__
    of_task.__module__ = adapter.__module__
    return of_task


def _arguments(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """What a function or a constructor may be given; what a base must be given, the class gives
    it.
    """
    if not inspect.isclass(make):
        return {name: each for name, each in _signature(make).items() if each.kind not in VARIADIC}
    own = _signature(make.__init__)
    return {
        name: each
        for name, each in _parameters(make).items()
        if name in own or each.default is not each.empty
    }


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Of its constructor without self; if that takes `**options` and passes them on, those of the
    next base too. Annotations that name what only type checkers import stay text.
    """
    found: dict[str, inspect.Parameter] = {}
    # from the class up, as long as constructors pass options on
    for base in kind.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        signature = _signature(vars(base)["__init__"])
        found = dict(list(signature.items())[1:]) | found
        if all(each.kind != each.VAR_KEYWORD for each in signature.values()):
            break
    return {name: each for name, each in found.items() if each.kind not in VARIADIC}


def _signature(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    for evaluates in (True, False):
        with contextlib.suppress(Exception):  # of any type: annotations are code
            return inspect.signature(function, eval_str=evaluates).parameters
    return {}


def class_of_copies(
    make: Callable[..., object], options: Sequence[inspect.Parameter] = ()
) -> type[VecEnv]:
    """A VecEnv class of the name of `make`, each of whose environments `make(**options)` makes; it
    takes `max_episode_steps` too.
    """
    adapter = resolve_env("gymnasium_cpu")[0]
    initialise: Callable[..., None] = vars(adapter)["__init__"]
    names = [option.name for option in options]

    def __init__(
        self: VecEnv, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, **given: Any
    ) -> None:
        to_make = {name: given.pop(name) for name in names if name in given}
        # errors name `env`: the class itself where nothing is given
        env = functools.partial(make, **to_make) if to_make else make
        initialise(self, num_envs, device, seed, env=env, **given)

    # `env_options` reads the options here
    shared = list(inspect.signature(__init__).parameters.values())[:-1]
    limit = [] if "max_episode_steps" in names else [env_options(adapter)["max_episode_steps"]]
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in (*options, *limit)]
    own = [each for each in own if each.name not in {one.name for one in shared}]
    __init__.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    # the class goes by the function's name, so that a resume finds it
    name = getattr(make, "__name__", type(make).__name__)
    copies = type(name, (adapter,), {"__init__": __init__, "__doc__": make.__doc__})
    copies.__qualname__ = getattr(make, "__qualname__", name)
    copies.__module__ = getattr(make, "__module__", __name__)
    return copies


def env_options(env_class: type[VecEnv]) -> dict[str, inspect.Parameter]:
    """Options of the task: the parameters of its constructor besides those of every environment.

    If the constructor takes `**options` and passes them on, the parameters of the next base count
    too. `declared_options` of the class are added.
    """
    shared = {"num_envs", "device", "seed"}
    return env_class.declared_options() | {
        name: parameter for name, parameter in _parameters(env_class).items() if name not in shared
    }


def user_options(env_class: type[VecEnv]) -> list[str]:
    """The options that a user gives: no environments that exist and no task, which is in the name;
    `task_options` only where the arguments that it holds are not known by name.
    """
    declared = env_class.declared_options()
    hidden = {"task", "env"} | ({"task_options"} if declared else set())
    return [name for name in env_options(env_class) if name not in hidden]


def option_types(env_class: type[VecEnv]) -> dict[str, Any]:
    """The type of each option that has an annotation."""
    return {
        name: option.annotation
        for name, option in env_options(env_class).items()
        if option.annotation is not option.empty
    }


def option_help(env_class: type[VecEnv]) -> dict[str, str]:
    """The comment of each option that has one: behind its declaration, as a parameter of a
    constructor or as a class attribute, or on the lines above it. That of a subclass comes first.
    """
    found: dict[str, str] = {}
    for base in env_class.__mro__:
        try:
            lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        except (OSError, TypeError):  # no source: a class made by a program, or in a console
            continue
        declared = {
            match[1]: number
            for number, line in enumerate(lines)
            if (match := re.match(r"\s+(\w+): [^#]*?(#.*)?$", line))
        }
        for name in env_options(env_class).keys() & declared.keys() - found.keys():
            if text := _comment_at(lines, declared[name]):
                found[name] = text
    return found


def _comment_at(lines: list[str], number: int) -> str:
    """The comment behind a line, else that of the lines above."""
    if "  # " in lines[number]:
        return lines[number].partition("  # ")[2].strip()
    above: list[str] = []
    while number > 0 and lines[number - 1].strip().startswith("# "):
        number -= 1
        above.insert(0, lines[number].strip().removeprefix("# "))
    return " ".join(above)


def check_options(name: str, env_class: type[VecEnv], options: Iterable[str]) -> None:
    """UsageError for names in `options` that are no options of the environment."""
    known = env_options(env_class)
    if unknown := sorted(set(options) - set(known)):
        named = user_options(env_class)
        hint = did_you_mean(unknown[0], named)
        value = getattr(env_class, unknown[0], callable)
        if not hint and not callable(value) and _is_users(env_class, unknown[0]):
            hint = (
                f"{unknown[0]} is a class attribute, and options are "
                f"{_declaration(env_class, unknown[0], value)}; "
            )
        raise UsageError(
            f"environment {name!r} has no option {', '.join(unknown)}; {hint}it has: "
            f"{', '.join(named) or 'none'}"
        )


def picture_options(name: str, options: Options) -> Options:
    """`options` of the task `name`, with those that its environments need to draw themselves."""
    env_class, named = resolve_env(name)
    needed = env_class.picture_options({**named, **options})
    return {option: value for option, value in needed.items() if option not in named}


def make_env(
    name: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> VecEnv:
    """Make `num_envs` environments of the task `name` on `device`; options: those of the task.
    UsageError with similar names for unknown ones.
    """
    # the class, and whether it takes these options
    env_class, named_options = resolve_env(name)
    if name.startswith(GIVEN):
        task = name.removeprefix(GIVEN)
        new = f", or name {task}, which makes new ones" if task in gymnasium.registry else ""
        raise UsageError(
            f"{name} stands for environments that were given as an instance, which no name makes "
            f"again: give them again, as gpurl.evaluate_run(RUN, env=...){new}"
        )
    check_options(name, env_class, options)
    shared = {"num_envs", "device", "seed"}
    parameters = inspect.signature(env_class).parameters.values()
    missing = shared - {parameter.name for parameter in parameters}
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise EnvError(
            f"{env_class.__name__}.__init__: wanted num_envs, device and seed among its arguments, "
            f"{', '.join(sorted(missing))} missing"
        )
    needed = [
        name
        for name, option in _parameters(env_class).items()
        if name not in shared
        and option.default is option.empty
        and name not in {**named_options, **options}
    ]
    if needed:
        raise UsageError(
            f"environment {name!r} needs a value of {', '.join(needed)}, which "
            f"{env_class.__name__}.__init__ gives no default: add one, as {needed[0]}: float = "
            f"1.0, and --env.{needed[0].replace('_', '-')} changes it"
        )
    device = find_device(device)
    # an error of the user's own constructor is reported with its place
    make: Callable[..., VecEnv] = env_class
    try:
        with on_device(device):
            env = make(num_envs=num_envs, device=device, seed=seed, **named_options, **options)
    except (GpurlError, ImportError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise EnvError(
            f"{env_class.__name__}.__init__ raised {type(error).__name__}: {error} "
            f"({raised_at(error, env_class)})"
        ) from error
    if problem := construction_problem(env):
        raise EnvError(problem)
    if env.num_envs != num_envs:
        raise EnvError(
            f"{env_class.__name__}.num_envs: wanted {num_envs}, as in its argument, got "
            f"{env.num_envs}"
        )
    return env


def construction_problem(env: VecEnv) -> str:
    """What a constructor leaves out that does not call that of its base, "" if nothing is
    missing.
    """
    names = ("num_envs", "device", "reward_shape", "episode_length_buf", "action_space")
    if all(hasattr(env, name) for name in names):
        return ""
    return (
        f"{type(env).__name__}: wanted num_envs, device and the batched spaces, got none; call "
        f"super().__init__(num_envs, device) in __init__, with seed in a TorchEnv"
    )


def _is_users(env_class: type[VecEnv], attribute: str) -> bool:
    """Whether a class of the user's defines it, which may be edited."""
    owner = next(base for base in env_class.__mro__ if attribute in vars(base))
    return owner.__module__.partition(".")[0] not in ("gpurl", "gymnasium")


def _declaration(env_class: type[VecEnv], name: str, value: object) -> str:
    """How an environment of this kind declares the option `name`."""
    kind = "annotated attributes" if env_class.declared_options() else "parameters of __init__"
    return f"{kind}: {name}: {type(value).__name__} = {value!r}"
