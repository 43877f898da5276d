"""MountainCar: drive a car out of a valley with an engine weaker than gravity, by swinging back
first.

Source: Moore, "Efficient memory-based learning for robot control" (1990); Singh and Sutton (1996).
Same task as Gymnasium's MountainCar-v0: the valley is sin(3 x), -1 a step until the goal.
"""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.canvas import Canvas
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
    observation_names = ("position", "velocity")
    action_names = ("left", "roll", "right")
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

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        draw_valley(canvas, state, GOAL, 0.0 if action is None else float(action) - 1.0)


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


def draw_valley(canvas: Canvas, state: State, goal: float, push: float) -> None:
    """The valley, the flag and the car with its push in [-1, 1]; both variants."""
    x = float(state["obs"][0])
    canvas.view(-1.3, -0.12, 0.72, 1.22)
    places = [MIN_POSITION - 0.2 + 0.02 * k for k in range(107)]
    ground = [(place, height(place)) for place in places]
    canvas.polygon([*ground, (places[-1], -1.0), (places[0], -1.0)], "faint")
    canvas.line(ground, "grey", 2.0)
    # the wall on the left, the flag at the goal
    canvas.line([(MIN_POSITION, height(MIN_POSITION)), (MIN_POSITION, 1.4)], "pale", 2.0)
    pole = height(goal)
    canvas.line([(goal, pole), (goal, pole + 0.2)], "ink", 2.0)
    canvas.polygon([(goal, pole + 0.2), (goal, pole + 0.11), (goal + 0.09, pole + 0.155)], "green")
    # the car stands on the slope: its own axes are (along, up)
    steepness = math.atan(0.45 * 3.0 * math.cos(3.0 * x))
    along = (math.cos(steepness), math.sin(steepness))
    up = (-along[1], along[0])

    def at(forward: float, above: float) -> tuple[float, float]:
        return (
            x + forward * along[0] + above * up[0],
            height(x) + forward * along[1] + above * up[1],
        )

    if abs(push) > 0.02:
        way = math.copysign(1.0, push)
        canvas.arrow([at(0.09 * way, 0.06), at((0.11 + 0.13 * abs(push)) * way, 0.06)], "blue", 3.0)
    canvas.polygon([at(-0.075, 0.03), at(0.075, 0.03), at(0.06, 0.09), at(-0.06, 0.09)], "orange")
    for wheel in (-0.042, 0.042):
        canvas.circle(at(wheel, 0.026), 0.026)


def height(position: float) -> float:
    """Of the ground in pictures: Gymnasium's scale of sin(3 x)."""
    return 0.55 + 0.45 * math.sin(3.0 * position)
