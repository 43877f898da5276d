"""A population is single runs side by side: each member computes, bit for bit, what a run of its
seed and settings computes, whatever the others do.
"""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.eager import Eager
from gpurl.engine.population import Population, idle_action, mean_metrics, split
from gpurl.engine.statistics import to_host
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import ShareSeeds, Timestep
from gpurl.errors import DivergedError, NonFiniteError
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.resume import checkpoint_parts, restore_engine
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import make_engine, make_population
from tests.engines import running_state
from tests.small_runs import assert_same, small_settings
from tests.tiny_envs import RandomWalk

ENVS, HORIZON, SEED = 8, 6, 3
WALK = "tests.tiny_envs:RandomWalk"
PIXELS = "tests.picture_envs:Pixels"


class OwnLoss(PPO):
    """Does not run in C."""

    def loss(self, batch: Minibatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(batch)
        return 2.0 * loss, metrics


class Spoiled(RandomWalk):
    """Rewards of the environments in the list are NaN."""

    bad: tuple[int, ...] = ()

    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        reward = timestep.reward.clone()
        reward[list(self.bad)] = float("nan")
        return timestep._replace(reward=reward)


def settings_of(algorithm: str, env: str, population: int = 1, **changes: Any) -> Settings:
    values: dict[str, Any] = {"num_envs": ENVS, "population": population, "device": "cpu"}
    if algorithm in ("dqn", "sac", "td3", "vdn", "flash_sac"):
        values |= small_settings(algorithm) | {"learning_starts": 16}
    else:
        values |= {"horizon": HORIZON, "minibatches": 1 if algorithm == "a2c" else 2}
        values |= {"network": {"hidden": [8, 8]}}
    return make_settings(algorithm, env, **(values | changes))


def algorithms_of(settings: Settings, env: Any, seed: int) -> list[Algorithm]:
    spaces = env.single_observation_space, env.single_action_space
    return [
        make_algorithm(
            settings.algorithm,
            config,
            *spaces,
            ENVS,
            seed=seed + k,
            state_space=env.single_state_space,
        )
        for k, config in enumerate(settings.member_configs())
    ]


def single(
    algorithm: str = "ppo", env: str = WALK, seed: int = SEED, begins: bool = True, **changes: Any
) -> Eager:
    """The engine of a plain run."""
    settings = settings_of(algorithm, env, **changes)
    made = make_env(env, ENVS, "cpu", seed, **settings.env_options)
    (own,) = algorithms_of(settings, made, seed)
    engine = make_engine(settings, own, made)
    if begins:
        engine.begin(seed, staggered=True)
    return engine


def population(
    size: int = 3,
    algorithm: str = "ppo",
    env: str = WALK,
    workers: int = 1,
    begins: bool = True,
    **changes: Any,
) -> Population:
    """The engine of a population, members with the seeds SEED, SEED + 1, ..."""
    settings = settings_of(algorithm, env, size, threads=workers, **changes)
    made = make_env(env, size * ENVS, "cpu", SEED, **settings.env_options)
    engine = make_population(settings, algorithms_of(settings, made, SEED), made)
    assert isinstance(engine, Population)
    if begins:
        engine.begin(SEED, staggered=True)
    return engine


def iterate(engine: Eager, iterations: int = 4) -> list[Metrics]:
    logged = []
    for number in range(iterations):
        metrics = engine.iterate(number / iterations)
        logged.append({name: value.clone() for name, value in metrics.items()})
    return logged


@pytest.mark.parametrize(
    ("earlier", "threads", "expected"), [(None, None, 2), (1, None, 1), (3, None, 2), (1, 4, 2)]
)
def test_a_resumed_population_takes_the_threads_that_there_are(
    earlier: int | None, threads: int | None, expected: int
) -> None:
    """earlier: of a member, in the checkpoint; of four threads two members have two each."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        settings = settings_of("ppo", WALK, 2, threads=threads)
        made = make_env(WALK, 2 * ENVS, "cpu", SEED)
        make_population(settings, algorithms_of(settings, made, SEED), made, earlier)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def member_state(member: Eager) -> dict[str, Any]:
    """What iterations change of a member or a single run; the environments are compared by what
    they show.
    """
    state = running_state(member)
    for name in ("env", "curriculum", "steps", "iteration"):
        state.pop(name)
    for name in ("terms", "host_terms"):  # of all environments together
        state["statistics"].pop(name)
    replay = getattr(member.algorithm, "replay", None)
    return state | {"replay": None if replay is None else replay.state_dict()}


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ppo", WALK, {}),
    ("ppo", "cart_pole", {"normalize_advantage": "minibatch", "schedule": "linear"}),
    ("ppo", "chasing", {}),
    *(("ppo", "pendulum", {"network": {"memory": each, "memory_size": 8}}) for each in MEMORIES),
    ("ppo", WALK, {"network": {"hidden": [8, 8], "layer_norm": True}}),
    ("ppo", PIXELS, {"network": {"hidden": [8], "body": "bro", "encoder": "impala"}}),
    ("sac", "pendulum", {"critic_network": {"hidden": [8, 8], "body": "simba"}}),
    ("tests.engine.test_population:OwnLoss", WALK, {}),
    ("tests.joint_ppo:JointPPO", "tests.tiny_envs:Walkers", {}),
    ("ppo", "tests.tiny_envs:HiddenAlternating", {}),
    ("sac", "tests.tiny_envs:HiddenAlternating", {}),
    ("ppo", "frame_stack:catch", {}),
    ("a2c", "pendulum", {}),
    ("dqn", "cart_pole", {}),
    ("dqn", "cart_pole", {"prioritized": True}),
    ("sac", "pendulum", {}),
    ("td3", "pendulum", {}),
    ("sac", "tests.picture_envs:Pointing", {}),
    ("pqn", "cart_pole", {}),
    ("vdn", "two_step_game", {}),
    ("ppo", "hopper", {"horizon": 32}),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("algorithm", "env", "changes"), CASES, ids=str)
def test_each_member_is_the_run_of_its_seed_to_the_bit(
    algorithm: str, env: str, changes: dict[str, Any], workers: int, one_thread: None
) -> None:
    if env == "hopper":
        pytest.importorskip("mujoco")
    together = population(3, algorithm, env, workers, **changes)
    together.acts_in_threads = True  # where there are some
    logged = iterate(together)
    alone = [single(algorithm, env, SEED + k, **changes) for k in range(3)]
    logs = [iterate(engine) for engine in alone]
    for k, engine in enumerate(alone):
        assert_same(member_state(together.members[k]), member_state(engine), f"member {k}")
        assert (together.steps, together.stored) == (engine.steps, engine.stored)
        assert together.members[k].name == engine.name
    # and they are different agents
    first, second = (each.algorithm.optimizers for each in together.members[:2])
    assert not torch.equal(*(next(iter(each.values())).flat for each in (first, second)))
    # what is logged are the means
    assert logged[-1].keys() == logs[0][-1].keys()
    for name, value in logged[-1].items():
        expected = sum(float(log[-1][name]) for log in logs) / 3
        assert float(value) == pytest.approx(expected, rel=1e-6, abs=1e-9), name


@pytest.fixture
def one_thread() -> Any:
    """The last bits of torch's sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_population_of_one_is_a_plain_run(one_thread: None) -> None:
    one, plain = population(1), single()
    assert_same(iterate(one)[-1].keys(), iterate(plain)[-1].keys())
    assert_same(member_state(one.members[0]), member_state(plain))
    assert_same(one.env.state_dict(), plain.env.state_dict())


def test_members_do_not_interact(one_thread: None) -> None:
    """Other weights of member 1 change member 1 and nobody else."""
    changed, plain = population(), population()
    for engine in (changed, plain):
        iterate(engine, 1)
    next(changed.members[1].algorithm.parameters()).data += 0.1
    for engine in (changed, plain):
        iterate(engine, 3)
    for k in (0, 2):
        assert_same(member_state(changed.members[k]), member_state(plain.members[k]))
    weights = [each.members[1].algorithm.state_dict() for each in (changed, plain)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # nor do they share memory
    addresses = {
        tensor.untyped_storage().data_ptr()
        for member in plain.members
        for tensor in (*member.algorithm.parameters(), *member.algorithm.buffers())
    }
    alone = {each.untyped_storage().data_ptr() for each in plain.members[0].algorithm.parameters()}
    alone |= {each.untyped_storage().data_ptr() for each in plain.members[0].algorithm.buffers()}
    assert len(addresses) == 3 * len(alone)


def test_members_have_settings_of_their_own(one_thread: None) -> None:
    """As single runs with those settings have them."""
    own = {"learning_rate": (1e-2, 1e-3), "gamma": (0.9, 0.5), "entropy_coef": (0.0, 0.1)}
    own |= {"clip_range": (0.1, 0.3), "gae_lambda": (0.9, 1.0)}
    together = population(2, schedule="linear", member=own)
    iterate(together)
    for k in range(2):
        alone = single(seed=SEED + k, schedule="linear", **{name: x[k] for name, x in own.items()})
        iterate(alone)
        assert_same(member_state(together.members[k]), member_state(alone))


def test_members_learn_in_threads_of_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    together = population(3, workers=2)
    seen = set[tuple[str, int]]()
    original = type(together.members[0]).learn

    def learn(self: Eager, data: dict[str, Tensor]) -> Metrics:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return original(self, data)

    monkeypatch.setattr(type(together.members[0]), "learn", learn)
    iterate(together, 3)
    assert {threads for _, threads in seen} == {1}
    assert {name.rpartition("_")[0] for name, _ in seen} == {"gpurl-member"}


def test_an_error_in_a_thread_is_raised_when_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = population(3, workers=2)
    ended = []

    def learn(data: dict[str, Tensor], k: int) -> Metrics:
        if k == 0:
            raise ValueError("member 0")
        threading.Event().wait(0.05)
        ended.append(k)
        return {}

    for k, member in enumerate(together.members):
        monkeypatch.setattr(member, "learn", lambda data, k=k: learn(data, k))
    with pytest.raises(ValueError, match="member 0"):
        iterate(together, 1)
    assert sorted(ended) == [1, 2]
    together.abandon()
    assert (together.steps, together.buffer.size) == (0, 0)


# ---- members that are lost ----


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("algorithm", "env"), [("ppo", WALK), ("sac", "pendulum")])
def test_nan_in_one_member_leaves_the_others_untouched(
    algorithm: str, env: str, workers: int, one_thread: None
) -> None:
    spoiled, plain = (population(3, algorithm, env, workers) for _ in range(2))
    for engine in (spoiled, plain):
        iterate(engine, 3)
    for parameter in spoiled.members[1].algorithm.parameters():
        parameter.data.fill_(float("nan"))
    for engine in (spoiled, plain):
        iterate(engine, 6)
    assert list(spoiled.guards.lost) == [1]
    assert "not finite" in spoiled.guards.lost[1] or "NaN" in spoiled.guards.lost[1]
    assert [warning for warning in spoiled.guards.warnings if "member 1 is lost" in warning]
    assert spoiled.guards.bad_weights() == ""
    assert [policy is None for policy in spoiled.policies] == [False, True, False]
    for k in (0, 2):
        assert_same(member_state(spoiled.members[k]), member_state(plain.members[k]))
    # what is logged is that of the others, and finite
    metrics = iterate(spoiled, 1)[-1]
    assert all(bool(value.isfinite()) for value in metrics.values()), metrics
    values = to_host(spoiled.guards.metrics())
    assert spoiled.guards.report(values, spoiled.iteration)["train/skipped_steps"] == 0


def test_the_last_member_that_is_lost_ends_the_run() -> None:
    engine = population(2)
    iterate(engine, 2)
    for member in engine.members:
        for parameter in member.algorithm.parameters():
            parameter.data.fill_(float("nan"))
    with pytest.raises(DivergedError):
        iterate(engine, 3)


@pytest.mark.parametrize("nan", ["raise", "skip"])
def test_nan_of_an_environment_costs_its_member_only(nan: str, one_thread: None) -> None:
    name = "tests.engine.test_population:Spoiled"
    engines = [population(3, env=name, nan=nan) for _ in range(2)]
    spoiled, plain = engines
    for engine in engines:
        iterate(engine, 2)
    assert isinstance(spoiled.env, Spoiled)
    spoiled.env.bad = (ENVS + 1,)
    for engine in engines:
        iterate(engine, 2)
    for k in (0, 2):
        assert_same(member_state(spoiled.members[k]), member_state(plain.members[k]))
    assert list(spoiled.guards.lost) == ([1] if nan == "raise" else [])
    if nan == "skip":
        values = to_host(spoiled.guards.metrics())
        logged = spoiled.guards.report(values, spoiled.iteration)
        assert logged["rollout/non_finite_rows"] == spoiled.members[1].guards.finite.total > 0
        return
    # the last one ends the run
    spoiled.env.bad = tuple(range(3 * ENVS))
    with pytest.raises(NonFiniteError, match="gave NaN or infinity"):
        iterate(spoiled, 1)


# ---- states ----


@pytest.mark.parametrize(("algorithm", "env"), [("ppo", WALK), ("ppo", "pendulum"), ("a2c", WALK)])
def test_it_continues_bit_for_bit(algorithm: str, env: str, one_thread: None) -> None:
    settings = settings_of(algorithm, env, 3)
    plain, broken, resumed = (population(3, algorithm, env) for _ in range(3))
    iterate(plain, 4)
    for number in range(2):
        broken.iterate(number / 4)
    run = {"elapsed": 0.0, "threads": 1, "best_return": 0.0, "evaluation": {}}
    parts = checkpoint_parts(broken, settings.to_dict(), run, {})
    restore_engine(resumed, parts, settings)
    for number in (2, 3):
        resumed.iterate(number / 4)
    states = [
        [running_state(engine), *map(member_state, engine.members)] for engine in (resumed, plain)
    ]
    for state in (*states[0], *states[1]):
        state.pop("guards")  # which count what a process has seen
    assert_same(*states)


# ---- statistics ----


def test_returns_are_logged_by_member_and_as_their_mean() -> None:
    engine = population(3, "ppo", "tests.tiny_envs:RandomWalk")
    for number in range(8):
        engine.iterate(number / 8)
    values = engine.statistics.read(to_host(engine.statistics.metrics()), engine.steps)
    returns = [values[f"members/{k}/ep_rew_mean"] for k in range(3)]
    newest = [member.statistics.newest for member in engine.members]
    expected = [float(each[0].double().sum() / each[2].count_nonzero()) for each in newest]
    assert returns == pytest.approx(expected)
    assert values["rollout/ep_rew_mean"] == pytest.approx(sum(expected) / 3)
    assert values["rollout/episodes"] == sum(float(each[2].sum()) for each in newest)
    # a lost one is left out
    engine.guards.lost[0] = "NaN"
    values = engine.statistics.read(to_host(engine.statistics.metrics()), engine.steps)
    assert "members/0/ep_rew_mean" not in values
    assert values["rollout/ep_rew_mean"] == pytest.approx(sum(expected[1:]) / 2)


# ---- functions ----


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (Discrete(3, start=2), 2),
        (Box(-1.0, 1.0, (2,), np.float32), [0.0, 0.0]),
        (Box(np.array([1.0, -3.0], np.float32), np.array([2.0, -2.0], np.float32)), [1.0, -2.0]),
        (MultiDiscrete([2, 3], start=[1, 0]), [1, 0]),
    ],
    ids=str,
)
def test_environments_of_lost_members_idle(space: Any, expected: Any) -> None:
    env = RandomWalk(4)
    env.single_action_space = space
    action = idle_action(env, 4)
    assert action.tolist() == [expected] * 4
    assert space.contains(action[0].numpy().astype(space.dtype))


