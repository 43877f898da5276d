"""A rollout cut into minibatches, in a new random order each pass: of steps, or of whole
environments for a memory to unroll.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpurl.kernels.permutation import gather_rows, permutation
from gpurl.kernels.random import CounterRandom

ALIGNMENT = 4  # floats: a row begins at 16 bytes


@dataclass
class Minibatch:
    """What PPO's loss reads: B steps, or with a memory T steps of B environments, [T, B, ...]."""

    obs: Tensor
    """[B, D] float32, normalised."""
    action: Tensor
    """[B, A] float32 in the policy's units, or [B] or [B, K] int64."""
    log_prob: Tensor
    """[B] of the action when it was taken."""
    value: Tensor
    """[B] of the critic then, in its own units."""
    advantage: Tensor
    """[B]."""
    returns: Tensor
    """[B] what the critic is to predict, in its own units."""
    weight: Tensor | None = None
    """[B] of sum 1, 0 where a row is not a real transition; None: all rows weigh the same."""
    policy_state: Tensor | None = None
    """[1, B, H] the memory before the first step."""
    episode_starts: Tensor | None = None
    """[T, B] bool, where the memory is emptied before the step."""


class PackedRows:
    """The columns of a rollout side by side in one float32 matrix, a row a sample: a random
    minibatch is then one gather instead of seven. Flags and whole numbers up to 2**24 survive
    float32.
    """

    def __init__(self, columns: dict[str, Tensor]) -> None:
        """columns: name -> [T, N] or [T, N, D], of the shapes and dtypes that `pack` will be
        given.
        """
        self.places: dict[str, Any] = {}
        self.whole = {name for name, column in columns.items() if column.dtype == torch.int64}
        width = 0
        for name, column in columns.items():
            size = 1 if column.dim() == 2 else column.shape[2]
            self.places[name] = width if column.dim() == 2 else slice(width, width + size)
            width += size
        self.width = width + -width % ALIGNMENT

    def pack(self, columns: dict[str, Tensor]) -> Tensor:
        """[T N, width] float32; row t N + n is step t of environment n."""
        first = next(iter(columns.values()))
        packed = first.new_zeros(first.shape[0] * first.shape[1], self.width, dtype=torch.float32)
        for name, place in self.places.items():
            packed[:, place] = columns[name].flatten(0, 1)
        return packed

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """name -> [...] or [..., D] of rows [..., width]: int64 columns as they were, others as
        float32 views.
        """
        views = {name: rows[..., place] for name, place in self.places.items()}
        return {name: view.long() if name in self.whole else view for name, view in views.items()}


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
        self.random.advance()
        return permutation(self.random.key, self.random.gamma, self.random.step, 0, size)

    def of_steps(self, packed: Tensor) -> Iterator[dict[str, Tensor]]:
        """name -> [B, ...]; with "weight" in place of "valid" where that is among the columns."""
        # one copy of all rows in a new order, so that they may be written to
        self.random.advance()
        stream = self.random.key, self.random.gamma, self.random.step
        rows = gather_rows(packed, *stream, offset=0, start=0, count=packed.shape[0])

        # all minibatches at once, which are then views
        columns = self.rows.unpack(rows.unflatten(0, (self.count, -1)))
        self._weigh(columns, (1,))
        for minibatch in zip(*(column.unbind(0) for column in columns.values())):
            yield dict(zip(columns, minibatch))

    def of_envs(self, columns: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """name -> [T, B, ...] of columns [T, N, ...], "weight" as in `of_steps`."""
        num_envs = next(iter(columns.values())).shape[1]
        for index in self.order(num_envs).split(num_envs // self.count):
            minibatch = {name: column.index_select(1, index) for name, column in columns.items()}
            self._weigh(minibatch, (0, 1))
            yield minibatch

    def _weigh(self, columns: dict[str, Tensor], dims: tuple[int, ...]) -> None:
        """Put "weight", whose sum over `dims` is 1, in place of "valid"; and normalise the
        advantages over `dims` if that is done by minibatch.
        """
        weight: Tensor | None = None
        if "valid" in columns:
            valid = columns.pop("valid").float()
            weight = valid.div_(valid.sum(dims, keepdim=True).clamp_(min=1.0))
            columns["weight"] = weight
        if self.normalizes:
            advantage = columns["advantage"]
            if weight is None:
                variance, mean = torch.var_mean(advantage, dims, correction=0, keepdim=True)
            else:
                mean = (advantage * weight).sum(dims, keepdim=True)
                variance = ((advantage - mean).square() * weight).sum(dims, keepdim=True)
            advantage.sub_(mean).div_(variance.sqrt() + 1e-8)
