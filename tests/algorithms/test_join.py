"""An agent on several ranks is that of one process: the same random numbers, and updates by the
averaged gradient.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.bc import BC, BCConfig
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.buffers.minibatches import Minibatches
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.nn.ranks import Alone
from gpurl.run.settings import build
from tests.small_runs import OFF_POLICY, off_policy, small_settings
from tests.thread_ranks import ThreadRank, together

MAKING = threading.Lock()  # weights are drawn from torch's generator, which threads share

FITTED = {"fit_returns": 0.5, "horizon": 2}
TASKS = {"vdn": "two_step_game"} | dict.fromkeys(("dqn", "rainbow", "discrete_sac"), "cart_pole")


def task_of(name: str, num_envs: int) -> VecEnv:
    return make_env(TASKS.get(name, "pendulum"), num_envs)


def made(name: str, ranks: Alone, num_envs: int, rows: int = 16, **settings: Any) -> OffPolicy:
    """The algorithm of one rank: its part of the environments and of a batch."""
    env = task_of(name, num_envs // ranks.count)
    sizes = {"batch_size": rows // ranks.count, "learning_starts": rows}
    settings = {"prioritized": False} | sizes | settings
    with MAKING:
        algorithm = off_policy(name, env, **settings)
    if ranks.count > 1:
        algorithm.join(ranks)
    return algorithm


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in OFF_POLICY),
        ("sac", FITTED),
        ("mod_sac", FITTED),
        ("flash_sac", {"num_critics": 3, "target_subset": 2}),
    ],
    ids=str,
)
def test_an_update_of_ranks_is_that_of_one_process(name: str, settings: dict[str, Any]) -> None:
    """On parts of one batch; the noise of each row follows it."""
    env = task_of(name, 4)
    alone = made(name, Alone(), 4, **settings)
    space = env.single_observation_space
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, 16, *(space.shape or ()), generator=generator)
    action = torch.rand(16, *alone.action_shape(), generator=generator) * 2.0 - 1.0
    if name in TASKS:
        action = torch.randint(0, 2, (16, *alone.action_shape()), generator=generator).float()
    batch = {
        "obs": obs[0].flatten(1),
        "next_obs": obs[1].flatten(1),
        "action": action.long() if name in TASKS else action,
        "reward": torch.randn(16, generator=generator),
        "discount": torch.full((16,), 0.9),
        "weight": torch.ones(16),
        "fit_return": torch.randn(16, generator=generator),
    }

    def learned(algorithm: OffPolicy, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        for number in range(2):
            algorithm.update_step(dict(rows), number)
            algorithm.update_random.advance()
            algorithm.choice_random.advance()
        # weights hide the size of a gradient, moments do not
        state = algorithm.state_dict()
        for key, optimizer in algorithm.optimizers.items():
            state |= {f"{key} {name}": each for name, each in optimizer.state_dict().items()}
        return {key: value.clone() for key, value in state.items()}

    before = {key: value.clone() for key, value in alone.state_dict().items()}
    expected = learned(alone, batch)

    def of_rank(rank: ThreadRank) -> dict[str, Tensor]:
        part = {key: value.chunk(2)[rank.index] for key, value in batch.items()}
        return learned(made(name, rank, 4, **settings), part)

    first, second = together(2, of_rank)
    moved = 0.0
    for key, value in expected.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=2e-6, msg=key)
        if key in before:
            moved = max(moved, float((value.double() - before[key].double()).abs().max()))
    assert moved > 1e-4


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_an_imitation_of_ranks_is_that_of_one_process(memory: str) -> None:
    """Every row that is a transition weighs the same, though one rank has fewer."""
    generator = torch.Generator().manual_seed(0)
    lead = (3, 8) if memory == "gru" else (8,)  # [T, B] or [B]
    batch = {
        "obs": torch.randn(*lead, 3, generator=generator),
        "action": torch.rand(*lead, 1, generator=generator) - 0.5,
        "weight": torch.ones(lead),
    }
    batch["weight"][..., :3] = 0.0
    if memory == "gru":
        batch["policy_state"] = torch.zeros(1, 8, 4)
        batch["episode_starts"] = torch.zeros(lead, dtype=torch.bool)

    def moments(ranks: Alone) -> dict[str, Tensor]:
        env = make_env("pendulum", 4 // ranks.count)
        network = {"hidden": [8], "memory": memory, "memory_size": 4}
        config = build(BCConfig, small_settings("bc") | {"actor_network": network})
        bc = make_algorithm("bc", config, env.single_observation_space, env.single_action_space, 2)
        assert isinstance(bc, BC)
        if ranks.count > 1:
            bc.join(ranks)
        part = {
            name: each.chunk(ranks.count, len(lead) - 1)[ranks.index]
            for name, each in batch.items()
        }
        bc.update_step(part, 0)
        return bc.optimizers["actor"].state_dict()

    whole = moments(Alone())
    first, second = together(2, moments)
    for name, value in whole.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-7, msg=name)
    assert float(whole["exp_avg"].abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["ppo", "sac", "dqn"])
def test_ranks_draw_the_numbers_of_one_process(name: str) -> None:
    """Actions of environments, and the noise of a batch's rows."""
    env_name = TASKS.get(name, "pendulum")

    def drawn(ranks: Alone) -> dict[str, Tensor]:
        env = make_env(env_name, 4 // ranks.count)
        values = small_settings(name) | ({"batch_size": 8 // ranks.count} if name != "ppo" else {})
        config = build(config_class(resolve_algorithm(name)), values)
        spaces = env.single_observation_space, env.single_action_space
        algorithm = make_algorithm(name, config, *spaces, env.num_envs, seed=3)
        if ranks.count > 1:
            algorithm.join(ranks)
        return {key: each.normal((2,)) for key, each in algorithm.random_streams.items()}

    whole = drawn(Alone())
    first, second = together(2, drawn)
    for key in whole:
        if len(whole[key]) > 1:
            assert torch.equal(torch.cat((first[key], second[key])), whole[key])
        else:  # a stream of the whole batch, or of each rank
            assert torch.equal(first[key], whole[key])
            assert torch.equal(second[key], whole[key]) == (key == "choice")


@pytest.mark.parametrize("setting", ["dqn", "ddpg"])
def test_each_environment_keeps_its_own_exploration(setting: str) -> None:
    """Epsilons and standard deviations of a ladder over all environments."""

    def ladder(ranks: Alone) -> Tensor:
        if setting == "dqn":
            return made("dqn", ranks, 8, epsilon_ladder=True).epsilon
        algorithm = made("ddpg", ranks, 8, noise="ladder", noise_std_range=(0.1, 0.8))
        return algorithm.noise.ladder  # type: ignore[union-attr]

    whole = ladder(Alone())
    assert len(whole.unique()) == 8
    torch.testing.assert_close(torch.cat(together(2, ladder)), whole)


def test_streams_that_begin_later_are_those_of_a_larger_batch() -> None:
    whole = CounterRandom(5, 6)
    part = CounterRandom(5, 2, first=3)
    moved = CounterRandom(5, 2)
    moved.normal()  # draws ahead
    moved.begin_at(3)
    moved.offset = 0
    expected = whole.normal((3,))[3:5]
    assert torch.equal(part.normal((3,)), expected)
    assert torch.equal(moved.normal((3,)), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_advantages_are_normalised_over_the_minibatch_of_all_ranks(masked: bool) -> None:
    """A minibatch of all ranks is what they take at the same time; the weights' sum is 1 on
    average, and every valid row weighs the same.
    """
    advantage = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3.0 + 2.0
    valid = torch.ones(4, 6, dtype=torch.bool)
    if masked:
        valid[1, :3] = False
        valid[0, 5] = False

    def of_rank(rank: ThreadRank) -> dict[str, Tensor]:
        minibatches = Minibatches(1, True, CounterRandom(0, 1))
        minibatches.ranks = rank
        columns = {"advantage": advantage, "obs": advantage.unsqueeze(-1)}
        if masked:
            columns["valid"] = valid
        parts = {name: column.chunk(2, 1)[rank.index] for name, column in columns.items()}
        (batch,) = minibatches.of_steps(minibatches.pack(parts))
        return {name: column.clone() for name, column in batch.items()}

    batches = together(2, of_rank)
    kept = advantage[valid]
    deviation = kept.std(correction=0) + 1e-8
    for batch in batches:
        expected = (batch["obs"].squeeze(-1) - kept.mean()) / deviation
        torch.testing.assert_close(batch["advantage"], expected, rtol=1e-5, atol=1e-5)
    if masked:
        weight = torch.cat([batch["weight"] for batch in batches])
        torch.testing.assert_close(weight.sum(), torch.tensor(2.0))
        assert len(weight[weight > 0].unique()) == 1
        assert int((weight > 0).sum()) == int(valid.sum())


def test_statistics_of_one_processs_rows_are_refused() -> None:
    def of_rank(rank: ThreadRank) -> None:
        algorithm = made("sac", Alone(), 4)
        algorithm.actor.add_module("norm", torch.nn.BatchNorm1d(3))  # type: ignore[attr-defined]
        algorithm.join(rank)

    with pytest.raises(UsageError, match="BatchNorm1d takes its statistics from the rows of one"):
        together(2, of_rank)
