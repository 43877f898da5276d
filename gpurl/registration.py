"""Makes the torch-native tasks known to Gymnasium:
`gymnasium.make_vec("gpurl/Chasing-v0", num_envs=4096, device="cuda", dim=3)`.

`import gpurl` calls `register` (Gymnasium itself, since 1.0, loads no plugins), so neither torch
nor a task is imported here: the names are read from the task files' text.
`gymnasium.make("gpurl:gpurl/Chasing-v0")` imports gpurl by itself.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Iterator

from gymnasium.envs import registration

TASK = re.compile(r"^class ([A-Z]\w*)\(TorchEnv\)", re.MULTILINE)


def register() -> None:
    """Register every TorchEnv of gpurl.envs as gpurl/<Class>-v0; a second call changes nothing.

    `make_vec` gives the tensor environment itself (of several agents' rewards the mean,
    `MeanReward`), `make` a numpy view of one (`SingleEnv`). Keyword arguments are the task's own.
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
    for module in sorted(
        pkgutil.iter_modules(package.submodule_search_locations), key=lambda module: module.name
    ):
        spec = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        loader = spec.loader if spec else None
        text = loader.get_source(module.name) if loader else ""  # type: ignore[attr-defined]
        for name in TASK.findall(text or ""):
            yield module.name, name
