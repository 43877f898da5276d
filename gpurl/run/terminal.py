"""The terminal that a live table is drawn in."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

try:
    import termios
except ImportError:  # not a Unix
    termios = None  # type: ignore[assignment]


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
