"""Modified SAC (ElegantRL, 2022): the actor moves the more often the better the critics are, and
has a target of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.off_policy import Batch
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.checks import check_numbers
from gpurl.errors import UsageError

LOSS_DECAY, FIRST_LOSS = 0.995, math.sqrt(math.log(2.0))  # at which reliability starts at one half


@dataclass(frozen=True)
class ModSACConfig(SACConfig):
    """Settings of ModSAC."""

    std_penalty: float = 2.0**-4
    """Weight of the variance of the log standard deviations over a batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"std_penalty": 0})
        if self.policy_delay != 1:
            raise UsageError(
                f"mod_sac decides by itself when the actor moves: leave out policy_delay "
                f"{self.policy_delay}"
            )


class ModSAC(SAC):
    """SAC with an adaptive two-timescale rule (TTUR).

    c is the running mean of the critics' loss, in units of scaled rewards squared; reliability =
    exp(-c^2). After u updates of the critics in an iteration the actor has moved a times; it moves
    if a / u < 1 / (2 - reliability): at every update when the critics are perfect, at every second
    one when they are hopeless. A step that is left out because it is not finite counts in u and in
    a like any other.
    """

    config: ModSACConfig
    has_target_actor = True
    temperature_limits = (-16.0, 2.0)
    loss_mean: Tensor  # 0-d
    moves: Tensor  # 0-d: of the actor in this iteration
    is_due: Tensor  # 0-d bool: whether the actor moves now

    def make_networks(self) -> None:
        super().make_networks()
        self.register_buffer("loss_mean", torch.tensor(FIRST_LOSS))
        self.register_buffer("moves", torch.zeros(()))

    def update_step(self, batch: Batch, number: int) -> tuple[Metrics, Tensor]:
        metrics, error = self.critic_step(batch, move_target=True)
        loss = metrics["critic_loss"]  # one that is not finite would stay in the mean for good
        is_finite = loss.abs() < math.inf
        self.loss_mean.lerp_(torch.where(is_finite, loss, self.loss_mean), 1.0 - LOSS_DECAY)
        if number == 0:
            self.moves.zero_()
        reliability = self.loss_mean.square().neg().exp()
        self.is_due = self.moves * (2.0 - reliability) < number + 1
        self.moves += self.is_due
        return metrics | self.actor_step(batch) | {"reliability": reliability}, error

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """With the variance of the log standard deviations: the mean over all of (x - mean x)^2, x
        of one action over the batch.
        """
        output = self.actor(batch["obs"]).squeeze(0)
        loss, metrics = self.soft_loss(batch["obs"], output)
        log_std = output.chunk(2, dim=1)[1]
        mean = log_std.detach().mean(0).expand_as(log_std)  # by which the variance has no slope
        variance = functional.mse_loss(log_std, mean)
        return torch.add(loss, variance, alpha=self.config.std_penalty), metrics

    def move_actor(self, loss: Tensor) -> Tensor:
        """Where the step is not due the optimiser is given an infinite loss, and so changes
        nothing: the host need not know. Such a step does not count as skipped, and its norm is 0.
        """
        optimizer = self.optimizers["actor"]
        counts, before = optimizer.skipped.counts, optimizer.skipped.counts.clone()
        norm = optimizer.step(loss, loss.detach() / self.is_due, of=self.actor_loss)
        torch.where(self.is_due, counts, before, out=counts)
        return torch.where(self.is_due, norm, 0.0)
