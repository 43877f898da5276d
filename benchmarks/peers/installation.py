"""The Python environment of the other trainers, separate from gpurl's: .venv-peers, made at the
first run.
"""

import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from benchmarks.results_table import ROOT

TORCH = "torch==2.13.0"
PEERS = (
    "rsl-rl-lib==5.5.1",
    "skrl==2.1.1",
    "stable-baselines3==2.9.2",
    "rl-games==1.6.5",
    "torchrl==0.14.1",
    "tensordict==0.14.3",
    "tensorboard",
    "gymnasium[box2d]",  # with the next, tasks of benchmarks.learning
    "mujoco",
    "imageio",
    "pytest",  # with the next, for make outward
    "pytest-timeout",
)


def make_environment(folder: Path) -> Path:
    """The Python of the environment in `folder`, which is made if it is missing or has other
    versions. Of two commands that start at the same time one makes it and the other waits.
    """
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        return _make(folder)


def _make(folder: Path) -> Path:
    python = folder / "bin" / "python"
    marker = folder / ".installed"
    requirements = "\n".join((TORCH, *PEERS))
    if marker.is_file() and marker.read_text() == requirements:
        return python
    print(f"making {folder}: {', '.join((TORCH, *PEERS))}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    # torch first, so that the others do not choose another version
    for packages in ([TORCH], [*PEERS], ["--editable", str(ROOT)]):
        subprocess.run([*pip, *packages], check=True)
    marker.write_text(requirements)
    return python


if __name__ == "__main__":
    make_environment(ROOT / ".venv-peers")
