"""Runs tests/kernels/triton/ under Triton's interpreter: Triton reads that choice when it is
imported.
"""

import os
import re
from pathlib import Path

import pytest

from tests.child_process import LONG, ROOT, run_tests

FILES = sorted((ROOT / "tests" / "kernels" / "triton").glob("test_*.py"))
PROCESSES = 5  # to start one takes longer than the tests of most files


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(
    "files",
    [FILES[i::PROCESSES] for i in range(PROCESSES)],
    ids=lambda files: " ".join(file.stem for file in files),
)
def test_kernels_under_the_interpreter(files: list[Path]) -> None:
    run_tests([*map(str, files)], os.environ | {"TRITON_INTERPRET": "1"})


def test_every_kernel_file_has_its_test() -> None:
    kernels = {
        path.stem
        for path in (ROOT / "kernels").glob("*.py")
        if re.search(r"^@triton.*\ndef \w+_kernel\(", path.read_text(), re.MULTILINE)
    }
    assert len(kernels) > 5
    assert kernels <= {file.stem.removeprefix("test_") for file in FILES}
