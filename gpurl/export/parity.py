"""Compares two forms of a policy on random observations: actions must agree to 1e-5 of their size,
or to what the rounding of large observations makes of them; choices exactly, except where the two
best are as close as 1e-5.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.observation_groups import GroupedBox
from gpurl.errors import UsageError, first_line
from gpurl.nn.acting import PolicyModule
from gpurl.nn.normalizer import Normalizer

TOLERANCE = 1e-5  # of float actions, in units of their own size where that is above 1
ROUNDINGS = 4  # times the rounding error of the module, allowed beside it
MAX_WIDTH = 1e6  # wider dimensions of observations count as unbounded
STEPS = 4  # of an episode for a policy with memory, twice

Observations = np.ndarray | dict[str, np.ndarray]  # [N, *obs], or [N, *group] by name
# (observations, memory [N, S] or None) -> (action [N, *action], next memory or None)
Play = Callable[[Observations, np.ndarray | None], tuple[np.ndarray, np.ndarray | None]]


class Acts(Protocol):
    """What `gpurl.load` returns, as far as it is needed here."""

    def act(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """[N, *obs] -> [N, *action], as gpurl's environments give and take them."""

    def reset(self) -> None:
        """Begin new episodes."""


def check_parity(
    policy: Acts,
    play: Play,
    module: PolicyModule,
    space: Box,
    normalizer: Normalizer | None,
    title: str,
    batch_sizes: tuple[int, ...] = (1, 7),
) -> float:
    """The largest difference of an action between `policy` and `play`, on random observations of
    `space`; UsageError, with `title` as its subject, if it is too large.

    module: the policy's own, which says how close two choices are.
    """
    rng = np.random.default_rng(0)
    worst = 0.0
    for batch_size in batch_sizes:
        # with memory two episodes of some steps, else one batch
        for _ in range(2 if module.memory_size else 1):
            policy.reset()
            memory = None
            if module.memory_size:
                memory = np.zeros((batch_size, module.memory_size), np.float32)
            for _ in range(STEPS if module.memory_size else 1):
                obs = random_observations(space, normalizer, batch_size, rng)
                expected = policy.act(_tensors(obs)).cpu().numpy()
                try:
                    action, next_memory = play(obs, memory)
                except Exception as error:
                    raise UsageError(
                        f"{title} cannot act at {batch_size} observations, which is exported for "
                        f"any number of them: {first_line(error)}"
                    ) from error
                difference = _difference(expected, action, module, obs, memory)
                allowed = TOLERANCE
                if TOLERANCE < difference < math.inf:
                    allowed += ROUNDINGS * _rounding(module, obs, memory)
                if not difference <= allowed:  # NaN too
                    raise UsageError(
                        f"{title} differs from the policy: by {difference:.2g} at {batch_size} "
                        f"random observations, at most {allowed:.2g} is allowed. An `act` of your "
                        f"own must be what `actor_modules` computes; else please report it"
                    )
                worst = max(worst, difference)
                memory = next_memory
    return worst


def _tensors(obs: Observations) -> Tensor | dict[str, Tensor]:
    if isinstance(obs, dict):
        return {name: torch.from_numpy(each) for name, each in obs.items()}
    return torch.from_numpy(obs)


def arrays_of(obs: Observations, memory: np.ndarray | None = None) -> list[np.ndarray]:
    """The inputs of a module or file, in their order."""
    groups = list(obs.values()) if isinstance(obs, dict) else [obs]
    return groups if memory is None else [*groups, memory]


def random_observations(
    space: Box, normalizer: Normalizer | None, count: int, rng: np.random.Generator
) -> Observations:
    """[count, *obs] within `space`: as the normaliser has seen them, else uniform between limits,
    and normal where there are none. Of named groups a dict in their order.
    """
    if isinstance(space, GroupedBox):
        return _random_groups(space, normalizer, count, rng)
    return _random_rows(space, normalizer, count, rng)


