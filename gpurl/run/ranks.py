"""The processes of a run that torchrun started: what they exchange by torch.distributed (gloo
between CPUs, NCCL between GPUs), and which of them is missing when one does not answer.
"""

import functools
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from gpurl.checkpoints.folders import list_checkpoints
from gpurl.errors import GpurlError, RankError, UsageError, first_line
from gpurl.native_output import dropped_lines
from gpurl.nn.ranks import ALONE, Alone

BACKENDS = "cpu:gloo,cuda:nccl"  # by the device of a tensor
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CONNECT_SECONDS = 300.0
NAMING_SECONDS = 3.0  # to hear which ranks are still there


class Ranks(Alone):
    """This process among those of a run. Every call but `store`'s is made by all ranks at once."""

    def __init__(self, index: int, count: int, store: dist.Store) -> None:
        self.index = index
        self.count = count
        self.store = store
        self._buffers: dict[int, Tensor] = {}  # of `reduce`, by size

    # ---- what algorithms and engines ask for ----

    def reduce(self, gradient: Tensor, losses: Tensor | None) -> None:
        """One exchange for both: where one rank's loss is not finite, all skip the step."""
        parts = [gradient] if losses is None else [gradient, losses]
        size = sum(part.numel() for part in parts)
        if size not in self._buffers:
            self._buffers[size] = torch.empty(size, device=gradient.device)
        buffer = self._buffers[size]
        torch.cat([part.reshape(-1) for part in parts], out=buffer)
        with self._naming():
            dist.all_reduce(buffer)
        buffer.div_(self.count)
        for part, averaged in zip(parts, buffer.split([part.numel() for part in parts])):
            part.copy_(averaged.view_as(part))

    def average(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        with self._naming():
            dist.all_reduce(total)
        return total.div_(self.count)

    def stack(self, tensor: Tensor) -> Tensor:
        stacked = tensor.new_empty(self.count, *tensor.shape)
        with self._naming():
            dist.all_gather(list(stacked.unbind(0)), tensor.contiguous())
        return stacked

    def any(self, *flags: bool) -> tuple[bool, ...]:
        numbers = torch.tensor(flags, dtype=torch.int32)
        with self._naming():
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return tuple(map(bool, numbers.tolist()))

    # ---- what a run asks for ----

    def gather(self, tensor: Tensor) -> list[Tensor]:
        # on the host: together they may not fit beside the run on the first one's GPU
        mine = tensor.contiguous().cpu()
        is_first = self.index == 0
        all_ = [torch.empty_like(mine) for _ in range(self.count)] if is_first else []
        with self._naming():
            dist.gather(as_bytes(mine), [as_bytes(each) for each in all_] or None)
        return all_

    def share(self, value: Any) -> list[Any]:
        # as JSON: what torch.distributed has for objects would unpickle them
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.stack(torch.tensor(len(text))).tolist()
        padded = torch.nn.functional.pad(text, (0, max(sizes) - len(text)))
        texts = self.stack(padded)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(texts, sizes)]

    def of_first(self, value: Any) -> Any:
        return self.share(value if self.index == 0 else None)[0]

    # ---- who is missing ----

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        try:
            text = f"{type(error).__name__}: {first_line(error)}"
            self.store.set(f"failed/{self.index}", text)
        except RuntimeError:
            pass  # the store is gone with another process

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """A `with` block in which an exchange that fails is a RankError with the rank at fault."""
        try:
            yield
        except RuntimeError as error:
            # a graph that cannot hold the exchange: nobody is missing
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise
            raise RankError(
                f"rank {self.index} of {self.count}: {self._at_fault(error)}"
            ) from error

    def _at_fault(self, error: RuntimeError) -> str:
        """In words, which rank does not answer; this one says that it is there."""
        others = [rank for rank in range(self.count) if rank != self.index]
        try:
            self.store.set(f"waiting/{self.index}", "")
            deadline = time.monotonic() + NAMING_SECONDS
            while True:
                missing = [each for each in others if not self.store.check([f"waiting/{each}"])]
                failed = [each for each in missing if self.store.check([f"failed/{each}"])]
                if failed or not missing or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if failed:
                return f"rank {failed[0]} failed: {self.store.get(f'failed/{failed[0]}').decode()}"
            if missing:
                names = ", ".join(map(str, missing))
                return f"rank {names} does not answer: it has ended or hangs ({_reason(error)})"
        except RuntimeError:
            pass  # the store is gone too
        return f"the connection between the ranks is broken ({_reason(error)})"


