"""What a task of Isaac Gym returned becomes transitions: restarts that come a step late, time
limits that it lost, terminal observations.

All in tensors on one device; the host reads nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.envs._autoreset import find_ends
from gpurl.envs._counting_env import select


class Returned(NamedTuple):
    """What a task gave, in tensors of the caller's own memory."""

    obs: Tensor  # [N, D] float32
    reward: Tensor  # [N] float32
    done: Tensor  # [N] bool
    timed_out: Tensor  # [N] bool, as the task says
    clock: Tensor  # [N] int64 steps of the episode before this one
    state: Tensor | None = None  # [N, S] float32, for critics

    def shown(self) -> list[Tensor]:
        """Obs, and state where there is one."""
        return [self.obs] if self.state is None else [self.obs, self.state]


class Transition(NamedTuple):
    """What the step really was."""

    final: list[Tensor]  # [N, D] the true successors of obs, and of state where there is one
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    done: Tensor  # [N] bool
    valid: Tensor  # [N] bool


class IsaacGymSteps:
    """Remembers what the next step needs to know of the last one.

    restarts_later: the task shows the terminal observation at the end of an episode and restarts
    within the next step, which is then no transition: its action was for the old episode. Else it
    restarts in the step that ends the episode and shows no terminal observation; the one before
    stands in for it, as in rl_games and rsl_rl, whose bootstrap at a time limit is gamma * V(s_t).
    last_clock: the task's clock at which the time limit ends an episode.
    """

    def __init__(self, restarts_later: bool, last_clock: int) -> None:
        self.restarts_later = restarts_later
        self.last_clock = last_clock
        self.shown: list[Tensor] = []  # obs and state of the last step

    def restart(self, returned: Returned) -> None:
        """All episodes begin with what the task gave."""
        self.shown = returned.shown()
        self._restarts_next = self._after(returned.done)

    def end_episodes(self, mask: Tensor) -> None:
        """The next step of the environments in mask [N] bool is no transition: they restart. Until
        then NaN and infinity show as 0.
        """
        self._restarts_next = self._restarts_next | mask
        self.shown = [select(mask, rows.nan_to_num(0.0, 0.0, 0.0), rows) for rows in self.shown]

    def transition(self, returned: Returned) -> Transition:
        """The step from the last observations to these."""
        valid = ~self._restarts_next
        # tasks lose their time-outs (AnymalTerrain looks after it has zeroed the clock), do not
        # give them, or keep old ones
        timed_out = returned.timed_out | (returned.clock + 1 >= self.last_clock)
        terminated, truncated, done = find_ends(
            returned.done & ~timed_out, returned.done & timed_out, valid
        )
        reward = torch.where(valid, returned.reward, 0.0)
        final = returned.shown()
        if not self.restarts_later:
            final = [select(done, *pair) for pair in zip(self.shown, final)]
        # cloned: these stand in for a terminal observation, and the caller may change its own
        self.shown = [rows.clone() for rows in returned.shown()]
        self._restarts_next = self._after(returned.done)
        return Transition(final, reward, terminated, truncated, done, valid)

    def _after(self, done: Tensor) -> Tensor:
        """Whose next step only restarts, [N] bool; a task that restarts in the step that ends an
        episode needs no such step.
        """
        return done if self.restarts_later else torch.zeros_like(done)