def _random_groups(
    space: GroupedBox, normalizer: Normalizer | None, count: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """[count, *group] by name; of rows of bytes the limits of their floats are not known."""
    numbers: Box = space
    if space.has_images:
        numbers = Box(-np.inf, np.inf, (space.num_floats,), np.float32)
    floats, start = _random_rows(numbers, normalizer, count, rng), 0
    parts = {}
    for group in space.groups:
        if group.is_image:
            part = rng.integers(0, 256, (count, *group.shape), np.uint8)
        else:
            part = floats[:, start : start + group.size].reshape(count, *group.shape)
            start += group.size
        parts[group.name] = part
    return parts


def _random_rows(
    space: Box, normalizer: Normalizer | None, count: int, rng: np.random.Generator
) -> np.ndarray:
    """As `random_observations`, of a space without names."""
    shape = (count, *space.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if np.issubdtype(space.dtype, np.integer):
        lows, highs = low.astype(np.int64), high.astype(np.int64)
        return rng.integers(lows, highs, shape, endpoint=True).astype(space.dtype)
    values = rng.standard_normal(shape)
    if normalizer is not None:
        size = int(np.prod(space.shape))
        mean, std = (
            each.double().cpu().numpy()[:size].reshape(space.shape)
            for each in (normalizer.mean, normalizer.variance.sqrt())
        )
        values = mean + 2.0 * std * values
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            is_bounded = high - low <= MAX_WIDTH
        lowest, highest = (np.where(is_bounded, limit, 0.0) for limit in (low, high))
        values = np.where(is_bounded, lowest + rng.random(shape) * (highest - lowest), values)
    return np.clip(values, low, high).astype(np.float32)


def _difference(
    expected: np.ndarray,
    action: np.ndarray,
    module: PolicyModule,
    obs: Observations,
    memory: np.ndarray | None,
) -> float:
    """Of two actions, in units of their size; infinity for other shapes, types or choices."""
    if action.shape != expected.shape or action.dtype != expected.dtype:
        return float("inf")
    if np.issubdtype(expected.dtype, np.floating):
        size = np.maximum(np.abs(expected), 1.0)
        return float((np.abs(action - expected) / size).max(initial=0.0))
    if np.array_equal(action, expected):
        return 0.0
    # another choice is right where it is as good
    margin = module.choice.margin(_scores(module, obs, memory))  # type: ignore[operator]
    is_other = torch.from_numpy(action != expected).reshape(margin.shape)
    largest = float(margin.cpu()[is_other].max())
    return largest if largest <= TOLERANCE else float("inf")


@torch.no_grad()
def _rounding(module: PolicyModule, obs: Observations, memory: np.ndarray | None) -> float:
    """The largest change of the module's own actions, in units of their size, between the next
    floats below and above the observations: no two ways to compute them are always closer.
    """
    device = next(module.parameters()).device
    rest = [] if memory is None else [memory]
    actions = []
    for limit in (-np.inf, np.inf):
        moved = [
            np.nextafter(each, np.float32(limit)) if each.dtype == np.float32 else each
            for each in arrays_of(obs)
        ]
        outputs = module(*(torch.as_tensor(each, device=device) for each in (*moved, *rest)))
        actions.append((outputs if isinstance(outputs, Tensor) else outputs[0]).cpu().numpy())
    return _difference(actions[0], actions[1], module, obs, memory)


@torch.no_grad()
def _scores(module: PolicyModule, obs: Observations, memory: np.ndarray | None) -> torch.Tensor:
    """[N, outputs] of the network of `module`."""
    device = next(module.parameters()).device
    features = module.inputs(*(torch.as_tensor(each, device=device) for each in arrays_of(obs)))
    if memory is not None:
        state = torch.as_tensor(memory, device=device)
        features, _ = module.memory(features, state)  # type: ignore[operator]
    return module.network(features)
