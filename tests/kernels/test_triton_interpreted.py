"""Runs tests/kernels/triton/ under Triton's interpreter, in a process of its own: Triton reads that
choice when it is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "kernels" / "triton").glob("test_*.py"))
PROCESSES = 4  # to start one takes longer than the tests of most files


@pytest.mark.parametrize(
    "files",
    [FILES[i::PROCESSES] for i in range(PROCESSES)],
    ids=lambda files: " ".join(file.stem for file in files),
)
def test_kernels_under_the_interpreter(files: list[Path]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        *map(str, files),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "100%" in done.stdout


def test_every_kernel_file_has_its_test() -> None:
    kernels = {
        path.stem
        for path in (ROOT / "kernels").glob("*.py")
        if re.search(r"^@triton.*\ndef \w+_kernel\(", path.read_text(), re.MULTILINE)
    }
    assert len(kernels) > 5
    assert kernels <= {file.stem.removeprefix("test_") for file in FILES}
