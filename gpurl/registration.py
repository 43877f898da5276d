"""Registers the torch-native tasks with Gymnasium:
`gymnasium.make_vec("gpurl/Chasing-v0", num_envs=4096, device="cuda", dim=3)`.

`import gpurl` calls `register`, since Gymnasium 1.0 loads no plugins. To keep that import fast,
neither torch nor a task is imported here: class names are read from the source of the task files.
`gymnasium.make("gpurl:gpurl/Chasing-v0")` imports gpurl first.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Iterator

from gymnasium.envs import registration

TASK = re.compile(r"^class ([A-Z]\w*)\(TorchEnv\)", re.MULTILINE)


def register() -> None:
    """Register every TorchEnv of gpurl.envs as gpurl/<Class>-v0; a second call changes nothing.

    `make_vec` returns the tensor environment (with several agents in a `MeanReward`), `make` one
    environment with numpy arrays (`SingleEnv`). Keyword arguments go to the task.
    """
    for module_name, class_name in tasks():
        env_id = f"gpurl/{class_name}-v0"
        if env_id not in registration.registry:
            registration.register(
                env_id,
                entry_point="gpurl.envs.single_env:SingleEnv",
                vector_entry_point="gpurl.envs.mean_reward:make_vector",
                kwargs={"name": module_name},
            )


def tasks() -> Iterator[tuple[str, str]]:
    """(module name, class name) of the tasks in gpurl.envs, by file name."""
    package = importlib.util.find_spec("gpurl.envs")  # finds it without importing it
    assert package is not None
    modules = pkgutil.iter_modules(package.submodule_search_locations)
    for module in sorted(modules, key=lambda module: module.name):
        # the source by the module's loader, which also reads from an archive
        spec = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        loader = spec.loader if spec else None
        source = loader.get_source(module.name) if loader else ""  # type: ignore[attr-defined]
        for class_name in TASK.findall(source or ""):
            yield module.name, class_name
