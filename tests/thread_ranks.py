"""Ranks that are threads of one process and exchange tensors by a list: the mathematics of ranks
without processes.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpurl.nn.ranks import Alone

Result = TypeVar("Result")


class ThreadRank(Alone):
    """One of `count` threads."""

    def __init__(self, index: int, count: int, barrier: threading.Barrier, slots: list[Any]):
        self.index = index
        self.count = count
        self._barrier = barrier
        self._slots = slots

    def share(self, value: Any) -> list[Any]:
        self._slots[self.index] = value
        self._barrier.wait(20)
        values = list(self._slots)
        self._barrier.wait(20)
        return values

    def of_first(self, value: Any) -> Any:
        return self.share(value)[0]

    def stack(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.share(tensor.clone()))

    def average(self, tensor: Tensor) -> Tensor:
        return self.stack(tensor).mean(0)

    def reduce(self, gradient: Tensor, losses: Tensor | None) -> None:
        for tensor in (gradient, losses):
            if tensor is not None:
                tensor.copy_(self.average(tensor))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        return tuple(map(any, zip(*self.share(flags))))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = self.share(tensor.clone())
        return tensors if self.index == 0 else []


def together(count: int, function: Callable[[ThreadRank], Result]) -> list[Result]:
    """[count] what `function` returns on each rank; the first error is raised."""
    barrier, slots = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    broken: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = function(ThreadRank(index, count, barrier, slots))
        except threading.BrokenBarrierError as error:
            broken.append(error)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors or broken:  # a rank that waits in vain is an error where no other has one
        raise (errors or broken)[0]
    return results
