"""Policy heads: what the numbers of the actor network mean for an action space. No
torch.distributions: they cost more than the formulas.

Actions inside are in the head's own units ([-1, 1] spans a bounded Box); `to_env` gives what the
environment receives.
"""

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from gpurl.errors import UsageError
from gpurl.kernels.backend import use_triton
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.ppo_loss import (
    PpoOptions,
    PpoRows,
    PpoScalars,
    Results,
    categorical_ppo_loss,
    gaussian_ppo_loss,
)
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.sample import MOST_COLUMNS, categorical_sample_triton, gaussian_sample_triton
from gpurl.nn.action_scaler import BoxUnits
from gpurl.nn.arrays import Array, add_at, clip, log_softmax, namespace, of_kind, pick, softplus

LOG_2PI = math.log(2.0 * math.pi)
LOG_STD_LIMITS = (-5.0, 2.0)  # so that no policy collapses or explodes
Backward = Callable[
    [Array, Array], Array
]  # (d loss / d log_prob [B], d loss / d entropy) -> d loss / d output [B, num_outputs]


class Head(nn.Module):
    """A family of distributions over one action space. `output` is [..., num_outputs] from the
    actor network, a tensor or numpy array.
    """

    num_outputs: int
    has_kernels = False  # whether `ppo_loss` is there, and `decide` draws in one

    @abstractmethod
    def sample(self, output: Array, rng: CounterRandom) -> tuple[Array, Array]:
        """(action [N, ...], its log-probability [N])."""

    @abstractmethod
    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        """(log-probability [...] of `action`, which `sample` gave; entropy in nats, [...] or 0-d
        where it is the same for all; backward).

        `backward` takes the derivatives of a loss by the two and gives that by `output`; those of
        the head's own parameters it writes into their `.grad`. It is for flat batches [B], and at
        most once.
        """

    def decide(self, output: Array, rng: CounterRandom) -> tuple[Array, Array, Array]:
        """(action, its log-probability, what the environment receives), as `sample` and `to_env`
        give them.
        """
        action, log_prob = self.sample(output, rng)
        return action, log_prob, self.to_env(action)

    def ppo_loss(
        self, output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
    ) -> Results:
        """`evaluate`, the loss and its gradients in one kernel: see `gpurl.kernels.ppo_loss`;
        writes the head's own into their `.grad`.
        """
        raise TypeError(
            f"{type(self).__name__} has no kernel of the loss: has_kernels says so, evaluate() is "
            f"there"
        )

    def log_prob(self, output: Array, action: Array) -> Array:
        """[...] log-probability of `action`."""
        return self.evaluate(output, action)[0]

    @abstractmethod
    def mode(self, output: Array) -> Array:
        """The greedy action."""

    def to_env(self, action: Array) -> Array:
        """What the environment receives for `action`."""
        return action

    def share_with_numpy(self) -> None:
        """Take the head's parameters and their gradients as arrays too, for good: call it when an
        optimiser has given them their memory.
        """


