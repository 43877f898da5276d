"""Acrobot: two hanging links, a motor at the elbow, swing the tip above a line.

Source: Sutton, "Generalization in reinforcement learning: successful examples using sparse coarse
coding" (1996), with the dynamics of Sutton and Barto's book. Same task as Gymnasium's Acrobot-v1
(one classical Runge-Kutta step of 0.2 s, -1 a step until the goal).
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom

GRAVITY = 9.8  # m/s^2
MASS_1 = MASS_2 = 1.0  # kg
LENGTH_1 = 1.0  # m
CENTRE_1 = CENTRE_2 = 0.5  # m, from a link's joint to its centre of mass
INERTIA_1 = INERTIA_2 = 1.0  # kg m^2
TIME_STEP = 0.2  # s
MAX_SPEED_1 = 4 * math.pi  # rad/s
MAX_SPEED_2 = 9 * math.pi  # rad/s
GOAL_HEIGHT = 1.0  # m above the fixed joint
INITIAL_RANGE = 0.1  # of both angles and both velocities

# the mass matrix is [[D1 + 2 C cos, D2 + C cos], [D2 + C cos, D2]] with cos = cos(angle 2)
COUPLING = MASS_2 * LENGTH_1 * CENTRE_2
D2 = MASS_2 * CENTRE_2**2 + INERTIA_2
D1 = MASS_1 * CENTRE_1**2 + MASS_2 * LENGTH_1**2 + INERTIA_1 + D2
# N m, torque of gravity on joint 1 with link 1 level
WEIGHT_1 = (MASS_1 * CENTRE_1 + MASS_2 * LENGTH_1) * GRAVITY
WEIGHT_2 = MASS_2 * CENTRE_2 * GRAVITY


class Acrobot(TorchEnv):
    """Observation: cosine and sine of angle 1, of angle 2, both angular velocities. Action: torque
    -1, 0, 1 N m at the elbow.

    Angle 1 is 0 where link 1 hangs, angle 2 is relative to link 1.
    """

    max_episode_steps = 500
    reward_threshold = -100.0
    control_step = TIME_STEP
    render_fps = 15.0  # three times real time, in which 5 steps a second would stutter
    observation_names = (
        *("cos(angle 1)", "sin(angle 1)", "cos(angle 2)", "sin(angle 2)"),
        *("angular velocity 1", "angular velocity 2"),
    )
    action_names = ("torque -1", "torque 0", "torque 1")
    single_action_space = Discrete(3)
    _bound = np.array([1.0, 1.0, 1.0, 1.0, MAX_SPEED_1, MAX_SPEED_2], dtype=np.float32)
    single_observation_space = Box(-_bound, _bound, dtype=np.float32)

    def initial_state(self, rng: CounterRandom) -> State:
        return make_state(*rng.uniform(-INITIAL_RANGE, INITIAL_RANGE, (4,)).unbind(1))

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        # one step of the dynamics; the action 0, 1, 2 is the torque -1, 0, 1
        obs = state["obs"]
        motion = torch.stack((state["angle_1"], state["angle_2"], obs[:, 4], obs[:, 5]))
        motion = runge_kutta_step(motion, (action - 1).float())
        angles = motion[:2]
        angles.sub_((angles * (0.5 / math.pi)).round_(), alpha=2 * math.pi)  # into [-pi, pi]
        angle_1, angle_2, speed_1, speed_2 = motion.unbind(0)
        # height of the tip above the fixed joint, with both links of length 1
        terminated = angle_1.cos() + (angle_1 + angle_2).cos_() < -GOAL_HEIGHT
        state = make_state(
            angle_1,
            angle_2,
            speed_1.clamp_(-MAX_SPEED_1, MAX_SPEED_1),
            speed_2.clamp_(-MAX_SPEED_2, MAX_SPEED_2),
        )
        return state, terminated.float().sub_(1.0), terminated

    def observe(self, state: State) -> Tensor:
        return state["obs"]

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        angle_1 = float(state["angle_1"])  # counter-clockwise, 0 hangs
        angle_2 = angle_1 + float(state["angle_2"])
        elbow = (math.sin(angle_1), -math.cos(angle_1))
        tip = (elbow[0] + math.sin(angle_2), elbow[1] - math.cos(angle_2))
        canvas.view(-2.3, -2.3, 2.3, 2.3)
        # the line to be crossed
        canvas.line([(-2.6, GOAL_HEIGHT), (2.6, GOAL_HEIGHT)], "green", 2.0)
        canvas.trail("tip", tip, "orange")
        # the links, and the torque at the elbow, an arc
        canvas.line([(0.0, 0.0), elbow], "ink", 10.0)
        canvas.line([elbow, tip], "orange", 10.0)
        torque = 0 if action is None else int(action) - 1
        if torque:
            turns = [angle_2 + torque * (0.5 + 1.5 * k / 8) - math.pi / 2 for k in range(9)]
            arc = [
                (elbow[0] + 0.4 * math.cos(turn), elbow[1] + 0.4 * math.sin(turn)) for turn in turns
            ]
            canvas.arrow(arc, "blue", 2.5)
        canvas.dot((0.0, 0.0), 9.0, "grey")
        canvas.dot(elbow, 7.0, "white")


def make_state(angle_1: Tensor, angle_2: Tensor, speed_1: Tensor, speed_2: Tensor) -> State:
    """The state from its four [n] variables."""
    obs = torch.stack(
        (angle_1.cos(), angle_1.sin(), angle_2.cos(), angle_2.sin(), speed_1, speed_2), dim=1
    )
    return {"obs": obs, "angle_1": angle_1, "angle_2": angle_2}


def runge_kutta_step(motion: Tensor, torque: Tensor) -> Tensor:
    """motion [4, N] after TIME_STEP under constant torque [N]: the classical fourth-order step."""
    k1 = motion_rate(motion, torque)
    k2 = motion_rate(torch.add(motion, k1, alpha=TIME_STEP / 2), torque)
    k3 = motion_rate(torch.add(motion, k2, alpha=TIME_STEP / 2), torque)
    k4 = motion_rate(torch.add(motion, k3, alpha=TIME_STEP), torque)
    return torch.add(motion, k2.add_(k3).mul_(2.0).add_(k1).add_(k4), alpha=TIME_STEP / 6)


def motion_rate(motion: Tensor, torque: Tensor) -> Tensor:
    """Time derivative [4, N] of motion [4, N] (angle 1, angle 2, speed 1, speed 2): the mass
    matrix's equations by Cramer's rule.
    """
    angle_1, angle_2, speed_1, speed_2 = motion.unbind(0)
    sine = angle_2.sin()
    cosine = angle_2.cos()
    weight_2 = (angle_1 + angle_2).sin_().mul_(WEIGHT_2)
    # load 1 = phi1 of the book; load 2 = torque - C sin speed_1^2 - phi2
    load_1 = torch.add(weight_2, angle_1.sin(), alpha=WEIGHT_1)
    load_1 = load_1.addcmul_(
        sine * speed_2, torch.add(speed_2, speed_1, alpha=2.0), value=-COUPLING
    )
    load_2 = (torque - weight_2).addcmul_(sine, speed_1.square(), value=-COUPLING)
    # the mass matrix, and its solution by Cramer's rule
    diagonal = torch.rsub(cosine, D1, alpha=-2.0 * COUPLING)  # D1 + 2 C cos
    off_diagonal = torch.rsub(cosine, D2, alpha=-COUPLING)  # D2 + C cos
    determinant = torch.rsub(cosine.square(), (D1 - D2) * D2, alpha=COUPLING**2)
    acceleration_1 = (load_1 * -D2).addcmul_(off_diagonal, load_2, value=-1.0).div_(determinant)
    acceleration_2 = (load_1 * off_diagonal).addcmul_(diagonal, load_2).div_(determinant)
    return torch.stack((speed_1, speed_2, acceleration_1, acceleration_2))
