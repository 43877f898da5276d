"""Keeps NaN and infinity of an environment out of training, without a host sync, and distinguishes
them from those of a diverged policy.

A row that holds one, or whose successor does, is marked as not valid and zeroed: it has no weight
in targets, losses and statistics. The host learns of it at once on a CPU, and on a GPU with the
next log entry. The columns of the first such environment are kept as evidence.
"""

import logging
import math

import torch
from torch import Tensor

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.envs.observation_groups import GroupedBox
from gpurl.errors import DivergedError, NonFiniteError
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.finite import Columns, Evidence, Findings, find_non_finite

SUCCESSOR = ("obs", "state")  # columns in which the next row shows a successor
FROM_ENV = (*SUCCESSOR, "reward", "final_obs", "final_state")
FROM_POLICY = ("action", "value", "log_prob")
CHECKED = (*FROM_ENV, *FROM_POLICY, "final_value")  # the last depends on both
EVIDENCE = (*SUCCESSOR, "action", "reward", "value", "terminated", "truncated")
SKIP_COMMAND = "gpurl train --resume RUN --nan reset-envs"
HOW_TO_GO_ON = f"To skip such steps and continue: {SKIP_COMMAND}"
MAX_NAMED_ENVS = 10


class FiniteGuard:
    """Checks each rollout before it is trained on."""

    def __init__(
        self,
        env_name: str,
        device: torch.device,
        nan: str = "raise",
        num_inputs: int | None = None,
        groups: GroupedBox | None = None,
    ) -> None:
        """nan: as `TrainConfig.nan`. num_inputs: size of an observation, if privileged observations
        follow it in each row. groups: of observations that are bytes.
        """
        self.env_name = env_name
        self.groups = groups
        self.nan = nan
        self.num_inputs = num_inputs
        self.total = 0  # rows skipped by this process
        self.names: list[str] = []  # of the checked columns, in the order of the bits of `keys`
        self.findings = Findings(
            first=torch.full((), -1, dtype=torch.int64, device=device),
            keys=torch.zeros((), dtype=torch.int64, device=device),
            count=torch.zeros((), dtype=torch.int64, device=device),
            policy_diverged=torch.zeros((), dtype=torch.bool, device=device),
        )
        self.evidence: dict[str, Tensor] = {}  # [T, ...] columns of the first bad environment

    def begin(self) -> None:
        """Forget what was found and not reported: a member that was lost goes on with the weights
        of another one.
        """
        self.findings.first.fill_(-1)
        for each in (self.findings.keys, self.findings.count, self.findings.policy_diverged):
            each.zero_()

    def clean(self, buffer: RolloutBuffer) -> Tensor | None:
        """Mark and zero bad rows; returns which environments had any, [N] bool, or None if the host
        knows that all is finite.
        """
        # nothing to do if the host sees that all sums are finite
        columns = {
            name: column
            for name in CHECKED
            if name in buffer.columns
            and (column := self._numbers(name, buffer.columns[name])).is_floating_point()
        }
        if host_sync_is_free(buffer.device) and all(
            math.isfinite(column.sum().item()) for column in columns.values()
        ):
            return None
        checked = self._split_obs(columns)
        self.names = list(checked)
        buffer.columns["valid"], bad_envs = find_non_finite(
            Columns(
                list(checked.values()),
                num_successor=sum(name in SUCCESSOR for name in checked),
                num_env=sum(name in FROM_ENV for name in checked),
                num_policy=sum(name in FROM_POLICY for name in checked),
            ),
            buffer["terminated"],
            buffer["truncated"],
            buffer.columns.get("valid"),
            self.findings,
            self._evidence(buffer.columns),
        )
        return bad_envs

    def _numbers(self, name: str, column: Tensor) -> Tensor:
        """The floats among the bytes of an observation, a view; other columns as they are."""
        if self.groups is None or not self.groups.num_floats or name not in ("obs", "final_obs"):
            return column
        return self.groups.floats(column)

    def _evidence(self, columns: dict[str, Tensor]) -> list[Evidence]:
        """The columns to keep of the first bad environment, and where."""
        columns = columns | self._split_obs(columns)
        columns = {name: columns[name] for name in EVIDENCE if name in columns}
        for name, column in columns.items():
            if name not in self.evidence:  # without meaning until a row is bad
                self.evidence[name] = column.new_empty(column.shape[:1] + column.shape[2:])
        return [Evidence(column, self.evidence[name]) for name, column in columns.items()]

    def _split_obs(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns in the order of CHECKED, with privileged observations as separate columns."""
        if self.num_inputs is None:
            return columns
        split = dict(columns)
        for obs, state in (("obs", "state"), ("final_obs", "final_state")):
            if obs in columns:
                split[obs] = columns[obs][..., : self.num_inputs]
                split[state] = columns[obs][..., self.num_inputs :]
        return {name: split[name] for name in CHECKED if name in split}

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        return {
            "non_finite_rows": self.findings.count.clone(),
            "first_non_finite": self.findings.first.clone(),
            "non_finite_keys": self.findings.keys.clone(),
            "policy_diverged": self.findings.policy_diverged.long(),
        }

    def report(
        self,
        values: dict[str, float],
        num_envs: int,
        iteration: int,
        env_ids: list[int],
        weights: str,
    ) -> None:
        """Count the skipped rows, warn of the first ones, and stop as `stop_if_bad` does."""
        if values["non_finite_rows"] and not self.total and self.nan != "raise":
            logging.getLogger("gpurl").warning(
                "%s gave NaN or infinity; --nan %s skips those steps, rollout/non_finite_rows "
                "counts them",
                self.env_name,
                self.nan,
            )
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
        """Raise DivergedError if the policy gave NaN since the last call, NonFiniteError if the
        environment did and `stop`.

        values: `metrics()`, on the host. env_ids: the environments with bad rows, if the host knows
        them. weights: a description of those that are not finite. The error's `evidence` is what
        its dump holds: what was bad, where, and the columns of the first environment.
        """
        count = int(values["non_finite_rows"])
        keys = int(values["non_finite_keys"])
        self.findings.first.fill_(-1)
        self.findings.count.zero_()
        self.findings.policy_diverged.zero_()
        if not (values["policy_diverged"] or (count and stop)):
            return
        # where it was
        step, env = divmod(int(values["first_non_finite"]), num_envs)
        names = [name for bit, name in enumerate(self.names) if keys >> bit & 1]
        columns = " and ".join(names) or "the next obs"
        where = f"iteration {iteration}, step {step} of the rollout"
        # whose it was
        error: NonFiniteError
        if values["policy_diverged"]:
            error = DivergedError(
                f"the policy gave NaN or infinity in {columns} ({where}), the observations of "
                f"{self.env_name!r} are finite: its weights "
                f"diverged{f' ({weights})' if weights else ''}, they are not saved"
            )
        else:
            envs = ", ".join(map(str, env_ids[:MAX_NAMED_ENVS] or [env]))
            if len(env_ids) > MAX_NAMED_ENVS:
                envs += f" and {len(env_ids) - MAX_NAMED_ENVS} more"
            error = NonFiniteError(
                f"environment {self.env_name!r} gave NaN or infinity {count} times, first in "
                f"{columns} ({where}, environments {envs}); these steps were not trained on. "
                f"{HOW_TO_GO_ON}"
            )
        error.evidence = {
            "env": self.env_name,
            "iteration": iteration,
            "step": step,
            "index": env,
            "keys": names,
            "rows": count,
            "columns": dict(self.evidence),
            "weights": weights,
        }
        raise error
