"""Starts the processes of `gpurl train --processes G` on this machine by torchrun's launcher, which
watches them, starts them again and passes signals on.
"""

import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpurl.errors import RankError, UsageError
from gpurl.nn.ranks import Alone
from gpurl.run.ranks import check_restarts
from gpurl.run.settings import Settings
from gpurl.run.shards import settings_of_rank

WATCH_SECONDS = 0.1
ADDRESS = "127.0.0.1"
LOOPBACK = "lo"  # the network interface of that address on Linux


class LocalRendezvous(RendezvousHandler):
    """Where the processes of one machine meet: a store that listens on this machine only. Those of
    torchrun listen on all of its addresses.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.attempts = 0
        self._socket = socket.socket()
        self._socket.bind((ADDRESS, 0))  # a free port
        self._socket.listen()
        self.port = self._socket.getsockname()[1]
        self._store = dist.TCPStore(
            ADDRESS,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.fileno(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This machine is the only one; each attempt has names of its own."""
        self.attempts += 1
        store = dist.PrefixStore(f"{self.run_id}/{self.attempts}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self.port))

    def get_backend(self) -> str:
        return "local"

    def get_run_id(self) -> str:
        return self.run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def shutdown(self) -> bool:
        return True


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def train_on(
    count: int, max_restarts: int, settings: Settings, resume: Path | None, words: list[str]
) -> int:
    """Train on `count` processes, each of which runs `gpurl train WORDS`; returns the exit code of
    the first that failed.
    """
    config = settings.train
    check_restarts(max_restarts, resume, config.run_dir)
    planned = Alone()
    planned.count = count
    settings_of_rank(settings, planned)  # or an error
    num_gpus = torch.cuda.device_count()
    if config.device != "cpu" and 0 < num_gpus < count:
        raise UsageError(
            f"--processes {count} takes a GPU each, this machine has {num_gpus}: --device cpu "
            f"trains on the CPU"
        )
    if any(name == LOOPBACK for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # as torchrun does: the processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    rendezvous_handler_registry.register("local", _rendezvous)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="gpurl",
        rdzv_backend="local",
        local_addr=ADDRESS,
        max_restarts=max_restarts,
        monitor_interval=WATCH_SECONDS,
    )
    # after a signal they finish their iteration and save, which may take long; torch 2.10 gives
    # them 30 seconds
    if hasattr(launch, "shutdown_timeout"):
        launch.shutdown_timeout = max(int(config.rank_timeout), 1)
    logging.disable(logging.ERROR)  # the processes say themselves what went wrong
    try:
        elastic_launch(launch, sys.executable)(*_program(), "train", *words)
    except ChildFailedError as error:
        return _report({rank: each.exitcode for rank, each in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _program() -> list[str]:
    """The words after `python` that start gpurl as this process was started."""
    script = sys.argv[0]
    is_script = Path(script).is_file() and Path(script).stem == "gpurl"
    return [script] if is_script else ["-m", "gpurl"]


def _report(codes: dict[int, int]) -> int:
    """The exit code of the rank that failed first, by its own fault if there is one; a killed rank
    could not say anything itself.
    """
    others = {RankError.exit_code}
    if RankError.exit_code in codes.values():
        others.add(-signal.SIGTERM)  # the launcher ends those that are left
    own = {rank: code for rank, code in codes.items() if code not in others}
    rank, code = next(iter(own.items()), (0, RankError.exit_code))
    if code < 0:
        name = signal.Signals(-code).name
        print(f"gpurl: rank {rank} was ended by signal {-code} ({name})", file=sys.stderr)
        return 128 - code
    return code
