"""The evaluator: whose episodes count, and a memory that ends with its episode in every autoreset
mode.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpurl.algorithms.base import PolicyState
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EndlessEpisodeError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.nn.ranks import ALONE, Alone
from gpurl.run import evaluator
from gpurl.run.evaluator import Evaluations, Player, Stopped, evaluate
from gpurl.run.settings import TrainConfig, make_settings
from gpurl.run.setup import evaluation_env
from tests.fake_graphs import FakeGraphs
from tests.thread_ranks import ThreadRank, together
from tests.tiny_envs import AlternatingEnv


def test_a_memory_is_empty_at_every_episodes_first_step() -> None:
    """Where the environment resets at the next step, the step between two episodes belongs to
    neither.
    """
    seen: list[Tensor] = []
    env = make_env("gymnasium_cpu:CartPole-v1", 4, vectorization="vector")
    starts: list[Tensor] = []
    step = env.step

    def watched(action: Tensor) -> object:
        starts.append(env.episode_length_buf == 0)
        return step(action)

    env.step = watched  # type: ignore[method-assign, assignment]

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        seen.append(policy_state[0][:, 0].clone())
        return torch.ones(4, dtype=torch.int64), (policy_state[0] + 1.0,)

    values = evaluate(act, env, 12, (torch.zeros(4, 1),))
    assert values["eval/episodes"] == 12
    ended = 0
    for steps_so_far, policy_state in zip(env_steps_since_start(starts), seen):
        real = steps_so_far >= 0
        assert torch.equal(policy_state[real], steps_so_far[real].float())
        ended += int((steps_so_far == 0).sum())
    assert ended > 8


def env_steps_since_start(starts: list[Tensor]) -> list[Tensor]:
    """[N] real steps taken in the present episode before each step; -1 at the step that only
    resets.
    """
    counts, now = [], torch.zeros(4, dtype=torch.int64)
    for number, start in enumerate(starts):
        begins = start & (starts[number - 1] if number else torch.ones_like(start))
        now = torch.where(start, torch.where(begins, 0, -1), now + 1)
        counts.append(now.clone())
    return counts


class Faulty(AlternatingEnv):
    """Returns 1 an episode; NaN in the first `faulty` environments."""

    faulty = 0

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, ended = super().transition(state, action, rng)
        return (
            next_state,
            torch.where(torch.arange(self.num_envs) < self.faulty, torch.nan, reward),
            ended,
        )


def test_episodes_without_a_finite_return_are_counted_apart() -> None:
    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return torch.zeros(4, dtype=torch.int64), policy_state

    env = Faulty(4)
    env.faulty = 1
    values = evaluate(act, env, 8)
    assert values == {
        **{"eval/mean_reward": 1.0, "eval/std_reward": 0.0, "eval/mean_ep_length": 3.0},
        **{"eval/episodes": 6.0, "eval/non_finite_episodes": 2.0},
    }
    env.faulty = 4
    values = evaluate(act, env, 8)
    assert (values["eval/episodes"], values["eval/non_finite_episodes"]) == (0.0, 8.0)
    assert math.isnan(values["eval/mean_reward"])
    assert math.isnan(values["eval/std_reward"])


class OfOwnLength(AlternatingEnv):
    """Environment i ends its first episode after i + 1 steps with a return of i + 1, and all later
    ones after a step with a return of 100.
    """

    max_episode_steps = 50

    def initial_state(self, rng: CounterRandom) -> State:
        return {"left": torch.zeros(rng.num_envs)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        is_first = self.is_first
        length = torch.where(is_first, torch.arange(self.num_envs) + 1.0, 1.0)
        left = torch.where(state["left"] > 0, state["left"], length) - 1.0
        ended = left == 0
        self.is_first = is_first & ~ended
        return {"left": left}, torch.where(is_first, 1.0, 100.0), ended

    def observe(self, state: State) -> Tensor:
        return state["left"][:, None].expand(-1, 2)


@pytest.mark.parametrize("episodes", [1, 3, 4, 6, 11])
def test_exactly_so_many_episodes_count_and_short_ones_are_not_favoured(episodes: int) -> None:
    """The environment with the shortest episodes plays many before the longest has ended one."""
    env = OfOwnLength(4)
    env.is_first = torch.ones(4, dtype=torch.bool)

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return torch.zeros(4, dtype=torch.int64), policy_state

    values = evaluate(act, env, episodes)
    assert values["eval/episodes"] == episodes
    # the first episodes of the first environments, then second ones
    returns = []
    for index in range(4):
        quota = episodes // 4 + (index < episodes % 4)
        returns += [index + 1.0, *[100.0] * quota][:quota]
    assert values["eval/mean_reward"] == pytest.approx(sum(returns) / episodes)


# ---- from a graph ----


def remembering(weight: Tensor) -> Callable[[Tensor, PolicyState], tuple[Tensor, PolicyState]]:
    """Acts by its observations and by how long it has played."""

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        played = policy_state[0] + 1.0
        return obs @ weight + 0.01 * played, (played,)

    return act


@pytest.mark.parametrize("env_name", ["chasing", "pendulum"])
def test_a_graph_plays_what_python_plays(env_name: str) -> None:
    """Three evaluations, between which the policy changes; each environment plays two episodes."""
    values = []
    for graphs in (None, FakeGraphs()):
        with no_host_syncs():
            env = make_env(env_name, 5, max_episode_steps=37)
            shape = *env.single_observation_space.shape, *env.single_action_space.shape
            weight = torch.full(shape, 0.1)
            player = Player(remembering(weight), env, 10, (torch.zeros(5, 1),), graphs)
            values.append([])
            for factor in (1.0, -2.0, 3.0):
                weight *= factor
                values[-1].append(player.play(3))
        assert player.obstacle == ""
        assert graphs is None or len(graphs.captured) == 1
    assert values[0] == values[1]
    assert len({row["eval/mean_reward"] for row in values[0]}) == 3
    assert [row["eval/episodes"] for row in values[0]] == [10.0] * 3


def test_what_cannot_be_captured_is_played_by_python() -> None:
    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return torch.full((4, 1), float(obs[0, 0])), policy_state

    with no_host_syncs():
        env = make_env("pendulum", 4, max_episode_steps=40)
        expected = evaluate(act, env, 4)
        player = Player(act, env, 4, (), FakeGraphs())
        assert player.play() == expected
        assert "_local_scalar_dense" in player.obstacle
        assert player.play() == expected


class Clocked(AlternatingEnv):
    """In evaluations each of its steps takes a second of `CLOCK`, which nothing else moves."""

    max_episode_steps = 30

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        CLOCK[0] += 1.0
        return super().step(actions)


CLOCK = [0.0]


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evaluations]:
    """Makes evaluations of two episodes, 30 s each and one after the other."""
    monkeypatch.setattr(evaluator.time, "monotonic", lambda: CLOCK[0])
    CLOCK[0] = 0.0

    def make(**settings: object) -> Evaluations:
        config = TrainConfig(total_steps=1000, eval_episodes=2, **settings)  # type: ignore[arg-type]
        return Evaluations(Clocked(1), "clocked", config)

    return make


def play(evaluations: Evaluations, steps: int, seconds: float) -> bool:
    """Whether there was an evaluation at env step `steps`, `seconds` after the start."""
    if not evaluations.is_due(steps, seconds):
        return False
    return bool(evaluations.play((policy_for(evaluations),), steps, bool, seconds=seconds))


def policy_for(evaluations: Evaluations) -> PPO:
    env = evaluations.env
    assert env is not None
    spaces = env.single_observation_space, env.single_action_space
    return PPO(PPOConfig(), *spaces, 1, env.device)


def test_evaluations_on_the_way_take_a_twentieth_of_the_time(
    evaluations: Callable[..., Evaluations],
) -> None:
    waiting = evaluations()
    played = []
    # the run takes 100 s for each step; the first look at the environment takes 16 s, and an
    # evaluation 64 s: it looks whether all episodes ended after every 16 steps
    for number in range(1, 101):
        if play(waiting, 10 * number, 100.0 * number):
            played.append(number)
            assert waiting.seconds <= 100.0 * number / 20
    assert played == [16, 29, 42, 55, 68, 80, 93]
    assert waiting.seconds == 16 + 64 * len(played)


def test_the_first_evaluation_waits_too_and_the_last_one_does_not(
    evaluations: Callable[..., Evaluations],
) -> None:
    waiting = evaluations()
    assert not play(waiting, 100, 1000.0)
    assert waiting.newest == {}
    # its time is known now, so nothing is played to find it out
    spent = waiting.seconds
    assert not play(waiting, 110, 1100.0)
    assert waiting.seconds == spent
    # the last one is not asked how long it takes
    assert play(waiting, 120, math.inf)
    assert waiting.newest["at_step"] == 120


@pytest.mark.parametrize("settings", [{"eval_every": 100}, {"stop_return": 5.0}])
def test_evaluations_that_the_user_asked_for_do_not_wait(
    evaluations: Callable[..., Evaluations], settings: dict[str, object]
) -> None:
    asked = evaluations(**settings)
    assert [play(asked, steps, 1.0) for steps in (99, 100, 101, 200)] == [False, True, False, True]


def test_without_a_time_limit_the_first_evaluation_is_at_once(
    evaluations: Callable[..., Evaluations],
) -> None:
    waiting = evaluations()
    assert waiting.env is not None
    waiting.env.max_episode_steps = None
    player = waiting._player_of((policy_for(waiting),), waiting.env, lambda: None)
    assert player.max_seconds(bool) == 0.0


# ---- on several ranks ----


def swinging(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
    return -0.5 * obs[:, 2:], policy_state


def pendulums(episodes: int, ranks: Alone = ALONE) -> VecEnv:
    """The environments of a rank for an evaluation of a training on eight."""
    settings = make_settings("ppo", "pendulum", num_envs=8, eval_episodes=episodes)
    env = evaluation_env(settings, torch.device("cpu"), ranks=ranks)
    assert env is not None
    return env


@pytest.mark.parametrize("episodes", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_play_the_episodes_of_one_process_a_part_each(count: int, episodes: int) -> None:
    alone = pendulums(episodes)
    expected = evaluate(swinging, alone, episodes)

    def play_part(ranks: ThreadRank) -> tuple[int, int, dict[str, float]]:
        env = pendulums(episodes, ranks)
        player = Player(swinging, env, episodes, ranks=ranks)
        return env.num_envs, int(player.quota.sum()), player.play()

    sizes, quotas, values = zip(*together(count, play_part))
    assert sum(quotas) == expected["eval/episodes"] == episodes
    assert sum(sizes) == max(alone.num_envs, count)
    assert max(sizes) - min(sizes) <= 1
    for of_rank in values:
        assert of_rank == pytest.approx(expected, rel=1e-12)


class Ending(AlternatingEnv):
    """Ends its episodes at once, or not before the time limit."""

    max_episode_steps = 50
    is_endless = False

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, ended = super().transition(state, action, rng)
        return next_state, reward, torch.full_like(ended, not self.is_endless)


def standing_still(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
    return torch.zeros(len(obs), dtype=torch.int64), policy_state


def test_endless_episodes_of_one_rank_end_the_evaluation_of_all() -> None:
    def play_part(ranks: ThreadRank) -> str:
        env = Ending(2 + ranks.index)
        env.is_endless = ranks.index == 1
        with pytest.raises(EndlessEpisodeError) as error:
            Player(standing_still, env, 5, ranks=ranks).play(max_steps=20)
        return str(error.value)

    first, second = together(2, play_part)
    assert first == second
    assert "episodes of 3 of 5 environments did not end in 20 steps" in first


@pytest.mark.parametrize("method", [Player.play, Player.max_seconds])
def test_a_stop_of_one_rank_ends_the_evaluation_of_all(method: Callable[..., object]) -> None:
    def play_part(ranks: ThreadRank) -> None:
        looks = iter(range(1000))
        player = Player(standing_still, Ending(2), 4, ranks=ranks)
        with pytest.raises(Stopped):
            method(player, should_stop=lambda: ranks.index == 1 and next(looks) == 3)

    together(2, play_part)


def test_the_first_ranks_clock_decides_whether_to_evaluate() -> None:
    def play_part(ranks: ThreadRank) -> list[dict[str, float]]:
        config = TrainConfig(total_steps=1000, eval_episodes=4)
        # long after the start by rank 1's clock only, then by rank 0's only
        played = []
        for seconds in ((1e-9, 1e9), (1e9, 1e-9)):
            evaluations = Evaluations(Ending(2), "ending", config, ranks)
            policies = (policy_for(evaluations),)
            played.append(evaluations.play(policies, 100, bool, seconds=seconds[ranks.index]))
        return played

    first, second = together(2, play_part)
    assert first == second
    assert first[0] == {}
    assert first[1]["eval/episodes"] == 4
