"""Pendulum: swing up a rod that hangs on a motor too weak to lift it in one go.

Same task as Gymnasium's Pendulum-v1: a uniform rod turns about its end, angle 0 points up, cost angle^2 + 0.1 velocity^2 + 0.001 torque^2
of the state before the step, semi-implicit Euler.
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

GRAVITY = 10.0  # m/s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
TIME_STEP = 0.05  # s
MAX_SPEED = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
INERTIA = MASS * LENGTH**2 / 3.0  # kg m^2, rod about its end
VELOCITY_COST = 0.1
TORQUE_COST = 0.001


class Pendulum(TorchEnv):
    """Observation: cosine and sine of the angle, angular velocity. Action: torque, clipped to [-2, 2]. Never terminates."""

    max_episode_steps = 200
    single_action_space = Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)
    _bound = np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
    single_observation_space = Box(-_bound, _bound, dtype=np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        half_turns, velocity = rng.uniform(-1.0, 1.0, (2,)).unbind(1)
        angle = half_turns * math.pi
        return {"obs": torch.stack((angle.cos(), angle.sin(), velocity), dim=1), "angle": angle}

    def transition(self, state: State, action: Tensor, rng: CounterRandom) -> tuple[State, Tensor, Tensor]:
        angle = state["angle"]
        _, sine, velocity = state["obs"].unbind(1)
        torque = action.squeeze(1).clamp(-MAX_TORQUE, MAX_TORQUE)
        cost = torch.addcmul(angle.square(), velocity, velocity, value=VELOCITY_COST).addcmul_(torque, torque, value=TORQUE_COST)
        velocity = torch.add(velocity, sine, alpha=0.5 * MASS * GRAVITY * LENGTH / INERTIA * TIME_STEP)
        velocity = velocity.add_(torque, alpha=TIME_STEP / INERTIA).clamp_(-MAX_SPEED, MAX_SPEED)
        angle = torch.add(angle, velocity, alpha=TIME_STEP)
        angle = angle.sub_((angle * (0.5 / math.pi)).round_(), alpha=2 * math.pi)  # into [-pi, pi], as the cost wants it
        obs = torch.stack((angle.cos(), angle.sin(), velocity), dim=1)
        return {"obs": obs, "angle": angle}, cost.neg_(), torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["obs"]
