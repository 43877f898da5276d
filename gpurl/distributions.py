"""Policy heads: what the numbers of the actor network mean for an action space. No torch.distributions: they cost more than the formulas.

Actions inside are in the head's own units ([-1, 1] spans a bounded Box); `to_env` gives what the environment receives.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom

LOG_2PI = math.log(2.0 * math.pi)
Array = Any  # a Tensor or a numpy array
Backward = Callable[[Array, Array], Array]  # (d loss / d log_prob [B], d loss / d entropy) -> d loss / d output [B, num_outputs]


class Head(nn.Module):
    """A family of distributions over one action space. `output` is [..., num_outputs] from the actor network."""

    num_outputs: int

    @abstractmethod
    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        """(action [N, ...], its log-probability [N])."""

    @abstractmethod
    def evaluate(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Backward]:
        """(log-probability [...] of `action`, which `sample` gave; entropy in nats, [...] or 0-d where it is the same for all; backward).

        `backward` takes the derivatives of a loss by the two and gives that by `output`; those of the head's own parameters it writes into
        their `.grad`. It is for flat batches [B], and at most once.
        """

    def log_prob(self, output: Tensor, action: Tensor) -> Tensor:
        """[...] log-probability of `action`."""
        return self.evaluate(output, action)[0]

    @abstractmethod
    def mode(self, output: Tensor) -> Tensor:
        """The greedy action."""

    def to_env(self, action: Tensor) -> Tensor:
        """What the environment receives for `action`."""
        return action


class Gaussian(Head):
    """Diagonal normal with a log standard deviation that no state changes; clipped on the way to the environment, not before."""

    center: Tensor
    half_width: Tensor

    def __init__(self, space: Box, initial_std: float = 1.0, min_log_std: float = -5.0, max_log_std: float = 2.0) -> None:
        super().__init__()
        self.num_outputs = math.prod(space.shape)
        self.shape = space.shape
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), math.log(initial_std)))
        self.min_log_std, self.max_log_std = min_log_std, max_log_std
        low, high = space.low.flatten(), space.high.flatten()
        self.bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
        self.is_unit_box = self.bounded and bool((low == -1).all() and (high == 1).all())
        center, half_width = ((low + high) / 2, (high - low) / 2) if self.bounded else (np.zeros_like(low), np.ones_like(low))
        self.register_buffer("center", torch.tensor(center.tolist()), persistent=False)
        self.register_buffer("half_width", torch.tensor(half_width.tolist()), persistent=False)

    def bounded_log_std(self) -> Tensor:
        """[A] log standard deviation inside its limits, so that no policy collapses or explodes."""
        return self.log_std.clamp(self.min_log_std, self.max_log_std)

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        log_std = self.bounded_log_std()
        noise = rng.normal((self.num_outputs,))
        action = torch.addcmul(output, noise, log_std.exp())
        log_prob = noise.square().sum(-1).mul_(-0.5).sub_(log_std.sum() + 0.5 * LOG_2PI * self.num_outputs)
        return action, log_prob

    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        """As `Head.evaluate`, for tensors or numpy arrays."""
        xp: Any = torch if isinstance(output, Tensor) else np
        own: Any = (self.bounded_log_std(), self.log_std, self.log_std.grad)
        log_std, unbounded, gradient = own if xp is torch else (x.detach().numpy() for x in own)
        inv_std, entropy = xp.exp(-log_std), log_std.sum() + 0.5 * (1.0 + LOG_2PI) * self.num_outputs
        z = (action - output) * inv_std
        log_prob = (0.5 * self.num_outputs - entropy) - 0.5 * (z * z).sum(-1)

        def backward(log_prob_slope: Array, entropy_slope: Array) -> Array:
            weighted = log_prob_slope[..., None] * z
            slope = (weighted * z).sum(0) + (entropy_slope.sum() - log_prob_slope.sum())
            xp.multiply(slope, log_std == unbounded, out=gradient)  # at a limit of log_std nothing moves it
            return weighted * inv_std

        return log_prob, entropy, backward

    def mode(self, output: Tensor) -> Tensor:
        return output

    def to_env(self, action: Tensor) -> Tensor:
        if self.bounded:
            action = action.clamp(-1.0, 1.0)
            if not self.is_unit_box:
                action = torch.addcmul(self.center, action, self.half_width)
        return action.unflatten(-1, self.shape) if len(self.shape) != 1 else action


class TanhGaussian(Gaussian):
    """Gaussian `u` squashed by tanh; the action inside is u itself, so nothing ever goes through atanh.

    log p(tanh u) = log N(u) - sum 2 (log 2 - u - softplus(-2u))   (Haarnoja et al. 2018, appendix C, in its stable form)
    """

    def __init__(self, space: Box, initial_std: float = 1.0) -> None:
        super().__init__(space, initial_std)
        if not self.bounded:
            raise UsageError(f"a tanh-squashed policy needs a bounded Box action space, this one is {space}")

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        action, log_prob = super().sample(output, rng)
        return action, log_prob - self._log_slope(action)

    def evaluate(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Backward]:
        """The entropy is the Gaussian's plus the mean log slope at the mode: the squashed one has no closed form."""
        log_prob, entropy, gaussian_backward = super().evaluate(output, action)

        def backward(log_prob_slope: Tensor, entropy_slope: Tensor) -> Tensor:
            gradient = gaussian_backward(log_prob_slope, entropy_slope)
            return gradient.addcmul_(entropy_slope.unsqueeze(-1), output.tanh(), value=-2.0)  # tanh's log slope has the slope -2 tanh

        return log_prob - self._log_slope(action), entropy + self._log_slope(output), backward

    def to_env(self, action: Tensor) -> Tensor:
        return super().to_env(action.tanh())

    @staticmethod
    def _log_slope(u: Tensor) -> Tensor:
        return (2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))).sum(-1)