def test_shares_of_a_step_are_views() -> None:
    rows = torch.arange(12.0).view(6, 2)
    info = {"a": rows, "nested": {"b": rows[:, 0]}, "other": 5, "scalar": torch.tensor(1.0)}
    first, second = split(info, 6, 3)
    assert torch.equal(second["a"], rows[3:])
    assert second["a"].data_ptr() == rows[3:].data_ptr()
    assert torch.equal(first["nested"]["b"], rows[:3, 0])
    assert (first["other"], float(second["scalar"])) == (5, 1.0)


def test_means_are_of_the_metrics_that_all_have() -> None:
    metrics = [{"a": torch.tensor(1), "b": torch.tensor(0.5)}, {"a": torch.tensor(4)}]
    means = mean_metrics(metrics)
    assert {name: float(value) for name, value in means.items()} == {"a": 2.5}


def test_seeds_of_shares_are_those_of_environments_alone() -> None:
    env = make_env("cart_pole", 6)
    obs, _ = env.reset(seed=ShareSeeds((4, 9, 4)))
    for share, seed in zip(obs.split(2), (4, 9, 4)):
        alone, _ = make_env("cart_pole", 2).reset(seed=seed)
        assert torch.equal(share, alone)
    with pytest.raises(ValueError, match=r"4 seeds need equal shares of the environments, .* 6"):
        env.reset(seed=ShareSeeds((1, 2, 3, 4)))


def test_replays_are_apart() -> None:
    engine = population(2, "sac", "pendulum")
    iterate(engine, 4)
    one, other = (member.algorithm.replay for member in engine.members)  # type: ignore[union-attr]
    assert one is not other
    assert engine.stored > 0
