"""Population based training (Jaderberg et al. 2017) in one process: every so many steps bad members
of a population go on from the state of better ones, with other settings.
"""

import math
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.leaderboard import Entry, Leaderboard, draw_entry, same_form
from gpurl.engine.eager import Eager
from gpurl.errors import CheckpointError
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
    """The state that a member goes on from."""

    name: str
    member: int  # of this population; -1: of a leaderboard
    score: float
    model: dict[str, Any]
    training: dict[str, Any]
    settings: dict[str, float]  # those that are explored


class TakeOver(NamedTuple):
    """What happened to a member."""

    member: int
    score: float  # until now
    source: Source
    settings: dict[str, float]  # from now on

    def __str__(self) -> str:
        changes = ", ".join(
            f"{name} {old:.3g} -> {self.settings[name]:.3g}"
            for name, old in self.source.settings.items()
        )
        returns = f"return {self.score:.4g} -> {self.source.score:.4g}"
        return f"member {self.member} took over {self.source.name} ({returns}), {changes}"


class PopulationBasedTraining:
    """Selects among `members`. A score is the mean return of the newest episode of each
    environment of a member, all of which began since the member changed; who has none yet neither
    takes over nor is taken over.
    """

    def __init__(
        self,
        options: PbtOptions,
        members: Sequence[Eager],
        seed: int,
        leaderboard: Leaderboard | None = None,
    ) -> None:
        """leaderboard: members take over its entries, and enter it, in place of each other."""
        self.options = options
        self.members = members
        self.leaderboard = leaderboard
        # names of entries must be unique among all runs
        self._run = uuid.uuid4().hex[:12]
        self.random = CounterRandom(seed + SELECTION_SEED, len(members))
        # [P, n] finished episodes of each environment when its member changed, and the one that was
        # being played then
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
        scores = self.scores(lost)
        if len(scores) < 2 and not self._has_waited:
            self._has_waited = True
            self.notes.append(
                f"nothing was selected: {len(scores)} of {len(self.members)} members have finished "
                f"an episode in each environment; a longer pbt_every than {self.options.every:,} "
                f"steps waits for them"
            )
        # all states first: a source may be replaced itself
        first = [row[0] for row in numbers]
        if self.leaderboard is None:
            sources = self._from_members(scores, first)
        else:
            sources = self._from_leaderboard(self.leaderboard, scores, first)
        return [
            self._take_over(k, scores[k], source, numbers[k][1:]) for k, source in sources.items()
        ]

    def _take_over(self, k: int, score: float, source: Source, numbers: list[float]) -> TakeOver:
        """Member k goes on from `source`; numbers: two for each setting."""
        settings = explored(self.options, source.settings, numbers)
        take_over(self.members[k].algorithm, source, settings)
        self.counted[k] = self.members[k].statistics.newest[2] + 1
        return TakeOver(k, score, source, settings)

    def _from_members(self, scores: dict[int, float], uniforms: list[float]) -> dict[int, Source]:
        """Who goes on from which other member."""
        # the rule sees those that have a score
        ready = [*scores]
        parents = parents_of(self.options, [*scores.values()], [uniforms[k] for k in ready])
        pairs = {k: ready[parent] for k, parent in zip(ready, parents) if ready[parent] != k}
        sources = {j: self._source(j, scores[j]) for j in {*pairs.values()}}
        return {k: sources[j] for k, j in pairs.items()}

    def _from_leaderboard(
        self, board: Leaderboard, scores: dict[int, float], uniforms: list[float]
    ) -> dict[int, Source]:
        """Enter all members; each then draws an entry, and goes on from it if that is better (Liu
        et al. 2021, "ElegantRL-Podracer", arXiv 2112.05923). What cannot be read is noted.
        """
        sources: dict[int, Source] = {}
        try:
            for k, score in scores.items():
                self._enter(board, k, score)
            entries = board.entries()
        except CheckpointError as error:
            self.notes.append(f"no member took over an entry: {error}")
            return sources
        for k, score in scores.items():
            entry = draw_entry(entries, uniforms[k])
            is_better = entry is not None and not score >= entry.score  # NaN is worse
            if entry is None or not is_better:
                continue
            try:
                sources[k] = self._of_entry(board, entry, k)
            except CheckpointError as error:
                self.notes.append(f"member {k} did not take over entry {entry.name}: {error}")
        return sources

    def _enter(self, board: Leaderboard, k: int, score: float) -> None:
        """A member that diverged enters nothing."""
        if not math.isfinite(score):
            return
        member, settings = self.members[k], self.settings_of(k)
        entry = Entry(f"{self._run}-{k}", score, member.steps, settings)
        algorithm = member.algorithm
        parts = {"weights": dict(algorithm.state_dict()), "learning": algorithm.extra_state()}
        board.submit(entry, parts)

    def _of_entry(self, board: Leaderboard, entry: Entry, k: int) -> Source:
        """The source for member k; CheckpointError if it is of another kind of agent."""
        algorithm = self.members[k].algorithm
        model, training = fitting_state(algorithm, board.load(entry, algorithm.device))
        settings = within(self.options.spans, self.settings_of(k), entry.settings)
        return Source(f"entry {entry.name}", -1, entry.score, model, training, settings)

    def settings_of(self, k: int) -> dict[str, float]:
        """The explored settings of member k."""
        config = self.members[k].algorithm.config
        return {name: getattr(config, name) for name in self.options.spans}

    def _source(self, k: int, score: float) -> Source:
        algorithm = self.members[k].algorithm
        # clones: a deep copy of a tensor would copy the memory that stacked members share
        model, training = (
            tree_map_only(Tensor, Tensor.clone, state)
            for state in (dict(algorithm.state_dict()), algorithm.extra_state())
        )
        return Source(f"member {k}", k, score, model, training, self.settings_of(k))

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self.random.state_dict(),
            "counted": [*self.counted],
            "run": "" if self.leaderboard is None else self._run,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.load_state_dict(state["random"])
        self._run = str(state["run"]) or self._run
        for own, saved in zip(self.counted, state["counted"], strict=True):
            own.copy_(saved)


