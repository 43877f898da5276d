"""The versions of Triton that kernels are tested with beside the pinned one: the oldest and the
newest that pyproject.toml allows. `python -m tests.tritons` installs them.

Tests run with one of them in a process of its own, with its folder first on the path of Python.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child_process import ROOT

VERSIONS = ("3.6.0", "3.9.0")
FOLDER = "GPURL_TRITONS"  # where they are; a version that is missing there fails its tests
DEFAULT_FOLDER = ".tritons"


def folder(version: str) -> Path:
    """Where `version` is installed."""
    return ROOT / os.environ.get(FOLDER, DEFAULT_FOLDER) / version


def environment(version: str) -> dict[str, str]:
    """The variables of a process with `version`, or skips the test if it is not installed."""
    path = folder(version)
    if not (path / "triton").is_dir():
        reason = f"triton {version} is not in {path}: python -m tests.tritons"
        pytest.fail(reason) if FOLDER in os.environ else pytest.skip(reason)
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}


def install() -> None:
    """Download those that are missing."""
    for version in VERSIONS:
        if not (folder(version) / "triton").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            target = ["--target", str(folder(version))]
            subprocess.run([*pip, *target, f"triton=={version}"], check=True)


if __name__ == "__main__":
    install()
