"""CartPole: balance a pole on a cart by pushing the cart left or right.

Source: Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning
control problems" (1983), without friction. Same task as Gymnasium's CartPole-v1 (explicit Euler, +1
for each step, including the last one).
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.env_step import TritonTask
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import CounterRandom, uniform_columns

GRAVITY = 9.8  # m/s^2
POLE_MASS = 0.1  # kg
TOTAL_MASS = 1.1  # kg, pole and cart
HALF_LENGTH = 0.5  # m, from the joint to the pole's centre of mass
FORCE = 10.0  # N
TIME_STEP = 0.02  # s
MAX_POSITION = 2.4  # m
MAX_ANGLE = math.radians(12.0)
INITIAL_RANGE = 0.05  # of all four state variables
POLE_FRACTION = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # m


@triton.jit
def cart_pole_initial_state(key, gamma, counter, OPTIONS: tl.constexpr):
    """`CartPole.initial_state`: position, velocity, angle, angular velocity."""
    uniform = uniform_columns(key, gamma, counter, 4)
    state = ()
    for k in tl.static_range(4):
        state = state + (uniform[k] * 0.1 - 0.05,)
    return state


@triton.jit
def cart_pole_transition(state, action, key, gamma, counter, OPTIONS: tl.constexpr):
    """`CartPole.transition`."""
    POLE: tl.constexpr = OPTIONS[3]
    position, velocity, angle, angular_velocity = state
    sine = tl.sin(angle)
    cosine = tl.cos(angle)
    push = (
        action[0].to(tl.float32) * OPTIONS[4]
        - OPTIONS[4] * 0.5
        + POLE * angular_velocity * angular_velocity * sine
    )
    # accelerations
    inertia = 0.5 * 4.0 / 3.0 - POLE * cosine * cosine
    angular_acceleration = tl.div_rn(9.8 * sine - cosine * push, inertia)
    acceleration = push - POLE * angular_acceleration * cosine
    # explicit Euler: positions move with the old velocities
    position = position + 0.02 * velocity
    velocity = velocity + 0.02 * acceleration
    angle = angle + 0.02 * angular_velocity
    angular_velocity = angular_velocity + 0.02 * angular_acceleration
    outside = (tl.abs(position) > OPTIONS[1]) | (tl.abs(angle) > OPTIONS[2])
    return (
        (position, velocity, angle, angular_velocity),
        tl.full(position.shape, 1.0, tl.float32),
        outside,
    )


@triton.jit
def cart_pole_observe(state, OPTIONS: tl.constexpr):
    """`CartPole.observe`."""
    if OPTIONS[0]:
        obs = state
    else:
        obs = (state[0], state[2])
    return obs


class CartPole(TorchEnv):
    """Observation: position, velocity, angle, angular velocity (`velocities=False`: position and
    angle). Action: 0 left, 1 right.
    """

    max_episode_steps = 500
    reward_threshold = 475.0
    control_step = TIME_STEP
    render_fps = 1 / TIME_STEP
    observation_names = ("position", "velocity", "angle", "angular velocity")
    action_names = ("left", "right")
    single_action_space = Discrete(2)

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,  # steps to the time limit; None: the task's
        velocities: bool = True,  # observe velocities too; without them a policy needs a memory
    ) -> None:
        self.velocities = velocities
        bound = np.array([2 * MAX_POSITION, np.inf, 2 * MAX_ANGLE, np.inf], dtype=np.float32)
        if not velocities:
            bound = bound[::2]
            self.observation_names = self.observation_names[::2]
        self.single_observation_space = Box(-bound, bound, dtype=np.float32)
        super().__init__(num_envs, device, seed, max_episode_steps)
        self._limit = torch.tensor([MAX_POSITION, MAX_ANGLE], device=self.device)

    def initial_state(self, rng: CounterRandom) -> State:
        return {"motion": rng.uniform(-INITIAL_RANGE, INITIAL_RANGE, (4,))}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        motion = state["motion"]
        _, velocity, angle, angular_velocity = motion.unbind(1)
        sine = angle.sin()
        cosine = angle.cos()
        # acceleration of the cart without the angular acceleration: (force + m l w^2 sin) / M
        push = (action * (2 * FORCE / TOTAL_MASS)).sub_(FORCE / TOTAL_MASS)
        push = push.addcmul_(angular_velocity.square(), sine, value=POLE_FRACTION)
        # divided by pole mass and half length
        inertia = torch.rsub(cosine.square(), HALF_LENGTH * 4.0 / 3.0, alpha=POLE_FRACTION)
        # accelerations of pole and cart
        angular_acceleration = torch.addcmul(sine * GRAVITY, cosine, push, value=-1.0).div_(inertia)
        acceleration = torch.addcmul(push, angular_acceleration, cosine, value=-POLE_FRACTION)
        rate = torch.stack((velocity, acceleration, angular_velocity, angular_acceleration), dim=1)
        # explicit Euler: positions move with the old velocities
        motion = torch.add(motion, rate, alpha=TIME_STEP)
        outside = motion[:, ::2].abs() > self._limit  # position, angle
        return {"motion": motion}, torch.ones_like(push), outside[:, 0] | outside[:, 1]

    def observe(self, state: State) -> Tensor:
        return state["motion"] if self.velocities else state["motion"][:, ::2].contiguous()

    def mirror(self, obs: Tensor, action: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Left and right swapped: obs [B, D], action [B]."""
        return -obs, None if action is None else 1 - action

    def triton_task(self) -> TritonTask:
        options = (self.velocities, MAX_POSITION, MAX_ANGLE, POLE_FRACTION, 2 * FORCE / TOTAL_MASS)
        return TritonTask(
            cart_pole_initial_state, cart_pole_transition, cart_pole_observe, options, words=0
        )

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        x, _, angle, _ = state["motion"].tolist()
        canvas.view(-2.9, -0.55, 2.9, 1.75)
        # the track, and where it ends
        canvas.line([(-3.2, -0.16), (3.2, -0.16)], "pale", 2.0)
        for limit in (-MAX_POSITION, MAX_POSITION):
            canvas.line([(limit, -0.3), (limit, -0.02)], "grey", 2.0)
        # the angles at which the pole counts as fallen
        for limit in (-MAX_ANGLE, MAX_ANGLE):
            top = (x + 1.15 * math.sin(limit), 1.15 * math.cos(limit))
            canvas.line([(x, 0.0), top], "faint", 1.5)
        # the cart, its push, and the pole
        canvas.polygon([(x - 0.3, -0.14), (x + 0.3, -0.14), (x + 0.3, 0.12), (x - 0.3, 0.12)])
        if action is not None:
            way = 1.0 if int(action) else -1.0
            canvas.arrow([(x + 0.36 * way, 0.0), (x + 0.75 * way, 0.0)], "blue", 3.0)
        length = 2 * HALF_LENGTH
        tip = (x + length * math.sin(angle), length * math.cos(angle))
        canvas.line([(x, 0.0), tip], "orange", 9.0)
        canvas.dot((x, 0.0), 7.0, "white")
