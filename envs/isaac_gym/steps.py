"""Turns the results of an Isaac Gym task into transitions: restarts one step late, time limits that
tasks do not report, terminal observations.

All tensors are on one device, and the host reads none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.envs._autoreset import find_ends
from gpurl.envs._counting_env import select


class Returned(NamedTuple):
    """The results of a task, in memory of the caller."""

    obs: Tensor  # [N, D] float32
    reward: Tensor  # [N] float32
    done: Tensor  # [N] bool
    timed_out: Tensor  # [N] bool, as reported by the task
    clock: Tensor  # [N] int64 steps of the episode before this one
    state: Tensor | None = None  # [N, S] float32, for critics

    def observations(self) -> list[Tensor]:
        """Obs, and state if there is one."""
        return [self.obs] if self.state is None else [self.obs, self.state]


class Transition(NamedTuple):
    """The corrected step."""

    final: list[Tensor]  # [N, D] true successor of obs, and of state if there is one
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    done: Tensor  # [N] bool
    valid: Tensor  # [N] bool


class IsaacGymSteps:
    """Makes transitions from the results of consecutive steps.

    restarts_later: the task returns the terminal observation at the end of an episode and restarts
    within the next step, which is then no transition: its action was for the old episode.
    Otherwise it restarts in the step that ends the episode and does not return the terminal
    observation; the one before replaces it, as in rl_games and rsl_rl, which bootstrap with
    gamma * V(s_t) at a time limit. last_clock: the task's clock at which the time limit ends an
    episode.
    """

    def __init__(self, restarts_later: bool, last_clock: int) -> None:
        self.restarts_later = restarts_later
        self.last_clock = last_clock
        self.last: list[Tensor] = []  # obs and state of the last step

    def restart(self, returned: Returned) -> None:
        """Start all episodes at the observations of `returned`."""
        self.last = returned.observations()
        self._restarts_next = self._needs_restart_step(returned.done)

    def end_episodes(self, mask: Tensor) -> None:
        """Mark the next step of the environments in mask [N] bool as no transition, since they
        restart in it. Until then NaN and infinity in their observations are replaced by 0.
        """
        self._restarts_next = self._restarts_next | mask
        self.last = [select(mask, rows.nan_to_num(0.0, 0.0, 0.0), rows) for rows in self.last]

    def transition(self, returned: Returned) -> Transition:
        """The step from the last observations to those of `returned`."""
        valid = ~self._restarts_next
        # tasks do not report time-outs, report old ones, or lose them (AnymalTerrain compares after
        # it has zeroed the clock)
        timed_out = returned.timed_out | (returned.clock + 1 >= self.last_clock)
        terminated, truncated, done = find_ends(
            returned.done & ~timed_out, returned.done & timed_out, valid
        )
        reward = torch.where(valid, returned.reward, 0.0)
        # true successors
        final = returned.observations()
        if not self.restarts_later:
            final = [select(done, *pair) for pair in zip(self.last, final)]
        # clones, as they may become terminal observations and the caller may overwrite its own
        self.last = [rows.clone() for rows in returned.observations()]
        self._restarts_next = self._needs_restart_step(returned.done)
        return Transition(final, reward, terminated, truncated, done, valid)

    def _needs_restart_step(self, done: Tensor) -> Tensor:
        """[N] bool: where the next step only restarts; nowhere for a task that restarts in the step
        that ends an episode.
        """
        return done if self.restarts_later else torch.zeros_like(done)
