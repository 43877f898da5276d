"""Prioritised replay (Schaul et al. 2016): transitions are sampled in proportion to a power of
their last error.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.buffers.replay import Replay, State
from gpurl.errors import UsageError
from gpurl.kernels.prioritized import prioritized_draw, prioritized_update
from gpurl.nn.ranks import ALONE, Alone

MIN_ERROR = 1e-6  # so that every transition can be sampled again


class PrioritizedReplay(Replay):
    """P(i) = p_i / sum p with p = (error + MIN_ERROR) ** alpha; weights (P_min / P_i) ** beta, with
    the smallest P of the batch.

    Each of G ranks draws its part of a batch from its own transitions, by P(i) = p_i / (G sum p)
    with its own sum: that is what the weights of all correct for.

    New transitions get the maximum priority so far. It decays by the factor `decay` an update
    towards the minimum, so that one large early error does not dominate for ever. beta goes from
    its initial value to 1 during training. Transitions without anything to learn have priority 0.
    """

    extra_bytes = 4

    def __init__(
        self,
        *arguments: Any,
        alpha: float = 0.5,
        beta: float = 0.4,
        decay: float = 0.999,
        ranks: Alone = ALONE,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.ranks = ranks
        self.alpha = alpha
        self.initial_beta = beta
        self.decay = decay
        # priorities are stored raised to alpha
        self.priority = torch.zeros(self.num_rows, self.num_envs, device=self.device)
        self.max_priority = torch.ones((), device=self.device)
        self.min_priority = torch.tensor(MIN_ERROR**alpha, device=self.device)
        self.beta = torch.tensor(beta, device=self.device)

    def add(self, columns: dict[str, Tensor]) -> None:
        steps = columns["truncated"].shape[0]
        rows = self._next_rows(steps)
        super().add(columns)
        # the largest priority: each transition is soon drawn once
        new = self.max_priority.expand(steps, self.num_envs)
        self.priority.index_copy_(0, rows, new * columns["valid"] if "valid" in columns else new)

    def clear(self) -> None:
        super().clear()
        self.priority.zero_()
        self.max_priority.fill_(1.0)

    def sample(
        self, batch_size: int, gamma: float, num_steps: int = 1, reuse: bool = False
    ) -> dict[str, Tensor]:
        """As Replay.sample, but by priority; weight is the importance-sampling weight, at
        most 1.
        """
        index, probability = prioritized_draw(
            self.priority.view(-1), self.random.streams, 0, batch_size
        )
        # the drawn transitions, as uniform sampling returns them
        batch = self._sample(batch_size, gamma, num_steps, reuse, index)
        # importance-sampling weights, relative to the least probable transition of the batch
        counts = probability * batch["weight"] > 0
        lowest = torch.where(counts, probability, torch.inf).min()
        if self.ranks.count > 1:
            lowest = self.ranks.stack(lowest).min()
        batch["weight"] = torch.where(counts, (lowest / probability) ** self.beta, 0.0)
        return batch

    def update_priorities(self, index: Tensor, error: Tensor) -> None:
        """Set the priorities of transitions `index` [B] from their errors [B]; the larger error
        counts for a transition that comes twice.

        An error that is NaN or infinite does not change the priority: its optimiser step was
        skipped, and gpurl.guards.steps reports it.
        """
        # transitions of priority 0 keep it: there is nothing to learn from them
        priority = (error.abs() + MIN_ERROR) ** self.alpha
        before = self.priority.view(-1)[index]
        priority = torch.where(error.isfinite() & (before > 0), priority, before)
        # decay towards the minimum and not to 0: after a start with nothing to learn it would stay
        # 0
        decayed = torch.lerp(self.min_priority, self.max_priority, self.decay)
        torch.maximum(decayed, priority.max(), out=self.max_priority)
        if self.ranks.count > 1:  # each has new transitions of the same priority
            self.max_priority.copy_(self.ranks.stack(self.max_priority).max())
        prioritized_update(self.priority.view(-1), index, priority)

    def set_progress(self, progress: float) -> None:
        """Set beta; progress of the training goes from 0 to 1."""
        self.beta.fill_(self.initial_beta + (1.0 - self.initial_beta) * min(progress, 1.0))

    def state_dict(self) -> State:
        state = super().state_dict()
        return state | {
            "priority": self.priority[: state["flags"].shape[0]],
            "max_priority": self.max_priority,
        }

    def load_state_dict(self, state: State) -> None:
        if "priority" not in state:
            raise UsageError(
                "the saved replay has no priorities: it was sampled uniformly; resume without "
                "prioritized"
            )
        super().load_state_dict(state)
        self.priority[: state["priority"].shape[0]].copy_(state["priority"])
        self.max_priority.copy_(state["max_priority"])
