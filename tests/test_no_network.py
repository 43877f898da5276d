"""No network unless asked: a training opens no socket that leaves the machine, and the simulator's
own has no name to be found by.
"""

import os
import socket
import sys
from pathlib import Path

import pytest

from gpurl.envs.isaac_gym.process import SimulatorProcess
from tests.small_runs import ITERATION, SMALL, exit_code

INTERNET = (socket.AF_INET, socket.AF_INET6)


def test_the_guard_of_these_tests_can_fail() -> None:
    with socket.socket() as one, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for call in (
            lambda: one.connect(("192.0.2.1", 80)),
            lambda: one.bind(("0.0.0.0", 0)),
            lambda: other.sendto(b"x", ("192.0.2.1", 9)),
        ):
            with pytest.raises(pytest.fail.Exception, match="tests use no network"):
                call()
        one.bind(("127.0.0.1", 0))
        one.listen()
        with socket.create_connection(one.getsockname()):
            pass


def internet_sockets() -> set[str]:
    """Inodes of this process's sockets that have an internet address, whoever opened them."""
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
    known = {
        line.split()[9]
        for table in tables
        if table.exists()
        for line in table.read_text().splitlines()[1:]
    }
    opened = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    ]
    return {link[len("socket:[") : -1] for link in opened if link.startswith("socket:[")} & known


def in_a_fork(words: list[str], tries: bool) -> int:
    """`gpurl words` in a process of its own: 0 when it ended well and opened no socket of the
    internet, 7 when it did.
    """
    if (child := os.fork()) == 0:
        code, seen = 1, list[str]()
        try:
            before = internet_sockets()  # which a fork inherits
            sys.addaudithook(
                lambda event, arguments: (
                    seen.append(event)
                    if event == "socket.__new__" and arguments[1] in INTERNET
                    else None
                )
            )
            sys.addaudithook(
                lambda event, _: (
                    seen.append(event)
                    if event in ("socket.getaddrinfo", "socket.gethostbyname")
                    else None
                )
            )
            if tries:
                socket.socket().close()
            code = exit_code(words)
            code = 7 if seen or internet_sockets() - before else code
        finally:
            os._exit(code if isinstance(code, int) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("tries", [False, True])
def test_a_training_opens_no_socket_of_the_internet(tmp_path: Path, tries: bool) -> None:
    words = [f"{name}={value}" for name, value in SMALL.items() if name != "network"] + [
        f"total_steps={ITERATION}",
        "network.hidden=8",
    ]
    assert in_a_fork(
        ["train", "ppo", "pendulum", *words, "--run-dir", str(tmp_path / "run")], tries
    ) == (7 if tries else 0)
    assert (tmp_path / "run" / "checkpoints" / "LATEST").exists()


def test_the_simulators_socket_has_no_address() -> None:
    process = SimulatorProcess(sys.executable)
    try:
        assert process._channel.family == socket.AF_UNIX
        assert (
            process._channel.getsockname() == process._channel.getpeername() == ""
        )  # nobody can connect to it
        assert os.readlink(f"/proc/self/fd/{process.memory_file}").startswith(
            "/memfd:"
        )  # nobody can open it
    finally:
        process._end()