def _reason(error: RuntimeError) -> str:
    """The error's first line without the source file of gloo in front."""
    return re.sub(r"^\[\S+\] ", "", first_line(error))


def as_bytes(tensor: Tensor) -> Tensor:
    """A view [bytes] of a contiguous tensor: every dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)


def is_rank() -> bool:
    """Whether this process was started as one of several, by torchrun or by variables of the
    environment that name its rank.
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def attempt() -> int:
    """How many times torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_index() -> int:
    """The rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def device_of_rank(name: str, ranks: Alone) -> str:
    """The device called `name` in the settings, for this rank: one GPU each. UsageError for one
    that all would share.
    """
    if ranks.count == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    if name not in ("auto", "cuda"):
        raise UsageError(
            f"device {name} is one GPU, this run has {ranks.count} processes, which take one each: "
            f"--device cuda"
        )
    return f"cuda:{local_index()}"


def folder_to_resume(
    resume_from: Path | None, run_dir: str | None, requeue: bool = False
) -> Path | None:
    """What to continue: that of `--resume`, or, with `--requeue` and where torchrun has started the
    processes again, the run in `run_dir`, if it has come to a checkpoint.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    check_restarts(restarts, resume_from, run_dir)
    if run_dir is None or not (requeue or attempt()):
        return resume_from
    folder = Path(run_dir).expanduser()
    return folder if list_checkpoints(folder / "checkpoints") else resume_from


def check_restarts(restarts: int, resume_from: Path | None, run_dir: str | None) -> None:
    """UsageError if processes that start again could not know the folder of their run."""
    if restarts and resume_from is None and run_dir is None:
        raise UsageError(
            f"--max-restarts {restarts} needs --run-dir FOLDER, in which a restart finds the run"
        )


@contextmanager
def join_ranks(timeout: float) -> Iterator[Alone]:
    """A `with` block of one training, which gets the ranks; ALONE without torchrun. timeout:
    seconds that a rank waits for another.
    """
    if not is_rank():
        yield ALONE
        return
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = logging.getLogger("gpurl")
    level = log.level
    store = next_store()
    try:
        with dropped_lines("[Gloo]"):
            dist.init_process_group(
                BACKENDS if torch.cuda.is_available() else "gloo",
                store=store,
                rank=index,
                world_size=count,
                timeout=timedelta(seconds=timeout),
            )
    except RuntimeError as error:
        raise RankError(f"rank {index} of {count} reaches no other: {first_line(error)}") from error
    ranks = Ranks(index, count, store)
    if index:
        log.setLevel(logging.ERROR)  # warnings are rank 0's
    try:
        yield ranks
    except BaseException as error:
        ranks.report_failure(error)
        if isinstance(error, GpurlError) and not isinstance(error, RankError):
            raise type(error)(f"rank {index} of {count}: {error}") from error
        raise
    finally:
        log.setLevel(level)
        dist.destroy_process_group()


_joined = 0  # trainings of this process


def next_store() -> dist.Store:
    """Where the ranks of the next training of this process meet: under a name of its own, apart
    from those of earlier trainings, and of earlier attempts of torchrun.
    """
    global _joined
    _joined += 1
    return dist.PrefixStore(f"gpurl/{attempt()}/{_joined}", _store())


@functools.cache
def _store() -> dist.Store:
    """What all ranks can read and write."""
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise UsageError(
            f"WORLD_SIZE says that this is one of several processes, but {', '.join(missing)} is "
            f"not set: start them by torchrun, or by gpurl train --processes"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_SECONDS)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        in_use = "EADDRINUSE" in str(error) or "already in use" in str(error)
        advice = "the port is in use, choose another MASTER_PORT" if in_use else first_line(error)
        raise UsageError(f"the ranks cannot meet at {address}: {advice}") from error
    return store
