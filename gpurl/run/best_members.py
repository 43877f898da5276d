"""The best policies of a population so far: each member's own."""

import math
from collections.abc import Mapping, Sequence

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.state_files import State


class BestMembers:
    """The weights of each member of a population at the best of its own evaluations."""

    def __init__(self) -> None:
        # member: its return, the env step and the weights
        self._of: dict[int, State] = {}

    def note(
        self, values: Mapping[str, float], step: int, policies: Sequence[Algorithm | None]
    ) -> bool:
        """After an evaluation at env step `step`; whether a member was better than before. values:
        as `of_population` of `gpurl.run.evaluator` has them.
        """
        better = False
        for k, policy in enumerate(policies):
            found = values.get(f"members/{k}/eval_reward", -math.inf)
            if policy is None or found <= self._of.get(k, {}).get("return", -math.inf):
                continue
            model = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            self._of[k] = {"return": found, "step": step, "model": model}
            better = True
        return better

    def state_dict(self) -> State:
        """The part `best` of a checkpoint."""
        return {str(k): dict(state) for k, state in self._of.items()}

    def load_state_dict(self, state: State) -> None:
        self._of = {int(k): dict(each) for k, each in state.items()}