class Gaussian(Head):
    """Diagonal normal with a log standard deviation that no state changes; clipped on the way to
    the environment, not before.
    """

    has_kernels = True

    def __init__(
        self, space: Box, initial_std: float = 1.0, limits: tuple[float, float] = LOG_STD_LIMITS
    ) -> None:
        super().__init__()
        if not limits[0] <= math.log(initial_std) <= limits[1]:
            wanted = (
                f"from {math.exp(limits[0]):.2g} to {math.exp(limits[1]):.2g}, between which the "
                f"deviation stays"
            )
            raise UsageError(f"initial_std must be {wanted}, got {initial_std}")
        self.num_outputs = math.prod(map(int, space.shape))
        self.box = BoxUnits(space)
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), math.log(initial_std)))
        self.min_log_std, self.max_log_std = limits
        self._host_log_std: tuple[np.ndarray, np.ndarray] | None = None

    def share_with_numpy(self) -> None:
        assert self.log_std.grad is not None
        self._host_log_std = self.log_std.detach().numpy(), self.log_std.grad.numpy()

    def _own_log_std(self, x: Array) -> tuple[Array, Array]:
        """(log_std, its gradient) as what `x` is."""
        if not isinstance(x, Tensor):
            assert self._host_log_std is not None, "share_with_numpy() comes first"
            return self._host_log_std
        return self.log_std, self.log_std.grad

    def bounded_log_std(self) -> Tensor:
        """[A] log standard deviation inside its limits."""
        return self.log_std.clamp(self.min_log_std, self.max_log_std)

    def stay_inside(self) -> None:
        """Bring the parameter back to its limits, beyond which it has no gradient: a step's
        momentum carries it there, for good.
        """
        self.log_std.clamp_(self.min_log_std, self.max_log_std)

    def sample(self, output: Array, rng: CounterRandom) -> tuple[Array, Array]:
        log_std = clip(self._own_log_std(output)[0], self.min_log_std, self.max_log_std)
        noise = of_kind(rng.normal((self.num_outputs,)), output)
        action = output + noise * namespace(output).exp(log_std)
        return action, (noise * noise).sum(-1) * -0.5 - (
            log_std.sum() + 0.5 * LOG_2PI * self.num_outputs
        )

    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        xp, (unbounded, gradient) = namespace(output), self._own_log_std(output)
        log_std = clip(unbounded, self.min_log_std, self.max_log_std)
        inv_std, entropy = (
            xp.exp(-log_std),
            log_std.sum() + 0.5 * (1.0 + LOG_2PI) * self.num_outputs,
        )
        z = (action - output) * inv_std
        square = z * z
        log_prob = (0.5 * self.num_outputs - entropy) - 0.5 * square.sum(-1)

        def backward(log_prob_slope: Array, entropy_slope: Array) -> Array:
            slope = log_prob_slope @ square + (entropy_slope.sum() - log_prob_slope.sum())
            xp.multiply(
                slope, log_std == unbounded, out=gradient
            )  # at a limit of log_std nothing moves it
            return log_prob_slope[..., None] * z * inv_std

        return log_prob, entropy, backward

    def decide(self, output: Array, rng: CounterRandom) -> tuple[Array, Array, Array]:
        if (
            not (self.has_kernels and isinstance(output, Tensor) and use_triton(output))
            or self.num_outputs > MOST_COLUMNS
        ):
            return super().decide(output, rng)
        streams = RandomStreams(rng.key, rng.gamma, rng.step)
        action, log_prob, env_action = gaussian_sample_triton(
            output, self.bounded_log_std(), self.box.units, streams, rng.offset
        )
        return action, log_prob, self.box.shaped(env_action)

    def ppo_loss(
        self, output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
    ) -> Results:
        limited = dataclasses.replace(
            options, min_log_std=self.min_log_std, max_log_std=self.max_log_std
        )
        assert self.log_std.grad is not None
        return gaussian_ppo_loss(
            output, self.log_std, value, rows, scalars, limited, self.log_std.grad
        )

    def mode(self, output: Array) -> Array:
        return output

    def to_env(self, action: Array) -> Array:
        return self.box.to_env(action)


class TanhGaussian(Gaussian):
    """Gaussian `u` squashed by tanh; the action inside is u itself, so nothing ever goes through
    atanh.

    log p(tanh u) = log N(u) - sum 2 (log 2 - u - softplus(-2u))   (Haarnoja et al. 2018, appendix
    C, in its stable form)
    """

    has_kernels = False

    def __init__(self, space: Box, initial_std: float = 1.0) -> None:
        super().__init__(space, initial_std)
        self.box.must_be_bounded("a tanh-squashed policy")

    def sample(self, output: Array, rng: CounterRandom) -> tuple[Array, Array]:
        action, log_prob = super().sample(output, rng)
        return action, log_prob - self._log_slope(action)

    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        """The squashed entropy, H(u) + E[log slope at u], has no closed form: of each row this is
        the estimate by its own action.

        Its mean over actions of the policy is the entropy. What `backward` gives for it is the
        slope along u = output + std z with z kept, whose mean is the entropy's slope.
        """
        xp, (unbounded, log_std_gradient) = namespace(output), self._own_log_std(output)
        log_prob, entropy, gaussian_backward = super().evaluate(output, action)
        log_slope = self._log_slope(action)

        def backward(log_prob_slope: Array, entropy_slope: Array) -> Array:
            gradient = gaussian_backward(log_prob_slope, entropy_slope)
            of_action = (
                -2.0 * entropy_slope[..., None] * xp.tanh(action)
            )  # the log slope of tanh has the slope -2 tanh
            is_free = clip(unbounded, self.min_log_std, self.max_log_std) == unbounded
            xp.add(
                log_std_gradient,
                (of_action * (action - output)).sum(0) * is_free,
                out=log_std_gradient,
            )
            return gradient + of_action

        return log_prob - log_slope, entropy + log_slope, backward

    def to_env(self, action: Array) -> Array:
        return super().to_env(namespace(action).tanh(action))

    @staticmethod
    def _log_slope(u: Array) -> Array:
        return (2.0 * (math.log(2.0) - u - softplus(-2.0 * u))).sum(-1)


