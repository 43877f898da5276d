"""Tests that need a Python of their own: another Triton, its interpreter, a stand-in for a GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 560  # well below the timeout of a test that is marked so
LONG = 600


def run_python(
    words: Sequence[str], environment: Mapping[str, str], check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Python with `words` in the root of the project and this environment."""
    variables = {
        name: value for name, value in environment.items() if name != "PYTEST_XDIST_WORKER"
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if check:
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


def run_tests(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """pytest with `words`, all of which must pass; returns what it printed."""
    command = ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *words]
    said = run_python(command, environment).stdout
    assert "100%" in said
    return said
