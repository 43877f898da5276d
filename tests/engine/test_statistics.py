"""Episode statistics: whose returns and lengths go into the means, and from when on."""

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.engine.statistics import EpisodeStatistics, Stopwatch
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import Timestep
from gpurl.kernels.random import CounterRandom

CPU = torch.device("cpu")
LIMIT = 12
SHORT = 0.75  # probability of an episode of one step
TRUE_MEAN = SHORT * 1.0 + (1.0 - SHORT) * -1.0
NUM_ENVS = 4096
TOLERANCE = 5.0 * math.sqrt((1.0 - TRUE_MEAN**2) / NUM_ENVS)  # standard errors of a mean


class TwoLengths(TorchEnv):
    """An episode succeeds at once, with return 1, or fails by the time limit, with return -1."""

    single_observation_space = Box(0.0, 1.0, (1,), np.float32)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = LIMIT

    def initial_state(self, rng: CounterRandom) -> State:
        return {"is_short": rng.uniform() < SHORT}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        is_short = state["is_short"]
        return state, torch.where(is_short, 1.0, -1.0 / LIMIT), is_short

    def observe(self, state: State) -> Tensor:
        return state["is_short"].float()[:, None]


def read(statistics: EpisodeStatistics, steps: int = 0) -> dict[str, float]:
    values = {name: float(value) for name, value in statistics.metrics().items()}
    return statistics.read(values, steps)


def finish(statistics: EpisodeStatistics, returns: list[float], finished: list[bool]) -> None:
    """A step after which episodes of these returns are finished; lengths are 10, 20, ..."""
    count = len(returns)
    nobody = torch.zeros(count, dtype=torch.bool)
    episode = {"r": torch.tensor(returns), "l": 10 * torch.arange(1, count + 1)}
    info = {"episode": episode, "_episode": torch.tensor(finished)}
    timestep = Timestep(torch.zeros(count, 1), torch.zeros(count), nobody, nobody, info)
    statistics.add(timestep)


def test_episodes_whose_return_is_not_finite_do_not_count() -> None:
    """Nor do episodes that go on; their lengths stay out too, and later means are not spoiled."""
    statistics = EpisodeStatistics(6, CPU)
    finish(
        statistics,
        [1.0, torch.nan, 3.0, 7.0, torch.inf, -torch.inf],
        [True, True, True, False, True, True],
    )
    metrics = {name: float(value) for name, value in statistics.metrics().items()}
    assert metrics == {"finished envs": 2.0, "returns": 4.0, "lengths": 40.0, "episodes": 2.0}
    assert read(statistics) == {"rollout/episodes": 2.0}
    finish(statistics, [5.0] * 6, [False, True, False, True, True, True])
    assert read(statistics) == {
        "rollout/ep_rew_mean": 4.0,
        "rollout/ep_len_mean": 35.0,
        "rollout/episodes": 4.0,
    }


def test_an_environment_counts_once_however_many_episodes_it_finishes() -> None:
    statistics = EpisodeStatistics(2, CPU)
    finish(statistics, [-6.0, -6.0], [False, True])
    for number in range(4):
        finish(statistics, [float(number), 0.0], [True, False])
    assert read(statistics)["rollout/ep_rew_mean"] == (3.0 - 6.0) / 2
    # nothing has ended since: the newest episodes are the same
    assert read(statistics) == {
        "rollout/ep_rew_mean": -1.5,
        "rollout/ep_len_mean": 15.0,
        "rollout/episodes": 0.0,
    }


def test_means_begin_with_the_last_environment_or_after_two_limits() -> None:
    statistics = EpisodeStatistics(3, CPU, max_episode_steps=50)
    finish(statistics, [1.0, 2.0, 0.0], [True, True, False])
    assert read(statistics, steps=3 * 2 * 50 - 1).keys() == {"rollout/episodes"}
    assert read(statistics, steps=3 * 2 * 50)["rollout/ep_rew_mean"] == 1.5
    finish(statistics, [0.0, 0.0, 6.0], [False, False, True])
    assert read(statistics, steps=0)["rollout/ep_rew_mean"] == 3.0
    # without a limit they wait
    endless = EpisodeStatistics(2, CPU)
    finish(endless, [1.0, 2.0], [True, False])
    assert "rollout/ep_rew_mean" not in read(endless, steps=10**9)


