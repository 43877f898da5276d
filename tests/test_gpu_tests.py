"""Runs tests/gpu on a stand-in for a GPU, in a process of its own: Triton reads when it is imported
that it is to be interpreted.
"""

import os
import subprocess
import sys

from tests.small_runs import ROOT


def test_gpu_tests_pass_on_the_stand_in() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "GPURL_FAKE_GPU": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, "tests/gpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "100%" in done.stdout
    assert "skipped" not in done.stdout
