"""Turns SIGINT and SIGTERM into a request to stop that training obeys after the iteration; a second
signal ends the process.
"""

import os
import signal
import threading
from types import FrameType

MESSAGE = b"stopping: the iteration ends and is saved first; another signal ends at once\n"


class StopRequest:
    """Context manager; `signal_number` is set once a signal has arrived. Outside the main thread it
    does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._handlers: dict[int, signal._HANDLER] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
        os.write(2, MESSAGE)  # the signal may have interrupted a print

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
