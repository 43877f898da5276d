"""The best policies of a population so far: each member's own."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError


class BestMembers:
    """The weights of each of P members at the best of its own evaluations."""

    def __init__(self) -> None:
        # [P] of each member; -inf and -1 before its first evaluation
        self.returns: list[float] = []
        self.steps: list[int] = []
        # name -> [P, ...]
        self.model: dict[str, Tensor] = {}

    def note(
        self, values: Mapping[str, float], step: int, policies: Sequence[Algorithm | None]
    ) -> None:
        """Keep the members that were better than before in the evaluation at env step `step`.
        values: as `of_population` of `gpurl.run.evaluator` has them.
        """
        for k, policy in enumerate(policies):
            found = values.get(f"members/{k}/eval_reward", -math.inf)
            if policy is None or found <= (self.returns[k] if self.returns else -math.inf):
                continue
            weights = policy.state_dict()
            if not self.returns:
                count = len(policies)
                self.returns, self.steps = [-math.inf] * count, [-1] * count
                self.model = {
                    name: tensor.new_zeros(count, *tensor.shape) for name, tensor in weights.items()
                }
            for name, tensor in weights.items():
                self.model[name][k].copy_(tensor)
            self.returns[k], self.steps[k] = found, step

    def state_dict(self) -> State:
        """The part `best` of a checkpoint; {} before the first evaluation."""
        if not self.returns:
            return {}
        returns = torch.tensor(self.returns, dtype=torch.float64)
        return {"returns": returns, "steps": torch.tensor(self.steps), "model": dict(self.model)}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`; CheckpointError for what is none."""
        if not state:
            return
        try:
            self.returns, self.steps = state["returns"].tolist(), state["steps"].tolist()
            self.model = dict(state["model"])
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"its part best does not fit: {error}") from error


def best_weights(state: State, member: int) -> tuple[dict[str, Tensor], int] | None:
    """(the weights of a member, the env step at which it was best) in the part `best` of a
    checkpoint; None if it was never evaluated.
    """
    if not state or (step := int(state["steps"][member])) < 0:
        return None
    return {name: each[member] for name, each in state["model"].items()}, step
