"""MountainCar: drive a car out of a valley with an engine weaker than gravity, by swinging back
first.

Source: Moore, "Efficient memory-based learning for robot control" (1990); Singh and Sutton (1996).
Same task as Gymnasium's MountainCar-v0: the valley is sin(3 x), -1 a step until the goal.
"""

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

MIN_POSITION = -1.2
MAX_POSITION = 0.6
MAX_SPEED = 0.07  # per step
FORCE = 0.001  # per step^2
GRAVITY = 0.0025  # per step^2
GOAL = 0.5  # position

# of the observation, low and high
BOUNDS = np.array([[MIN_POSITION, -MAX_SPEED], [MAX_POSITION, MAX_SPEED]], dtype=np.float32)


class MountainCar(TorchEnv):
    """Observation: position, velocity. Action: 0 push left, 1 roll, 2 push right."""

    max_episode_steps = 200
    reward_threshold = -110.0
    single_action_space = Discrete(3)
    single_observation_space = Box(BOUNDS[0], BOUNDS[1], dtype=np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        return {"obs": start_at_rest(rng)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        # the action 0, 1, 2 pushes by -1, 0, 1
        position, velocity = state["obs"].unbind(1)
        obs, terminated = drive(position, torch.add(velocity, action - 1, alpha=FORCE), GOAL)
        return {"obs": obs}, torch.full_like(position, -1.0), terminated

    def observe(self, state: State) -> Tensor:
        return state["obs"]


def start_at_rest(rng: CounterRandom) -> Tensor:
    """[n, 2] first observations of both variants: position in [-0.6, -0.4], velocity 0."""
    position = rng.uniform(-0.6, -0.4)
    return torch.stack((position, torch.zeros_like(position)), dim=1)


def drive(position: Tensor, velocity: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    """(obs [N, 2], [N] bool where the goal is reached) after one step with gravity and walls;
    `velocity` [N] already includes the engine's push.
    """
    # gravity along the slope of sin(3 x)
    velocity = torch.add(velocity, (position * 3.0).cos_(), alpha=-GRAVITY).clamp_(
        -MAX_SPEED, MAX_SPEED
    )
    position = (position + velocity).clamp_(MIN_POSITION, MAX_POSITION)
    velocity = velocity.masked_fill_(position == MIN_POSITION, 0.0)  # the left wall stops the car
    return torch.stack((position, velocity), dim=1), (position >= goal) & (velocity >= 0.0)