class Categorical(Head):
    """One of n actions, int64 [N]; sampled by the Gumbel maximum, which needs no host sync."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_outputs = num_actions

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        gumbel = (rng.uniform(0.0, 1.0, (self.num_outputs,)) + 2.0**-25).log_().neg_().log_().neg_()
        action = (output + gumbel).argmax(-1)
        return action, self.log_prob(output, action)

    def evaluate(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Backward]:
        log_probs, index = output.log_softmax(-1), action.unsqueeze(-1)
        probability = log_probs.exp()
        entropy = -(probability * log_probs).sum(-1)

        def backward(log_prob_slope: Tensor, entropy_slope: Tensor) -> Tensor:
            of_log_prob, of_entropy = log_prob_slope.unsqueeze(-1), entropy_slope.unsqueeze(-1)
            gradient = probability * -(of_log_prob + of_entropy * (log_probs + entropy.unsqueeze(-1)))
            return gradient.scatter_add_(-1, index, of_log_prob)

        return log_probs.gather(-1, index).squeeze(-1), entropy, backward

    def mode(self, output: Tensor) -> Tensor:
        return output.argmax(-1)


class MultiCategorical(Head):
    """K independent choices, int64 [N, K]; `num_actions[k]` actions each."""

    def __init__(self, num_actions: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Categorical(n) for n in num_actions)
        self.num_actions = num_actions
        self.num_outputs = sum(num_actions)

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        pairs = [part.sample(logits, rng) for part, logits in self._split(output)]
        return torch.stack([action for action, _ in pairs], dim=-1), torch.stack([log_prob for _, log_prob in pairs]).sum(0)

    def evaluate(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Backward]:
        parts = [part.evaluate(logits, action[..., k]) for k, (part, logits) in enumerate(self._split(output))]

        def backward(log_prob_slope: Tensor, entropy_slope: Tensor) -> Tensor:
            return torch.cat([of_part(log_prob_slope, entropy_slope) for _, _, of_part in parts], dim=-1)

        return (
            torch.stack([log_prob for log_prob, _, _ in parts]).sum(0),
            torch.stack([entropy for _, entropy, _ in parts]).sum(0),
            backward,
        )

    def mode(self, output: Tensor) -> Tensor:
        return torch.stack([part.mode(logits) for part, logits in self._split(output)], dim=-1)

    def _split(self, output: Tensor) -> list[tuple[Head, Tensor]]:
        return list(zip(self.parts, output.split(self.num_actions, dim=-1)))  # type: ignore[arg-type]


def make_head(space: gymnasium.Space, squash: bool = False, initial_std: float = 1.0, algorithm: str = "this algorithm") -> Head:
    """The head for `space`; UsageError names the space where there is none."""
    if isinstance(space, Box):
        return (TanhGaussian if squash else Gaussian)(space, initial_std)
    if isinstance(space, Discrete):
        if space.start != 0:
            raise UsageError(f"{algorithm} numbers actions from 0, this space is {space}")
        return Categorical(int(space.n))
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(tuple(int(n) for n in space.nvec.flatten()))
    raise UsageError(f"{algorithm} needs a Box, Discrete or MultiDiscrete action space, this one is {space}")
