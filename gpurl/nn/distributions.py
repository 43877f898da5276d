"""Action heads: the distribution over actions that the outputs of the actor network define. Without
torch.distributions, which costs more than the formulas.

Heads compute in the policy's units ([-1, 1] spans a bounded Box); `to_env` converts to the
environment's.
"""

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from gpurl.buffers.minibatches import Minibatch
from gpurl.errors import UsageError
from gpurl.kernels.backend import use_triton
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.ppo_loss import METRICS, PpoOptions, fused_ppo_loss
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.sample import MAX_COLUMNS, categorical_sample_triton, gaussian_sample_triton
from gpurl.losses import ppo_loss
from gpurl.nn.acting import Best, BestOfEach, chain
from gpurl.nn.action_scaler import ActionScaler

LOG_2PI = math.log(2.0 * math.pi)
LOG_STD_LIMITS = (-5.0, 2.0)  # keep the policy from collapse and divergence


class Head(nn.Module):
    """A family of distributions over one action space. `output` is [..., num_outputs] from the
    actor network.
    """

    num_outputs: int

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute this distribution; a subclass may define another one."""
        return type(self) in (Gaussian, Categorical)

    @abstractmethod
    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        """(action [N, ...], its log-probability [N]) for output [N, num_outputs]."""

    @abstractmethod
    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability [...] of a sampled `action`; entropy in nats, [...], or 0-d if it is the
        same in all states), both differentiable.
        """

    def log_prob(self, output: Tensor, action: Tensor) -> Tensor:
        """[...] log-probability of `action`."""
        return self.log_prob_and_entropy(output, action)[0]

    def decide(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor, Tensor]:
        """(action, its log-probability, the environment's action) of `sample` and `to_env`."""
        action, log_prob = self.sample(output, rng)
        return action, log_prob, self.to_env(action)

    def _is_sampled_by_kernel(self, output: Tensor) -> bool:
        return self.has_kernels and self.num_outputs <= MAX_COLUMNS and use_triton(output)

    def ppo_loss(
        self,
        output: Tensor,
        value: Tensor,
        batch: Minibatch,
        clip_range: Tensor,
        entropy_coef: Tensor,
        value_coef: float,
        clip_range_value: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`gpurl.losses.ppo_loss` of this policy; one kernel on a GPU."""
        if self.has_kernels and use_triton(output):
            log_std, limits = self._log_std_and_limits()
            options = PpoOptions(value_coef, clip_range_value, *limits)
            loss, parts = fused_ppo_loss(
                output, log_std, value, batch, clip_range, entropy_coef, options
            )
            return loss, dict(zip(METRICS, parts.unbind()))
        log_prob, entropy = self.log_prob_and_entropy(output, batch.action)
        numbers = clip_range, entropy_coef, value_coef, clip_range_value
        return ppo_loss(log_prob, value, entropy, batch, *numbers)

    def _log_std_and_limits(self) -> tuple[Tensor | None, tuple[float, float]]:
        """(log_std, its limits) of a Gaussian, for the kernel of the loss."""
        return None, (0.0, 0.0)

    @abstractmethod
    def mode(self, output: Tensor) -> Tensor:
        """The greedy action."""

    def to_env(self, action: Tensor) -> Tensor:
        """The environment's action for `action`."""
        return action

    @abstractmethod
    def to_torch(self) -> nn.Module:
        """The environment's greedy action of `output`, in torch's own modules."""


class Gaussian(Head):
    """Diagonal normal distribution with a state-independent log standard deviation. Only the
    environment's action is clipped.
    """

    def __init__(
        self, space: Box, initial_std: float = 1.0, limits: tuple[float, float] = LOG_STD_LIMITS
    ) -> None:
        super().__init__()
        if not limits[0] <= math.log(initial_std) <= limits[1]:
            raise UsageError(
                f"initial_std must be from {math.exp(limits[0]):.2g} to {math.exp(limits[1]):.2g}, "
                f"between which the deviation stays, got {initial_std}"
            )
        self.num_outputs = math.prod(map(int, space.shape))
        self.box = ActionScaler(space)
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), math.log(initial_std)))
        self.min_log_std, self.max_log_std = limits

    def bounded_log_std(self) -> Tensor:
        """[A] log standard deviation inside its limits."""
        return self.log_std.clamp(self.min_log_std, self.max_log_std)

    def clamp_log_std_(self) -> None:
        """Clamp the parameter to its limits. Beyond them it has no gradient, so momentum that moved
        it there would keep it there.
        """
        with torch.no_grad():
            self.log_std.clamp_(self.min_log_std, self.max_log_std)

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        log_std = self.bounded_log_std()
        noise = rng.normal((self.num_outputs,))
        action = output + noise * log_std.exp()
        log_volume = log_std.sum() + 0.5 * LOG_2PI * self.num_outputs
        return action, -0.5 * noise.square().sum(-1) - log_volume

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_std = self.bounded_log_std()
        entropy = log_std.sum() + 0.5 * (1.0 + LOG_2PI) * self.num_outputs
        z = (action - output) * (-log_std).exp()
        log_prob = (0.5 * self.num_outputs - entropy) - 0.5 * z.square().sum(-1)
        return log_prob, entropy

    def decide(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor, Tensor]:
        if not self._is_sampled_by_kernel(output):
            return super().decide(output, rng)
        streams = RandomStreams(rng.key, rng.gamma, rng.step)
        action, log_prob, env_action = gaussian_sample_triton(
            output, self.bounded_log_std(), self.box.units, streams, rng.offset
        )
        return action, log_prob, self.box.shaped(env_action)

    def _log_std_and_limits(self) -> tuple[Tensor | None, tuple[float, float]]:
        return self.log_std, (self.min_log_std, self.max_log_std)

    def mode(self, output: Tensor) -> Tensor:
        return output

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def to_torch(self) -> nn.Module:
        return copy.deepcopy(self.box)


