"""The same compilation under the other supported versions of Triton: every case for one generation
of GPU, one case of every kernel for the others.
"""

import pytest

from tests.child_process import LONG, run_python, run_tests
from tests.tritons import VERSIONS, environment

SELECTED = ("sm_90", "(first or spilling) and not sm_90")


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("selected", SELECTED)
def test_compiles_under_another_triton(selected: str, version: str) -> None:
    variables = environment(version)
    shown = run_python(["-c", "import triton; print(triton.__version__)"], variables)
    assert shown.stdout.strip() == version
    run_tests(["tests/aot/test_compile.py", "-k", selected], variables)
