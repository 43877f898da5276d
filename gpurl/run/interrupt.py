"""Turns SIGINT and SIGTERM into a request that training honours between steps of work; a second
signal ends the process.
"""

import os
import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Context manager; `signal_number` is set once a signal has come. Outside the main thread it
    does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, object] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
        os.write(
            2, b"stopping: the iteration ends and is saved first; another signal ends at once\n"
        )  # print may be what was broken into

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
