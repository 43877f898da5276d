"""Modified SAC (ElegantRL, 2022): the actor moves the more often the better the critics are, and
has a target of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.checks import check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.backend import host_may_look
from gpurl.kernels.squash import squashed_sample

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
    due: Tensor  # 0-d bool: whether the actor moves now

    def make_networks(self) -> None:
        super().make_networks()
        self.register_buffer("loss_mean", torch.tensor(FIRST_LOSS))
        self.register_buffer("moves", torch.zeros(()))

    def learn_from(
        self, batch: dict[str, Tensor], number: int, wants_parts: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        parts, error = self.critic_step(batch, move_target=True)
        loss = parts["critic_loss"]  # one that is not finite would stay in the mean for good
        self.loss_mean.lerp_(torch.where(loss.isfinite(), loss, self.loss_mean), 1.0 - LOSS_DECAY)
        if number == 0:
            self.moves.zero_()
        reliability = self.loss_mean.square().neg().exp()
        due = self.moves / (number + 1) < 1.0 / (2.0 - reliability)
        self.moves += due
        self.due = due
        parts |= self.actor_step(batch["obs"], wants_parts)
        return parts | ({"reliability": reliability} if wants_parts else {}), error

    def actor_step(self, obs: Tensor, wants_parts: bool) -> dict[str, Tensor]:
        if wants_parts or not host_may_look(self.device) or self.due:
            return super().actor_step(obs, wants_parts)
        drawn = squashed_sample(
            self.actor.forward(obs)[0], self.update_random.normal((self.num_actions,))
        )
        return self.temperature_step(-drawn.log_prob.mean(), wants_parts)

    def penalized(self, gradient: Tensor, output: Tensor) -> Tensor:
        """With the variance of the log standard deviations: the mean over all of (x - mean x)^2, x
        of one action over the batch.
        """
        log_std = output[:, self.num_actions :]
        slope = (log_std - log_std.mean(0)) * (2.0 * self.config.std_penalty / log_std.numel())
        return torch.cat(
            (gradient[:, : self.num_actions], gradient[:, self.num_actions :] + slope), 1
        )

    def move_actor(self) -> Tensor:
        return self.optimizers["actor"].step_along_gradient(wanted=self.due)
