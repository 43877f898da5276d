"""The memory of a recurrent policy, before the hidden layers of actor and critic: a step at a time
while acting, unrolled over a rollout for the update.
"""

from abc import abstractmethod

from torch import Tensor, nn


class Memory(nn.Module):
    """From observations to features [N, F] of `size` F, by a state [N, S] that is zeros where an
    episode begins.
    """

    size: int  # F
    state_size: int  # S

    @abstractmethod
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: x [N, D], state [N, S] before it -> (features [N, F], next state [N, S])."""

    @abstractmethod
    def unroll(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """x: [T, N, D]; state: [N, S] before the first step; starts: [T, N] bool, where the state
        is emptied before the step -> features [T, N, F].
        """

    @abstractmethod
    def to_torch(self) -> nn.Module:
        """What `forward` computes, in torch's own modules with copies of the weights."""
