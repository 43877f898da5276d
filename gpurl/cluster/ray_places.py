"""The places of a cluster that Ray manages: actors that train slices, each with its share of CPUs
and GPUs, and the actor that keeps the board.

An actor that dies is not restarted by Ray (`max_restarts=0`): its slice goes back to the driver,
which knows whose it was, counts the attempts, and asks for another actor, on whichever node has
room. The board's actor has its state in a folder, so Ray may restart it anywhere.
"""

import importlib.util
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from gpurl.cluster.board import BoardOfRows, BoardRows
from gpurl.cluster.driver import Event, Plan
from gpurl.cluster.schedule import Job, Result
from gpurl.errors import GpurlError, UsageError, first_line, install_extra

MAX_FAILED_STARTS = 5  # of actors in a row
STORE_BYTES = 80 << 20  # of Ray's object store, which gpurl gives next to nothing
ANSWER_SECONDS = 5.0
# the begin of a connection of HTTP/2 and an empty frame of settings (RFC 9113, section 3.4)
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS_FRAME = 4
ADVICE = "; ray start --head makes one, without --address members train on this machine alone"


def check_installed() -> None:
    """UsageError where Ray is not installed. It is not imported: some of its switches are read when
    it is.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # any folder ray/ is found, without an origin
        raise UsageError(f"members on a cluster need Ray, which is missing: {install_extra('ray')}")


def connect(address: str | None) -> ModuleType:
    """Ray, connected to the cluster at `address` (auto, or HOST:PORT; by default RAY_ADDRESS), else
    to a new one on this machine alone. UsageError if that is not possible.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"address": address}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        # Ray's switch for systems where it has no clusters: it keeps to the loopback address
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # it sends no statistics
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_installed()
    check_answers(address)
    import ray

    try:
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # errors of any type, also of its processes
        what = "Ray cannot start here" if address == "local" else f"no cluster of Ray at {address}"
        raise UsageError(f"{what}: {first_line(error)}{ADVICE}") from error
    return ray


