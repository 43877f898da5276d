"""Turns signals into requests that training obeys after the iteration: SIGUSR1 to save, the others
to save and stop; a second SIGINT or SIGTERM ends the process.
"""

import contextlib
import os
import signal
import threading
from types import FrameType

MESSAGE = b"stopping: the iteration ends and is saved first; another signal ends at once"
SAVING = b"saving: the iteration ends first, the training goes on\n"
# of a terminal: Ctrl-C, and its end; of a scheduler: kill, and the end of the processor time
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
AT_ONCE = (signal.SIGINT, signal.SIGTERM)  # if repeated; systems repeat the others by themselves
# the cursor is on the last line of the table: write over it, and put the cursor back
MESSAGE_IN_TABLE = b"\0337\rstopping: saves after this iteration; again ends at once \0338"


class StopRequest:
    """Context manager; `signal_number` is set once a signal to stop has arrived, `wants_save` once
    one to save has. Outside the main thread it does nothing, and what is ignored (nohup) stays so.
    is_in_table: whether a live table is on the screen. is_silent: it says nothing.
    """

    def __init__(self, is_in_table: bool = False, is_silent: bool = False) -> None:
        self.signal_number: int | None = None
        self.wants_save = False
        message = MESSAGE_IN_TABLE if is_in_table else MESSAGE + b"\n"
        self._message = b"" if is_silent else message
        self._saving = b"" if is_silent or is_in_table else SAVING
        self._handlers: dict[int, signal._HANDLER] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            if number in AT_ONCE:
                os._exit(128 + number)
            return
        self.signal_number = number
        _write(self._message)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.wants_save = True
        _write(self._saving)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: of C code
                    self._handlers[number] = signal.signal(number, self._on_signal)
            # a handler of the caller's own stays
            if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _write(message: bytes) -> None:
    # not print: the signal may have interrupted one. Nobody may read it, or the disk be full
    with contextlib.suppress(OSError):
        os.write(2, message)
