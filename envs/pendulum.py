"""Pendulum: swing up a rod that hangs on a motor too weak to lift it in one go.

Same task as Gymnasium's Pendulum-v1: a uniform rod turns about its end, angle 0 points up, cost
angle^2 + 0.1 velocity^2 + 0.001 torque^2 of the state before the step, semi-implicit Euler.
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.env_step import TritonTask
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import CounterRandom, uniform_columns

GRAVITY = 10.0  # m/s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
TIME_STEP = 0.05  # s
MAX_SPEED = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
INERTIA = MASS * LENGTH**2 / 3.0  # kg m^2, rod about its end
VELOCITY_COST = 0.1
TORQUE_COST = 0.001


@triton.jit
def pendulum_initial_state(key, gamma, counter, OPTIONS: tl.constexpr):
    """`Pendulum.initial_state`: cosine, sine, velocity, angle."""
    uniform = uniform_columns(key, gamma, counter, 2)
    angle = (uniform[0] * 2.0 - 1.0) * 3.141592653589793
    return tl.cos(angle), tl.sin(angle), uniform[1] * 2.0 - 1.0, angle


@triton.jit
def pendulum_transition(state, action, key, gamma, counter, OPTIONS: tl.constexpr):
    """`Pendulum.transition`."""
    sine, velocity, angle = state[1], state[2], state[3]
    torque = tl.minimum(tl.maximum(action[0], -2.0), 2.0)
    # cost of the state before the step
    cost = angle * angle + 0.1 * velocity * velocity + 0.001 * torque * torque
    # semi-implicit Euler: the angle moves with the new velocity
    velocity = velocity + 0.75 * sine + 0.15 * torque
    velocity = tl.minimum(tl.maximum(velocity, -8.0), 8.0)
    angle = angle + 0.05 * velocity
    angle = angle - 6.283185307179586 * tl.floor(angle * 0.15915494309189535 + 0.5)
    return (tl.cos(angle), tl.sin(angle), velocity, angle), -cost, tl.zeros(cost.shape, tl.int1)


@triton.jit
def pendulum_observe(state, OPTIONS: tl.constexpr):
    """`Pendulum.observe`."""
    return state[0], state[1], state[2]


class Pendulum(TorchEnv):
    """Observation: cosine and sine of the angle, angular velocity. Action: torque, clipped to [-2,
    2]. Never terminates.
    """

    max_episode_steps = 200
    control_step = TIME_STEP
    render_fps = 1 / TIME_STEP
    observation_names = ("cos(angle)", "sin(angle)", "angular velocity")
    action_names = ("torque",)
    single_action_space = Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)
    _bound = np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
    single_observation_space = Box(-_bound, _bound, dtype=np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        half_turns, velocity = rng.uniform(-1.0, 1.0, (2,)).unbind(1)
        angle = half_turns * math.pi
        return {"obs": torch.stack((angle.cos(), angle.sin(), velocity), dim=1), "angle": angle}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        angle = state["angle"]
        _, sine, velocity = state["obs"].unbind(1)
        # cost of the state before the step
        torque = action.squeeze(1).clamp(-MAX_TORQUE, MAX_TORQUE)
        cost = torch.addcmul(angle.square(), velocity, velocity, value=VELOCITY_COST).addcmul_(
            torque, torque, value=TORQUE_COST
        )
        # semi-implicit Euler: the angle moves with the new velocity
        velocity = torch.add(
            velocity, sine, alpha=0.5 * MASS * GRAVITY * LENGTH / INERTIA * TIME_STEP
        )
        velocity = velocity.add_(torque, alpha=TIME_STEP / INERTIA).clamp_(-MAX_SPEED, MAX_SPEED)
        angle = torch.add(angle, velocity, alpha=TIME_STEP)
        # into [-pi, pi], as the cost needs it
        angle = angle.sub_((angle * (0.5 / math.pi)).round_(), alpha=2 * math.pi)
        obs = torch.stack((angle.cos(), angle.sin(), velocity), dim=1)
        return {"obs": obs, "angle": angle}, cost.neg_(), torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["obs"]

    def mirror(self, obs: Tensor, action: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The pendulum on the other side: obs [B, 3], action [B, 1]."""
        cosine, sine, velocity = obs.unbind(1)
        mirrored = torch.stack((cosine, -sine, -velocity), dim=1)
        return mirrored, None if action is None else -action

    def triton_task(self) -> TritonTask:
        return TritonTask(
            pendulum_initial_state, pendulum_transition, pendulum_observe, (), words=0
        )

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        angle = float(state["angle"])  # counter-clockwise, 0 is up
        tip = (-LENGTH * math.sin(angle), LENGTH * math.cos(angle))
        canvas.view(-1.35, -1.35, 1.35, 1.35)
        canvas.circle((0.0, 0.0), LENGTH, "white", outline="faint")
        canvas.dot((0.0, LENGTH), 6.0, "pale")
        canvas.trail("tip", tip, "orange")
        canvas.line([(0.0, 0.0), tip], "orange", 13.0)
        # the torque, an arc of up to a third of a turn
        if action is not None:
            torque = min(max(float(action), -MAX_TORQUE), MAX_TORQUE) / MAX_TORQUE
            turns = [math.pi / 2 + 2.1 * torque * k / 12 for k in range(13)]
            arc = [(0.36 * math.cos(turn), 0.36 * math.sin(turn)) for turn in turns]
            if abs(torque) > 0.05:
                canvas.arrow(arc, "blue", 3.0)
        canvas.dot((0.0, 0.0), 9.0, "ink")
