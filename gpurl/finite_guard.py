"""Keeps NaN and infinity of an environment out of training, without a host sync, and tells them from those of a policy that diverged.

A row that holds one, or whose successor does, is marked as not valid and zeroed: it weighs nothing in targets, losses and statistics.
The host learns of it at once on a CPU, and on a GPU with the next log entry.
"""

import torch
from torch import Tensor

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.errors import DivergedError, NonFiniteError
from gpurl.kernels.backend import host_may_look

FROM_ENV, FROM_POLICY = ("obs", "reward", "final_obs"), ("action", "value", "log_prob")
CHECKED = (*FROM_ENV, *FROM_POLICY, "final_value")  # the last comes of both: final_obs, seen by the policy
NAMED_ENVS = 10


class FiniteGuard:
    """Looks over each rollout before it is trained on."""

    def __init__(self, env_name: str, device: torch.device) -> None:
        self.env_name = env_name
        self.first = torch.full((), -1, dtype=torch.int64, device=device)  # t * N + env of the first bad row
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.policy_diverged = torch.zeros((), dtype=torch.bool, device=device)  # it gave NaN where the environment gave none

    def clean(self, buffer: RolloutBuffer) -> Tensor | None:
        """Mark and zero bad rows; returns which environments had any, [N] bool, or None where the host saw that all is finite."""
        columns = {name: buffer[name] for name in CHECKED if name in buffer.columns and buffer[name].is_floating_point()}
        if host_may_look(buffer.device) and all(bool(torch.isfinite(column.sum())) for column in columns.values()):
            return None
        of_env, of_policy = (sum(name in names for name in columns) for names in (FROM_ENV, FROM_POLICY))
        # x 0 is 0 or NaN: few operations a column, and no finite number overflows
        bad = torch.stack([(column * 0.0).flatten(2).sum(2) if column.dim() > 2 else column * 0.0 for column in columns.values()]) != 0.0
        rows = bad.any(0)
        if "obs" in columns:  # the first of them
            rows[:-1] |= bad[0, 1:] & ~(buffer["terminated"] | buffer["truncated"])[:-1]
        valid = buffer.columns.setdefault("valid", torch.ones_like(rows))
        rows &= valid  # what is not trained on anyway may hold anything
        valid &= ~rows
        for column in columns.values():
            column.nan_to_num_(0.0, 0.0, 0.0)
        flat = rows.flatten()
        index = torch.where(flat.any(), flat.int().argmax(), -1)
        self.first.copy_(torch.where(self.first >= 0, self.first, index))
        self.count += flat.sum()
        from_env, from_policy, _ = (bad & rows).flatten(1).any(1).split((of_env, of_policy, len(columns) - of_env - of_policy))
        self.policy_diverged |= from_policy.any() & ~from_env.any()
        return rows.any(0)

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        numbers = {"non_finite_rows": self.count, "first_non_finite": self.first, "policy_diverged": self.policy_diverged.long()}
        return {name: number.clone() for name, number in numbers.items()}

    def load(self, numbers: dict[str, Tensor]) -> None:
        """Go back to what `metrics` gave."""
        self.count.copy_(numbers["non_finite_rows"])
        self.first.copy_(numbers["first_non_finite"])
        self.policy_diverged.copy_(numbers["policy_diverged"])

    def stop_if_bad(self, values: dict[str, float], num_envs: int, stop: bool, iteration: int, env_ids: list[int]) -> None:
        """Raise NonFiniteError if there were bad rows since the last call and `stop`, DivergedError if they are the policy's own.

        values: `metrics()`, on the host. env_ids: the environments with bad rows, where the host knows them.
        """
        count, first, policy_diverged = (int(values[name]) for name in ("non_finite_rows", "first_non_finite", "policy_diverged"))
        self.first.fill_(-1)
        self.count.zero_()
        self.policy_diverged.zero_()
        at = f"iteration {iteration}, step {first // num_envs} of the rollout"
        if policy_diverged:
            raise DivergedError(
                f"the policy gave NaN or infinity ({at}), the observations of {self.env_name!r} are finite: its weights diverged, they are "
                "not saved. To go on from the last checkpoint with smaller steps: gpurl train --resume RUN --learning-rate RATE"
            )
        if count and stop:
            named = ", ".join(map(str, env_ids[:NAMED_ENVS])) if env_ids else str(first % num_envs)
            more = f" and {len(env_ids) - NAMED_ENVS} more" if len(env_ids) > NAMED_ENVS else ""
            raise NonFiniteError(
                f"environment {self.env_name!r} gave NaN or infinity {count} times ({at}, environments {named}{more}); nothing of it was "
                "trained on. To leave such steps out and go on: gpurl train --resume RUN --nan skip"
            )
