"""Splits a rollout into minibatches, in a new random order each epoch: of steps, or of whole
environments for recurrent policies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gpurl.kernels.moments import pooled_moments
from gpurl.kernels.pack_rows import Column, pack_rows, unscaled
from gpurl.kernels.permutation import gather_rows, permutation
from gpurl.kernels.random import CounterRandom, RandomStreams
from gpurl.nn.ranks import ALONE, Alone

ALIGNMENT = 4  # floats: a row begins at 16 bytes
FLOAT_BYTES = 4


@dataclass
class Minibatch:
    """The input of PPO's loss: [B, ...] for B steps; of a recurrent policy [T, B, ...] for T steps
    of B environments.
    """

    obs: Tensor
    """[B, D] float32, normalised; of images uint8."""
    action: Tensor
    """[B, A] float32 in the policy's units, or [B] or [B, K] int64."""
    log_prob: Tensor
    """[B] of the action under the policy that acted."""
    value: Tensor
    """[B] estimate of the critic when the action was taken, in the critic's units."""
    advantage: Tensor
    """[B] normalised if the algorithm normalises by minibatch."""
    returns: Tensor
    """[B] targets of the critic, in the critic's units."""
    weight: Tensor | None = None
    """[B] of sum 1, 0 where a row is not a real transition; None: all rows weigh the same."""
    policy_state: Tensor | None = None
    """[1, B, S] of the memory, before the first step."""
    episode_starts: Tensor | None = None
    """[T, B] bool, where the policy state is zeroed before the step."""
    mirror_obs: Tensor | None = None
    """[B, D] normalised, of the mirrored states, where the task has a symmetry to learn from."""
    mirror_action: Tensor | None = None
    """The mirrored actions, as `action`."""
    originals: int | None = field(default=None, init=False)
    """Rows in front that were played, before their mirrored copies; None: all."""


class PackedRows:
    """The columns of a rollout side by side in one float32 matrix, one row per sample: a random
    minibatch is then one gather instead of one per column. float32 holds flags and integers up to
    2**24 exactly. Bytes are moved four to a float32, as they are: images keep their size.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """columns: name -> [T, N] or [T, N, D], an example of what `pack` will get."""
        self.places: dict[str, int | slice] = {}
        stored = {name: unscaled(column) for name, column in columns.items()}
        self.integers = {name for name, column in stored.items() if column.dtype == torch.int64}
        # name -> bytes of a row
        self.bytes = {
            name: column.shape[2]
            for name, column in stored.items()
            if column.dtype == torch.uint8 and column.dim() == 3
        }
        width = 0
        for name, column in stored.items():
            if column.dim() == 2:
                self.places[name] = width
                width += 1
            else:
                size = column.shape[2]
                if name in self.bytes:
                    size = -(-size // FLOAT_BYTES)
                self.places[name] = slice(width, width + size)
                width += size
        self.width = width + -width % ALIGNMENT

    def pack(self, columns: Mapping[str, Column]) -> Tensor:
        """[T N, width] float32; row t N + n is step t of environment n."""
        return pack_rows(
            [
                bytes_as_floats(unscaled(column)) if name in self.bytes else column
                for name, column in ((name, columns[name]) for name in self.places)
            ],
            self.width,
        )

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """name -> [...] or [..., D] of rows [..., width]: int64 columns are converted back, bytes
        are uint8 views, others float32 views.
        """
        columns = {name: rows[..., place] for name, place in self.places.items()}
        images = {name: columns[name].view(torch.uint8)[..., :n] for name, n in self.bytes.items()}
        return columns | {name: columns[name].long() for name in self.integers} | images


def bytes_as_floats(column: Tensor) -> Tensor:
    """[T, N, D] uint8 -> [T, N, D / 4, rounded up] float32 of the same bits, which only copies may
    handle; a view if 4 divides D.
    """
    if missing := -column.shape[2] % FLOAT_BYTES:
        column = functional.pad(column, (0, missing))
    return column.contiguous().view(torch.float32)


class Minibatches:
    """Splits a rollout into `count` minibatches per epoch.

    normalizes: normalise the advantage in each minibatch. random: one stream.

    Of several ranks, each splits its own rollout: a minibatch of all is what the ranks take at the
    same time.
    """

    ranks: Alone = ALONE

    def __init__(self, count: int, normalizes: bool, random: CounterRandom) -> None:
        self.count = count
        self.normalizes = normalizes
        self.random = random
        self.rows = PackedRows({})

    def pack(self, columns: Mapping[str, Column]) -> Tensor:
        """[T N, W] the rows for `of_steps`, of columns [T, N, ...]."""
        self.rows = PackedRows(columns)
        return self.rows.pack(columns)

    def next_order(self) -> RandomStreams:
        """The stream of a new random permutation."""
        self.random.advance()
        return self.random.streams

    def order(self, size: int) -> Tensor:
        """[size] int64, a new random permutation."""
        return permutation(*self.next_order(), 0, size)

    def of_steps(self, packed: Tensor) -> Iterator[dict[str, Tensor]]:
        """The minibatches of an epoch over steps, name -> [B, ...]; a column "valid" becomes
        "weight".
        """
        # a copy of all rows in a new order, which may be modified in place
        rows = gather_rows(packed, *self.next_order(), offset=0, start=0, count=packed.shape[0])
        # computed for all minibatches at once, [count, B, ...]; each minibatch is a view
        columns = self.rows.unpack(rows.unflatten(0, (self.count, -1)))
        self._weigh(columns, (1,))
        for minibatch in zip(*(column.unbind(0) for column in columns.values())):
            yield dict(zip(columns, minibatch))

    def of_envs(self, columns: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The minibatches of an epoch over environments, name -> [T, B, ...] of columns [T, N,
        ...]; "weight" as in `of_steps`.
        """
        num_envs = next(iter(columns.values())).shape[1]
        for index in self.order(num_envs).split(num_envs // self.count):
            minibatch = {name: column.index_select(1, index) for name, column in columns.items()}
            self._weigh(minibatch, (0, 1))
            yield minibatch

    def _weigh(self, columns: dict[str, Tensor], dims: tuple[int, ...]) -> None:
        """Replace "valid" by "weight", whose sum over `dims` is 1, on average over ranks, and
        normalise the advantages over `dims` of all ranks if `normalizes`.
        """
        # rows that are no transitions weigh nothing
        share: Tensor | None = None  # of each row in the mean over this rank's
        number: Tensor | None = None  # of valid rows, where other ranks have some too
        if "valid" in columns:
            valid = columns.pop("valid").float()
            total = valid.sum(dims, keepdim=True)
            number = total.clone() if self.ranks.count > 1 else None
            share = valid.div_(total.clamp_(min=1.0))
            columns["weight"] = share
            if number is not None:
                # every row of all ranks weighs the same: a rank with fewer of them weighs less
                mean_number = self.ranks.average(number)
                columns["weight"] = share * (number / mean_number.clamp(min=1.0 / self.ranks.count))
        # to weighted mean 0 and variance 1
        if self.normalizes:
            advantage = columns["advantage"]
            if share is None:
                variance, mean = torch.var_mean(advantage, dims, correction=0, keepdim=True)
            else:
                mean = (advantage * share).sum(dims, keepdim=True)
                variance = ((advantage - mean).square() * share).sum(dims, keepdim=True)
            if self.ranks.count > 1:
                numbers = torch.ones_like(mean) if number is None else number
                of_ranks = self.ranks.stack(torch.stack((numbers, mean, variance)))
                _, mean, variance = pooled_moments(*of_ranks.unbind(1))
            advantage.sub_(mean).div_(variance.sqrt() + 1e-8)
