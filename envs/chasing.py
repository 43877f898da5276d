"""Chasing: a point mass pursues a drifting target in `dim` dimensions; two published variants.

bonus=True is the variant of 2021 (capture radius 1, reward +8 at capture, cost 0.02 |a|, solved at
a return of 6.3); bonus=False the one of 2022 (capture radius equal to dim, no bonus, cost 0.02
max(|a|, 1)). Defects of the published code are corrected: the distance is that of the current
episode, a time limit is a truncation, and the last observation of an episode is returned.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.envs.canvas import Canvas
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.errors import UsageError
from gpurl.kernels.env_step import TritonTask
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import CounterRandom, normal_columns, uniform_columns

INITIAL_DISTANCE = 8.0  # per coordinate
TIME_STEP = 0.01
CHASER_DAMPING = 0.75
TARGET_DAMPING = 0.5
ACTION_COST = 0.02
CAPTURE_BONUS = 8.0


@triton.jit
def chasing_initial_state(key, gamma, counter, OPTIONS: tl.constexpr):
    """`Chasing.initial_state`: target, its velocity, chaser, its velocity, distance."""
    DIM: tl.constexpr = OPTIONS[0]
    position = normal_columns(key, gamma, counter, 2 * DIM)
    still = ()
    target = ()
    chaser = ()
    square = tl.zeros_like(position[0])
    for k in tl.static_range(DIM):
        still = still + (tl.zeros_like(position[0]),)
        target = target + (position[k],)
        chaser = chaser + (position[DIM + k] - 8.0,)
        square += (target[k] - chaser[k]) * (target[k] - chaser[k])
    return target + still + chaser + still + (tl.sqrt_rn(square),)


@triton.jit
def chasing_transition(state, action, key, gamma, counter, OPTIONS: tl.constexpr):
    """`Chasing.transition`."""
    DIM: tl.constexpr = OPTIONS[0]
    DISCRETE: tl.constexpr = OPTIONS[1]
    BONUS: tl.constexpr = OPTIONS[2]
    # force of the action, drift of the target, and their lengths
    drift = uniform_columns(key, gamma, counter, DIM)
    force = ()
    choice = action[0]
    length = tl.zeros_like(drift[0])
    drift_length = tl.zeros_like(drift[0])
    for k in tl.static_range(DIM):
        if DISCRETE:
            force = force + ((choice % 3 - 1).to(tl.float32),)
            choice = choice // 3
        else:
            force = force + (action[k],)
        length += force[k] * force[k]
        drift_length += drift[k] * drift[k]
    length = tl.sqrt_rn(length)
    divisor = tl.maximum(length, 1.0)
    drift_divisor = tl.maximum(tl.sqrt_rn(drift_length), 1.0)
    # both move, each with its own damping
    target, target_velocity, chaser, chaser_velocity = (), (), (), ()
    square = tl.zeros_like(length)
    for k in tl.static_range(DIM):
        pull = drift[k]
        if BONUS:
            pull = tl.div_rn(pull, drift_divisor)
        target_velocity = target_velocity + (pull + 0.5 * state[DIM + k],)
        chaser_velocity = chaser_velocity + (
            tl.div_rn(force[k], divisor) + 0.75 * state[3 * DIM + k],
        )
        target = target + (state[k] + 0.01 * target_velocity[k],)
        chaser = chaser + (state[2 * DIM + k] + 0.01 * chaser_velocity[k],)
        square += (target[k] - chaser[k]) * (target[k] - chaser[k])
    # reward: decrease of the distance, minus the cost of the action
    distance = tl.sqrt_rn(square)
    captured = distance < OPTIONS[3]
    reward = state[4 * DIM] - distance
    if BONUS:
        reward = reward - 0.02 * length + tl.where(captured, 8.0, 0.0)
    else:
        reward = reward - 0.02 * divisor
    return target + target_velocity + chaser + chaser_velocity + (distance,), reward, captured


@triton.jit
def chasing_observe(state, OPTIONS: tl.constexpr):
    """`Chasing.observe`: all but the distance."""
    DIM: tl.constexpr = OPTIONS[0]
    obs = ()
    for k in tl.static_range(4 * DIM):
        obs = obs + (state[k],)
    return obs


class Chasing(TorchEnv):
    """Observation [4 dim]: target position and velocity, chaser position and velocity. Action: Box
    [-1, 1]^dim, or 3^dim directions.
    """

    max_episode_steps = 1024
    control_step = TIME_STEP
    render_fps = 1 / TIME_STEP

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,  # steps to the time limit; None: the task's
        dim: int = 2,  # coordinates of the space, 1 to 8
        discrete: bool = False,  # 3^dim directions instead of a force
        bonus: bool = True,  # +8 at a capture within 1; else no bonus, within dim
    ) -> None:
        if not 1 <= dim <= 8:
            raise UsageError(f"chasing: dim must be 1 to 8, got {dim}")
        self.dim = dim
        self.discrete = discrete
        self.bonus = bonus
        self.capture_radius = 1.0 if bonus else float(dim)
        self.reward_threshold = 6.3 if bonus else None
        self.single_observation_space = Box(-np.inf, np.inf, (4 * dim,), np.float32)
        self.single_action_space = (
            Discrete(3**dim) if discrete else Box(-1.0, 1.0, (dim,), np.float32)
        )
        axes = "xyz"[:dim] if dim <= 3 else [str(axis) for axis in range(dim)]
        self.observation_names = [
            f"{what} {axis}"
            for what in ("target", "target velocity", "chaser", "chaser velocity")
            for axis in axes
        ]
        self.action_names = None if discrete else [f"force {axis}" for axis in axes]
        super().__init__(num_envs, device, seed, max_episode_steps)
        self._powers = 3 ** torch.arange(dim, device=self.device)

    def initial_state(self, rng: CounterRandom) -> State:
        position = rng.normal((2 * self.dim,))
        target = position[:, : self.dim]
        chaser = position[:, self.dim :] - INITIAL_DISTANCE
        still = torch.zeros_like(target)
        return {
            "obs": torch.cat((target, still, chaser, still), dim=1),
            "distance": (target - chaser).norm(dim=1),
        }

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        # force of the action, of length 1 at most, and drift of the target
        target, target_velocity, chaser, chaser_velocity = state["obs"].split(self.dim, dim=1)
        if self.discrete:
            action = ((action.unsqueeze(1) // self._powers) % 3 - 1).float()
        length = action.norm(dim=1)
        divisor = length.clamp(min=1.0)
        drift = rng.uniform(0.0, 1.0, (self.dim,))
        if self.bonus:
            drift = drift / drift.norm(dim=1, keepdim=True).clamp_(min=1.0)
        # both move, each with its own damping
        target_velocity = torch.add(drift, target_velocity, alpha=TARGET_DAMPING)
        chaser_velocity = torch.add(
            action / divisor.unsqueeze(1), chaser_velocity, alpha=CHASER_DAMPING
        )
        target = torch.add(target, target_velocity, alpha=TIME_STEP)
        chaser = torch.add(chaser, chaser_velocity, alpha=TIME_STEP)
        # reward: decrease of the distance, minus the cost of the action
        distance = (target - chaser).norm(dim=1)
        captured = distance < self.capture_radius
        reward = torch.sub(
            state["distance"] - distance, length if self.bonus else divisor, alpha=ACTION_COST
        )
        if self.bonus:
            reward = torch.add(reward, captured, alpha=CAPTURE_BONUS)
        obs = torch.cat((target, target_velocity, chaser, chaser_velocity), dim=1)
        return {"obs": obs, "distance": distance}, reward, captured

    def observe(self, state: State) -> Tensor:
        return state["obs"]

    def triton_task(self) -> TritonTask:
        options = (self.dim, self.discrete, self.bonus, self.capture_radius)
        return TritonTask(
            chasing_initial_state,
            chasing_transition,
            chasing_observe,
            options,
            words=(self.dim + 1) // 2,
        )

    def scripted_action(self, obs: Tensor) -> Tensor:
        """The baseline: pursue the target at full speed. obs [N, 4 dim] -> action [N, dim], or [N]
        int64 for the discrete task.
        """
        target, _, chaser, _ = obs.split(self.dim, dim=1)
        direction = target - chaser
        direction = direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-6)
        if not self.discrete:
            return direction
        # the nearest of -1, 0, 1 in each dimension
        choice = (direction / (2 * math.sin(math.pi / 8))).round().clamp(-1, 1).long()
        return (choice + 1).mul(self._powers).sum(1)

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        """The plane in which they move, from 3 dimensions on the first three as seen obliquely."""
        target, _, chaser, _ = state["obs"].double().numpy().reshape(4, self.dim)
        force = np.zeros(self.dim)
        if action is not None and self.discrete:
            force = int(action) // self._powers.cpu().numpy() % 3 - 1.0
        elif action is not None:
            force = action.double().numpy()
        force = force / max(float(np.linalg.norm(force)), 1.0)
        # the whole way in view; farther away where they leave it
        points = [on_plane(target), on_plane(chaser)]
        center = -INITIAL_DISTANCE / 2
        reach = 7.5 if self.dim < 3 else 9.0
        half = max(reach, *(1.25 * abs(x - center) for point in points for x in point))
        canvas.view(center - half, center - half, center + half, center + half)
        draw_ground(canvas, self.dim, half)
        # in space a line to the ground shows where they are
        if self.dim >= 3:
            for position, color in ((target, "orange"), (chaser, "blue")):
                foot = on_plane([*position[:2], FLOOR])
                canvas.line([foot, on_plane(position)], color, 1.0, 0.35)
                canvas.dot(foot, 5.0, "grey", 0.5)
        # the target with the radius of capture, and the chaser with its force
        canvas.trail("target", points[0], "orange")
        canvas.trail("chaser", points[1], "blue")
        canvas.circle(points[0], self.capture_radius, "orange", 0.18)
        canvas.dot(points[0], 9.0, "orange")
        ahead = on_plane(chaser + 1.6 * half / reach * force)
        canvas.arrow([points[1], ahead], "blue", 2.5)
        canvas.dot(points[1], 9.0, "blue")
        if self.dim > 3:
            corner = (center - 0.93 * half, center - 0.93 * half)
            canvas.text(corner, f"dimensions 1 to 3 of {self.dim}")


FLOOR = -11.0  # height of the ground under the pursuit in space
AZIMUTH, ELEVATION = math.radians(20.0), math.radians(25.0)  # of the view on it


def on_plane(position: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Where a position [dim] is in the picture: 1 dimension lies on a line, 3 are projected in
    parallel.
    """
    if len(position) == 1:
        return float(position[0]), -INITIAL_DISTANCE / 2
    x, y = float(position[0]), float(position[1])
    if len(position) == 2:
        return x, y
    across = x * math.cos(AZIMUTH) + y * math.sin(AZIMUTH)
    deep = y * math.cos(AZIMUTH) - x * math.sin(AZIMUTH)
    return across, float(position[2]) * math.cos(ELEVATION) + deep * math.sin(ELEVATION)


def draw_ground(canvas: Canvas, dim: int, half: float) -> None:
    """Lines 4 units apart: a line with marks, the plane, or the ground under the pursuit."""
    reach = 4.0 * math.ceil((half + 8.0) / 4.0)
    marks = np.arange(-reach - 4.0, reach + 1.0, 4.0)
    if dim == 1:
        y = -INITIAL_DISTANCE / 2
        canvas.line([(marks[0], y), (marks[-1], y)], "pale", 1.5)
        for mark in marks:
            canvas.line([(mark, y - 0.25), (mark, y + 0.25)], "pale", 1.5)
        return
    height = () if dim == 2 else (FLOOR,)
    for mark in marks:
        for start, end in (
            ((mark, marks[0]), (mark, marks[-1])),
            ((marks[0], mark), (marks[-1], mark)),
        ):
            canvas.line([on_plane([*start, *height]), on_plane([*end, *height])], "faint", 1.2)
