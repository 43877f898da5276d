"""What every algorithm that replays must learn: values known by hand, from real transitions only;
and how it explores.
"""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.discrete_sac import DiscreteSAC
from gpurl.algorithms.exploration import THETA, TIME_STEP, ActionNoise
from gpurl.algorithms.mod_sac import ModSAC
from gpurl.algorithms.pqn import PQNConfig
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.squash import squashed_sample
from gpurl.run.settings import build
from tests.small_runs import OFF_POLICY, off_policy, play, small_settings, takes
from tests.tiny_envs import AlternatingEnv, ContinuousAlternating, RandomWalk

ENVS: dict[type, type[TorchEnv]] = {Discrete: AlternatingEnv, Box: ContinuousAlternating}
CYCLE = [
    (name, kind, 3)
    for name in OFF_POLICY
    for kind in ENVS
    if takes(name, ENVS[kind].single_action_space)
]
CYCLE += [
    ("dqn", Discrete, 1),
    ("sac", Box, 1),
]  # how many steps a discount spans is the replay's affair and no algorithm's


@pytest.mark.parametrize(("name", "kind", "n_step"), CYCLE, ids=str)
def test_truncation_is_not_termination(name: str, kind: type, n_step: int) -> None:
    """V(A) = 0.9 / 0.19, V(B) = 1 / 0.19; truncation as an end gives 0.75 and 1.71, the observation
    after a reset 3.14 and 3.84.
    """
    env = ENVS[kind](16)
    wide = (
        {"v_min": 0.0, "v_max": 8.0}
        if "v_min" in config_class(resolve_algorithm(name)).__dataclass_fields__
        else {}
    )
    settings = {
        "gamma": 0.9,
        "learning_rate": 3e-3,
        "updates": 4,
        "batch_size": 64,
        "learning_starts": 64,
        "n_step": n_step,
    }
    settings |= {
        "replay_size": 2000,
        "weight_decay": 0.0,
        "tau": 0.1,
        "normalize_obs": False,
        "max_grad_norm": 1.0,
    } | wide
    settings |= {
        network: {"hidden": [32]}
        for network in ("network", "actor_network", "critic_network")
        if network in small_settings(name)
    }
    if "temperature" in config_class(resolve_algorithm(name)).__dataclass_fields__:
        settings["temperature"] = 1e-4  # no reward for entropy
    if name == "flash_sac":  # of rewards as they are
        settings["normalize_rewards"] = False
    algorithm = off_policy(name, env, **settings)
    play(algorithm, env, 400 if name == "ddpg" else 160)
    values = algorithm.value(torch.eye(2))
    torch.testing.assert_close(values, torch.tensor([0.9, 1.0]) / 0.19, atol=0.05, rtol=0)


def test_pqn_knows_the_cycle_too() -> None:
    env = AlternatingEnv(16)
    settings = {
        "gamma": 0.9,
        "learning_rate": 3e-3,
        "horizon": 8,
        "q_lambda": 0.5,
        "network": {"hidden": [32]},
        "normalize_obs": False,
    }
    config = build(PQNConfig, small_settings("pqn") | settings)
    algorithm = make_algorithm(
        "pqn", config, env.single_observation_space, env.single_action_space, 16
    )
    play(algorithm, env, 300)
    torch.testing.assert_close(
        algorithm.value(torch.eye(2)), torch.tensor([0.9, 1.0]) / 0.19, atol=0.05, rtol=0
    )


class Bandit(TorchEnv):
    """One state for ever, rewards 1, 0 and -1."""

    single_observation_space, single_action_space = Box(0.0, 1.0, (1,), np.float32), Discrete(3)
    max_episode_steps = 10

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": torch.ones(rng.num_envs, 1)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        return (
            {"x": state["x"] * 1.0},
            1.0 - action.float(),
            torch.zeros(len(action), dtype=torch.bool),
        )

    def observe(self, state: State) -> Tensor:
        return state["x"]


