"""Standard output and error, whose failures end nothing, and the terminal that a live table or a
line of progress is drawn in.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import TextIO

try:
    import termios
except ImportError:  # not a Unix
    termios = None  # type: ignore[assignment]


SECONDS_PER_LINE = 5.0
SECONDS_PER_FRAME = 0.25
ERASE = "\r\x1b[K"  # to the beginning of the line, and nothing behind it


def fill_standard_streams() -> None:
    """Open /dev/null where standard input, output or error is closed: else the next file that is
    opened gets its number, and with it what C code and child processes print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def say(text: str, is_error: bool = False, end: str = "\n") -> bool:
    """Print `text` and `end` on standard output or error; False where nobody can read it: a closed
    pipe, a full disk, a lost terminal. Letters that the stream cannot encode are escaped.
    """
    stream = sys.stderr if is_error else sys.stdout
    if stream is None:
        return False
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        print(shown, file=stream, end=end, flush=True)
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


def can_animate(stream: TextIO) -> bool:
    """Whether it is a terminal in which lines can be drawn again."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")


class ProgressLine:
    """A `with` block with one line of progress on standard error: drawn again in its place in a
    terminal and gone at the end, or printed every few seconds in a file or a pipe.
    """

    def __init__(self) -> None:
        self._is_muted = sys.stderr is None
        self._is_live = not self._is_muted and can_animate(sys.stderr)
        self._next_show = time.monotonic() + (0.0 if self._is_live else SECONDS_PER_LINE)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Before other lines are printed."""
        if self._is_live and not self._is_muted:
            say(ERASE, is_error=True, end="")

    def show(self, text: str) -> None:
        """The newest text, if it is time to show one."""
        if self._is_muted or time.monotonic() < self._next_show:
            return
        if self._is_live:
            # the last column stays free: some terminals begin a new line behind it
            text = text[: max(shutil.get_terminal_size().columns - 1, 1)]
            self._next_show = time.monotonic() + SECONDS_PER_FRAME
            self._is_muted = not say(f"{ERASE}{text}", is_error=True, end="")
        else:
            self._next_show = time.monotonic() + SECONDS_PER_LINE
            self._is_muted = not say(text, is_error=True)


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
