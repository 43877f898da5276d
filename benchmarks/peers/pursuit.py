"""Pursuit: 20 joints follow drifting targets; 60 observations and 20 actions, as a quadruped's task
has them, and hardly any time for the environment itself.
"""

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

JOINTS = 20
TIME_STEP = 0.05  # s
DAMPING = 0.75  # of a joint's velocity in a step
DRIFT = 0.2  # largest velocity of a target
ACTION_COST = 0.01


class Pursuit(TorchEnv):
    """Observations: errors, velocities of the targets, velocities of the joints."""

    max_episode_steps = 200

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,
    ) -> None:
        self.single_observation_space = Box(-np.inf, np.inf, (3 * JOINTS,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (JOINTS,), np.float32)
        super().__init__(num_envs, device, seed, max_episode_steps)

    def initial_state(self, rng: CounterRandom) -> State:
        error = rng.normal((JOINTS,))
        drift = rng.uniform(-DRIFT, DRIFT, (JOINTS,))
        return {"obs": torch.cat((error, drift, torch.zeros_like(error)), dim=1)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        error, drift, velocity = state["obs"].split(JOINTS, dim=1)
        action = action.clamp(-1.0, 1.0)
        velocity = torch.add(action, velocity, alpha=DAMPING)
        error = torch.add(error, drift - velocity, alpha=TIME_STEP)
        reward = -error.square().mean(1) - ACTION_COST * action.square().mean(1)
        return {"obs": torch.cat((error, drift, velocity), dim=1)}, reward, reward < -10.0

    def observe(self, state: State) -> Tensor:
        return state["obs"]
