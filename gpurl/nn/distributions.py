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
from gpurl.kernels.backend import use_triton, use_triton_for_members
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.ppo_loss import METRICS, PpoOptions, fused_ppo_loss
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.sample import MAX_COLUMNS, sample_categorical, sample_gaussian
from gpurl.losses import ppo_loss
from gpurl.nn.acting import Best, BestOfEach, BetaMean, FirstHalf, chain
from gpurl.nn.action_scaler import ActionScaler

LOG_2PI = math.log(2.0 * math.pi)
LOG_STD_LIMITS = (-5.0, 2.0)  # keep the policy from collapse and divergence
SOFT_BOUND = 1.1  # of mean actions, where [-1, 1] spans the Box
EDGE = 1e-6  # a Beta's actions keep away from the ends of [0, 1], where densities are 0
GAMMA_TRIES = 8


def _in_triton(output: Tensor) -> bool:
    """Whether kernels compute with it, alone or for all members of a stack."""
    return use_triton(output) or use_triton_for_members(output)


class Head(nn.Module):
    """A family of distributions over one action space. `output` is [..., num_outputs] from the
    actor network.
    """

    num_outputs: int
    actions: str  # how the outputs become actions, see `gpurl.nn.parts.ActorPart`

    @property
    def variant(self) -> str:
        """The option by which the distribution is another than its class has by default, or ""."""
        return ""

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute this distribution; a subclass may define another one."""
        return type(self) in (Gaussian, Categorical) and not self.variant

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
        return self.has_kernels and self.num_outputs <= MAX_COLUMNS and _in_triton(output)

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
        """`gpurl.losses.ppo_loss` of this policy; one kernel on a GPU, if no row is mirrored."""
        if self.has_kernels and batch.originals is None and _in_triton(output):
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

    def state_std(self, output: Tensor) -> Tensor | None:
        """[..., A] standard deviations in the policy's units, where they depend on the state."""
        return None

    def excess(self, output: Tensor) -> Tensor:
        """[...] squared excess of mean actions beyond the bounds, differentiable. UsageError if
        there are no bounds that a mean can exceed.
        """
        raise UsageError(
            f"bounds_coef keeps the mean of normal actions in the bounds of a Box, which "
            f"{type(self).__name__} actions do not exceed: leave it out"
        )

    def to_env(self, action: Tensor) -> Tensor:
        """The environment's action for `action`."""
        return action

    @abstractmethod
    def to_torch(self) -> nn.Module:
        """The environment's greedy action of `output`, in torch's own modules."""


