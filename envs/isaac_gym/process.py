"""The process that Isaac Gym runs in, seen from the trainer: started, asked, watched and ended;
whatever goes wrong there is told here.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from gpurl.errors import EnvError, UsageError

SERVER = Path(__file__).with_name("server.py")
PYTHON_VARIABLE = "GPURL_ISAAC_GYM_PYTHON"
MAX_SHOWN_LINES, MAX_SHOWN_BYTES = 20, 4096  # of what the process printed last
LOG_BYTES, LOOK_EVERY = (
    1 << 24,
    1024,
)  # how much of its printing is kept on disk; calls between looks
END_SECONDS = 5.0  # for a process that was asked to end
LD_PATH = "LD_LIBRARY_PATH"


def find_python(given: str) -> str:
    """Path of the interpreter that Isaac Gym is installed in: `given`, or the environment
    variable's. UsageError without one.
    """
    name = given or os.environ.get(PYTHON_VARIABLE, "")
    if not name:
        raise UsageError(
            "isaac_gym needs the Python 3.6 to 3.8 that Isaac Gym is installed in: --env.python "
            "~/envs/rlgpu/bin/python, "
            f"or the same in the environment variable {PYTHON_VARIABLE}"
        )
    path = Path(name).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        inside = path / "bin" / "python"
        hint = f"; perhaps {inside}" if inside.is_file() else ""
        raise UsageError(
            f"python must be the interpreter that Isaac Gym is installed in; {path} is no "
            f"program{hint}"
        )
    return str(path.absolute())  # links stay: through them a virtual environment finds its packages


class SimulatorProcess:
    """One server under `python`, on the CUDA device `gpu` of this process; it answers within the
    seconds that a call gives it, or ends.
    """

    def __init__(self, python: str, gpu: int | None = None) -> None:
        self.python = python
        # nothing listens anywhere and nothing has a name: the socket, the pipe, the memory and the
        # log live as long as who holds them
        self._channel, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        self.memory_file = os.memfd_create("gpurl_isaac_gym")
        self._log: BinaryIO = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
        fcntl.fcntl(
            self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND
        )  # as it is cut short now and then
        command = [python, "-u", str(SERVER), str(theirs.fileno()), str(read_end)]
        passed = (theirs.fileno(), read_end, self.memory_file)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - the user's interpreter on a file of this package
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(python, gpu),
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        except OSError as error:
            for descriptor in (self._lifeline, self.memory_file):
                os.close(descriptor)
            raise UsageError(f"{python} cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(read_end)
        self._answers, self._calls = b"", 0
        holds = self._channel, self._log, (self._lifeline, self.memory_file)
        self._end = weakref.finalize(self, _end, os.getpid(), self.process, *holds)

    def call(self, name: str, seconds: float, **arguments: Any) -> Any:
        """The server's result. UsageError or EnvError where there is none, after which the server
        is gone.
        """
        self.check_is_there()
        try:
            self._channel.settimeout(seconds)
            answer = self._ask(name, arguments)
        except TimeoutError:
            os.kill(self.process.pid, signal.SIGUSR1)  # it prints where it is
            time.sleep(0.2)
            raise self._failed(f"gave no answer to {name} within {seconds:g} seconds") from None
        except OSError:
            raise self._failed(
                f"ended in {name}", "" if self._calls else "; it printed nothing: is it a Python?"
            ) from None
        except BaseException:
            self.close()  # an answer may still come, which would be taken for that to another call
            raise
        if "result" in answer:
            self._calls += 1
            if self._calls % LOOK_EVERY == 0:
                self._shorten_log()
            return answer["result"]
        if "wrong_use" in answer:
            self.close()
            raise UsageError(answer["wrong_use"])
        raise self._failed(f"failed in {name}: {answer['error']}")

    def check_is_there(self) -> None:
        """UsageError after its end."""
        if not self._end.alive:
            raise UsageError("Isaac Gym's process has ended: make the environment anew")

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._channel.sendall(json.dumps({"call": name, **arguments}).encode() + b"\n")
        while b"\n" not in self._answers:
            received = self._channel.recv(65536)
            if not received:
                raise ConnectionResetError
            self._answers += received
        line, _, self._answers = self._answers.partition(b"\n")
        return json.loads(line)

    def _failed(self, what: str, if_silent: str = "") -> EnvError:
        """The error to raise, with what the server printed last; ends it."""
        try:
            code = self.process.wait(0.5)  # its socket closes a moment before it has an exit code
        except subprocess.TimeoutExpired:
            code = 0
            self.process.kill()
        how = (
            f" (signal {signal.Signals(-code).name})"
            if code < 0
            else f" (exit code {code})"
            if code
            else ""
        )
        size = os.fstat(self._log.fileno()).st_size
        printed = (
            os.pread(self._log.fileno(), MAX_SHOWN_BYTES, max(size - MAX_SHOWN_BYTES, 0))
            .decode(errors="replace")
            .splitlines()
        )
        self.close()
        told = "\n".join(f"  {line}" for line in printed[-MAX_SHOWN_LINES:])
        return EnvError(
            f"Isaac Gym's process ({self.python}) {what}{how}"
            + (f"; its last lines:\n{told}" if told else if_silent)
        )

    def _shorten_log(self) -> None:
        """A task may print at every step for days."""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        if size > LOG_BYTES:
            end = os.pread(descriptor, MAX_SHOWN_BYTES, size - MAX_SHOWN_BYTES)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, end)

    def close(self) -> None:
        """Ask it to end, then end it; nothing of it is left."""
        self._end()


def _environment(python: str, gpu: int | None) -> dict[str, str]:
    """Variables for the server: its cuda:0 is our `gpu`, and its own libpython is found, which
    conda leaves to the user.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    if gpu is not None:
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = (
            str(gpu) if visible is None else visible.split(",")[gpu].strip()
        )
    for folder in (
        Path(python).parent.parent / "lib",
        Path(python).resolve().parent.parent / "lib",
    ):
        if any(folder.glob("libpython3*.so*")):
            variables[LD_PATH] = (
                f"{folder}:{variables[LD_PATH]}" if variables.get(LD_PATH) else str(folder)
            )
            break
    return variables


def _end(
    owner: int,
    process: subprocess.Popen,
    channel: socket.socket,
    log: BinaryIO,
    descriptors: tuple[int, ...],
) -> None:
    """What `close` does, also for who forgot it. A forked copy of the trainer only lets go of its
    own descriptors.
    """
    if os.getpid() == owner:
        with suppress(OSError):  # it may be gone, or not read
            channel.settimeout(0.0)
            channel.sendall(b'{"call": "close"}\n')
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
    channel.close()
    log.close()
    for descriptor in descriptors:
        os.close(descriptor)
