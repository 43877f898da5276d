"""The launcher of Isaac Lab 2: one in a process, and it reads the command line."""

import os
import sys
from types import SimpleNamespace
from typing import Any

launched: list[dict[str, Any]] = []


class AppLauncher:
    def __init__(self, launcher_args: dict[str, Any]) -> None:
        assert not launched, "a second launcher in one process"
        assert len(sys.argv) == 1, f"a command line that is not the simulator's: {sys.argv}"
        launched.append(launcher_args)
        self.app = SimpleNamespace(close=close)


def close() -> None:
    """Isaac Sim ends the process; in this one only if the variable says so."""
    if os.environ.get("FAKE_ISAAC_SIM_ENDS_THE_PROCESS"):
        os._exit(0)