class Gaussian(Head):
    """Diagonal normal distribution. Only the environment's action is clipped.

    The standard deviation is the same in all states, or with state_dependent_std an output of the
    network beside the mean. std_type: what is learned, "log" its logarithm or "scalar" itself, as
    rsl_rl has it. It begins at initial_std, where the network's output is 0.
    """

    actions = "clipped"

    def __init__(
        self,
        space: Box,
        initial_std: float = 1.0,
        limits: tuple[float, float] = LOG_STD_LIMITS,
        std_type: str = "log",
        state_dependent_std: bool = False,
    ) -> None:
        super().__init__()
        if not limits[0] <= math.log(initial_std) <= limits[1]:
            raise UsageError(
                f"initial_std must be from {math.exp(limits[0]):.2g} to {math.exp(limits[1]):.2g}, "
                f"between which the deviation stays, got {initial_std}"
            )
        self.num_actions = math.prod(map(int, space.shape))
        self.num_outputs = 2 * self.num_actions if state_dependent_std else self.num_actions
        self.box = ActionScaler(space)
        self.std_type = std_type
        self.state_dependent_std = state_dependent_std
        self.initial_std = initial_std
        self.min_log_std, self.max_log_std = limits
        if state_dependent_std:
            return
        if std_type == "log":
            self.log_std = nn.Parameter(torch.full((self.num_actions,), math.log(initial_std)))
        else:
            self.std = nn.Parameter(torch.full((self.num_actions,), initial_std))

    @property
    def variant(self) -> str:
        if self.state_dependent_std:
            return "state_dependent_std"
        return "" if self.std_type == "log" else f"std_type {self.std_type}"

    def bounded_log_std(self) -> Tensor:
        """[A] log standard deviation inside its limits, the same in all states."""
        if self.std_type == "log":
            return self.log_std.clamp(self.min_log_std, self.max_log_std)
        return self._log_of(self.std)

    def _log_of(self, std: Tensor) -> Tensor:
        """The logarithm of `std`, inside its limits."""
        return std.clamp(math.exp(self.min_log_std), math.exp(self.max_log_std)).log()

    def mean_and_log_std(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """(mean [..., A], log standard deviation [A] or, if it depends on the state, [..., A])."""
        if not self.state_dependent_std:
            return output, self.bounded_log_std()
        mean, change = output.chunk(2, dim=-1)
        if self.std_type == "scalar":
            return mean, self._log_of(self.initial_std + change)
        log_std = math.log(self.initial_std) + change
        return mean, log_std.clamp(self.min_log_std, self.max_log_std)

    def clamp_log_std_(self) -> None:
        """Clamp the parameter to its limits. Beyond them it has no gradient, so momentum that moved
        it there would keep it there.
        """
        if self.state_dependent_std:
            return
        with torch.no_grad():
            if self.std_type == "log":
                self.log_std.clamp_(self.min_log_std, self.max_log_std)
            else:
                self.std.clamp_(math.exp(self.min_log_std), math.exp(self.max_log_std))

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        mean, log_std = self.mean_and_log_std(output)
        noise = rng.normal((self.num_actions,))
        action = mean + noise * log_std.exp()
        log_volume = log_std.sum(-1) + 0.5 * LOG_2PI * self.num_actions
        return action, -0.5 * noise.square().sum(-1) - log_volume

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.mean_and_log_std(output)
        entropy = log_std.sum(-1) + 0.5 * (1.0 + LOG_2PI) * self.num_actions
        z = (action - mean) * (-log_std).exp()
        log_prob = (0.5 * self.num_actions - entropy) - 0.5 * z.square().sum(-1)
        return log_prob, entropy

    def decide(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor, Tensor]:
        if not self._is_sampled_by_kernel(output):
            return super().decide(output, rng)
        streams = RandomStreams(rng.key, rng.gamma, rng.step)
        action, log_prob, env_action = sample_gaussian(
            output, self.bounded_log_std(), self.box.units, streams, rng.offset
        )
        return action, log_prob, self.box.shaped(env_action)

    def _log_std_and_limits(self) -> tuple[Tensor | None, tuple[float, float]]:
        return self.log_std, (self.min_log_std, self.max_log_std)

    def mode(self, output: Tensor) -> Tensor:
        return output.chunk(2, dim=-1)[0] if self.state_dependent_std else output

    def state_std(self, output: Tensor) -> Tensor | None:
        return self.mean_and_log_std(output)[1].exp() if self.state_dependent_std else None

    def excess(self, output: Tensor) -> Tensor:
        """[...] sum over bounded dimensions of max(|mean| - SOFT_BOUND, 0)^2, in units in which
        [-1, 1] spans the Box: `bound_loss` of rl_games (a2c_continuous.py).
        """
        if not self.box.has_bounds:
            raise UsageError(
                f"bounds_coef keeps mean actions in the bounds of a Box, this one has none: "
                f"{self.box.space}; leave it out"
            )
        excess = (self.mode(output).abs() - SOFT_BOUND).clamp(min=0.0)
        return (excess.square() * self.box.bounded_dims).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def to_torch(self) -> nn.Module:
        scaler = copy.deepcopy(self.box)
        return chain(FirstHalf(), scaler) if self.state_dependent_std else scaler


class TanhGaussian(Gaussian):
    """Gaussian `u` squashed by tanh. The stored action is u, so atanh is never needed.

    log p(tanh u) = log N(u) - sum 2 (log 2 - u - softplus(-2u))   (Haarnoja et al. 2018, appendix
    C, in its stable form)
    """

    actions = "squashed"

    def __init__(
        self,
        space: Box,
        initial_std: float = 1.0,
        limits: tuple[float, float] = LOG_STD_LIMITS,
        std_type: str = "log",
        state_dependent_std: bool = False,
    ) -> None:
        super().__init__(space, initial_std, limits, std_type, state_dependent_std)
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
        mean, log_std = self.mean_and_log_std(output)
        std = log_std.exp()
        z = ((action - mean) / std).detach()
        return log_prob - self._log_derivative(action), entropy + self._log_derivative(
            mean + std * z
        )

    def excess(self, output: Tensor) -> Tensor:
        return Head.excess(self, output)

    def to_env(self, action: Tensor) -> Tensor:
        return super().to_env(action.tanh())

    def to_torch(self) -> nn.Module:
        *first, scaler = chain(super().to_torch())
        return chain(*first, nn.Tanh(), scaler)

    @staticmethod
    def _log_derivative(u: Tensor) -> Tensor:
        return (2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))).sum(-1)


