"""gpurl trains policies on thousands of environments in tensors of one process:
`gpurl.train("ppo", "chasing", num_envs=4096)`.
"""

from typing import TYPE_CHECKING

from gpurl.engine.threads import wait_briefly
from gpurl.registration import register

if TYPE_CHECKING:
    from gpurl.api import Run, evaluate_run, film, resume, train
    from gpurl.envs.registry import make_env
    from gpurl.model_soup import soup
    from gpurl.policy import Policy, load
    from gpurl.run.callbacks import Callback
    from gpurl.seeds import train_seeds

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Policy",
    "Run",
    "evaluate_run",
    "film",
    "load",
    "make_env",
    "resume",
    "soup",
    "train",
    "train_seeds",
]

_HOME = {
    "Callback": "gpurl.run.callbacks",
    "Policy": "gpurl.policy",
    "Run": "gpurl.api",
    "evaluate_run": "gpurl.api",
    "film": "gpurl.api",
    "load": "gpurl.policy",
    "make_env": "gpurl.envs.registry",
    "resume": "gpurl.api",
    "soup": "gpurl.model_soup",
    "train": "gpurl.api",
    "train_seeds": "gpurl.seeds",
}


wait_briefly()
register()


def __getattr__(name: str) -> object:
    """Import on first use: `gpurl --help` must not wait for torch."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'gpurl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
