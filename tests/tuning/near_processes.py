"""Stand-ins for the processes of a tuning's trainings, which take seconds to import torch: a thread
of this process, and a fork of it.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from gpurl.run import child, records
from gpurl.tuning import study, trial


class ThreadProcess:
    """Trains in a thread; it cannot be ended."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        answers, own_answers = os.pipe()
        reports, own_reports = os.pipe()
        self.stdin = os.fdopen(own_answers, "w")
        self.stdout = os.fdopen(reports)
        self._code = 0
        self._thread = threading.Thread(
            target=self._train, args=(os.fdopen(answers), os.fdopen(own_reports, "w"))
        )
        self._thread.start()

    def _train(self, answers: Any, reports: Any) -> None:
        with answers, reports:
            outcome = trial.train(json.loads(answers.readline()), answers, reports)
            child.send(reports, outcome)
            self._code = int(outcome.get("code", 0))

    def send_signal(self, number: int) -> None:
        """Nothing: a thread has no signals."""

    def wait(self) -> int:
        self._thread.join()
        return self._code


class ForkProcess:
    """Trains in a fork."""

    def __init__(self, command: Sequence[str], stderr: Any, **options: Any) -> None:
        answers, own_answers = os.pipe()
        reports, own_reports = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.setsid()
                for ours, number in ((answers, 0), (own_reports, 1), (stderr.fileno(), 2)):
                    os.dup2(ours, number)
                # an end that it has too would never be closed
                os.closerange(3, 256)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                sys.stdin = os.fdopen(0)
                code = trial.main()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        os.close(answers)
        os.close(own_reports)
        self.stdin = os.fdopen(own_answers, "w")
        self.stdout = os.fdopen(reports)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_trainings() -> None:
    """In a process of its own: its trainings are forks from now on, which may begin often, and
    nothing is drawn.
    """
    import gpurl.cli.tune

    child.Popen = ForkProcess  # type: ignore[misc, assignment]
    study.MAX_ATTEMPTS = 99
    records.versions = dict  # type: ignore[assignment]
    gpurl.cli.tune.plot_tuning = lambda rows, importances, title, path: path
