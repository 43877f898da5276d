"""Keeps NaN and infinity of an environment out of training, without a host sync, and tells them
from those of a policy that diverged.

A row that holds one, or whose successor does, is marked as not valid and zeroed: it weighs nothing
in targets, losses and statistics.
The host learns of it at once on a CPU, and on a GPU with the next log entry. What the first
environment that gave one did in that rollout is kept aside, to be looked into.
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.errors import DivergedError, NonFiniteError
from gpurl.kernels.backend import host_sync_is_free

SEEN = ("obs", "state")  # what the next row has of a successor
FROM_ENV, FROM_POLICY = (
    (*SEEN, "reward", "final_obs", "final_state"),
    ("action", "value", "log_prob"),
)
CHECKED = (
    *FROM_ENV,
    *FROM_POLICY,
    "final_value",
)  # the last comes of both: final_obs, seen by the policy
KEPT = (*SEEN, "action", "reward", "value", "terminated", "truncated")  # of the first environment
NAMED_ENVS = 10


class FiniteGuard:
    """Looks over each rollout before it is trained on."""

    def __init__(
        self, env_name: str, device: torch.device, nan: str = "raise", num_inputs: int | None = None
    ) -> None:
        """nan: what to do about them, as gpurl.run.settings has it; num_inputs: of observations
        that have behind them what only critics see.
        """
        self.env_name, self.nan, self.num_inputs = env_name, nan, num_inputs
        self.total = 0  # rows left out so far, by this process
        self.names: list[
            str
        ] = []  # of the columns that are looked at, as they are numbered in `keys`
        self.first = torch.full(
            (), -1, dtype=torch.int64, device=device
        )  # t * N + env of the first bad row
        self.keys = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # which columns are bad there, a bit each
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.policy_diverged = torch.zeros(
            (), dtype=torch.bool, device=device
        )  # it gave NaN where the environment gave none
        self.evidence: dict[str, Tensor] = {}  # [T, ...] columns of that environment, as they were

    def clean(self, buffer: RolloutBuffer) -> Tensor | None:
        """Mark and zero bad rows; returns which environments had any, [N] bool, or None where the
        host saw that all is finite.
        """
        columns = {
            name: buffer[name]
            for name in CHECKED
            if name in buffer.columns and buffer[name].is_floating_point()
        }
        if host_sync_is_free(buffer.device) and all(
            math.isfinite(column.sum().item()) for column in columns.values()
        ):
            return None
        columns = self._told_apart(columns)
        self.names = list(columns)
        of_env, of_policy = (
            sum(name in names for name in columns) for names in (FROM_ENV, FROM_POLICY)
        )
        # x 0 is 0 or NaN: few operations a column, and no finite number overflows
        bad = (
            torch.stack(
                [
                    (column * 0.0).flatten(2).sum(2) if column.dim() > 2 else column * 0.0
                    for column in columns.values()
                ]
            )
            != 0.0
        )
        rows = bad.any(0)
        for number in range(sum(name in SEEN for name in columns)):  # the first of them
            rows[:-1] |= bad[number, 1:] & ~(buffer["terminated"] | buffer["truncated"])[:-1]
        valid = buffer.columns.setdefault("valid", torch.ones_like(rows))
        rows &= valid  # what is not trained on anyway may hold anything
        valid &= ~rows
        self._remember(buffer, bad, rows)
        for column in columns.values():
            column.nan_to_num_(0.0, 0.0, 0.0)
        self.count += rows.sum()
        from_env, from_policy, _ = (
            (bad & rows)
            .flatten(1)
            .any(1)
            .split((of_env, of_policy, len(columns) - of_env - of_policy))
        )
        self.policy_diverged |= from_policy.any() & ~from_env.any()
        return rows.any(0)

    def _told_apart(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns, in the order of CHECKED; of an observation that has a state behind it both
        parts.
        """
        if self.num_inputs is None:
            return columns
        parts = {}
        for obs, state in (("obs", "state"), ("final_obs", "final_state")):
            if obs in columns:
                parts[obs], parts[state] = (
                    columns[obs][..., : self.num_inputs],
                    columns[obs][..., self.num_inputs :],
                )
        columns = columns | parts
        return {name: columns[name] for name in CHECKED if name in columns}

    def _remember(self, buffer: RolloutBuffer, bad: Tensor, rows: Tensor) -> None:
        """Keep where the first bad row is and what its environment did; bad: [columns, T, N] bool,
        rows: [T, N] bool, those that count.
        """
        flat = rows.flatten()
        index = flat.int().argmax()
        is_first = flat.any() & (self.first < 0)
        bits = (
            bad.flatten(1).index_select(1, index.view(1)).squeeze(1).long()
            << torch.arange(len(bad), device=bad.device)
        ).sum()
        torch.where(is_first, bits, self.keys, out=self.keys)
        torch.where(is_first, index, self.first, out=self.first)
        env = (index % rows.shape[1]).view(1)
        found = buffer.columns | self._told_apart(buffer.columns)
        for name in KEPT:
            if name in found:
                column = found[name].index_select(1, env).squeeze(1)
                if name not in self.evidence:
                    self.evidence[name] = column  # of no meaning until something is bad
                torch.where(is_first, column, self.evidence[name], out=self.evidence[name])

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        numbers = {
            "non_finite_rows": self.count,
            "first_non_finite": self.first,
            "non_finite_keys": self.keys,
        }
        return {
            name: number.clone()
            for name, number in (numbers | {"policy_diverged": self.policy_diverged.long()}).items()
        }

    def report(
        self,
        values: dict[str, float],
        num_envs: int,
        iteration: int,
        env_ids: list[int],
        weights: str,
    ) -> None:
        """Count what was left out, say so once, and stop by `stop_if_bad`."""
        if values["non_finite_rows"] and not self.total and self.nan != "raise":
            text = (
                "%s gives NaN or infinity, which --nan %s leaves out; rollout/non_finite_rows "
                "counts it"
            )
            logging.getLogger("gpurl").warning(text, self.env_name, self.nan)
        self.total += int(values["non_finite_rows"])
        self.stop_if_bad(values, num_envs, self.nan == "raise", iteration, env_ids, weights)

    def stop_if_bad(
        self,
        values: dict[str, float],
        num_envs: int,
        stop: bool,
        iteration: int,
        env_ids: list[int],
        weights: str = "",
    ) -> None:
        """Raise NonFiniteError if there were bad rows since the last call and `stop`, DivergedError
        if they are the policy's own.

        values: `metrics()`, on the host. env_ids: the environments with bad rows, where the host
        knows them. weights: those that are not finite, in words. The error's `evidence` is what a
        dump of it holds: what was bad, where, and the first environment's columns.
        """
        count, first, keys, policy_diverged = (
            int(values[name])
            for name in (
                "non_finite_rows",
                "first_non_finite",
                "non_finite_keys",
                "policy_diverged",
            )
        )
        self.first.fill_(-1)
        self.count.zero_()
        self.policy_diverged.zero_()
        if not (policy_diverged or (count and stop)):
            return
        step, env = divmod(first, num_envs)
        found = [name for bit, name in enumerate(self.names) if keys >> bit & 1]
        what = " and ".join(found) or "the next obs"
        at = f"iteration {iteration}, step {step} of the rollout"
        error: NonFiniteError
        if policy_diverged:
            error = DivergedError(
                f"the policy gave NaN or infinity in {what} ({at}), the observations of "
                f"{self.env_name!r} are finite: its weights "
                f"diverged{f' ({weights})' if weights else ''}, they are not saved"
            )
        else:
            named = ", ".join(map(str, env_ids[:NAMED_ENVS])) if env_ids else str(env)
            more = f" and {len(env_ids) - NAMED_ENVS} more" if len(env_ids) > NAMED_ENVS else ""
            error = NonFiniteError(
                f"environment {self.env_name!r} gave NaN or infinity {count} times, first in "
                f"{what} ({at}, environments {named}{more}); "
                "nothing of it was trained on. To leave such steps out and go on: gpurl train "
                "--resume RUN --nan reset-envs"
            )
        where: dict[str, Any] = {
            "env": self.env_name,
            "iteration": iteration,
            "step": step,
            "index": env,
            "keys": found,
            "rows": count,
        }
        error.evidence = where | {"columns": dict(self.evidence), "weights": weights}
        raise error