class TanhGaussian(Gaussian):
    """Gaussian `u` squashed by tanh. The stored action is u, so atanh is never needed.

    log p(tanh u) = log N(u) - sum 2 (log 2 - u - softplus(-2u))   (Haarnoja et al. 2018, appendix
    C, in its stable form)
    """

    def __init__(self, space: Box, initial_std: float = 1.0) -> None:
        super().__init__(space, initial_std)
        self.box.require_bounds("a tanh-squashed policy")

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        action, log_prob = super().sample(output, rng)
        return action, log_prob - self._log_derivative(action)

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The entropy H(u) + E[log tanh'(u)] has no closed form; each row estimates it from its own
        action.

        Over actions of the policy the estimate is unbiased, and so is its gradient, which is
        taken along u = output + std z with z fixed.
        """
        log_prob, entropy = super().log_prob_and_entropy(output, action)
        std = self.bounded_log_std().exp()
        z = ((action - output) / std).detach()
        return log_prob - self._log_derivative(action), entropy + self._log_derivative(
            output + std * z
        )

    def to_env(self, action: Tensor) -> Tensor:
        return super().to_env(action.tanh())

    def to_torch(self) -> nn.Module:
        return chain(nn.Tanh(), super().to_torch())

    @staticmethod
    def _log_derivative(u: Tensor) -> Tensor:
        return (2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))).sum(-1)


class Categorical(Head):
    """One of n actions, int64 [N]; sampled by the Gumbel maximum, which needs no host sync."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_outputs = num_actions

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        uniform = rng.uniform(0.0, 1.0, (self.num_outputs,))
        uniform = uniform * (1.0 - 2.0**-24) + 2.0**-25  # never 0, and never 1 after rounding
        action = (output - (-uniform.log()).log()).argmax(-1)
        return action, self.log_prob(output, action)

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = output.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return self._of_action(log_probs, action), entropy

    def log_prob(self, output: Tensor, action: Tensor) -> Tensor:
        return self._of_action(output.log_softmax(-1), action)

    @staticmethod
    def _of_action(log_probs: Tensor, action: Tensor) -> Tensor:
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def decide(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor, Tensor]:
        if not self._is_sampled_by_kernel(output):
            return super().decide(output, rng)
        streams = RandomStreams(rng.key, rng.gamma, rng.step)
        action, log_prob = categorical_sample_triton(output, streams, rng.offset)
        return action, log_prob, action

    def mode(self, output: Tensor) -> Tensor:
        return output.argmax(-1)

    def to_torch(self) -> nn.Module:
        return Best()


class MultiCategorical(Head):
    """K independent choices, int64 [N, K]; `num_actions[k]` actions each."""

    def __init__(self, num_actions: tuple[int, ...]) -> None:
        super().__init__()
        self.heads = [Categorical(n) for n in num_actions]
        self.num_outputs = sum(num_actions)
        # columns of each choice in the actor's output
        ends = list(itertools.accumulate(num_actions))
        self.columns = [slice(end - n, end) for end, n in zip(ends, num_actions)]

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        pairs = [head.sample(logits, rng) for head, logits in self._split(output)]
        actions, log_probs = zip(*pairs)
        return torch.stack(actions, -1), torch.stack(log_probs).sum(0)

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [
            head.log_prob_and_entropy(logits, choice)
            for (head, logits), choice in zip(self._split(output), action.unbind(-1))
        ]
        log_probs, entropies = zip(*pairs)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def mode(self, output: Tensor) -> Tensor:
        return torch.stack([head.mode(logits) for head, logits in self._split(output)], -1)

    def to_torch(self) -> nn.Module:
        return BestOfEach(tuple(head.num_outputs for head in self.heads))

    def _split(self, output: Tensor) -> Iterator[tuple[Categorical, Tensor]]:
        return ((head, output[..., columns]) for head, columns in zip(self.heads, self.columns))


def make_head(
    space: gymnasium.Space,
    squash: bool = False,
    initial_std: float = 1.0,
    algorithm: str = "this algorithm",
) -> Head:
    """The action head for `space`; UsageError for a space without one."""
    if isinstance(space, Box) and space.low.size:
        return (TanhGaussian if squash else Gaussian)(space, initial_std)
    if squash:
        raise UsageError(f"squash is for continuous actions, a Box; this action space is {space}")
    if isinstance(space, Discrete):
        if space.start != 0:
            raise UsageError(f"{algorithm} numbers actions from 0, this space is {space}")
        return Categorical(int(space.n))
    if isinstance(space, MultiDiscrete) and space.nvec.size:
        if space.nvec.ndim != 1 or space.start.any():
            raise UsageError(
                f"{algorithm} numbers choices from 0 and in one row, this space is {space}"
            )
        return MultiCategorical(tuple(int(n) for n in space.nvec))
    raise UsageError(
        f"{algorithm} needs a Box of at least one number, a Discrete or a MultiDiscrete action "
        f"space, this one is {space}"
    )
