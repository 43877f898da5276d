"""The environment of the other trainers, apart from gpurl's own: .venv-peers, made at the first
run.
"""

import subprocess
import sys
from pathlib import Path

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
    "pytest",  # with the next, for make outward
    "pytest-timeout",
)


def make_environment(folder: Path) -> Path:
    """The Python of the peers' environment in `folder`, made where it is missing or holds other
    versions.
    """
    python, marker, wanted = (
        folder / "bin" / "python",
        folder / ".installed",
        "\n".join((TORCH, *PEERS)),
    )
    if marker.is_file() and marker.read_text() == wanted:
        return python
    print(f"making {folder}: {', '.join((TORCH, *PEERS))}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    for requirements in (
        [TORCH],
        [*PEERS],
        ["--editable", str(ROOT)],
    ):  # torch first: what comes after must not choose another
        subprocess.run([*pip, *requirements], check=True)
    marker.write_text(wanted)
    return python


if __name__ == "__main__":
    make_environment(ROOT / ".venv-peers")
