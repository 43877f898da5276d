"""Lines that C libraries write: known ones are dropped, all others arrive."""

import os
import subprocess
import sys

import pytest

from gpurl.native_output import dropped_lines


def test_known_lines_are_dropped_and_others_stay(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with dropped_lines("noise:", "more noise"):
            os.write(2, b"noise: 1\nan error\nabout noise: 2\nmore noise")
            os.write(2, b" goes on\nhalf a line")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    os.write(2, b", and after\n")
    assert capfd.readouterr().err == "an error\nabout noise: 2\nhalf a line, and after\n"


def test_nothing_is_dropped_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    with dropped_lines():
        os.write(2, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"


def test_a_process_without_standard_error() -> None:
    code = (
        "import os; os.close(2)\n"
        "from gpurl.native_output import dropped_lines\n"
        "with dropped_lines('x'): print('inside')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"inside\n"


def test_warp_starts_without_a_word_where_there_is_no_gpu() -> None:
    """In a process of its own: Warp warns once."""
    pytest.importorskip("warp")
    code = (
        "import torch, warp\n"
        "from gpurl.envs.mujoco._warp_worlds import start_warp\n"
        "start_warp(warp)\n"
        "print(warp.get_device('cpu'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cpu\n"
    assert done.stderr == ""
