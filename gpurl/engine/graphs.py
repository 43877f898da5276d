"""Captures plain functions into CUDA graphs that share one memory pool: a replay is one call, and
Python runs no more.

What a captured function returns lies at the same place at every replay. It stays true until the
functions captured before it are replayed again, since graphs that run one after the other use the
same memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Function = Callable[[], Any]


class Backend(Protocol):
    """What captures and replays: `CudaGraphs`, or what a test puts in its place."""

    def warm_up(self, function: Function) -> None:
        """Run `function` once as it will be captured, so that nothing is compiled or set up while
        it is.
        """

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        """(replay, what `function` returned). Capturing computes nothing: only replays do."""


class CudaGraphs:
    """CUDA graphs on a stream of their own, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Function) -> None:
        """Raises RuntimeError where `function` waits for the device: a graph could not hold
        that.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream), _no_waiting():
                function()
        finally:  # what goes on must not overtake what was begun
            current.wait_stream(self.stream)

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = function()
        except BaseException:  # a capture that broke leaves its stream chosen and its pool in use
            torch.cuda.set_stream(current)
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, result


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
