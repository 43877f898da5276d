"""Starts the processes of `gpurl train --processes G` on this machine by torchrun's launcher, which
watches them, starts them again and passes signals on.
"""

import logging
import os
import signal
import sys
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpurl.errors import RankError, UsageError
from gpurl.nn.ranks import Alone
from gpurl.run.ranks import check_restarts
from gpurl.run.settings import Settings
from gpurl.run.shards import settings_of_rank

WATCH_SECONDS = 0.1


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
    # as torchrun does: the processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=WATCH_SECONDS,
    )
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
    own = {rank: code for rank, code in codes.items() if code != RankError.exit_code}
    rank, code = next(iter(own.items() or codes.items()))
    if code < 0:
        name = signal.Signals(-code).name
        print(f"gpurl: rank {rank} was ended by signal {-code} ({name})", file=sys.stderr)
        return 128 - code
    return code
