"""The same compilation under the other supported versions of Triton: every case for one generation
of GPU, one case of every kernel for the others.
"""

import subprocess
import sys

import pytest

from tests.tritons import ROOT, VERSIONS, environment

SELECTED = "sm_90 or first or spilling"


@pytest.mark.parametrize("version", VERSIONS)
def test_compiles_under_another_triton(version: str) -> None:
    variables = environment(version)
    show = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    shown = subprocess.run(show, env=variables, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == version
    words = ["-p", "no:xdist", "-p", "no:cacheprovider", "tests/aot/test_compile.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-k", SELECTED],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
