"""MountainCarContinuous: the car in the valley with a continuous engine and a price on its use.

Same task as Gymnasium's MountainCarContinuous-v0: +100 at the goal, -0.1 action^2 a step (of the
action before it is clipped).
"""

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.mountain_car import BOUNDS, draw_valley, drive, start_at_rest
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

POWER = 0.0015  # per step^2
GOAL = 0.45  # position
GOAL_REWARD = 100.0
ACTION_COST = 0.1


class MountainCarContinuous(TorchEnv):
    """Observation: position, velocity. Action: force, clipped to [-1, 1]."""

    max_episode_steps = 999
    reward_threshold = 90.0
    observation_names = ("position", "velocity")
    action_names = ("force",)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    single_observation_space = Box(BOUNDS[0], BOUNDS[1], dtype=np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        return {"obs": start_at_rest(rng)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        position, velocity = state["obs"].unbind(1)
        action = action.squeeze(1)
        obs, terminated = drive(
            position, torch.add(velocity, action.clamp(-1.0, 1.0), alpha=POWER), GOAL
        )
        # the price is of the action as given, before it is clipped
        reward = torch.addcmul(terminated * GOAL_REWARD, action, action, value=-ACTION_COST)
        return {"obs": obs}, reward, terminated

    def observe(self, state: State) -> Tensor:
        return state["obs"]

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        push = 0.0 if action is None else min(max(float(action), -1.0), 1.0)
        draw_valley(canvas, state, GOAL, push)
