"""Running normalisation of observations and returns, kept inside the policy, so that every
checkpoint holds it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gpurl.kernels.moments import (
    RunningMoments,
    batch_moments,
    merge_moments,
    normalize,
    normalize_reference,
    pooled_moments,
    update_moments,
)
from gpurl.kernels.pack_rows import Scaled
from gpurl.nn.acting import Normalize
from gpurl.nn.ranks import ALONE, Alone


class Normalizer(nn.Module):
    """Running mean and variance of [..., D] data; only `update` changes them, once a rollout."""

    ranks: Alone = ALONE  # `update` adds the rows of all of them
    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    inv_std: Tensor

    def __init__(self, size: int, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        self.unknown_from: int | None = None  # see `measure_anew`
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # float32 copies for `forward`
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("inv_std", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> (x - mean) / std, clipped."""
        # a trace records torch operations; a kernel's result would become a constant
        function = normalize_reference if torch.jit.is_tracing() else normalize
        return function(x, self.shift, self.inv_std, self.clip)

    def to_torch(self, size: int) -> Normalize:
        """Normalises the first `size` columns, with statistics of its own that never change."""
        return Normalize(self.shift[:size], self.inv_std[:size], self.clip)

    def scaled(self, column: Tensor) -> Scaled:
        """[T, N, D], or [T, N] for D = 1, to be packed as `forward` gives it."""
        return Scaled(column, self.shift, self.inv_std, self.clip)

    def scaled_as_now(self, column: Tensor) -> Scaled:
        """As `scaled`, whatever `update` does before the packing."""
        return Scaled(column, self.shift.clone(), self.inv_std.clone(), self.clip)

    def measure_anew(self, first: int) -> None:
        """Of the columns from `first` on nothing is known: they begin with the statistics of the
        next rows, whatever `count` is. Mean 0 and variance 1 would weigh as much as true rows.
        """
        self.unknown_from = first

    def update(self, x: Tensor, valid: Tensor | None = None, fixed: int = 0) -> None:
        """Add the rows of x [..., D] where valid [...] is True; the first `fixed` columns keep
        their statistics.
        """
        if fixed >= x.shape[-1]:
            return  # nor does the count know of these rows
        columns = (self.mean, self.variance, self.shift, self.inv_std)
        before = [column[:fixed].clone() for column in columns] if fixed else []
        running = RunningMoments(self.mean, self.variance, self.count, self.shift, self.inv_std)
        rows = x.reshape(-1, x.shape[-1])
        valid = None if valid is None else valid.reshape(-1)
        if self.ranks.count == 1 and self.unknown_from is None:
            update_moments(running, self.epsilon, rows, valid)
        else:
            number, mean, variance = self._moments(rows, valid)
            if (first := self.unknown_from) is not None:
                # merged with their own statistics they stay as they are
                for own, new in ((self.mean, mean), (self.variance, variance)):
                    own[first:] = torch.where(number > 0, new[first:], own[first:])
                self.unknown_from = None
            merge_moments(running, self.epsilon, number, mean, variance)
        for column, saved in zip(columns, before):
            column[:fixed].copy_(saved)

    def _moments(self, rows: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(number, mean [D], variance [D]) of the valid ones of the rows [B, D] of all ranks."""
        number, mean, variance = batch_moments(rows, valid)
        if self.ranks.count == 1:
            return number, mean, variance
        of_ranks = self.ranks.stack(torch.stack((number.expand_as(mean), mean, variance)))
        numbers, mean, variance = pooled_moments(*of_ranks.unbind(1))
        return numbers[0], mean, variance

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Become the statistics of all rows that G normalisers have seen; their `state_dict()`s."""
        count, mean, variance = (
            torch.stack([state[name] for state in states]) for name in ("count", "mean", "variance")
        )
        total, mean, variance = pooled_moments(count.unsqueeze(1).expand_as(mean), mean, variance)
        if not bool(total[0]):
            return  # they are as at the start
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.count.copy_(total[0])
        # as `normalize` takes them
        self.shift.copy_(mean)
        self.inv_std.copy_((variance + self.epsilon).rsqrt())


class ValueNormalizer(Normalizer):
    """Scales returns to mean 0 and variance 1 for the critic, whatever the scale of rewards."""

    def __init__(self) -> None:
        super().__init__(1, clip=float("inf"))

    def denormalized(self, value: Tensor) -> Tensor:
        """[...] the critic's scale -> true returns."""
        return value / self.inv_std + self.shift
