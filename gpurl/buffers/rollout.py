"""The rollout buffer: T steps of N environments in preallocated [T, N, ...] tensors, written in
place.
"""

import torch
from torch import Tensor

from gpurl.errors import UsageError
from gpurl.kernels.backend import host_sync_is_free

# columns that may be stored in half the memory
STORED = ("obs", "state", "final_obs", "final_state", "value", "final_value")


class RolloutBuffer:
    """`add` writes one row of every column; the first `add` allocates the columns.

    storage: "float32", or "bfloat16" for observations and values, which are read as float32.
    """

    def __init__(self, horizon: int, device: torch.device, storage: str = "float32") -> None:
        self.horizon = horizon
        self.device = device
        self.storage = getattr(torch, storage)
        self.columns: dict[str, Tensor] = {}
        self.size = 0  # rows written
        # [1] int64, the next row, if one CUDA graph records every step; else None
        self.row: Tensor | None = None
        self._recorded: tuple[str, ...] = ()  # columns that `add` writes
        # columns that are copied in one call: their names, and their rows of each step
        self._groups: list[tuple[tuple[str, ...], list[tuple[Tensor, ...]]]] = []

    @property
    def is_full(self) -> bool:
        """Whether all rows are written."""
        return self.size == self.horizon

    def add(self, row: dict[str, Tensor]) -> None:
        """Write a step. row: column name -> [N, ...], the same names in each step. UsageError if
        the buffer is full.
        """
        if self.is_full:
            raise UsageError(
                f"the rollout holds {self.horizon} steps and is full; clear() it after the update"
            )
        # memory, once the names, shapes and dtypes are known
        if not self.columns:
            self.columns = {
                name: torch.empty(
                    self.horizon, *value.shape, dtype=self._dtype(name, value), device=self.device
                )
                for name, value in row.items()
            }
            self._recorded = tuple(row)
            self._groups = self._group_columns()
        # by the row that Python counts, or by the one on the device
        if self.row is None:
            for names, steps in self._groups:
                torch._foreach_copy_(steps[self.size], [row[name] for name in names])
        else:
            for name in self._recorded:
                column = self.columns[name]
                column.index_copy_(0, self.row, row[name].to(column.dtype).unsqueeze(0))
            self.row += 1
        self.size += 1

    def _dtype(self, name: str, value: Tensor) -> torch.dtype:
        return self.storage if name in STORED and value.dtype == torch.float32 else value.dtype

    def _group_columns(self) -> list[tuple[tuple[str, ...], list[tuple[Tensor, ...]]]]:
        """On a GPU one launch copies all tensors of one dtype. On a CPU tensors are copied one by
        one anyway, and a single call is fastest.
        """
        by_kind: dict[str, list[str]] = {}
        for name, column in self.columns.items():
            kind = "all" if host_sync_is_free(self.device) else str(column.dtype)
            by_kind.setdefault(kind, []).append(name)
        return [
            (tuple(names), list(zip(*(self.columns[name].unbind(0) for name in names))))
            for _, names in sorted(by_kind.items())
        ]

    def set_columns(self, columns: dict[str, Tensor]) -> None:
        """Use columns [T, N, ...] that a kernel fills, instead of `add`."""
        self.columns = dict(columns)
        self._recorded = tuple(columns)

    def clear(self) -> None:
        """Start the next rollout in the same memory."""
        self.size = 0
        if self.row is not None:
            self.row.zero_()
        self.drop_derived()

    def drop_derived(self) -> None:
        """Drop columns that were derived from recorded ones."""
        self.columns = {name: self.columns[name] for name in self._recorded}

    def __getitem__(self, name: str) -> Tensor:
        """The column, of `storage` a float32 copy."""
        column = self.columns[name]
        return column.float() if column.dtype == torch.bfloat16 else column