def check_answers(address: str) -> None:
    """UsageError if nothing at HOST:PORT speaks HTTP/2, as Ray does: Ray itself would try for two
    minutes. With TLS it is enough that something listens.
    """
    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # as Ray reads it
    match = re.fullmatch(r"(?!\w+://)\[?([^\[\]/]+)\]?:(\d{1,5})", address)
    if match is None:  # auto, local, or another protocol
        if ":" not in address and address not in ("auto", "local"):
            raise UsageError(f"--address is {address!r}; it must be auto or HOST:PORT")
        return
    try:
        with socket.create_connection((match[1], int(match[2])), ANSWER_SECONDS) as connection:
            if has_tls:
                return
            connection.sendall(HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise UsageError(f"no cluster of Ray at {address}: {error}{ADVICE}") from None
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise UsageError(f"no cluster of Ray at {address}: another program listens there{ADVICE}")


class Seat:
    """An actor: a process that trains slices, one after another."""

    def where(self) -> str:
        """Where the process is, once it is there."""
        import ray

        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def train(
        self,
        job: Mapping[str, Any],
        settings: Mapping[str, Any],
        folders: Sequence[str],
        board: Any,
    ) -> Result:
        import ray

        from gpurl.cluster.member import train_slice

        def ask(*words: Any) -> Any:
            return ray.get(board.ask.remote(*words))

        folder, board_folder = map(Path, folders)
        return train_slice(Job(**job), settings, folder, board_folder, BoardOfRows(ask))


class RayPlaces:
    """As many actors as there are members: those for which there is no room wait until a node
    comes, or another one ends.
    """

    def __init__(
        self, ray: ModuleType, plan: Plan, cpus: float, gpus: float, say: Callable[[str], object]
    ) -> None:
        self._ray = ray
        self._folders = (str(plan.folder.absolute()), str(plan.board.absolute()))
        self._say = say
        self._seat = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(Seat)
        board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(BoardRows)
        self._board = board.remote(self._folders[1], plan.capacity, plan.url)
        self._numbers = itertools.count()
        self._actors: dict[int, Any] = {}
        self._where: dict[int, str] = {}  # of those that are there
        self._refs: dict[Any, int] = {}  # the answer that a place owes
        # slices that begin once their places have answered
        self._given: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._failed_starts = 0
        for _ in range(plan.settings.train.population):
            self._request()

    @property
    def board(self) -> BoardOfRows:
        """The board, for the driver."""
        return BoardOfRows(lambda *words: self._ray.get(self._board.ask.remote(*words)))

    def _request(self) -> None:
        place = next(self._numbers)
        self._actors[place] = actor = self._seat.remote()
        self._refs[actor.where.remote()] = place

    def train(self, place: int, job: Job, settings: Mapping[str, Any]) -> None:
        # first whether it is still there: a node that has left since costs the member no attempt
        self._given[place] = (asdict(job), dict(settings))
        self._refs[self._actors[place].where.remote()] = place

    def wait(self, seconds: float) -> list[Event]:
        refs = [*self._refs]
        if not refs:
            time.sleep(seconds)
            return []
        done, _ = self._ray.wait(refs, num_returns=1, timeout=seconds)
        if done:
            done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        events = [self._event(ref, self._refs.pop(ref)) for ref in done]
        return [event for event in events if event is not None]

    def _event(self, ref: Any, place: int) -> Event | None:
        """None: the place now begins the slice that it was given."""
        given = self._given.pop(place, None)
        try:
            answer = self._ray.get(ref)
        except Exception as error:  # of Ray: the actor has died, or cannot be reached
            return Event(place, died=self._replace(place, error), had_begun=given is None)
        if given is not None:
            train = self._actors[place].train
            self._refs[train.remote(*given, self._folders, self._board)] = place
            return None
        if place in self._where:
            return Event(place, answer)
        self._where[place] = answer
        self._failed_starts = 0
        return Event(place)

    def _replace(self, place: int, error: Exception) -> str:
        """Ask for another actor; returns what happened to this one. GpurlError if none begins."""
        self._ray.kill(self._actors.pop(place))
        if (where := self._where.pop(place, "")) == "":
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise GpurlError(f"no process of a member can start: {error}") from error
        self._request()
        return f"{where or 'its process'} has ended: {_reason(error)}"

    def close(self) -> None:
        for actor in (*self._actors.values(), self._board):
            self._ray.kill(actor)


def _reason(error: Exception) -> str:
    """Why an actor has died, in a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line.startswith("The actor is dead")]
    return first_line(causes[0] if causes else error)[:200]


def room(ray: ModuleType, cpus: float, gpus: float) -> int:
    """How many members the nodes of now can train at a time."""
    total = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fits = [
                has.get(name, 0) / share for name, share in (("CPU", cpus), ("GPU", gpus)) if share
            ]
            total += int(min(fits) + 1e-9) if fits else 0
    return total


def begin(
    cleanup: ExitStack,
    plan: Plan,
    address: str | None,
    cpus: float,
    gpus: float,
    say: Callable[[str], object],
) -> tuple[RayPlaces, BoardOfRows]:
    """Connect, and ask for the places of a plan; `cleanup` ends them. UsageError if a machine of
    one's own has no room for one.
    """
    ray = connect(address)
    cleanup.callback(ray.shutdown)
    share = f"{cpus:g} CPU" + f" and {gpus:g} GPU" * bool(gpus)
    members = plan.settings.train.population
    count = room(ray, cpus, gpus)
    if count == 0 and not (address or os.environ.get("RAY_ADDRESS")):
        raise UsageError(f"this machine has no room for a member, which takes {share}")
    if count < members:
        what = "they take turns" if count else "they wait until a node comes"
        say(f"{members} members, room for {count} at a time ({share} each): {what}")
    places = RayPlaces(ray, plan, cpus, gpus, say)
    cleanup.callback(places.close)
    return places, places.board
