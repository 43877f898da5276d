"""What a task of Isaac Gym returned becomes transitions: restarts that come a step late, time
limits that it lost, terminal observations.

All in tensors on one device, and nothing is read by the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.envs._counting_env import select


class Returned(NamedTuple):
    """What a task gave, in tensors of its caller's own."""

    obs: Tensor  # [N, D] float32
    reward: Tensor  # [N] float32
    done: Tensor  # [N] bool
    timed_out: Tensor  # [N] bool, as the task says
    clock: Tensor  # [N] int64 steps of the episode before this one
    state: Tensor | None = None  # [N, S] float32, for critics


class Transition(NamedTuple):
    """What the step really was."""

    final_obs: Tensor  # [N, D] the true successor, as far as there is one
    final_state: Tensor | None
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    valid: Tensor  # [N] bool


class IsaacGymSteps:
    """Remembers what the next step needs to know of the last one.

    restarts_later: the task shows the terminal observation at an episode's end and restarts within
    the next step, which is then no
    transition: its action was for the old episode. Else it restarts in the step that ends the
    episode and shows no terminal observation; the one before stands for it, as in rl_games and
    rsl_rl, whose bootstrap at a time limit is gamma * V(s_t).
    last_clock: the task's clock at which an episode is cut off.
    """

    def __init__(self, restarts_later: bool, last_clock: int) -> None:
        self.restarts_later, self.last_clock = restarts_later, last_clock
        self.obs = torch.empty(0)
        self.state: Tensor | None = None

    def restart(self, returned: Returned) -> None:
        """All episodes begin with what the task gave."""
        self.obs, self.state = returned.obs, returned.state
        self._is_dead = self._after(returned.done)

    def kill(self, mask: Tensor) -> None:
        """The next step of the environments in mask [N] bool is no transition: they restart. Until
        then NaN and infinity show as 0.
        """
        self._is_dead = self._is_dead | mask
        self.obs = _finite(self.obs, mask)
        self.state = None if self.state is None else _finite(self.state, mask)

    def transition(self, returned: Returned) -> Transition:
        """The step from the last observations to these."""
        valid = ~self._is_dead
        done = returned.done & valid
        # tasks lose their time-outs (AnymalTerrain looks after the clock was zeroed), leave them
        # out, or keep old ones
        timed_out = returned.timed_out | (returned.clock + 1 >= self.last_clock)
        final_obs, final_state = returned.obs, returned.state
        if not self.restarts_later:
            final_obs = select(done, self.obs, returned.obs)
            if self.state is not None and returned.state is not None:
                final_state = select(done, self.state, returned.state)
        self.obs = (
            returned.obs.clone()
        )  # the caller may change its own, and these stand in for a terminal observation
        self.state = None if returned.state is None else returned.state.clone()
        self._is_dead = self._after(returned.done)
        reward = torch.where(valid, returned.reward, 0.0)
        return Transition(
            final_obs, final_state, reward, done & ~timed_out, done & timed_out, valid
        )

    def _after(self, done: Tensor) -> Tensor:
        """Whose next step only restarts, [N] bool; a task that ends in the step that restarts it
        does so again.
        """
        return done if self.restarts_later else torch.zeros_like(done)


def _finite(rows: Tensor, mask: Tensor) -> Tensor:
    """rows [N, D], those in mask [N] without NaN and infinity."""
    return select(mask, rows.nan_to_num(0.0, 0.0, 0.0), rows)
