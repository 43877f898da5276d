"""Running statistics kept on the device, inside the policy, so that a checkpoint can never lose
them.
"""

import torch
from torch import Tensor, nn

from gpurl.kernels.moments import normalize, normalize_reference, update_moments


class Normalizer(nn.Module):
    """Running mean and variance of [..., D] data. Frozen while a rollout is collected and trained
    on; `update` moves it in between.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    inv_std: Tensor

    def __init__(self, size: int, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer(
            "shift", torch.zeros(size)
        )  # what is applied: float32 copies made once an update
        self.register_buffer("inv_std", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> (x - mean) / std, clipped."""
        # a trace holds what it sees torch do, and of a kernel its result only
        function = normalize_reference if torch.jit.is_tracing() else normalize
        return function(x, self.shift, self.inv_std, self.clip)

    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Take x [..., D] in; rows where valid [...] is False are left out."""
        update_moments(
            self.mean,
            self.variance,
            self.count,
            x.reshape(-1, x.shape[-1]),
            None if valid is None else valid.reshape(-1),
        )
        self.shift.copy_(self.mean)
        self.inv_std.copy_((self.variance + self.epsilon).rsqrt())


class ValueNormalizer(Normalizer):
    """Lets the critic predict returns of mean 0 and variance 1, whatever the rewards' scale. Values
    outside are true returns.
    """

    def __init__(self) -> None:
        super().__init__(1, clip=float("inf"))

    def normalized(self, value: Tensor) -> Tensor:
        """[...] true returns -> the critic's scale."""
        return (value - self.shift).mul_(self.inv_std)

    def denormalized(self, value: Tensor) -> Tensor:
        """[...] the critic's numbers -> true returns."""
        return value / self.inv_std + self.shift
