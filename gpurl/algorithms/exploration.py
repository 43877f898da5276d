"""Exploration: epsilon-greedy with a falling epsilon, and noise on continuous actions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpurl.algorithms.base import PolicyState
from gpurl.kernels.random import CounterRandom
from gpurl.nn.ranks import Alone

KINDS = ("gaussian", "ladder", "episode", "ornstein_uhlenbeck")
# of the Ornstein-Uhlenbeck process: Lillicrap et al. 2016, section 7; the usual time step
THETA, TIME_STEP = 0.15, 1e-2


def linear_schedule(start: float, end: float, fraction: float, progress: float) -> float:
    """From start to end, linearly over the first `fraction` of training, then end; progress: of the
    training, from 0 to 1.
    """
    return start + (end - start) * (min(progress / fraction, 1.0) if fraction else 1.0)


@dataclass(frozen=True)
class EpsilonGreedyConfig:
    """Settings of epsilon-greedy exploration."""

    epsilon_start: float = 1.0
    """Probability of a random action at the start."""
    epsilon_end: float = 0.05
    """Probability of a random action after epsilon_fraction of the training."""
    epsilon_fraction: float = 0.2
    """Fraction of the training over which it falls linearly."""

    def epsilon_at(self, progress: float) -> float:
        """The probability at this progress of the training, from 0 to 1."""
        return linear_schedule(
            self.epsilon_start, self.epsilon_end, self.epsilon_fraction, progress
        )


EPSILONS = tuple(EpsilonGreedyConfig.__dataclass_fields__)


class ActionNoise:
    """Adds noise to actions in [-1, 1].

    gaussian            standard deviation `std`
    ladder              environment i of N has min + (max - min) i / (N - 1), min and max of
                        `std_range` (Li et al. 2023, PQL)
    episode             each episode draws its own from `std_range` (Seo et al. 2025, FastTD3)
    ornstein_uhlenbeck  x <- x - theta x dt + std sqrt(dt) normal, from 0 in each episode
                        (Uhlenbeck and Ornstein 1930)
    """

    def __init__(
        self,
        kind: str,
        std: float,
        std_range: tuple[float, float],
        num_envs: int,
        num_actions: int,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.std = std
        self.std_range = std_range
        self.num_actions = num_actions
        self.device = device
        self.ladder = torch.linspace(*std_range, num_envs, device=device).unsqueeze(1)

    def join(self, ranks: Alone) -> None:
        """These are some of the environments of all ranks, and the ladder is that of all."""
        num_envs = len(self.ladder)
        of_all = torch.linspace(*self.std_range, num_envs * ranks.count, device=self.device)
        self.ladder = of_all.chunk(ranks.count)[ranks.index].unsqueeze(1)

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """What lasts through an episode: the process [N, A] or the standard deviation [N, 1]; zeros
        where an episode begins.
        """
        width = {"ornstein_uhlenbeck": self.num_actions, "episode": 1}.get(self.kind)
        return () if width is None else (torch.zeros(num_envs, width, device=self.device),)

    def add(
        self, action: Tensor, policy_state: PolicyState, random: CounterRandom
    ) -> tuple[Tensor, PolicyState]:
        """(action [N, A] with noise, clipped to [-1, 1]; the next policy state)."""
        noise = random.normal((self.num_actions,))
        if self.kind == "gaussian":
            noise = noise * self.std
        elif self.kind == "ladder":
            noise = noise * self.ladder
        elif self.kind == "episode":
            (std,) = policy_state
            drawn = random.uniform(*self.std_range, (1,))
            std = torch.where(std == 0.0, drawn, std)
            noise, policy_state = noise * std, (std,)
        else:
            decayed = policy_state[0] * (1.0 - THETA * TIME_STEP)
            noise = torch.add(decayed, noise, alpha=self.std * math.sqrt(TIME_STEP))
            policy_state = (noise,)
        return (action + noise).clamp_(-1.0, 1.0), policy_state


class RepeatedNoise:
    """Standard normal noise for actions, which lasts some steps: n of them with a probability in
    proportion to n^-exponent, 1 to `span`, and no longer than the episode: FlashSAC's, after Dabney
    et al. 2021.
    """

    def __init__(self, span: int, exponent: float, num_actions: int, device: torch.device) -> None:
        self.span_cdf = zeta_cdf(exponent, span).to(device)  # [span]
        self.num_actions = num_actions
        self.device = device

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """The noise [N, A], and for how many more steps it lasts [N, 1]."""
        sizes = (self.num_actions, 1)
        return tuple(torch.zeros(num_envs, size, device=self.device) for size in sizes)

    def draw(self, policy_state: PolicyState, random: CounterRandom) -> tuple[Tensor, PolicyState]:
        """(the noise [N, A] of this step, the next policy state)."""
        last_noise, left = policy_state
        noise, left = repeat_noise(last_noise, left, self.span_cdf, random)
        return noise, (noise, left)


def zeta_cdf(exponent: float, count: int) -> Tensor:
    """[count] the probability of at most n under p(n) ~ n^-exponent, n from 1 to `count`."""
    weight = torch.arange(1, count + 1, dtype=torch.float64) ** -exponent
    return (weight.cumsum(0) / weight.sum()).float()


def repeat_noise(
    noise: Tensor, left: Tensor, span_cdf: Tensor, random: CounterRandom
) -> tuple[Tensor, Tensor]:
    """(the noise [N, A] of this step, for how many more steps it lasts [N, 1]).

    noise: of the last step; left: for how many steps more it lasts; where that is 0, it is drawn
    anew, and for how long with `span_cdf` [S].
    """
    fresh = random.normal(noise.shape[1:])
    # the number of spans that are too short for this uniform number; the last one is the longest
    span = 1.0 + (random.uniform(shape=(1,)) >= span_cdf[:-1]).sum(1, keepdim=True)
    begins = left == 0.0
    return torch.where(begins, fresh, noise), torch.where(begins, span, left) - 1.0