def test_the_soft_value_of_a_bandit() -> None:
    """V = alpha log sum exp(r / alpha) / (1 - gamma) = 10.714658 and pi = softmax(r / alpha), for
    gamma 0.9 and alpha 0.5.
    """
    env = Bandit(16)
    settings = {
        "gamma": 0.9,
        "temperature": 0.5,
        "learning_rate": 3e-3,
        "updates": 4,
        "batch_size": 64,
        "learning_starts": 64,
        "tau": 0.05,
    }
    settings |= {
        "actor_network": {"hidden": [16]},
        "critic_network": {"hidden": [16]},
        "replay_size": 4000,
        "schedule": "linear",
    }
    algorithm = off_policy("sac", env, **settings)
    assert isinstance(algorithm, DiscreteSAC)
    play(algorithm, env, 450)
    one = torch.ones(1, 1)
    with torch.no_grad():
        log_prob = algorithm.actor.forward(one)[0].log_softmax(-1)
        soft_value = float(algorithm.value(one)) - 0.5 * float((log_prob.exp() * log_prob).sum())
    assert soft_value == pytest.approx(10.714658, abs=0.05)
    torch.testing.assert_close(
        log_prob.exp()[0], torch.tensor([0.8668, 0.1173, 0.0159]), atol=0.01, rtol=0
    )


class Alive(Bandit):
    """Action 1 is rewarded with 1, action 0 ends the episode."""

    single_action_space = Discrete(2)

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        return {"x": state["x"] * 1.0}, action.float(), action == 0


def test_staying_alive_leaves_the_target_entropy_in_reach() -> None:
    """With the entropy 0.7 log 2 staying has p = 0.8107 and V = p (1 + 0.9 V). Beside the end it is
    worth 1 + 0.9 V = 1 / (1 - 0.9 p), which is logit p times the temperature, 2.543. Paid for all
    of its entropy a policy has less of it, 0.65 log 2 or less, at any temperature.
    """
    env = Alive(16)
    settings = {
        "gamma": 0.9,
        "learning_rate": 3e-3,
        "temperature_learning_rate": 1e-2,
        "updates": 4,
        "batch_size": 128,
        "learning_starts": 128,
        "replay_size": 4000,
        "tau": 0.05,
        "schedule": "linear",
    }
    algorithm = off_policy(
        "sac", env, **settings, actor_network={"hidden": [16]}, critic_network={"hidden": [16]}
    )
    assert isinstance(algorithm, DiscreteSAC)
    play(algorithm, env, 500)
    with torch.no_grad():
        prob = algorithm.actor.forward(torch.ones(1, 1))[0].softmax(-1)
        temperature = float(algorithm.temperature.value())
    assert float(prob[0, 1]) == pytest.approx(0.8107, abs=0.01)
    assert temperature == pytest.approx(2.543, rel=0.05)


