"""Squashed actions of an actor that gives mean and log standard deviation of each state; drawing, log-probability, and the way back.

a = tanh(u), u = mean + exp(log_std) noise;   log p(a) = sum log N(u) - 2 (log 2 - u - softplus(-2u))
(Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", appendix C, in its stable form). The gradient goes along u with the
noise kept (the reparametrisation of their equation 11).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

LOG_STD_LIMITS = (-5.0, 2.0)  # of the log standard deviation; beyond them a gradient of draws moves it no more
LARGEST_ACTION = 1.0 - 1e-6  # of those that somebody else took: 1 itself is infinitely far out


class Squashed(NamedTuple):
    """A drawn action and what its way back needs."""

    action: Tensor  # [B, A] in (-1, 1)
    log_prob: Tensor  # [B]
    step: Tensor  # [B, A]: exp(log_std) noise
    is_free: Tensor  # [B, A]: where log_std is within its limits


def squashed_sample(output: Tensor, noise: Tensor) -> Squashed:
    """output: [B, 2A], means before log standard deviations; noise: [B, A] standard normal."""
    (mean, unlimited), noise = output.chunk(2, dim=-1), noise.to(output.dtype)
    log_std = unlimited.clamp(*LOG_STD_LIMITS)
    step = log_std.exp() * noise
    u = mean + step
    log_density = noise.square() * -0.5 - log_std - 0.5 * math.log(2.0 * math.pi)
    log_slope = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))
    return Squashed(u.tanh(), (log_density - log_slope).sum(-1), step, log_std == unlimited)


def squashed_backward(drawn: Squashed, action_slope: Tensor, log_prob_slope: Tensor | float) -> Tensor:
    """The derivative of a loss by `output` [B, 2A], from those by the action [B, A] and by its log-probability, [B, 1] or one number."""
    action = drawn.action
    of_u = action_slope * (1.0 - action * action) + 2.0 * log_prob_slope * action
    of_log_std = (of_u * drawn.step - log_prob_slope) * drawn.is_free
    return torch.cat((of_u, of_log_std), -1)


def squashed_mode(output: Tensor) -> Tensor:
    """[B, A] the action of the mean."""
    return output.chunk(2, dim=-1)[0].tanh()


def squashed_likelihood(output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [B] of the actions [B, A] that others took, its derivative by `output` [B, 2A]).

    Actions count as at most 1 - 1e-6, where atanh is finite. A log_std beyond its limits is led back by the derivative, never further out.
    """
    mean, unlimited = output.chunk(2, dim=-1)
    log_std = unlimited.clamp(*LOG_STD_LIMITS)
    inv_std = log_std.neg().exp()
    u = action.clamp(-LARGEST_ACTION, LARGEST_ACTION).atanh()
    z = (u - mean) * inv_std
    log_slope = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))
    log_prob = (z.square() * -0.5 - log_std - 0.5 * math.log(2.0 * math.pi) - log_slope).sum(-1)
    of_log_std, way_back = z.square() - 1.0, log_std - unlimited
    moves = (way_back == 0.0) | (of_log_std * way_back > 0.0)
    return log_prob, torch.cat((z * inv_std, of_log_std * moves), -1)
