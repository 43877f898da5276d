"""The columns of a rollout side by side in one float32 matrix, a row a sample: a random minibatch
is then one gather instead of seven.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.nn.arrays import Array, as_whole

ALIGNMENT = 4  # floats: a row begins at 16 bytes


class PackedRows:
    """Where each column stands in a row. Flags and whole numbers up to 2**24 survive float32."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        """columns: name -> [T, N] or [T, N, D], of the shapes and dtypes that `pack` will be
        given.
        """
        self.places: dict[str, Any] = {}
        self.whole = {name for name, column in columns.items() if column.dtype == torch.int64}
        width = 0
        for name, column in columns.items():
            self.places[name] = (
                width if column.dim() == 2 else slice(width, width + column.shape[2])
            )
            width += 1 if column.dim() == 2 else column.shape[2]
        self.width = width + -width % ALIGNMENT

    def pack(self, columns: dict[str, Tensor]) -> Tensor:
        """[T N, width] float32; row t N + n is step t of environment n."""
        first = next(iter(columns.values()))
        packed = first.new_zeros(first.shape[0] * first.shape[1], self.width, dtype=torch.float32)
        for name, place in self.places.items():
            packed[:, place] = columns[name].flatten(0, 1)
        return packed

    def views(self, rows: Array) -> dict[str, Array]:
        """name -> float32 view [B] or [B, D] of rows [B, width]."""
        return {name: rows[:, place] for name, place in self.places.items()}

    def unpack(self, rows: Array) -> dict[str, Array]:
        """As `views`, but columns of int64 are int64 again."""
        return {
            name: as_whole(view) if name in self.whole else view
            for name, view in self.views(rows).items()
        }