class Regulator(TorchEnv):
    """x' = 0.9 x + 0.5 u, cost x^2 + 0.1 u^2: at gamma 0.95 the best control is u = -1.344266 x and
    costs 1.241968 x^2 (Riccati).
    """

    single_observation_space, single_action_space = (
        Box(-2.0, 2.0, (1,), np.float32),
        Box(-1.0, 1.0, (1,), np.float32),
    )
    max_episode_steps = 20

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": rng.uniform(-0.7, 0.7, (1,))}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x = 0.9 * state["x"] + 0.5 * action
        cost = state["x"].square() + 0.1 * action.square()
        return {"x": x}, -cost[:, 0], torch.zeros(len(x), dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["x"]


def test_a_linear_regulator_costs_what_it_must() -> None:
    """The least discounted cost from x is 1.241968 x^2; around its gain the cost is flat, so the
    gain itself is known less well.
    """
    env = Regulator(32)
    settings = {
        "gamma": 0.95,
        "learning_rate": 1e-3,
        "updates": 4,
        "batch_size": 128,
        "learning_starts": 288,
        "tau": 0.05,
    }
    settings |= {
        "actor_network": {"hidden": [32, 32]},
        "critic_network": {"hidden": [64, 64]},
        "replay_size": 50_000,
        "schedule": "linear",
    }
    settings |= {"noise_std": 0.3, "target_noise": 0.0, "normalize_obs": False}
    algorithm = off_policy("ddpg", env, **settings)
    play(algorithm, env, 600)
    start = x = torch.linspace(-0.6, 0.6, 20).unsqueeze(1)
    cost = torch.zeros_like(x)
    for step in range(100):
        action = algorithm.act(x, explore=False).action
        cost += 0.95**step * (x.square() + 0.1 * action.square())
        x = 0.9 * x + 0.5 * action
    assert 1.0 - 1e-4 <= float(cost.sum() / (1.241968 * start.square().sum())) <= 1.08


@pytest.mark.parametrize(("start", "expected"), [(1.0, -1.0), (1e-3, 0.2)])
def test_a_learned_temperature_brings_the_entropy_where_it_is_wanted(
    start: float, expected: float
) -> None:
    """Down and up: what an action costs at once, 0.1 u^2, asks for 0 exactly; uniform ones have
    0.69.
    """
    env = Regulator(32)
    settings = {
        "gamma": 0.0,
        "target_entropy": expected,
        "initial_temperature": start,
        "temperature_learning_rate": 1e-2,
        "updates": 4,
    }
    settings |= {
        "learning_rate": 3e-3,
        "batch_size": 128,
        "learning_starts": 128,
        "replay_size": 10_000,
    }
    algorithm = off_policy(
        "sac", env, **settings, actor_network={"hidden": [32]}, critic_network={"hidden": [32]}
    )
    play(algorithm, env, 700)
    with torch.no_grad():
        _, log_prob = squashed_sample(
            algorithm.actor.forward(torch.linspace(-0.7, 0.7, 4000).unsqueeze(1))[0],
            torch.randn(4000, 1),
        )
    assert -float(log_prob.mean()) == pytest.approx(expected, abs=0.15)


# ---- what is no transition ----


class Gaps(RandomWalk):
    """Every fifth step of an environment is no transition, and pays a million."""

    def step(self, actions: Tensor) -> Any:
        timestep = super().step(actions)
        self.count = getattr(self, "count", 0) + 1
        invalid = (torch.arange(self.num_envs) + self.count) % 5 == 0
        return timestep._replace(
            reward=torch.where(invalid, 1e6, timestep.reward),
            info={**timestep.info, "valid": ~invalid},
        )


@pytest.mark.parametrize("settings", [{}, {"prioritized": True}, {"n_step": 3}], ids=str)
def test_steps_that_are_no_transition_are_not_learnt_from(settings: dict[str, Any]) -> None:
    env = Gaps(16)
    algorithm = off_policy(
        "td3", env, horizon=4, normalize_obs=True, final_obs_fraction=1.0, **settings
    )
    metrics = play(algorithm, env, 20)
    assert float(metrics["train/critic_loss"]) < 1e4
    batch = algorithm.replay.sample(4000, 0.9, algorithm.config.n_step)
    assert float(batch["reward"][batch["weight"] > 0].abs().max()) < 1e3
    drawn = float((batch["weight"] == 0).float().mean())
    assert drawn < 0.25 if settings.get("prioritized") else 0.1 < drawn < 0.7
    assert algorithm.normalizer is not None
    assert float(algorithm.normalizer.count) == 20 * 4 * 16 - 20 * 4 * 16 // 5


# ---- ModSAC, noise, epsilon ----


@pytest.mark.parametrize(("loss", "expected"), [(0.0, [True] * 8), (1e9, [True, False] * 4)])
def test_mod_sac_moves_its_actor_as_its_critics_deserve(loss: float, expected: list[bool]) -> None:
    """With perfect critics at every update; with hopeless ones at every second."""
    env = RandomWalk(4)
    algorithm = off_policy("mod_sac", env, updates=8, temperature=1e-9)
    play(algorithm, env, 2, learns=False)
    assert isinstance(algorithm, ModSAC)
    moved = []
    for number in range(8):
        algorithm.loss_mean.fill_(loss)
        before = algorithm.optimizers["actor"].flat.clone()
        batch = algorithm.replay.sample(8, 0.9)
        batch["reward"] *= 0.0
        algorithm.update_step(batch, number)
        moved.append(not torch.equal(algorithm.optimizers["actor"].flat, before))
    assert moved == expected


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_of_mod_sacs_actor_that_is_not_due_changes_nothing(broken: bool) -> None:
    """Neither weights, moments, step, target nor the count of skipped steps, be its gradient finite
    or not; the temperature moves all the same.
    """
    env = RandomWalk(4)
    algorithm = off_policy("mod_sac", env, updates=8)
    play(algorithm, env, 2)
    assert isinstance(algorithm, ModSAC)
    optimizer, batch = algorithm.optimizers["actor"], algorithm.replay.sample(8, 0.9)
    algorithm.loss_mean.fill_(1e9)
    algorithm.update_step(batch, 0)
    if broken:
        batch["obs"][3] = torch.nan

    def state() -> list[Tensor]:
        assert optimizer.target is not None
        tensors = *optimizer.state[:4], optimizer.target, optimizer.skipped.counts
        return [each.clone() for each in tensors]

    before, temperature = state(), algorithm.temperature.log.detach().clone()
    metrics = algorithm.actor_step(batch)
    assert not all(torch.equal(one, other) for one, other in zip(state(), before))  # it was due
    algorithm.is_due.fill_(False)
    before = state()
    metrics = algorithm.actor_step(batch)
    for one, other in zip(state(), before):
        assert torch.equal(one, other)
    assert float(metrics["actor_grad_norm"]) == 0.0
    assert torch.equal(algorithm.temperature.log, temperature) == broken


def test_mod_sac_starts_at_one_half() -> None:
    algorithm = off_policy("mod_sac", RandomWalk(4))
    assert isinstance(algorithm, ModSAC)
    assert float(algorithm.loss_mean.square().neg().exp()) == pytest.approx(0.5)


def test_noise_of_every_kind() -> None:
    still, random = torch.zeros(1000, 1), CounterRandom(0, 1000)

    def draws(kind: str, steps: int = 200) -> Tensor:
        noise = ActionNoise(kind, 0.05, (0.01, 0.2), 1000, 1, torch.device("cpu"))
        policy_state, rows = noise.initial_policy_state(1000), []
        for _ in range(steps):
            action, policy_state = noise.add(still, policy_state, random)
            random.advance()
            rows.append(action[:, 0])
        return torch.stack(rows)

    at_the_limit, _ = ActionNoise("gaussian", 0.05, (0.01, 0.2), 1000, 1, torch.device("cpu")).add(
        still + 1.0, (), random
    )
    assert float(at_the_limit.amax()) == 1.0 > float(at_the_limit.amin())
    assert float(draws("gaussian").std()) == pytest.approx(0.05, rel=0.02)
    ladder = draws("ladder").std(0)
    torch.testing.assert_close(ladder, torch.linspace(0.01, 0.2, 1000), rtol=0.3, atol=0.002)
    widths = draws("episode").std(0).sort().values
    torch.testing.assert_close(widths, torch.linspace(0.01, 0.2, 1000), rtol=0.3, atol=0.01)
    drift = draws("ornstein_uhlenbeck")
    # variance after k steps: std^2 dt (1 - a^2k) / (1 - a^2), a = 1 - theta dt
    a = 1.0 - THETA * TIME_STEP
    expected = 0.05 * (TIME_STEP * (1 - a**400) / (1 - a * a)) ** 0.5
    assert float(drift[-1].std()) == pytest.approx(expected, rel=0.1)
    assert float(torch.corrcoef(drift[-2:])[0, 1]) > 0.99


def test_epsilon_falls_and_the_ladder_stands() -> None:
    algorithm: Any = off_policy(
        "dqn", AlternatingEnv(8), epsilon_start=0.9, epsilon_end=0.1, epsilon_fraction=0.5
    )
    for progress, expected in ((0.0, 0.9), (0.25, 0.5), (0.5, 0.1), (1.0, 0.1)):
        algorithm.make_buffer()
        algorithm.schedule(progress, 0)
        assert float(algorithm.epsilon) == pytest.approx(expected)
    ladder: Any = off_policy("dqn", AlternatingEnv(8), epsilon_ladder=True)
    assert float(ladder.epsilon[0]) == pytest.approx(0.4)
    assert float(ladder.epsilon[-1]) == pytest.approx(0.4**8)