def parents_of(
    options: PbtOptions, scores: Sequence[float], uniforms: Sequence[float]
) -> list[int]:
    """Who goes on from whom by the rule of the options, as in `gpurl.selection`."""
    if options.rule == "truncation":
        return truncation(scores, options.fraction, uniforms)
    if options.rule == "tournament":
        return tournament(scores, uniforms)
    return generation(scores, max(int(options.fraction * len(scores)), 1), uniforms)


def explored(
    options: PbtOptions, settings: Mapping[str, float], numbers: Sequence[float]
) -> dict[str, float]:
    """Other values of `settings`; numbers: two in [0, 1) for each."""
    pairs = zip(numbers[::2], numbers[1::2])
    return {
        name: explore(value, options.spans[name], options.resample, pair)
        for (name, value), pair in zip(settings.items(), pairs)
    }


def within(
    spans: Mapping[str, Span], settings: Mapping[str, float], of_entry: Mapping[str, float]
) -> dict[str, float]:
    """`settings` with those of a leaderboard's entry in their place, within their ranges."""
    return {
        name: min(max(of_entry[name], span.low), span.high) if name in of_entry else settings[name]
        for name, span in spans.items()
    }


def fitting_state(
    algorithm: Algorithm, parts: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model, training) of a leaderboard's checkpoint, for `Algorithm.take_over`; CheckpointError
    if it is of another kind of agent.
    """
    own = algorithm.extra_state()
    kept = {name: own[name] for name in algorithm.of_episodes & own.keys()}
    # settings come from the list of entries
    kept |= {"changed_settings": algorithm.changed_settings}
    model, training = parts.get("weights", {}), parts.get("learning", {}) | kept
    if not (same_form(dict(algorithm.state_dict()), model) and same_form(own, training)):
        raise CheckpointError("it is an agent of another algorithm, other spaces or networks")
    return model, training


def take_over(algorithm: Algorithm, source: Source, settings: Mapping[str, float]) -> None:
    """Go on from the source with other `settings`."""
    # with its settings first: a learning rate that a schedule has adapted is one of them
    for name, value in source.settings.items():
        algorithm.change_setting(name, value)
    algorithm.take_over(source.model, source.training)
    for name, value in settings.items():
        algorithm.change_setting(name, value)
