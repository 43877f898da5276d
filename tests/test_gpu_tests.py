"""Runs tests/gpu on a stand-in for a GPU: Triton reads when it is imported that it is to be
interpreted.
"""

import os

import pytest

from tests.child_process import LONG, run_tests


@pytest.mark.timeout(LONG)
def test_gpu_tests_pass_on_the_stand_in() -> None:
    on_stand_in = {"TRITON_INTERPRET": "1", "GPURL_FAKE_GPU": "1"}
    assert "skipped" not in run_tests(["tests/gpu"], os.environ | on_stand_in)
