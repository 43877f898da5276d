"""How far actions leave what is best: noise on continuous ones, of some width or a slow drift, and
a share of random ones that falls.
"""

import math

import torch
from torch import Tensor

from gpurl.algorithms.base import PolicyState
from gpurl.kernels.random import CounterRandom

KINDS = ("gaussian", "ladder", "episode", "ornstein_uhlenbeck")
THETA, TIME_STEP = (
    0.15,
    1e-2,
    # of the Ornstein-Uhlenbeck process (Lillicrap et al. 2016, section 7; time step as in its usual
    # code)
)


def linear_schedule(start: float, end: float, fraction: float, progress: float) -> float:
    """From start to end, linearly over this fraction of the training, then end; progress is from 0
    to 1.
    """
    return start + (end - start) * (min(progress / fraction, 1.0) if fraction else 1.0)


class ActionNoise:
    """Adds noise to actions in [-1, 1].

    gaussian            standard deviation `std`
    ladder              environment i of N has least + (most - least) i / (N - 1) (Li et al. 2023,
                        PQL)
    episode             each episode draws its own between least and most (Seo et al. 2025, FastTD3)
    ornstein_uhlenbeck  a drift x <- x - theta x dt + std sqrt(dt) normal, anew each episode
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
        self.kind, self.std, self.num_actions, self.device = kind, std, num_actions, device
        self.least, self.most = std_range
        self.ladder = torch.linspace(self.least, self.most, num_envs, device=device).unsqueeze(1)

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """What lasts through an episode: the drift [N, A] or the width [N, 1]; zeros where an
        episode begins.
        """
        width = {"ornstein_uhlenbeck": self.num_actions, "episode": 1}.get(self.kind)
        return () if width is None else (torch.zeros(num_envs, width, device=self.device),)

    def add(
        self, action: Tensor, policy_state: PolicyState, random: CounterRandom
    ) -> tuple[Tensor, PolicyState]:
        """(action [N, A] with noise, within [-1, 1]; the next policy state)."""
        noise = random.normal((self.num_actions,))
        if self.kind == "gaussian":
            noise = noise * self.std
        elif self.kind == "ladder":
            noise = noise * self.ladder
        elif self.kind == "episode":
            (width,) = policy_state
            drawn = random.uniform(self.least, self.most, (1,))
            width = torch.where(width == 0.0, drawn, width)
            noise, policy_state = noise * width, (width,)
        else:
            noise = torch.add(
                policy_state[0] * (1.0 - THETA * TIME_STEP),
                noise,
                alpha=self.std * math.sqrt(TIME_STEP),
            )
            policy_state = (noise,)
        return (action + noise).clamp_(-1.0, 1.0), policy_state
