"""A rollout cut into minibatches, in a new random order each pass: of steps, or of whole
environments for a memory to unroll.
"""

import math
from collections.abc import Iterator

from torch import Tensor

from gpurl.buffers.packed import PackedRows
from gpurl.kernels.backend import host_may_look
from gpurl.kernels.permutation import gather_rows, permutation
from gpurl.kernels.random import CounterRandom
from gpurl.nn.arrays import Array, namespace

# as many minibatches at a time as a cache holds: a gather costs as much for 64 rows as for
# thousands
GATHERED_ROWS = 8192


class Minibatches:
    """Cuts `count` minibatches a pass; random: one stream. `normalizes`: the advantage, by
    minibatch.
    """

    def __init__(self, count: int, normalizes: bool, random: CounterRandom) -> None:
        self.count, self.normalizes, self.random = count, normalizes, random
        self.rows = PackedRows({})

    def pack(self, columns: dict[str, Tensor]) -> Tensor:
        """[T N, W] of columns [T, N, ...]; what the passes over steps cut."""
        self.rows = PackedRows(columns)
        return self.rows.pack(columns)

    def order(self, size: int) -> Tensor:
        """[size] int64, a random order that was not used before."""
        return permutation(*self._stream(), size)

    def of_steps(self, packed: Tensor, few: int = 0) -> Iterator[dict[str, Array]]:
        """name -> [B, ...], with "weight" where not all rows are valid; arrays where they are no
        more than `few` rows.
        """
        size = packed.shape[0] // self.count
        for rows in self._shuffled(packed, size):
            for minibatch in rows.numpy() if size <= few else rows.unbind(0):
                yield self.weighted(self.rows.unpack(minibatch))

    def in_place(self, packed: Tensor) -> Iterator[dict[str, Tensor]]:
        """The same as the fused loss takes it: float32 columns in place, "valid" among them and
        "num_valid", 0-d.
        """
        for rows in self._shuffled(packed, packed.shape[0] // self.count):
            place = self.rows.places.get("valid")
            counts = None if place is None else rows[:, :, place].sum(1).unbind(0)
            for number, minibatch in enumerate(map(self.rows.views, rows.unbind(0))):
                if self.normalizes:
                    minibatch["advantage"] = self.weighted(dict(minibatch))["advantage"]
                yield minibatch if counts is None else minibatch | {"num_valid": counts[number]}

    def of_envs(self, columns: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """name -> [T, B, ...] of columns [T, N, ...]."""
        num_envs = next(iter(columns.values())).shape[1]
        for index in self.order(num_envs).split(num_envs // self.count):
            yield self.weighted(
                {name: column.index_select(1, index) for name, column in columns.items()}
            )

    def weighted(self, minibatch: dict[str, Array]) -> dict[str, Array]:
        """`minibatch` with weights that sum to 1 where its rows are valid, and with normalised
        advantages if that is done by minibatch.
        """
        if "valid" in minibatch:
            valid = minibatch.pop("valid")
            minibatch["weight"] = valid / namespace(valid).maximum(
                valid.sum(), namespace(valid).ones_like(valid.sum())
            )
        if self.normalizes:
            minibatch["advantage"] = _normalized(minibatch["advantage"], minibatch.get("weight"))
        return minibatch

    def _shuffled(self, packed: Tensor, size: int) -> Iterator[Tensor]:
        """All rows of `packed` [S, W] in a new random order, in pieces [minibatches, size, W]."""
        if not host_may_look(packed.device):
            yield gather_rows(packed, *self._stream(), start=0, count=packed.shape[0]).unflatten(
                0, (-1, size)
            )
            return
        for index in self.order(packed.shape[0]).split(max(GATHERED_ROWS // size, 1) * size):
            yield packed.index_select(0, index).unflatten(0, (-1, size))

    def _stream(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Key, gamma, step and offset that were not used before."""
        self.random.advance()
        return self.random.key, self.random.gamma, self.random.step, 0


def _normalized(advantage: Array, weight: Array | None) -> Array:
    """(A - mean) / std, weighted by `weight` or all alike."""
    share = 1.0 / math.prod(advantage.shape) if weight is None else weight
    centred = advantage - (advantage * share).sum()
    return centred / ((centred * centred * share).sum() ** 0.5 + 1e-8)
