"""Finds the class that a file defines by the file's name: `pendulum` in a package folder, or a
user's `my_project.my_module`.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from gpurl.errors import UsageError, did_you_mean, last_line

# files of gpurl/algorithms that define no algorithm
NOT_ALGORITHMS = frozenset(
    {"base", "on_policy", "off_policy", "actor_critic", "exploration", "symmetry"}
)
# files and folders of envs/ that define no environment
NOT_ENVS = frozenset(
    {
        *("registry", "single_env", "mean_reward", "vec_env", "torch_env", "base", "numpy"),
        *("canvas", "names", "deployment", "observation_groups", "stacked_box", "wrapper"),
    }
)


def algorithm_names() -> list[str]:
    """Names of the algorithms of gpurl; none is imported, nor torch."""
    return _names_in("gpurl.algorithms", NOT_ALGORITHMS)


def env_names() -> list[str]:
    """Names of the environments of gpurl and of the packages in it, one per simulator; none is
    imported, nor torch.
    """
    return _names_in("gpurl.envs", NOT_ENVS)


def _names_in(package: str, hidden: frozenset[str]) -> list[str]:
    spec = importlib.util.find_spec(package)  # without executing its __init__.py
    assert spec is not None
    return sorted(
        name for name, _ in _modules(spec.submodule_search_locations or (), package, hidden)
    )


def module_names(package: ModuleType, hidden: frozenset[str] = frozenset()) -> dict[str, str]:
    """{name: full module name} of the modules in `package` and its subpackages, sorted by name,
    without private and `hidden` ones. Nothing is imported.
    """
    return dict(sorted(_modules(package.__path__, package.__name__, hidden)))


def _modules(
    folders: Iterable[str], package_name: str, hidden: frozenset[str]
) -> Iterator[tuple[str, str]]:
    for module in pkgutil.iter_modules(folders):
        full_name = f"{package_name}.{module.name}"
        if module.name.startswith("_") or module.name in hidden:
            continue
        if not module.ispkg:
            yield module.name, full_name
            continue
        # a package with a module of its name is that module, and the other files are parts of it
        inner = [Path(folder) / module.name for folder in folders]
        if any((folder / f"{module.name}.py").exists() for folder in inner):
            yield module.name, f"{full_name}.{module.name}"
        else:
            yield from _modules(map(str, inner), full_name, hidden)


GIVEN_CLASSES: dict[str, type] = {}  # classes given from Python, by name


def name_of_class(kind: type) -> str:
    """The name by which `find_class` finds `kind`: `my_project.my_env:MyEnv`; in other processes
    only if it can be imported there.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    GIVEN_CLASSES[name] = kind
    return name


def is_of_session(name: str) -> bool:
    """Whether only this process knows the class `name`: it is of a notebook, a console or a script,
    or its module holds something else under this name, such as the function that was given.
    """
    module_name, _, class_name = name.partition(":")
    if module_name == "__main__" or "<locals>" in name:
        return True
    kind = GIVEN_CLASSES.get(name)
    held = getattr(sys.modules.get(module_name), class_name, None)
    return kind is not None and (held is not kind or class_name.startswith("_"))


def find_class(
    name: str,
    package: ModuleType,
    base: type,
    kind: str,
    hidden: frozenset[str] = frozenset(),
    advise: Callable[[str], str] = lambda name: "",
) -> type:
    """The public subclass of `base` that the module `name` defines.

    `name` is a module of `package` or an importable module path, followed by `:Class` if the module
    defines several. Only that module is imported. UsageError names similar names, or the classes
    that were found. advise: what else an unknown `name` may mean, as sentences or "".
    """
    # classes given from Python, and modules outside the package
    module_name, _, class_name = name.partition(":")
    known = module_names(package, hidden)
    if name in GIVEN_CLASSES or (module_name not in known and is_importable(module_name)):
        return find_class_at(name, base, kind)
    if module_name not in known:
        hint = did_you_mean(module_name.lower(), known)
        place = "the module path of your own class"
        if module_name.endswith(".py"):
            path = module_name.removesuffix(".py").lstrip("./").replace("/", ".")
            hint = f"a file is given by its module path, {path}. "
        elif module_name.isidentifier():
            place += f" (there is no {module_name}.py in {Path.cwd()})"
        hint += advise(name)  # a reader finds it before the long list
        raise UsageError(
            f"no {kind} is called {module_name!r}; {hint}Known: {', '.join(known)}; or give {place}"
        )
    full_name = known[module_name]
    return find_class_at(f"{full_name}:{class_name}" if class_name else full_name, base, kind)


def find_class_at(name: str, base: type, kind: str) -> type:
    """The public subclass of `base` at the module path `name`, followed by `:Class` if the module
    defines several. UsageError names the classes that were found.
    """
    given = GIVEN_CLASSES.get(name)
    if given is not None and issubclass(given, base):
        return given
    # import the module
    full_name, _, class_name = name.partition(":")
    if is_of_session(name):
        raise UsageError(
            f"{kind} {class_name} was defined in a notebook, a console or a script, and only that "
            f"process knows it: define it in a module, as my_env.py"
        )
    try:
        module = importlib.import_module(full_name)
    except Exception as error:
        # an import that fails and a syntax error name their place themselves
        place = "" if isinstance(error, ImportError | SyntaxError) else f" ({last_line(error)})"
        raise UsageError(
            f"{kind} {full_name} cannot be imported: {type(error).__name__}: {error}{place}"
        ) from error
    # its only public class, or the one that `name` gives
    classes = public_classes(module, base)
    if class_name in classes:
        return classes[class_name]
    names = ", ".join(classes) or "none"
    if class_name:
        raise UsageError(
            f"module {full_name} has no public {base.__name__} class {class_name}, found {names}"
        )
    if not classes:
        raise UsageError(
            f"module {full_name} must define one public {base.__name__} class, found none"
            f"{_private_hint(base, module)}"
        )
    if len(classes) > 1:
        raise UsageError(
            f"module {full_name} must define one public {base.__name__} class, found {names}; name "
            f"it as {full_name}:CLASS"
        )
    return next(iter(classes.values()))


def public_classes(module: ModuleType, base: type) -> dict[str, type]:
    """The public subclasses of `base` that `module` defines, by name."""
    return {
        value.__name__: value
        for value in vars(module).values()
        if _is_public_subclass(value, base, module)
    }


def is_importable(module_name: str) -> bool:
    """Whether the module exists; it is not imported, but its parent packages are."""
    try:
        return module_name in sys.modules or importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        return False


def _private_hint(base: type, module: ModuleType) -> str:
    """The classes that would do under a public name."""
    names = [
        value.__name__
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base)
        if value.__module__ == module.__name__ and value.__name__.startswith("_")
    ]
    return f"; {names[0]} is private: its name begins with _" if names else ""


def _is_public_subclass(value: object, base: type, module: ModuleType) -> TypeGuard[type]:
    if not inspect.isclass(value) or not issubclass(value, base) or inspect.isabstract(value):
        return False
    return value.__module__ == module.__name__ and not value.__name__.startswith("_")
