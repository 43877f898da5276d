"""What a live table changes of its terminal, and that it changes it back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpurl.run import terminal
from gpurl.run.interrupt import MESSAGE, MESSAGE_IN_TABLE
from gpurl.run.terminal import ProgressLine, hidden_control_keys

ROOT = Path(__file__).resolve().parent.parent.parent
# prints whether the terminal shows ^C: before, within and after the block
SHOWN = """
import sys, termios
from gpurl.run import terminal
from gpurl.run.terminal import ProgressLine, hidden_control_keys
def shown():
    return bool(termios.tcgetattr(0)[3] & termios.ECHOCTL)
words = [shown()]
try:
    with hidden_control_keys():
        words.append(shown())
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(*words, shown())
"""
# the same as a background job of that terminal
BACKGROUND = f"""
import os, subprocess, sys
print(subprocess.run([sys.executable, "-c", {SHOWN!r}], preexec_fn=os.setpgrp, capture_output=True,
    text=True, timeout=60).stdout, flush=True)
"""


def in_a_terminal(code: str) -> str:
    """What `code` prints in a terminal of its own."""
    outer = f"import pty, sys; pty.spawn([sys.executable, '-c', {code!r}])"
    done = subprocess.run(
        [sys.executable, "-c", outer],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_control_keys_are_hidden_until_the_table_ends() -> None:
    assert in_a_terminal(SHOWN).splitlines()[-1] == "True False True"


def test_a_background_job_leaves_the_terminal_alone() -> None:
    assert in_a_terminal(BACKGROUND).splitlines()[-1] == "True True True"


# a line of progress, with a text that is wider than the terminal
LINE = """
import os
from gpurl.run import terminal
os.environ["TERM"], os.environ["COLUMNS"] = "xterm", "20"
terminal.SECONDS_PER_FRAME = 0.0
with terminal.ProgressLine() as line:
    line.show("frame 1 of 30")
    line.show("frame 2 of at most 30, 6.7 %, ETA 0:00:01")
print("done")
"""


def test_a_line_of_progress_is_drawn_in_its_place_and_gone_at_the_end() -> None:
    # carriage returns are read as ends of lines
    drawn = in_a_terminal(LINE).replace("\n", "").split(terminal.ERASE.strip())
    assert drawn[1:] == ["frame 1 of 30", "frame 2 of at most ", "done"]


def test_in_a_pipe_a_line_of_progress_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with ProgressLine() as line:
        for count in range(1, 13):
            line.show(f"frame {count}")
            now += 1.0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["frame 6", "frame 11"]
    assert shown.out == ""


def test_without_a_terminal_nothing_happens() -> None:
    with hidden_control_keys():
        pass


# ---- what Ctrl-C says ----

INTERRUPTED = """
import os, signal
from gpurl.run.interrupt import StopRequest
with StopRequest({is_in_table}) as stop:
    os.kill(os.getpid(), signal.SIGINT)
    print(stop.signal_number)
"""


@pytest.mark.parametrize(
    ("is_in_table", "said"), [(False, MESSAGE + b"\n"), (True, MESSAGE_IN_TABLE)]
)
def test_the_message_leaves_a_table_whole(is_in_table: bool, said: bytes) -> None:
    code = INTERRUPTED.format(is_in_table=is_in_table)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == (b"2\n", said)
    assert is_in_table != (b"\n" in said)  # a new line would push the table up


def test_nobody_has_to_read_the_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = INTERRUPTED.format(is_in_table=False)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=writer,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"2\n")
