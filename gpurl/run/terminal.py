"""Standard output and error, whose failures end nothing, and the terminal that a live table is
drawn in.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

try:
    import termios
except ImportError:  # not a Unix
    termios = None  # type: ignore[assignment]


def fill_standard_streams() -> None:
    """Open /dev/null where standard input, output or error is closed: else the next file that is
    opened gets its number, and with it what C code and child processes print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def say(text: str, is_error: bool = False) -> bool:
    """Print `text` on standard output or error; False where nobody can read it: a closed pipe, a
    full disk, a lost terminal. Letters that the stream cannot encode are escaped.
    """
    stream = sys.stderr if is_error else sys.stdout
    if stream is None:
        return False
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError):
        silence(stream)
        return False
    return True


def silence(stream: TextIO) -> None:
    """Send it to nowhere, else Python reports the failure again at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def hidden_control_keys() -> Iterator[None]:
    """A `with` block in which the terminal of standard input writes no ^C into the table. Nothing
    happens without a terminal, or in the background.
    """
    terminal = _own_terminal()
    if terminal is None:
        yield
        return
    saved = termios.tcgetattr(terminal)
    changed = [*saved]
    changed[3] &= ~termios.ECHOCTL  # the local modes
    _set(terminal, changed)
    try:
        yield
    finally:
        _set(terminal, saved)


def _own_terminal() -> int | None:
    """The file descriptor of standard input if it is a terminal that this process may change."""
    try:
        number = sys.stdin.fileno()
        is_own = termios is not None and os.tcgetpgrp(number) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # no standard input, or another one
        return None
    return number if is_own else None


def _set(terminal: int, modes: list[object]) -> None:
    # a process that has gone to the background meanwhile would be stopped by SIGTTOU
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, modes)  # type: ignore[arg-type]
    except (OSError, termios.error):  # the terminal is lost
        pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