class Categorical(Head):
    """One of n actions, int64 [N]; sampled by the Gumbel maximum, which needs no host sync."""

    has_kernels = True

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_outputs = num_actions

    def sample(self, output: Array, rng: CounterRandom) -> tuple[Array, Array]:
        xp, uniform = namespace(output), of_kind(rng.uniform(0.0, 1.0, (self.num_outputs,)), output)
        inside = uniform * (1.0 - 2.0**-24) + 2.0**-25  # never 0, and never 1 after rounding
        action = (output - xp.log(-xp.log(inside))).argmax(-1)
        return action, self.log_prob(output, action)

    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        log_probs = log_softmax(output)
        probability = namespace(output).exp(log_probs)
        entropy = -(probability * log_probs).sum(-1)

        def backward(log_prob_slope: Array, entropy_slope: Array) -> Array:
            of_log_prob, of_entropy = log_prob_slope[..., None], entropy_slope[..., None]
            gradient = probability * -(of_log_prob + of_entropy * (log_probs + entropy[..., None]))
            return add_at(gradient, action, log_prob_slope)

        return pick(log_probs, action), entropy, backward

    def decide(self, output: Array, rng: CounterRandom) -> tuple[Array, Array, Array]:
        if (
            not (isinstance(output, Tensor) and use_triton(output))
            or self.num_outputs > MOST_COLUMNS
        ):
            return super().decide(output, rng)
        action, log_prob = categorical_sample_triton(
            output, RandomStreams(rng.key, rng.gamma, rng.step), rng.offset
        )
        return action, log_prob, action

    def ppo_loss(
        self, output: Tensor, value: Tensor, rows: PpoRows, scalars: PpoScalars, options: PpoOptions
    ) -> Results:
        return categorical_ppo_loss(output, value, rows, scalars, options)

    def mode(self, output: Array) -> Array:
        return output.argmax(-1)


class MultiCategorical(Head):
    """K independent choices, int64 [N, K]; `num_actions[k]` actions each."""

    def __init__(self, num_actions: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = [Categorical(n) for n in num_actions]
        self.num_outputs = sum(num_actions)
        ends = list(itertools.accumulate(num_actions))
        self.columns = [
            slice(end - n, end) for end, n in zip(ends, num_actions)
        ]  # of each choice in the actor's output

    def sample(self, output: Array, rng: CounterRandom) -> tuple[Array, Array]:
        pairs = [part.sample(logits, rng) for part, logits in self._split(output)]
        return namespace(output).stack([action for action, _ in pairs], -1), sum(
            log_prob for _, log_prob in pairs
        )

    def evaluate(self, output: Array, action: Array) -> tuple[Array, Array, Backward]:
        parts = [
            part.evaluate(logits, action[..., k])
            for k, (part, logits) in enumerate(self._split(output))
        ]

        def backward(log_prob_slope: Array, entropy_slope: Array) -> Array:
            return namespace(output).concatenate(
                [of_part(log_prob_slope, entropy_slope) for _, _, of_part in parts], -1
            )

        return (
            sum(log_prob for log_prob, _, _ in parts),
            sum(entropy for _, entropy, _ in parts),
            backward,
        )

    def mode(self, output: Array) -> Array:
        return namespace(output).stack(
            [part.mode(logits) for part, logits in self._split(output)], -1
        )

    def _split(self, output: Array) -> Iterator[tuple[Categorical, Array]]:
        return ((part, output[..., columns]) for part, columns in zip(self.parts, self.columns))


def make_head(
    space: gymnasium.Space,
    squash: bool = False,
    initial_std: float = 1.0,
    algorithm: str = "this algorithm",
) -> Head:
    """The head for `space`; UsageError names the space where there is none."""
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
