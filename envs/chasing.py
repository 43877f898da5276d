"""Chasing: a point mass pursues a drifting target in `dim` dimensions; two published variants.

bonus=True is the variant of 2021 (capture radius 1, reward +8 at capture, cost 0.02 |a|, solved at a return of 6.3);
bonus=False the one of 2022 (capture radius equal to dim, no bonus, cost 0.02 max(|a|, 1)). Defects of the published code are not kept:
the distance is that of the present episode, a time limit is a truncation, and the last observation of an episode is not lost.
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom

INITIAL_DISTANCE = 8.0  # per coordinate
TIME_STEP = 0.01
CHASER_DAMPING = 0.75
TARGET_DAMPING = 0.5
ACTION_COST = 0.02
CAPTURE_BONUS = 8.0


class Chasing(TorchEnv):
    """Observation [4 dim]: target position and velocity, chaser position and velocity. Action: Box [-1, 1]^dim, or 3^dim directions."""

    max_episode_steps = 1024

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,
        dim: int = 2,
        discrete: bool = False,
        bonus: bool = True,
    ) -> None:
        if not 1 <= dim <= 8:
            raise UsageError(f"chasing: dim must be 1 to 8, got {dim}")
        self.dim, self.discrete, self.bonus = dim, discrete, bonus
        self.capture_radius = 1.0 if bonus else float(dim)
        self.reward_threshold = 6.3 if bonus else None
        self.single_observation_space = Box(-np.inf, np.inf, (4 * dim,), np.float32)
        self.single_action_space = Discrete(3**dim) if discrete else Box(-1.0, 1.0, (dim,), np.float32)
        super().__init__(num_envs, device, seed, max_episode_steps)
        self._powers = 3 ** torch.arange(dim, device=self.device)

    def initial_state(self, rng: CounterRandom) -> State:
        position = rng.normal((2 * self.dim,))
        target = position[:, : self.dim]
        chaser = position[:, self.dim :] - INITIAL_DISTANCE
        still = torch.zeros_like(target)
        return {"obs": torch.cat((target, still, chaser, still), dim=1), "distance": (target - chaser).norm(dim=1)}

    def transition(self, state: State, action: Tensor, rng: CounterRandom) -> tuple[State, Tensor, Tensor]:
        target, target_velocity, chaser, chaser_velocity = state["obs"].split(self.dim, dim=1)
        if self.discrete:
            action = ((action.unsqueeze(1) // self._powers) % 3 - 1).float()
        length = action.norm(dim=1)
        divisor = length.clamp(min=1.0)
        drift = rng.uniform(0.0, 1.0, (self.dim,))
        if self.bonus:
            drift = drift / drift.norm(dim=1, keepdim=True).clamp_(min=1.0)
        target_velocity = torch.add(drift, target_velocity, alpha=TARGET_DAMPING)
        chaser_velocity = torch.add(action / divisor.unsqueeze(1), chaser_velocity, alpha=CHASER_DAMPING)
        target = torch.add(target, target_velocity, alpha=TIME_STEP)
        chaser = torch.add(chaser, chaser_velocity, alpha=TIME_STEP)
        distance = (target - chaser).norm(dim=1)
        captured = distance < self.capture_radius
        reward = torch.sub(state["distance"] - distance, length if self.bonus else divisor, alpha=ACTION_COST)
        if self.bonus:
            reward = torch.add(reward, captured, alpha=CAPTURE_BONUS)
        obs = torch.cat((target, target_velocity, chaser, chaser_velocity), dim=1)
        return {"obs": obs, "distance": distance}, reward, captured

    def observe(self, state: State) -> Tensor:
        return state["obs"]

    def scripted_action(self, obs: Tensor) -> Tensor:
        """The baseline: pursue the target at full speed. obs [N, 4 dim] -> action [N, dim], or [N] int64 for the discrete task."""
        target, _, chaser, _ = obs.split(self.dim, dim=1)
        direction = target - chaser
        direction = direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-6)
        if not self.discrete:
            return direction
        return ((direction / (2 * math.sin(math.pi / 8))).round().clamp(-1, 1).long() + 1).mul(self._powers).sum(1)
