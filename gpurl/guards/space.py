"""Observations outside their space: a sample of them with every log entry, and one warning."""

import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import VecEnv

SLACK = 1e-5  # relative: how far rounding may put an observation outside its space
MAX_NUMBERS = 1 << 14  # of a sample


def limits(space: Box, device: torch.device) -> tuple[Tensor, Tensor]:
    """(lowest, highest) numbers [*obs] float64 that count as inside `space`."""
    low, high = (
        torch.as_tensor(limit, dtype=torch.float64, device=device)
        for limit in (space.low, space.high)
    )
    return low - SLACK * low.abs().clamp(min=1.0), high + SLACK * high.abs().clamp(min=1.0)


class SpaceGuard:
    """Looks at the newest observations of some environments whenever it is asked, of others each
    time; off where the space has no limits or holds integers, such as images.

    An iteration costs nothing: the sample is taken between iterations, on the device, and read
    with the other numbers of a log entry.
    """

    def __init__(self, env_name: str, env: VecEnv) -> None:
        self.env_name = env_name
        self.space = space = env.single_observation_space
        self.is_on = (
            isinstance(space, Box)
            and space.dtype.kind == "f"
            and bool((space.bounded_below | space.bounded_above).any())
        )
        if self.is_on:
            assert isinstance(space, Box)
            self.low, self.high = limits(space, env.device)
        self.next = 0  # environment that the next sample begins with

    def metrics(self, obs: Tensor) -> dict[str, Tensor]:
        """0-d tensors for the host, of some of obs [N, *obs]; NaN counts as inside, since another
        guard finds it.
        """
        if not self.is_on:
            return {}
        # the next environments
        width = max(self.low.numel(), 1)
        count = min(max(MAX_NUMBERS // width, 1), len(obs))
        first = min(self.next, len(obs) - count)
        self.next = (first + count) % len(obs)
        sample = obs[first : first + count]
        # how far each number is outside
        excess = torch.maximum(self.low - sample, sample - self.high).reshape(count, -1)
        is_outside = excess > 0.0
        worst = torch.where(is_outside, excess, 0.0).reshape(-1).argmax()
        return {
            "rows outside": is_outside.any(1).sum(),
            "rows of the sample": torch.full_like(worst, count),
            "worst number": sample.reshape(-1)[worst],
            "worst place": worst % width,
        }

    def report(self, values: dict[str, float]) -> list[str]:
        """The warning, the first time that `metrics()`, on the host, has something."""
        if not values.get("rows outside"):
            return []
        self.is_on = False
        assert isinstance(self.space, Box)
        place = int(values["worst place"])
        low, high = (limit.reshape(-1)[place] for limit in (self.space.low, self.space.high))
        return [
            f"observations of {self.env_name!r} leave their space: {values['rows outside']:.0f} of "
            f"the {values['rows of the sample']:.0f} checked; element {place} of one was "
            f"{values['worst number']:.6g}, single_observation_space allows {low:.6g} to "
            f"{high:.6g}. "
            f"Widen the space, to np.inf where there is no limit"
        ]
