"""The trainer's side of the Isaac Gym process: starts, calls, watches and ends it, and raises its
errors.
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

import numpy as np

from gpurl.errors import EnvError, UsageError

SERVER = Path(__file__).with_name("server.py")
PYTHON_VARIABLE = "GPURL_ISAAC_GYM_PYTHON"
# of the last output of the process, in an error
MAX_SHOWN_LINES = 20
MAX_SHOWN_BYTES = 4096
LOG_BYTES = 1 << 24  # of its output that stay on disk
CALLS_BETWEEN_LOG_CHECKS = 1024
END_SECONDS = 5.0  # for the process to end by itself
LD_PATH = "LD_LIBRARY_PATH"
# of this process: the server has another Python, and a torch that knows fewer settings
NOT_PASSED_ON = {"PYTHONHOME", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}


def find_python() -> str:
    """Path of the interpreter that Isaac Gym is installed in, from PYTHON_VARIABLE. An option would
    be saved with the run, and a stranger's run would start a program. UsageError if there is none.
    """
    name = os.environ.get(PYTHON_VARIABLE, "")
    if not name:
        raise UsageError(
            f"isaac_gym needs the Python 3.6 to 3.8 that Isaac Gym is installed in: "
            f"export {PYTHON_VARIABLE}=~/envs/rlgpu/bin/python"
        )
    path = Path(name).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        inside = path / "bin" / "python"
        hint = f"; perhaps {inside}" if inside.is_file() else ""
        raise UsageError(
            f"{PYTHON_VARIABLE} must be the interpreter that Isaac Gym is installed in; {path} is "
            f"no program{hint}"
        )
    return str(path.absolute())  # links are kept: a virtual environment finds its packages by them


class SimulatorProcess:
    """A server process under `python`, on the CUDA device `gpu` of this process. A call that
    exceeds its time limit ends it.
    """

    def __init__(self, python: str, gpu: int | None = None) -> None:
        self.python = python
        # socket, pipe, memory and log have no names: no other process can open them, and they
        # disappear with these processes
        self._channel, server_end = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        self.memory_file = os.memfd_create("gpurl_isaac_gym")
        self._log: BinaryIO = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
        # its working directory: some tasks write their models there
        self._folder = tempfile.TemporaryDirectory(prefix="gpurl_isaac_gym_")
        # in append mode, since the log is truncated from time to time
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)
        fcntl.fcntl(self._log, fcntl.F_SETFL, flags | os.O_APPEND)
        # the server, in its own session
        command = [python, "-u", str(SERVER), str(server_end.fileno()), str(read_end)]
        try:
            self.process = subprocess.Popen(  # noqa: S603 - a file of this package
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(python, gpu),
                cwd=self._folder.name,
                pass_fds=(server_end.fileno(), read_end, self.memory_file),
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
            )
        except OSError as error:
            for descriptor in (self._lifeline, self.memory_file):
                os.close(descriptor)
            raise UsageError(f"{python} cannot be started: {error.strerror}") from error
        finally:
            server_end.close()
            os.close(read_end)
        self._received = b""
        self._calls = 0  # number of calls that returned
        # ended when this object is, even if nobody calls `close`
        descriptors = (self._lifeline, self.memory_file)
        self._end = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self.process,
            self._channel,
            self._log,
            descriptors,
            self._folder,
        )

    def call(self, name: str, seconds: float, **arguments: Any) -> Any:
        """The result of the server's function `name`, which may take `seconds`. UsageError or
        EnvError if it fails; the server has then ended.
        """
        self.check_is_alive()
        try:
            self._channel.settimeout(seconds)
            reply = self._exchange(name, arguments)
        except TimeoutError:
            os.kill(self.process.pid, signal.SIGUSR1)  # it prints its traceback
            time.sleep(0.2)
            raise self._failed(f"did not return from {name} within {seconds:g} seconds") from None
        except OSError:
            raise self._failed(
                f"ended in {name}", "" if self._calls else "; it printed nothing: is it a Python?"
            ) from None
        except BaseException:
            self.close()  # a late reply must not be taken for that to another call
            raise
        if "result" in reply:
            self._calls += 1
            if self._calls % CALLS_BETWEEN_LOG_CHECKS == 0:
                self._shorten_log()
            return reply["result"]
        if "wrong_use" in reply:
            self.close()
            raise UsageError(reply["wrong_use"])
        raise self._failed(f"failed in {name}: {reply['error']}")

    def check_is_alive(self) -> None:
        """UsageError if the process has ended."""
        if not self._end.alive:
            raise UsageError("Isaac Gym's process has ended: make a new environment")

    def _exchange(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a call and receive its reply, a line of JSON each."""
        request = json.dumps({"call": name, **arguments}, default=_plain_number)
        self._channel.sendall(request.encode() + b"\n")
        while b"\n" not in self._received:
            received = self._channel.recv(65536)
            if not received:
                raise ConnectionResetError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _failed(self, text: str, if_silent: str = "") -> EnvError:
        """The error to raise, with the exit code and last output of the server; ends it."""
        # how it ended
        try:
            code = self.process.wait(0.5)  # its socket closes a moment before it has an exit code
        except subprocess.TimeoutExpired:
            code = 0
            self.process.kill()
        cause = ""
        if code < 0:
            cause = f" (signal {signal.Signals(-code).name})"
        elif code > 0:
            cause = f" (exit code {code})"
        # what it printed
        output = self._last_output().decode(errors="replace").splitlines()
        lines = "\n".join(f"  {line}" for line in output[-MAX_SHOWN_LINES:])
        self.close()
        return EnvError(
            f"Isaac Gym's process ({self.python}) {text}{cause}"
            + (f"; its last lines:\n{lines}" if lines else if_silent)
        )

    def _last_output(self) -> bytes:
        descriptor = self._log.fileno()
        start = max(os.fstat(descriptor).st_size - MAX_SHOWN_BYTES, 0)
        return os.pread(descriptor, MAX_SHOWN_BYTES, start)

    def _shorten_log(self) -> None:
        """Truncate a long log: a task may print in every step for days."""
        descriptor = self._log.fileno()
        if os.fstat(descriptor).st_size > LOG_BYTES:
            last = self._last_output()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, last)

    def close(self) -> None:
        """End the process: by a call, then by a signal."""
        self._end()


