"""What a process knows of the others that train the same agent: how many they are, and what they
have together. Alone, that is what the process has itself.

A rank is one of the processes, as in torch.distributed. `gpurl.run.ranks` has those that talk.
"""

from typing import Any

from torch import Tensor


class Alone:
    """The only process of a training. Every rank must make the same calls in the same order."""

    index = 0  # of this rank, from 0
    count = 1  # of all ranks

    def reduce(self, gradient: Tensor, losses: Tensor | None) -> None:
        """Average gradient [P] and losses [L] over the ranks, in place."""

    def average(self, tensor: Tensor) -> Tensor:
        """The mean of `tensor` over the ranks."""
        return tensor

    def stack(self, tensor: Tensor) -> Tensor:
        """[G, ...] `tensor` of each of the G ranks."""
        return tensor.unsqueeze(0)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Of each flag of the host, whether it is true on some rank."""
        return flags

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 the tensor of each rank, on the host, all of one shape and dtype; elsewhere
        [].
        """
        return [tensor]

    def share(self, value: Any) -> list[Any]:
        """The plain value of each rank."""
        return [value]

    def of_first(self, value: Any) -> Any:
        """The plain value of rank 0."""
        return value


ALONE = Alone()