class Beta(Head):
    """Beta distribution of each action between its bounds (Chou et al. 2017, "Improving stochastic
    policy gradients in continuous control with deep reinforcement learning using the Beta
    distribution"): no action is clipped. The greedy action is the mean.

    The network gives [..., 2A], of which softplus + 1 are alpha and beta, above 1: one maximum,
    inside the bounds. Actions are 2 x - 1 for x in (0, 1), EDGE away from its ends.
    """

    actions = "beta"

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.box = ActionScaler(space)
        self.box.require_bounds("a Beta policy")
        self.num_actions = math.prod(map(int, space.shape))
        self.num_outputs = 2 * self.num_actions

    def alpha_beta(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """[..., A] each."""
        alpha, beta = (1.0 + nn.functional.softplus(output)).chunk(2, dim=-1)
        return alpha, beta

    def sample(self, output: Tensor, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        # x = g / (g + h) of gamma variates g and h
        g, h = gamma_sample(1.0 + nn.functional.softplus(output), rng).chunk(2, dim=-1)
        action = 2.0 * (g / (g + h)).clamp(EDGE, 1.0 - EDGE) - 1.0
        return action, self.log_prob(output, action)

    def log_prob_and_entropy(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        alpha, beta = self.alpha_beta(output)
        both = alpha + beta
        # of actions 2 x - 1, hence twice as wide as x
        log_volume = alpha.lgamma() + beta.lgamma() - both.lgamma() + math.log(2.0)
        x = (0.5 * (action + 1.0)).clamp(EDGE, 1.0 - EDGE)
        log_prob = (alpha - 1.0) * x.log() + (beta - 1.0) * (-x).log1p() - log_volume
        entropy = (
            log_volume
            - (alpha - 1.0) * alpha.digamma()
            - (beta - 1.0) * beta.digamma()
            + (both - 2.0) * both.digamma()
        )
        return log_prob.sum(-1), entropy.sum(-1)

    def mode(self, output: Tensor) -> Tensor:
        alpha, beta = self.alpha_beta(output)
        return (alpha - beta) / (alpha + beta)

    def state_std(self, output: Tensor) -> Tensor | None:
        alpha, beta = self.alpha_beta(output)
        both = alpha + beta
        return 2.0 * (alpha * beta / (both + 1.0)).sqrt() / both

    def to_env(self, action: Tensor) -> Tensor:
        return self.box.to_env(action)

    def to_torch(self) -> nn.Module:
        return chain(BetaMean(), copy.deepcopy(self.box))


def gamma_sample(shape: Tensor, rng: CounterRandom) -> Tensor:
    """[N, D] gamma variates of scale 1 and `shape` [N, D], at least 1.

    The first accepted one of GAMMA_TRIES proposals of Marsaglia and Tsang (2000, "A simple method
    for generating gamma variables"), so that no loop depends on the data. More than 95 % are
    accepted; without one, once in 1e10 times, it is about the median.
    """
    size = shape.shape[1]
    normal = rng.normal((GAMMA_TRIES, size))
    uniform = rng.uniform(0.0, 1.0, (GAMMA_TRIES, size)) + 2.0**-25  # never 0
    d = (shape - 1.0 / 3.0).unsqueeze(1)
    v = (1.0 + normal / (9.0 * d).sqrt()).pow(3)
    log_v = v.clamp(min=torch.finfo(v.dtype).tiny).log()
    is_accepted = (v > 0.0) & (uniform.log() < 0.5 * normal.square() + d * (1.0 - v + log_v))
    first = is_accepted.float().argmax(1, keepdim=True)
    proposal = v.gather(1, first).squeeze(1)
    return d.squeeze(1) * torch.where(is_accepted.any(1), proposal, 1.0)


class Categorical(Head):
    """One of n actions, int64 [N]; sampled by the Gumbel maximum, which needs no host sync."""

    actions = "logits"

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
        action, log_prob = sample_categorical(output, streams, rng.offset)
        return action, log_prob, action

    def mode(self, output: Tensor) -> Tensor:
        return output.argmax(-1)

    def to_torch(self) -> nn.Module:
        return Best()


class MultiCategorical(Head):
    """K independent choices, int64 [N, K]; `num_actions[k]` actions each."""

    actions = "logits"

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
    distribution: str = "normal",
    std_type: str = "log",
    state_dependent_std: bool = False,
) -> Head:
    """The action head for `space`; UsageError for a space without one. Other arguments than
    `algorithm` are for continuous actions.
    """
    if distribution == "beta" and (squash or state_dependent_std):
        name = "squash" if squash else "state_dependent_std"
        raise UsageError(
            f"distribution beta stays in its bounds, and its deviation depends on the state: leave "
            f"out {name}, which is for distribution normal"
        )
    if isinstance(space, Box) and space.low.size:
        if distribution == "beta":
            return Beta(space)
        kind = TanhGaussian if squash else Gaussian
        return kind(space, initial_std, LOG_STD_LIMITS, std_type, state_dependent_std)
    given = {"squash": squash, "distribution beta": distribution == "beta"}
    given |= {"std_type scalar": std_type == "scalar", "state_dependent_std": state_dependent_std}
    if names := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"{names[0]} is for continuous actions, a Box; this action space is {space}"
        )
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
