"""A training in a process of its own, of this Python: the two exchange lines of JSON, and one whose
parent is gone saves and ends.
"""

import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import IO, Any

from gpurl.run.callbacks import Callback, RunView


class Child:
    """The parent's side. Messages of the process go into `messages` as (owner, message), and
    (owner, None) when it has ended.

    main: "module:function" that the process runs, its exit code. errors: the file of its standard
    error, None: this process's. It has one thread unless OMP_NUM_THREADS says otherwise, and a
    session of its own: Ctrl-C is for the parent, which passes it on. OSError if it cannot begin.
    """

    def __init__(
        self, main: str, owner: object, messages: "queue.Queue[Any]", errors: IO[Any] | None = None
    ) -> None:
        module, function = main.split(":")
        # the modules come from where this process has them
        paths = [path for path in sys.path if path] + [os.getcwd()] * ("" in sys.path)
        program = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            f"from {module} import {function}; sys.exit({function}())"
        )
        self.process = Popen(  # noqa: S603 - this Python
            [sys.executable, "-c", program, json.dumps(paths)],
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,
        )
        self._owner = owner
        self._messages = messages
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    self._messages.put((self._owner, json.loads(line)))
        self._messages.put((self._owner, None))

    def send(self, text: str) -> None:
        """One line; nothing happens if the process has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(f"{text}\n")
            self.process.stdin.flush()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask it by a signal to save and end."""
        with suppress(OSError):
            self.process.send_signal(number)

    def close(self) -> int:
        """The exit code of the process, which has ended or does so now."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        return self.process.wait()


def how_it_died(code: int) -> str:
    """In words, of a process that said nothing about its end."""
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended with {code}"


def reports_of_child(is_silent: bool = False) -> IO[str]:
    """Where this process, a `Child`, sends messages; what else it prints goes to standard error, or
    nowhere.
    """
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY) if is_silent else 2, 1)
    return reports


def send(reports: IO[str], message: Mapping[str, Any]) -> bool:
    """False where nobody reads any more."""
    try:
        reports.write(f"{json.dumps(message)}\n")
        reports.flush()
    except OSError:
        return False
    return True


class EndsWithParent(Callback):
    """Of a training in a `Child`: it saves and ends once its parent is gone.

    answers: what the parent sends; between two questions only the end of the pipe can be there.
    """

    def __init__(self, answers: IO[str], reports: IO[str]) -> None:
        self.answers = answers
        self.reports = reports
        self.is_alone = False
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN | select.POLLHUP)

    def after_iteration(self, run: RunView, metrics: object) -> None:
        if self._poll.poll(0):
            self.end_alone()

    def end_alone(self) -> None:
        """Save and end as by a signal, without an evaluation: another process can go on from here.
        A second signal would end the process at once.
        """
        if not self.is_alone:
            self.is_alone = True
            signal.raise_signal(signal.SIGTERM)
