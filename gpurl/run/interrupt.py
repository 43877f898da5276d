"""Turns SIGINT and SIGTERM into a request to stop that training obeys after the iteration; a second
signal ends the process.
"""

import contextlib
import os
import signal
import threading
from types import FrameType

MESSAGE = b"stopping: the iteration ends and is saved first; another signal ends at once"
# the cursor is on the last line of the table: write over it, and put the cursor back
MESSAGE_IN_TABLE = b"\0337\rstopping: saves after this iteration; again ends at once \0338"


class StopRequest:
    """Context manager; `signal_number` is set once a signal has arrived. Outside the main thread it
    does nothing. is_in_table: whether a live table is on the screen. is_silent: it says nothing.
    """

    def __init__(self, is_in_table: bool = False, is_silent: bool = False) -> None:
        self.signal_number: int | None = None
        message = MESSAGE_IN_TABLE if is_in_table else MESSAGE + b"\n"
        self._message = b"" if is_silent else message
        self._handlers: dict[int, signal._HANDLER] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
        # not print: the signal may have interrupted one. Nobody may read it, or the disk be full
        with contextlib.suppress(OSError):
            os.write(2, self._message)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
