"""The rollout: T steps of N environments in preallocated [T, N, ...] tensors, written in place."""

import torch
from torch import Tensor

from gpurl.errors import UsageError


class RolloutBuffer:
    """`add` writes one row of every column; columns are made at the first `add`, from what it
    brings.
    """

    def __init__(self, horizon: int, num_envs: int, device: torch.device) -> None:
        self.horizon, self.num_envs, self.device = horizon, num_envs, device
        self.columns: dict[str, Tensor] = {}
        self.size = 0  # rows written
        self.row: Tensor | None = (
            None  # [1] int64, the next row, where a CUDA graph of one step serves all of them
        )
        self._recorded: tuple[str, ...] = ()
        self._groups: list[
            tuple[tuple[str, ...], list[tuple[Tensor, ...]]]
        ] = []  # names, and of each step its rows of these columns

    def add(self, row: dict[str, Tensor]) -> None:
        """row: column name -> [N, ...] of the step, the same names each time."""
        if self.size == self.horizon:
            raise UsageError(
                f"the rollout holds {self.horizon} steps and is full; clear() it after the update"
            )
        if not self.columns:
            self.columns = {
                name: torch.empty(self.horizon, *value.shape, dtype=value.dtype, device=self.device)
                for name, value in row.items()
            }
            self._recorded = tuple(row)
            self._groups = self._grouped()
        if self.row is None:
            for names, steps in self._groups:
                torch._foreach_copy_(steps[self.size], [row[name] for name in names])
        else:
            for name in self._recorded:
                self.columns[name].index_copy_(0, self.row, row[name].unsqueeze(0))
            self.row += 1
        self.size += 1

    def _grouped(self) -> list[tuple[tuple[str, ...], list[tuple[Tensor, ...]]]]:
        """On a GPU tensors of one dtype are copied in one launch; on a CPU each is copied by itself
        anyway, so one call is the least.
        """
        kinds = (
            {column.dtype for column in self.columns.values()}
            if self.device.type != "cpu"
            else {None}
        )
        groups = []
        for kind in sorted(kinds, key=str):
            names = tuple(
                name
                for name, column in self.columns.items()
                if kind is None or column.dtype == kind
            )
            groups.append((names, list(zip(*(self.columns[name].unbind(0) for name in names)))))
        return groups

    def hold(self, columns: dict[str, Tensor]) -> None:
        """Take columns [T, N, ...] that a kernel fills whole, in place of `add`."""
        self.columns, self._recorded = dict(columns), tuple(columns)

    def clear(self) -> None:
        """Begin the next rollout in the same memory; columns that were not recorded but derived
        go.
        """
        self.size = 0
        if self.row is not None:
            self.row.zero_()
        self.columns = {name: self.columns[name] for name in self._recorded}

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]
