"""Population based training (Jaderberg et al. 2017) in one process: every so many steps bad members
of a population go on from the state of better ones, with other settings.
"""

import copy
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpurl.algorithms.base import Algorithm
from gpurl.engine.eager import Eager
from gpurl.kernels.random import CounterRandom
from gpurl.selection import Span, explore, generation, tournament, truncation

# far from the seeds of all other streams
SELECTION_SEED = 1 << 33
RULES = ("truncation", "tournament", "generation")


@dataclass(frozen=True)
class PbtOptions:
    """How members are selected."""

    every: int  # steps of a member between selections
    rule: str  # one of RULES
    fraction: float  # of all members: the worst ones and the best ones, or the elite
    resample: float  # probability of a new value in place of a perturbed one
    spans: Mapping[str, Span]  # of each setting that is explored


class Source(NamedTuple):
    """The state of a member that others go on from."""

    model: dict[str, Any]
    training: dict[str, Any]
    settings: dict[str, float]  # those that are explored


class TakeOver(NamedTuple):
    """What happened to a member."""

    member: int
    source: int
    scores: tuple[float, float]  # of the member and of the source
    before: dict[str, float]  # settings of the source
    after: dict[str, float]  # of the member from now on

    def __str__(self) -> str:
        changes = ", ".join(
            f"{name} {old:.3g} -> {self.after[name]:.3g}" for name, old in self.before.items()
        )
        returns = f"return {self.scores[0]:.4g} -> {self.scores[1]:.4g}"
        text = f"member {self.member} took over member {self.source}"
        return f"{text} ({returns})" + f", {changes}" * bool(changes)


class PopulationBasedTraining:
    """Selects among `members`. A score is the mean return of the newest episode of each
    environment of a member, all of which have ended since the member changed; who has none yet
    neither takes over nor is taken over.
    """

    def __init__(self, options: PbtOptions, members: Sequence[Eager], seed: int) -> None:
        self.options = options
        self.members = members
        self.random = CounterRandom(seed + SELECTION_SEED, len(members))
        # [P, n] finished episodes of each environment when its member changed
        self.counted = [member.statistics.newest[2].clone() for member in members]
        # for the user
        self.notes: list[str] = []
        self._has_waited = False

    def is_due(self, before: int, steps: int) -> bool:
        """Whether a selection lies between two numbers of steps."""
        return steps // self.options.every > before // self.options.every

    def scores(self, lost: Set[int]) -> dict[int, float]:
        """The score of each member that has one; NaN of the lost ones."""
        scores = {}
        for k, member in enumerate(self.members):
            returns, _, count = member.statistics.newest
            if k in lost:
                scores[k] = math.nan
            elif bool((count > self.counted[k]).all()):
                scores[k] = float(returns.double().mean())
        return scores

    def select(self, lost: Set[int]) -> list[TakeOver]:
        """One selection; lost: members that diverged, which only others can replace."""
        names = [*self.options.spans]
        numbers = self.random.uniform(shape=(1 + 2 * len(names),)).double().tolist()
        self.random.advance()
        # the rule sees those that have a score
        scores = self.scores(lost)
        ready = [*scores]
        if len(ready) < 2 and not self._has_waited:
            self._has_waited = True
            self.notes.append(
                f"nothing was selected: {len(ready)} of {len(self.members)} members have finished "
                f"an episode in each environment; a longer pbt_every than {self.options.every:,} "
                f"steps waits for them"
            )
        parents = self._parents([*scores.values()], [numbers[k][0] for k in ready])
        pairs = {k: ready[parent] for k, parent in zip(ready, parents) if ready[parent] != k}
        # all states first: a source may be replaced itself
        sources = {j: self._source(j) for j in {*pairs.values()}}
        taken = []
        for k, j in pairs.items():
            after = self._explored(sources[j].settings, numbers[k][1:])
            _take_over(self.members[k].algorithm, sources[j], after)
            self.counted[k] = self.members[k].statistics.newest[2].clone()
            taken.append(TakeOver(k, j, (scores[k], scores[j]), sources[j].settings, after))
        return taken

    def _parents(self, scores: list[float], uniforms: list[float]) -> list[int]:
        fraction = self.options.fraction
        if self.options.rule == "truncation":
            return truncation(scores, fraction, uniforms)
        if self.options.rule == "tournament":
            return tournament(scores, uniforms)
        return generation(scores, max(int(fraction * len(scores)), 1), uniforms)

    def _explored(self, settings: dict[str, float], numbers: list[float]) -> dict[str, float]:
        """numbers: two for each setting."""
        pairs = zip(numbers[::2], numbers[1::2])
        return {
            name: explore(value, self.options.spans[name], self.options.resample, pair)
            for (name, value), pair in zip(settings.items(), pairs)
        }

    def settings_of(self, k: int) -> dict[str, float]:
        """The explored settings of member k."""
        config = self.members[k].algorithm.config
        return {name: getattr(config, name) for name in self.options.spans}

    def _source(self, k: int) -> Source:
        algorithm = self.members[k].algorithm
        state = copy.deepcopy((dict(algorithm.state_dict()), algorithm.extra_state()))
        return Source(*state, self.settings_of(k))

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.state_dict(), "counted": [*self.counted]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.load_state_dict(state["random"])
        for own, saved in zip(self.counted, state["counted"], strict=True):
            own.copy_(saved)


def _take_over(algorithm: Algorithm, source: Source, settings: Mapping[str, float]) -> None:
    """Go on from the source with other `settings`."""
    # with its settings first: a learning rate that a schedule has adapted is one of them
    for name, value in source.settings.items():
        algorithm.change_setting(name, value)
    algorithm.take_over(source.model, source.training)
    for name, value in settings.items():
        algorithm.change_setting(name, value)
