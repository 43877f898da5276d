"""Keeps NaN and infinity of an environment out of training, without a host sync.

A row that holds one, or whose successor does, is marked as not valid and zeroed: it weighs nothing in targets, losses and statistics.
The host learns of it at once on a CPU, and on a GPU with the next log entry.
"""

import torch
from torch import Tensor

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.errors import NonFiniteError
from gpurl.kernels.backend import host_may_look

CHECKED = ("obs", "action", "reward", "final_value", "value", "log_prob")


class FiniteGuard:
    """Looks over each rollout before it is trained on."""

    def __init__(self, env_name: str, device: torch.device) -> None:
        self.env_name = env_name
        self.first = torch.full((), -1, dtype=torch.int64, device=device)  # t * N + env of the first bad row
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def clean(self, buffer: RolloutBuffer) -> Tensor | None:
        """Mark and zero bad rows; returns which environments had any, [N] bool, or None where the host saw that all is finite."""
        columns = {name: buffer[name] for name in CHECKED if name in buffer.columns and buffer[name].is_floating_point()}
        if host_may_look(buffer.device) and all(bool(torch.isfinite(column.sum())) for column in columns.values()):
            return None
        bad = {
            name: ~torch.isfinite(column).flatten(2).all(2) if column.dim() > 2 else ~torch.isfinite(column)
            for name, column in columns.items()
        }
        rows = torch.stack(list(bad.values())).any(0)
        ended = buffer["terminated"] | buffer["truncated"]
        rows[:-1] |= bad["obs"][1:] & ~ended[:-1] if "obs" in bad else False
        valid = buffer.columns.setdefault("valid", torch.ones_like(rows))
        rows &= valid  # what is not trained on anyway may hold anything
        valid &= ~rows
        for column in columns.values():
            column.nan_to_num_(0.0, 0.0, 0.0)
        flat = rows.flatten()
        index = torch.where(flat.any(), flat.int().argmax(), -1)
        self.first.copy_(torch.where(self.first >= 0, self.first, index))
        self.count += flat.sum()
        return rows.any(0)

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        return {"non_finite_rows": self.count.clone(), "first_non_finite": self.first.clone()}

    def stop_if_bad(self, values: dict[str, float], num_envs: int, stop: bool, iteration: int, env_ids: list[int]) -> None:
        """Raise NonFiniteError if `stop` and there were bad rows since the last call. values: `metrics()`, on the host."""
        count, first = int(values.pop("non_finite_rows")), int(values.pop("first_non_finite"))
        self.first.fill_(-1)
        self.count.zero_()
        if count and stop:
            where = ", ".join(map(str, env_ids)) if env_ids else str(first % num_envs)
            raise NonFiniteError(
                f"environment {self.env_name!r} gave NaN or infinity {count} times "
                f"(iteration {iteration}, step {first // num_envs} of the rollout, "
                f"environments {where}); nothing of it was trained on. "
                "To leave such steps out and go on: gpurl train --resume RUN --nan skip"
            )
