"""Greedy evaluation in separate environments: of every environment a number of first episodes that
is decided before, so short ones are not favoured. Several processes play a part each.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, PolicyState, episode_ends, restart_policy_state
from gpurl.checkpoints.state_files import State
from gpurl.engine.graphs import WARM_UPS, Backend, in_place
from gpurl.envs.vec_env import ShareSeeds, VecEnv
from gpurl.errors import EndlessEpisodeError, NonFiniteError, first_line
from gpurl.guards.contract import reset_env, step_env
from gpurl.guards.finite import SKIP_COMMAND
from gpurl.nn.ranks import ALONE, Alone
from gpurl.run.display import counted
from gpurl.run.settings import TrainConfig

Act = Callable[[Tensor, PolicyState], tuple[Tensor, PolicyState]]
EVAL_SEED = 1_000_003  # every evaluation plays the same episodes, which training never plays
LOOK_EVERY = 16  # steps between checks whether all episodes ended
MAX_STEPS = 5_000  # of an episode without a time limit: longer ones count as endless
# of a run's time for evaluations on the way, unless the user says when to evaluate
MAX_SHARE = 1 / 20


def greedy(algorithm: Algorithm) -> Act:
    """The algorithm's policy without exploration."""

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        decision = algorithm.act(obs, policy_state, explore=False)
        return decision.action, decision.policy_state

    return act


def greedy_player(algorithm: Algorithm, num_envs: int) -> tuple[Act, PolicyState]:
    """(`greedy`, its hidden state at the start of episodes)."""
    return greedy(algorithm), algorithm.initial_policy_state(num_envs)


def greedy_members(policies: Sequence[Algorithm | None]) -> Act:
    """The policies of a population without exploration, each on its share of the rows; in place of
    a lost one, None, the first of the others plays.
    """
    others = next(each for each in policies if each is not None)
    players = [others if each is None else each for each in policies]
    if len(players) == 1:
        return greedy(others)

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        size = len(obs) // len(players)
        states = [memory.split(size) for memory in policy_state]
        decisions = [
            player.act(own, tuple(memory[k] for memory in states), explore=False)
            for k, (player, own) in enumerate(zip(players, obs.split(size)))
        ]
        memories = zip(*(decision.policy_state for decision in decisions))
        action = torch.cat([decision.action for decision in decisions])
        return action, tuple(torch.cat(each) for each in memories)

    return act


def scripted(env: VecEnv) -> Act | None:
    """The environment's baseline policy, None if it has none."""
    function: Callable[[Tensor], Tensor] | None = getattr(env, "scripted_action", None)
    return None if function is None else lambda obs, policy_state: (function(obs), policy_state)


class Stopped(Exception):
    """`should_stop` ended the evaluation."""