def _plain_number(value: Any) -> Any:
    """For JSON, which knows no numbers of numpy, as seeds may be."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"wanted plain values, got a {type(value).__name__}")


def _environment(python: str, gpu: int | None) -> dict[str, str]:
    """Environment variables of the server."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    # its working directory is another one
    if paths := variables.get("PYTHONPATH"):
        absolute = [os.path.abspath(path) for path in paths.split(os.pathsep) if path]
        variables["PYTHONPATH"] = os.pathsep.join(absolute)
    # its cuda:0 is `gpu` of this process
    if gpu is not None:
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        name = str(gpu) if visible is None else visible.split(",")[gpu].strip()
        variables["CUDA_VISIBLE_DEVICES"] = name
    # isaacgym loads libpython, which conda does not put on the path
    for path in (Path(python), Path(python).resolve()):
        folder = path.parent.parent / "lib"
        if any(folder.glob("libpython3*.so*")):
            others = variables.get(LD_PATH)
            variables[LD_PATH] = f"{folder}:{others}" if others else str(folder)
            break
    return variables


def _end(
    owner: int,
    process: subprocess.Popen,
    channel: socket.socket,
    log: BinaryIO,
    descriptors: tuple[int, ...],
    folder: tempfile.TemporaryDirectory,
) -> None:
    """End the server process, close the descriptors and remove its folder; a forked copy of the
    trainer only closes its descriptors.
    """
    if os.getpid() == owner:
        with suppress(OSError):  # it may have ended, or be busy
            channel.settimeout(0.0)
            channel.sendall(b'{"call": "close"}\n')
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()
        folder.cleanup()
    channel.close()
    log.close()
    for descriptor in descriptors:
        os.close(descriptor)
