"""The same compilation under the oldest Triton that is supported: `make test` installs it into
.tr36 and names it in GPURL_TRITON36.

For one generation of GPU only: what a version of Triton refuses or spills, it does for most.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_compiles_under_triton_3_6() -> None:
    folder = ROOT / os.environ.get("GPURL_TRITON36", ".tr36")
    if "GPURL_TRITON36" not in os.environ and not folder.is_dir():
        pytest.skip("triton 3.6.0 is not in .tr36: make test puts it there")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    version = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == "3.6.0"
    words = [
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "tests/aot/test_compile.py",
        "-k",
        "sm_90 or spilling",
    ]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