def test_a_checkpoint_continues_and_one_of_other_environments_starts_anew() -> None:
    first = EpisodeStatistics(3, CPU, max_episode_steps=5)
    finish(first, [1.0, 2.0, 3.0], [True, True, True])
    read(first)
    finish(first, [4.0, 0.0, 0.0], [True, False, False])
    second, other = EpisodeStatistics(3, CPU, 5), EpisodeStatistics(2, CPU, 5)
    second.load_state_dict(first.state_dict(), steps=300)
    assert read(second, 300) == read(first, 300)
    assert read(second, 300)["rollout/episodes"] == 0.0
    other.load_state_dict(first.state_dict(), steps=300)
    finish(other, [8.0, 0.0], [True, False])
    assert read(other, 300 + 2 * 2 * 5 - 1) == {"rollout/episodes": 1.0}
    assert read(other, 300 + 2 * 2 * 5)["rollout/ep_rew_mean"] == 8.0


def test_short_episodes_do_not_weigh_more_at_any_step() -> None:
    """The mean of all episodes that have ended begins at 1, since only short ones have; the mean of
    the newest ones is p - (1 - p) from the limit on, in every step.
    """
    env, statistics = TwoLengths(NUM_ENVS), EpisodeStatistics(NUM_ENVS, CPU, LIMIT)
    env.reset(seed=4)
    ended = torch.zeros(2, dtype=torch.float64)  # number of all episodes so far, their returns
    for step in range(1, 4 * LIMIT + 1):
        timestep = env.step(torch.zeros(NUM_ENVS, 1))
        statistics.add(timestep)
        returns = timestep.info["episode"]["r"][timestep.info["_episode"]].double()
        ended += torch.stack((torch.tensor(float(len(returns))), returns.sum()))
        entry = read(statistics, step * NUM_ENVS)
        if step < LIMIT:
            assert "rollout/ep_rew_mean" not in entry
            assert float(ended[1] / ended[0]) == 1.0
        else:
            assert entry["rollout/ep_rew_mean"] == pytest.approx(TRUE_MEAN, abs=TOLERANCE)
    assert entry["rollout/ep_len_mean"] == pytest.approx(SHORT + (1 - SHORT) * LIMIT, rel=0.1)


def test_staggered_starts_are_not_short_episodes() -> None:
    """Clocks that start anywhere: the partial first episodes do not count, and the law holds from
    the first mean on, at the latest after two limits.
    """
    env, statistics = TwoLengths(NUM_ENVS), EpisodeStatistics(NUM_ENVS, CPU, LIMIT)
    env.reset(seed=5)
    env.stagger(CounterRandom(9, NUM_ENVS, CPU).integers(0, LIMIT))
    means = {}
    for step in range(1, 4 * LIMIT):
        statistics.add(env.step(torch.zeros(NUM_ENVS, 1)))
        entry = read(statistics, step * NUM_ENVS)
        if "rollout/ep_rew_mean" in entry:
            means[step] = entry["rollout/ep_rew_mean"]
    assert LIMIT < min(means) <= 2 * LIMIT
    assert len(means) == 4 * LIMIT - min(means)
    for mean in means.values():
        assert mean == pytest.approx(TRUE_MEAN, abs=TOLERANCE)


def test_a_stopwatch_sums_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("gpurl.engine.statistics.time.perf_counter", lambda: float(next(clock)))
    stopwatch = Stopwatch(torch.device("cpu"))
    for _ in range(1000):
        for phase in ("collect", "update", "other"):
            stopwatch.mark(phase)
    assert len(stopwatch.marks) == 1
    assert stopwatch.read() == {"collect": 1000.0, "update": 1000.0, "other": 999.0}
    # the phase that is not over belongs to the next interval
    stopwatch.mark("collect")
    assert stopwatch.read() == {"other": 1.0}


def test_counts_of_failures_are_logged_from_the_first_on() -> None:
    """A run without any has no tag of them; after the first they are logged when they are 0 too,
    and a resume goes on so.
    """
    statistics = EpisodeStatistics(2, CPU)

    def logged(count: float, into: EpisodeStatistics = statistics) -> dict[str, float]:
        into.add_log({"log": {"non_finite_worlds": torch.tensor(count), "speed": torch.zeros(2)}})
        values = read(into)
        assert values["env/speed"] == 0.0
        return {name: x for name, x in values.items() if "worlds" in name}

    assert logged(0.0) == {}
    assert logged(3.0) == {"env/non_finite_worlds": 3.0}
    assert logged(0.0) == {"env/non_finite_worlds": 0.0}
    resumed = EpisodeStatistics(2, CPU)
    resumed.load_state_dict(statistics.state_dict(), 0)
    assert logged(0.0, resumed) == {"env/non_finite_worlds": 0.0}
