"""Modified SAC (ElegantRL, 2022): the better the critics, the more often the actor is updated; it
has a target network too. ElegantRL has changed its AgentModSAC since: eight critics, whose mean the
actor maximises, a temperature that begins at exp(-1), a target entropy of -log(actions).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.off_policy import Batch
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.checks import check_numbers
from gpurl.errors import UsageError
from gpurl.losses import row_share

LOSS_DECAY = 0.995
INITIAL_LOSS = math.sqrt(math.log(2.0))  # reliability starts at one half


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
                f"mod_sac decides by itself when the actor is updated: leave out policy_delay "
                f"{self.policy_delay}"
            )


class ModSAC(SAC):
    """SAC with an adaptive two-timescale rule (TTUR).

    c is the running mean of a critic's loss, in units of scaled rewards squared; reliability =
    exp(-c^2). After u updates of the critics and a of the actor in an iteration the actor is
    updated if a / u < 1 / (2 - reliability): with every update when the critics are perfect, with
    every second one when they are useless. Steps skipped because they are not finite count in u and
    in a too.
    """

    config: ModSACConfig
    has_target_actor = True
    log_temperature_limits = (-16.0, 2.0)
    loss_mean: Tensor  # 0-d
    actor_updates: Tensor  # 0-d: of this iteration
    is_due: Tensor  # 0-d bool: whether the actor is updated now

    def make_networks(self) -> None:
        super().make_networks()
        self.register_buffer("loss_mean", torch.tensor(INITIAL_LOSS))
        self.register_buffer("actor_updates", torch.zeros(()))

    def update_step(self, batch: Batch, number: int) -> Metrics:
        metrics = self.critic_step(batch, move_target=True)
        if self.warms_critic:
            return metrics
        # how good the critics are; a loss that is not finite would stay in the mean for good
        loss = self.ranks.average(metrics["critic_loss"]) / self.config.num_critics
        change = torch.nan_to_num(loss - self.loss_mean, 0.0, 0.0, 0.0)
        self.loss_mean.add_(change, alpha=1.0 - LOSS_DECAY)
        reliability = self.loss_mean.square().neg().exp()
        # whether it is the actor's turn
        if number == 0:
            self.actor_updates.zero_()
        # a / u < 1 / (2 - reliability), as a - a reliability / 2 < u / 2: one launch fewer
        half = torch.addcmul(self.actor_updates, self.actor_updates, reliability, value=-0.5)
        self.is_due = half < 0.5 * (number + 1)
        self.actor_updates += self.is_due
        return metrics | self.actor_step(batch) | {"reliability": reliability}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """SAC's with std_penalty times the variance over the batch of each log standard deviation,
        averaged over actions.
        """
        output = self.actor_output(batch["obs"])
        share = row_share(batch["weight"])
        loss, metrics = self.soft_actor_loss(batch["obs"], output, share)
        log_std = output.chunk(2, dim=1)[1]
        # the gradient of a variance by its mean is 0
        mean = self.ranks.average(share @ log_std.detach())
        variance = (log_std - mean).square().mean(1).dot(share)
        return torch.add(loss, variance, alpha=self.config.std_penalty), metrics

    def actor_optimizer_step(self, loss: Tensor) -> Tensor:
        """A step that is not due gets an infinite loss, so the optimiser changes nothing and the
        host need not know. It does not count as skipped, and its norm is 0.
        """
        optimizer = self.optimizers["actor"]
        counts, before = optimizer.skipped.counts, optimizer.skipped.counts.clone()
        norm = optimizer.step(loss, loss.detach() / self.is_due, of=self.actor_loss)
        torch.where(self.is_due, counts, before, out=counts)
        # False is the 0 for a step that is not due
        return torch.where(self.is_due, norm, self.is_due)
