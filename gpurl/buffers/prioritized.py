"""Prioritised replay (Schaul et al. 2016): transitions are drawn in proportion to a power of their
last error.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.buffers.replay import Replay
from gpurl.errors import UsageError
from gpurl.kernels.prioritized import prioritized_draw, prioritized_update

MIN_ERROR = 1e-6  # so that no transition is never drawn again


class PrioritizedReplay(Replay):
    """P(i) = p_i / sum p with p = (error + MIN_ERROR) ** exponent; weights (P_min / P_i) ** beta,
    P_min the least of those in the batch that are learnt from.

    New transitions get the greatest priority seen, which decays by `decay` an update towards the
    least there is, lest one early error outlives all. beta goes from `importance` to 1 with
    training. Transitions that are not to be learnt from have priority 0.
    """

    also_bytes = 4

    def __init__(
        self,
        *arguments: Any,
        exponent: float = 0.5,
        importance: float = 0.4,
        decay: float = 0.999,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.exponent, self.importance, self.decay = exponent, importance, decay
        self.priority = torch.zeros(
            self.num_rows, self.num_envs, device=self.device
        )  # raised to the exponent already
        self.greatest = torch.ones((), device=self.device)
        self.least = torch.tensor(MIN_ERROR**exponent, device=self.device)
        self.beta = torch.tensor(importance, device=self.device)

    def add(self, columns: dict[str, Tensor]) -> None:
        steps = columns["truncated"].shape[0]
        rows = self._next_rows(steps)
        super().add(columns)
        new = self.greatest.expand(steps, self.num_envs)
        self.priority.index_copy_(0, rows, new * columns["valid"] if "valid" in columns else new)

    def sample(
        self, batch_size: int, gamma: float, num_steps: int = 1, reuse: bool = False
    ) -> dict[str, Tensor]:
        """As Replay.sample, by priority; weight is the importance weight, at most 1."""
        index, probability = prioritized_draw(
            self.priority.view(-1), self._streams(), 0, batch_size
        )
        batch = self._sample(batch_size, gamma, num_steps, reuse, index)
        counts = probability * batch["weight"] > 0
        least = torch.where(counts, probability, torch.inf).min()
        batch["weight"] = torch.where(counts, (least / probability) ** self.beta, 0.0)
        return batch

    def update_priorities(self, index: Tensor, error: Tensor) -> None:
        """Set the priorities of transitions `index` [B] from their errors [B] >= 0; of one that
        comes twice the greater counts.

        An error that is NaN or infinite leaves the priority as it was: its step was left out, which
        gpurl.guards.steps tells.
        """
        priority = (error.abs() + MIN_ERROR) ** self.exponent
        kept = self.priority.view(-1)[index]
        priority = torch.where(
            error.isfinite() & (kept > 0), priority, kept
        )  # what has priority 0 is not to be learnt from
        # not towards 0, which would last for ever where a start has nothing to learn from
        torch.maximum(
            torch.lerp(self.least, self.greatest, self.decay), priority.max(), out=self.greatest
        )
        prioritized_update(self.priority.view(-1), index, priority)

    def set_progress(self, progress: float) -> None:
        """Move beta; progress runs from 0 to 1."""
        self.beta.fill_(self.importance + (1.0 - self.importance) * min(progress, 1.0))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {
            "priority": self.priority[: state["flags"].shape[0]],
            "greatest": self.greatest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "priority" not in state:
            raise UsageError(
                "the saved replay has no priorities: it was drawn from uniformly; go on without "
                "prioritized"
            )
        super().load_state_dict(state)
        self.priority[: state["priority"].shape[0]].copy_(state["priority"])
        self.greatest.copy_(state["greatest"])