class Player:
    """Plays evaluations with one policy; with graphs every `LOOK_EVERY` steps are one replay."""

    def __init__(
        self,
        act: Act,
        env: VecEnv,
        episodes: int,
        policy_state: PolicyState = (),
        graphs: Backend | None = None,
        members: int = 1,
        ranks: Alone = ALONE,
    ) -> None:
        """episodes: all that are counted; policy_state: before the first step. graphs: for a
        `graph_safe` environment only. members: of a population, each with an equal share of the
        environments, in which it plays `episodes` episodes, the same ones as the others. ranks:
        the processes that play them together, each in its environments.
        """
        self.act = act
        self.env = env
        self.members = members
        self.ranks = ranks
        # how many each environment plays is decided before, however short its own are
        share = env.num_envs // members
        sizes = ranks.share(share)
        self.num_envs = members * sum(sizes)
        whole, rest = divmod(episodes, sum(sizes))
        index = sum(sizes[: ranks.index]) + torch.arange(share, device=env.device)
        self.quota = (whole + (index < rest).long()).repeat(members)  # [N]
        self.max_quota = whole + bool(rest)
        self.first_policy_state = policy_state
        self.graphs = graphs
        self.obstacle = ""  # why the steps could not be captured
        self.obs = torch.empty(0)
        self.policy_state = policy_state
        self.finished = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        # sums over a member's finite episodes: number, return, squared return, length; number of
        # the others
        self.sums = torch.zeros(members, 5, dtype=torch.float64, device=env.device)
        self._warmed_up = 0
        self._replay: Callable[[], None] | None = None

    def play(
        self,
        seed: int = 0,
        max_steps: int | None = None,
        should_stop: Callable[[], object] = bool,
    ) -> dict[str, float]:
        """Play the episodes of one policy; see `play_each`."""
        (values,) = self.play_each(seed, max_steps, should_stop)
        return values

    def play_each(
        self,
        seed: int = 0,
        max_steps: int | None = None,
        should_stop: Callable[[], object] = bool,
    ) -> list[dict[str, float]]:
        """Play the episodes and return each member's statistics, named as they are logged.

        Episodes whose return is NaN or infinite are skipped and counted as
        eval/non_finite_episodes; if there are no others the mean is NaN. Raises EndlessEpisodeError
        if not all episodes end within `max_steps` steps an episode, by default twice the time limit
        or MAX_STEPS; Stopped once `should_stop()` is true.
        """
        limit = self.env.max_episode_steps
        if max_steps is None:
            # twice, since an environment may count its own steps or reset in a step of its own
            max_steps = MAX_STEPS if limit is None else 2 * limit + LOOK_EVERY
        with self._stopping_together():
            endless = self._play_all(seed, max_steps, should_stop)
        num_endless = sum(self.ranks.share(endless))
        if not num_endless:
            return self._statistics()
        why = f"max_episode_steps is {limit}"
        if limit is None:
            why = "there is no time limit: set max_episode_steps, or end them in the environment"
        raise EndlessEpisodeError(
            f"{type(self.env).__name__}: episodes of {num_endless} of {self.num_envs} environments "
            f"did not end in {max_steps:,} steps; {why}"
        )

    def _play_all(self, seed: int, max_steps: int, should_stop: Callable[[], object]) -> int:
        """Play the episodes of these environments; returns in how many they did not end."""
        self._begin(seed)
        # look rarely whether all have ended: each look waits for the device
        for _ in range(0, max_steps * self.max_quota, LOOK_EVERY):
            self._play_some(should_stop)
            ended = self.finished >= self.quota
            if bool(ended.all()):
                return 0
        return int((~ended).sum())

    @contextmanager
    def _stopping_together(self) -> Iterator[None]:
        """A `with` block after which all ranks are Stopped if one of them is."""
        was_stopped = False
        try:
            yield
        except Stopped:
            was_stopped = True
        if any(self.ranks.any(was_stopped)):
            raise Stopped

    def max_seconds(self, should_stop: Callable[[], object]) -> float:
        """The seconds that `play` takes if all episodes reach the time limit, measured by a few
        steps; 0 if there is no limit.
        """
        if self.env.max_episode_steps is None:
            return 0.0
        with self._stopping_together():
            self._begin(EVAL_SEED)
            began = time.monotonic()
            self._play_some(should_stop)
        seconds = (time.monotonic() - began) / LOOK_EVERY
        return seconds * self.env.max_episode_steps * self.max_quota

    def _begin(self, seed: int) -> None:
        seeds = seed if self.members == 1 else ShareSeeds((seed,) * self.members)
        obs = reset_env(self.env, seeds)
        self.sums.zero_()
        self.finished.zero_()
        first = (obs, *self.first_policy_state)
        if self._warmed_up:  # graphs read the old addresses
            for target, source in zip((self.obs, *self.policy_state), first):
                target.copy_(source)
        else:
            self.obs, *policy_state = [each.clone() for each in first]
            self.policy_state = tuple(policy_state)

    def _play_some(self, should_stop: Callable[[], object]) -> None:
        """LOOK_EVERY steps: at first by Python, then on the graphs' stream, then captured."""

        def steps() -> None:
            for _ in range(LOOK_EVERY):
                if should_stop():
                    raise Stopped
                self._step()

        if self._replay is None and self._warmed_up > WARM_UPS:
            self._capture(in_place(self, steps))
        if self._replay is not None:
            if should_stop():
                raise Stopped
            self._replay()
        elif self.graphs is None:
            steps()
        elif not self._warmed_up:
            in_place(self, steps)()
            self._warmed_up = 1
        else:
            _, waited = self.graphs.warm_up(in_place(self, steps))
            self._warmed_up += 1
            if waited:
                self._give_up(waited)

    def _capture(self, steps: Callable[[], None]) -> None:
        assert self.graphs is not None
        try:
            self._replay, _ = self.graphs.capture(steps)
        except RuntimeError as error:
            self._give_up(first_line(error))

    def _give_up(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self.graphs = None
        self._warmed_up = 0

    def _step(self) -> None:
        # one step
        action, policy_state = self.act(self.obs, self.policy_state)
        timestep = step_env(self.env, action)
        self.obs = timestep.obs
        self.policy_state = restart_policy_state(policy_state, episode_ends(timestep))
        # add the episodes that ended in it
        info = timestep.info
        counts = info["_episode"] & (self.finished < self.quota)
        returns = info["episode"]["r"].double()
        lengths = info["episode"]["l"].double()
        is_finite = returns.isfinite()
        rows = torch.stack((is_finite, returns, returns.square(), lengths, ~is_finite))
        rows[:4] = torch.where(is_finite, rows[:4], 0.0)
        shares = torch.where(counts, rows, 0.0).unflatten(1, (self.members, -1))
        self.sums += shares.sum(2).T
        self.finished += counts

    def _statistics(self) -> list[dict[str, float]]:
        """On the host, of all ranks; without a finite episode they are NaN."""
        sums = torch.tensor(self.ranks.share(self.sums.tolist()), dtype=torch.float64).sum(0)
        return [self._of_member(*of_member) for of_member in sums.tolist()]

    @staticmethod
    def _of_member(
        count: float, total: float, squares: float, length: float, non_finite: float
    ) -> dict[str, float]:
        divisor = count or math.nan
        mean = total / divisor
        deviation = max(squares / divisor - mean * mean, 0.0) ** 0.5
        values = {
            "eval/mean_reward": mean,
            "eval/std_reward": deviation,
            "eval/mean_ep_length": length / divisor,
            "eval/episodes": count,
        }
        return values | ({"eval/non_finite_episodes": non_finite} if non_finite else {})


def evaluate(
    act: Act,
    env: VecEnv,
    episodes: int,
    policy_state: PolicyState = (),
    seed: int = 0,
    max_steps: int | None = None,
    should_stop: Callable[[], object] = bool,
    ranks: Alone = ALONE,
) -> dict[str, float]:
    """One evaluation without graphs, see `Player`."""
    player = Player(act, env, episodes, policy_state, ranks=ranks)
    return player.play(seed, max_steps, should_stop)


def of_population(values: Sequence[dict[str, float]], is_lost: Sequence[bool]) -> dict[str, float]:
    """The evaluation of a population: that of its best member, which member it is, the mean over
    members, and the return of each. Members that are lost, or have no finite episode, are left out.
    """
    means = [each["eval/mean_reward"] for each in values]
    ranked = [k for k, mean in enumerate(means) if not is_lost[k] and math.isfinite(mean)]
    best = max(ranked, key=means.__getitem__, default=is_lost.index(False))
    non_finite = sum(each.get("eval/non_finite_episodes", 0.0) for each in values)
    return {
        **values[best],
        "eval/best_member": best,
        "eval/population_mean": sum(means[k] for k in ranked) / (len(ranked) or math.nan),
        **{f"members/{k}/eval_reward": means[k] for k in ranked},
        **({"eval/non_finite_episodes": non_finite} if non_finite else {}),
    }


class Evaluations:
    """The evaluations of a run: when the next one is due, the newest values and the best return."""

    def __init__(
        self, env: VecEnv | None, env_name: str, config: TrainConfig, ranks: Alone = ALONE
    ) -> None:
        """env: for evaluation only; None if it cannot exist beside the training environments.
        ranks: the processes that evaluate together; the first one's clock counts.
        """
        self.env = env
        self.ranks = ranks
        self.env_name = env_name
        self.episodes = config.eval_episodes
        # of a population NaN costs one member's episodes, not the run
        self.raises_at_nan = config.nan == "raise" and config.population == 1
        self.total_steps = config.total_steps
        self.every = config.eval_every or max(config.total_steps // 10, 1)  # env steps
        # evaluations wait until they are a small share of the time
        self.may_wait = config.eval_every is None and config.stop_return is None
        self.seconds = 0.0  # of all evaluations of this process
        self.next_seconds: float | None = None  # of the next one, about
        self.next_at = self.every
        self.last_at = -1
        self.newest: dict[str, float] = {}
        # of each member of a population, if this process played it
        self.newest_of_members: list[dict[str, float]] = []
        self.is_new = False  # whether the newest was played by this process
        self.has_endless_episodes = False  # then there are no more evaluations
        # the best return so far that is in a checkpoint, or of which one is to be written
        self.best_return = float("-inf")
        self.best_at = -1  # its env step, if this process played it
        self.saved_best_return = float("-inf")  # the best one that is in a checkpoint
        self.warnings: list[str] = []  # for the user, until somebody shows them
        self._player: Player | None = None
        self._lost: list[bool] = []  # of its policies, those of members that were lost

    def end_training(self, env: VecEnv) -> bool:
        """After training its environments may play the evaluation, if there are no others; returns
        whether they will.
        """
        needs_env = self.env is None and self.episodes > 0 and not self.has_endless_episodes
        if needs_env:
            self.env = env
        return needs_env

    def is_due(self, steps: int, seconds: float) -> bool:
        """Whether to evaluate at env step `steps`, `seconds` after the start of this process'
        training.
        """
        if steps < self.next_at:
            return False
        expected = self.seconds + (self.next_seconds or 0.0)
        return not self.may_wait or expected <= MAX_SHARE * seconds

    def was_missed(self, steps: int) -> bool:
        """Whether an evaluation that does not wait should have been played by env step `steps`."""
        return not self.may_wait and 0 < self.next_at <= steps

    def play(
        self,
        policies: Sequence[Algorithm | None],
        steps: int,
        should_stop: Callable[[], object],
        graphs: Callable[[], Backend | None] = lambda: None,
        seconds: float = math.inf,
    ) -> dict[str, float]:
        """Evaluate at env step `steps`; returns the values to log, {} if there are none, or if it
        would take too long yet. policies: as `Eager.policies`. graphs: makes their backend;
        seconds: as `is_due` takes them.
        """
        began = time.monotonic()
        spent = self.seconds
        try:
            return self._play(policies, steps, should_stop, graphs, seconds)
        finally:
            self.seconds = spent + time.monotonic() - began

    def _play(
        self,
        policies: Sequence[Algorithm | None],
        steps: int,
        should_stop: Callable[[], object],
        graphs: Callable[[], Backend | None],
        seconds: float,
    ) -> dict[str, float]:
        if self.env is None or not self.episodes:
            self.next_at = (steps // self.every + 1) * self.every
            return {}
        self.env.training_progress.fill_(min(steps / self.total_steps, 1.0))
        player = self._player_of(policies, self.env, graphs)
        # the first evaluation may take long: it waits, too
        if self.may_wait and self.next_seconds is None and seconds < math.inf:
            self.next_seconds = player.max_seconds(should_stop)
            if not self.ranks.of_first(self.is_due(steps, seconds)):
                return {}
        # play the episodes
        self.next_at = (steps // self.every + 1) * self.every
        self.last_at = steps
        had_graphs = player.graphs is not None
        began = time.monotonic()
        try:
            each = player.play_each(EVAL_SEED, should_stop=should_stop)
            self.next_seconds = time.monotonic() - began
        except EndlessEpisodeError as error:
            self.warnings.append(f"no more evaluations: {error}")
            self.env = None
            self.has_endless_episodes = True
            return {}
        if had_graphs and player.obstacle:
            self.warnings.append(f"evaluations are played without CUDA graphs: {player.obstacle}")
        values = each[0]
        if len(policies) > 1:
            values = of_population(each, [policy is None for policy in policies])
        # episodes with NaN, and the best return so far
        if non_finite := values.get("eval/non_finite_episodes"):
            self._report_non_finite(non_finite)
        if not values["eval/episodes"]:
            return {}
        self.newest = {**values, "at_step": steps}
        if len(policies) > 1:
            self.newest_of_members = [{**values, "at_step": steps} for values in each]
        self.is_new = True
        # a better policy that no disk took is lost: a worse one than that may be the best
        self.best_return = self.saved_best_return
        if values["eval/mean_reward"] > self.best_return:
            self.best_return = values["eval/mean_reward"]
            self.best_at = steps
        return values

    def note_saved(self, steps: int) -> None:
        """The policy at env step `steps` is in a checkpoint."""
        if self.best_at == steps:
            self.saved_best_return = self.best_return

    def _player_of(
        self,
        policies: Sequence[Algorithm | None],
        env: VecEnv,
        graphs: Callable[[], Backend | None],
    ) -> Player:
        """The player of the evaluations before, if it had graphs; else a new one."""
        player = self._player
        lost = [each is None for each in policies]  # graphs hold the policies of the others
        is_same = player is not None and player.env is env and lost == self._lost
        if player is None or not is_same or not (player.graphs or player.obstacle):
            act = greedy_members(policies)
            first = next(each for each in policies if each is not None)
            policy_state = first.initial_policy_state(env.num_envs)
            backend = graphs() if env.graph_safe else None
            count = len(policies)
            player = Player(act, env, self.episodes, policy_state, backend, count, self.ranks)
            self._player = player
            self._lost = lost
        return player

    def _report_non_finite(self, episodes: float) -> None:
        """NonFiniteError or a warning, as the setting `nan` says."""
        text = (
            f"{counted(int(episodes), 'evaluation episode')} of environment {self.env_name!r} gave "
            f"NaN or infinity"
        )
        if self.raises_at_nan:
            raise NonFiniteError(f"{text}; to skip such episodes and continue: {SKIP_COMMAND}")
        self.warnings.append(f"{text} and are skipped")

    def state_dict(self, steps: int) -> State:
        """The newest values, and the best return with that of env step `steps`."""
        best = self.best_return if self.best_at == steps else self.saved_best_return
        return {"best_return": best, "evaluation": dict(self.newest)}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`."""
        self.best_return = self.saved_best_return = state["best_return"]
        self.newest = dict(state["evaluation"])
        self.last_at = int(self.newest.get("at_step", -1))
        self.next_at = (max(self.last_at, 0) // self.every + 1) * self.every
