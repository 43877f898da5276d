"""PPO and A2C: known values, exact replay of what was acted, masked rows, and the settings that
must have an effect.
"""

import copy
import dataclasses
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.a2c import A2CConfig
from gpurl.algorithms.base import Metrics, episode_ends, restart_policy_state
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.buffers.minibatches import Minibatch
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.eager import Eager
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import UsageError
from gpurl.guards.guards import Guards
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES, NetworkConfig
from gpurl.nn.mlp import Dense
from gpurl.nn.normalizer import Normalizer
from tests.tiny_envs import AlternatingEnv, RandomWalk, State

GRU = NetworkConfig(hidden=(16,), memory="gru", memory_size=8)
SIMBA = NetworkConfig(hidden=(8, 8), body="simba")
NORMED_GRU = dataclasses.replace(GRU, layer_norm=True)


def make(env: VecEnv, name: str = "ppo", **settings: object) -> PPO:
    config = (A2CConfig if name == "a2c" else PPOConfig)(
        **{"horizon": 8, "minibatches": 1 if name == "a2c" else 2, **settings}
    )
    return make_algorithm(
        name, config, env.single_observation_space, env.single_action_space, env.num_envs, "cpu", 0
    )


def collect(
    algorithm: PPO, env: VecEnv, obs: torch.Tensor, policy_state: tuple[torch.Tensor, ...]
) -> tuple[RolloutBuffer, torch.Tensor, tuple[torch.Tensor, ...]]:
    buffer = algorithm.make_buffer()
    while not buffer.is_full:
        decision = algorithm.act(obs, policy_state)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        policy_state = restart_policy_state(decision.policy_state, episode_ends(timestep))
        obs = timestep.obs
    return buffer, obs, policy_state


def in_order(algorithm: PPO, buffer: RolloutBuffer) -> Minibatch:
    """The whole rollout as PPO learns from it, in the order in which it was played: [T N, ...], or
    with a memory [T, N, ...].
    """
    data = algorithm.prepare(buffer)
    columns = {name: column for name, column in data.items() if column.dim()}
    if not algorithm.is_recurrent:
        columns = algorithm.minibatches.rows.unpack(data["packed"])
    columns.pop("valid", None)
    return Minibatch(**columns)


class RandomWalkWithGaps(RandomWalk):
    """Every fifth step of an environment is no transition."""

    def step(self, actions: torch.Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.info["valid"] = (self.episode_length_buf + torch.arange(self.num_envs)) % 5 != 0
        return timestep


def run_updates(algorithm: PPO, env: VecEnv, count: int) -> dict[str, torch.Tensor]:
    obs, _ = env.reset(seed=0)
    policy_state = algorithm.initial_policy_state(env.num_envs)
    metrics: dict[str, torch.Tensor] = {}
    for _ in range(count):
        buffer, obs, policy_state = collect(algorithm, env, obs, policy_state)
        metrics = algorithm.learn(algorithm.prepare(buffer))
    return metrics


@pytest.mark.parametrize(
    ("name", "normalize_value", "shape"),
    [("ppo", True, {}), ("ppo", False, {}), ("a2c", False, {}), ("ppo", True, {"body": "bro"})],
)
def test_truncation_is_not_termination(
    name: str, normalize_value: bool, shape: dict[str, Any]
) -> None:
    """Values of the alternating task under gamma 0.9 are 4.737 and 5.263; a reset-observation
    bootstrap gives 3.14, a terminal one 0.75.
    """
    env = AlternatingEnv(16)
    algorithm = make(
        env,
        name,
        gamma=0.9,
        gae_lambda=0.9,
        learning_rate=5e-3,
        normalize_obs=False,
        normalize_value=normalize_value,
        network=NetworkConfig(hidden=(32,), **shape),
        schedule="constant",
    )
    run_updates(algorithm, env, 250 if name == "ppo" else 700)
    assert float(algorithm.value(torch.tensor([[1.0, 0.0]]))) == pytest.approx(0.9 / 0.19, abs=0.15)
    assert float(algorithm.value(torch.tensor([[0.0, 1.0]]))) == pytest.approx(1.0 / 0.19, abs=0.15)


@pytest.mark.parametrize("memory", MEMORIES)
def test_with_a_memory_the_cut_off_state_is_valued_under_its_own_memory(memory: str) -> None:
    """Not under the emptied one of the next episode, and not the next episode's first
    observation.
    """
    env = AlternatingEnv(4)
    network = dataclasses.replace(GRU, memory=memory)
    algorithm = make(env, network=network, normalize_value=False)
    obs, _ = env.reset(seed=0)
    policy_state, buffer, seen = algorithm.initial_policy_state(4), algorithm.make_buffer(), 0
    while not buffer.is_full:
        decision = algorithm.act(obs, policy_state)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        if bool(timestep.truncated.all()):
            seen += 1
            recorded = buffer["final_value"][buffer.size - 1]
            torch.testing.assert_close(
                recorded, algorithm.value(timestep.info["final_obs"], decision.policy_state)
            )
            for wrong in (
                algorithm.value(timestep.info["final_obs"], algorithm.initial_policy_state(4)),
                algorithm.value(timestep.obs, decision.policy_state),
            ):
                assert float((recorded - wrong).abs().min()) > 1e-4
        policy_state, obs = (
            restart_policy_state(decision.policy_state, episode_ends(timestep)),
            timestep.obs,
        )
    assert seen == 2


@pytest.mark.parametrize("memory", ["none", *MEMORIES])
def test_replaying_stored_observations_gives_the_acting_log_probabilities(memory: str) -> None:
    """Across episode ends, after the normaliser has moved and been frozen again."""
    env = RandomWalk(12)
    algorithm = make(env, horizon=20, network=dataclasses.replace(GRU, memory=memory))
    obs, _ = env.reset(seed=0)
    policy_state = algorithm.initial_policy_state(12)
    for _ in range(2):
        buffer, obs, policy_state = collect(algorithm, env, obs, policy_state)
        algorithm.learn(algorithm.prepare(buffer))
    buffer, obs, policy_state = collect(algorithm, env, obs, policy_state)
    assert int((buffer["terminated"] | buffer["truncated"]).sum()) > 20
    batch = in_order(algorithm, buffer)
    output, value = algorithm.outputs(batch)
    log_prob = algorithm.head.log_prob(output, batch.action).detach()
    assert algorithm.value_normalizer is not None
    for got, expected in ((log_prob, batch.log_prob), (batch.log_prob, buffer["log_prob"])):
        error = (got.view(20, 12) - expected.view(20, 12)).abs().max()
        assert float(error) < 1e-6 * float(expected.abs().max().clamp(min=1))
    assert value.shape == log_prob.shape


@pytest.mark.parametrize(
    "network", [NetworkConfig(), GRU, NetworkConfig(shared=True), SIMBA, NORMED_GRU]
)
def test_first_minibatch_has_ratio_one_whatever_the_normaliser_does(network: NetworkConfig) -> None:
    env = RandomWalk(8)
    algorithm = make(env, epochs=1, minibatches=1, schedule="constant", network=network)
    for _ in range(3):
        metrics = run_updates(algorithm, env, 1)
        assert abs(float(metrics["train/approx_kl"])) < 1e-6
        assert float(metrics["train/clip_fraction"]) == 0.0


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_rows_that_are_not_valid_are_never_trained_on(network: NetworkConfig) -> None:
    """Whatever stands in masked rows, the weights after the update are the same; without the mask
    the rows do matter.
    """

    def weights_after(garbage: float, masked: bool) -> torch.Tensor:
        env = RandomWalk(8)
        algorithm = make(
            env,
            epochs=1,
            minibatches=1,
            schedule="constant",
            normalize_value=False,
            network=network,
        )
        obs, _ = env.reset(seed=0)
        buffer, _, _ = collect(algorithm, env, obs, algorithm.initial_policy_state(8))
        if masked:
            buffer.columns["valid"] = torch.ones(8, 8, dtype=torch.bool)
            buffer.columns["valid"][5, 3] = False
        buffer["reward"][5, 3] = garbage
        if not algorithm.is_recurrent:
            buffer["obs"][5, 3] = garbage
        buffer["terminated"][4, 3] = True  # nothing bootstraps from the garbage
        algorithm.learn(algorithm.prepare(buffer))
        return algorithm.optimizer.flat.clone()

    clean = weights_after(0.0, True)
    assert torch.equal(clean, weights_after(1e6, True))
    assert not torch.equal(clean, weights_after(1e3, False))


def rollout_with_gaps(algorithm: PPO) -> RolloutBuffer:
    """A rollout in which every fifth row is no transition and holds 1000 as observation, reward and
    value.
    """
    env = RandomWalkWithGaps(8)
    buffer, _, _ = collect(algorithm, env, env.reset(seed=0)[0], algorithm.initial_policy_state(8))
    for name in ("obs", "reward", "value"):
        buffer[name][~buffer["valid"]] = 1e3
    assert 0 < int(buffer["valid"].sum()) < 64
    return buffer


def assert_moments_of(normalizer: Normalizer, x: torch.Tensor) -> None:
    """The normaliser's first data were the rows of x [B, D] and nothing else."""
    assert float(normalizer.count) == x.shape[0]
    torch.testing.assert_close(normalizer.mean, x.double().mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        normalizer.variance, x.double().var(0, correction=0), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_rows_that_are_not_valid_do_not_move_the_observations_normaliser(
    network: NetworkConfig,
) -> None:
    algorithm = make(RandomWalk(8), network=network)
    buffer = rollout_with_gaps(algorithm)
    algorithm.learn(algorithm.prepare(buffer))
    assert algorithm.normalizer is not None
    assert_moments_of(algorithm.normalizer, buffer["obs"][buffer["valid"]])


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_rows_that_are_not_valid_do_not_move_the_values_normaliser(network: NetworkConfig) -> None:
    """Under gamma 0 a row's return is its reward; that of a row that is not valid is its value."""
    algorithm = make(RandomWalk(8), gamma=0.0, network=network)
    buffer = rollout_with_gaps(algorithm)
    algorithm.learn(algorithm.prepare(buffer))
    assert algorithm.value_normalizer is not None
    assert_moments_of(algorithm.value_normalizer, buffer["reward"][buffer["valid"]].unsqueeze(1))


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_rows_that_are_not_valid_do_not_count_as_explained(network: NetworkConfig) -> None:
    algorithm = make(RandomWalk(8), gamma=0.0, network=network)
    buffer = rollout_with_gaps(algorithm)
    value, reward = buffer["value"][buffer["valid"]], buffer["reward"][buffer["valid"]]
    wanted = 1.0 - float((reward - value).var()) / float(reward.var())
    found = algorithm.prepare(buffer)["explained_variance"]
    assert float(found) == pytest.approx(wanted, rel=1e-4)


class Numbers(RandomWalk):
    single_action_space = Box(-2.0, 2.0, (), np.float32)
    single_observation_space = Box(-9.0, 9.0, (), np.float32)

    def observe(self, state: State) -> Tensor:
        return state["x"][:, 0]


def test_single_numbers_are_seen_and_done() -> None:
    """Spaces of shape (): one number an environment, observed and acted."""
    env = Numbers(8)
    algorithm = make(env)
    run_updates(algorithm, env, 2)
    action = algorithm.act(torch.linspace(-3.0, 3.0, 8)).action
    assert action.shape == (8,)
    assert bool((action.abs() <= 2.0).all())


def test_an_algorithm_is_not_copied_apart() -> None:
    with pytest.raises(TypeError, match="PPO shares memory"):
        copy.deepcopy(make(RandomWalk(8)))


def test_final_value_by_rows_equals_final_value_by_mask() -> None:
    """On a CPU the engine values the truncated rows only, a GPU values all: advantages must not
    differ.
    """

    def advantage() -> torch.Tensor:
        env = RandomWalk(8)
        algorithm = make(env)
        engine = Eager(algorithm, env, Guards("walk", algorithm, env))
        engine.begin(0, staggered=False)
        env.stagger(torch.arange(8) % 7)  # cut off at different steps
        engine.collect()
        buffer = engine.buffer
        assert bool(buffer["truncated"].any())
        if "final_value" in buffer.columns:  # nothing of an earlier step is left
            assert not bool(buffer["final_value"][:-1][~buffer["truncated"][:-1]].any())
        return in_order(algorithm, buffer).advantage

    by_rows = advantage()
    with no_host_syncs():
        by_mask = advantage()
    torch.testing.assert_close(by_rows, by_mask, rtol=1e-5, atol=1e-5)


SPACES = [
    Box(-1.0, 1.0, (2,), np.float32),
    Box(-3.0, 5.0, (2, 2), np.float32),
    Discrete(3),
    MultiDiscrete([2, 3]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_every_action_space_trains(space: object, name: str) -> None:
    env = RandomWalk(8)
    env.single_action_space = space  # type: ignore[assignment]
    algorithm = make(env, name)
    before = algorithm.optimizer.flat.clone()
    metrics = run_updates(algorithm, env, 2)
    assert all(torch.isfinite(value) for value in metrics.values())
    assert not torch.equal(before, algorithm.optimizer.flat)
    decision = algorithm.act(torch.randn(8, 3), explore=False)
    assert all(space.contains(action.numpy().astype(space.dtype)) for action in decision.action)  # type: ignore[attr-defined]


def test_linear_schedule_reaches_zero_and_kl_schedule_follows_the_target() -> None:
    env = RandomWalk(8)
    linear = make(env, schedule="linear", learning_rate=0.1)
    linear.schedule(0.75, 0)
    assert float(linear.optimizer.learning_rate) == pytest.approx(0.025)
    before = 1e-3
    adaptive = make(env, schedule="kl", learning_rate=before, target_kl=0.01)
    for kl, rate in ((0.03, 1e-3 / 1.5), (0.012, 1e-3 / 1.5), (0.001, 1e-3), (0.001, 1.5e-3)):
        for has_moved in (False, True):  # where all steps were left out it stays
            adaptive._adapt_learning_rate(torch.tensor(kl), torch.tensor(has_moved))
            assert has_moved or float(adaptive.optimizer.learning_rate) == pytest.approx(
                before, rel=1e-5
            )
        before = rate
        assert float(adaptive.optimizer.learning_rate) == pytest.approx(rate, rel=1e-5)
    adaptive.schedule(0.9, 0)
    assert float(adaptive.optimizer.learning_rate) == pytest.approx(1.5e-3, rel=1e-5)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3, 1e-2, 0.05])
def test_the_limits_of_the_kl_schedule_bound_changes_only(rate: float) -> None:
    """A rate that a user sets beyond them changes by its KL divergence and by nothing else."""
    cases = ((0.03, max(rate / 1.5, min(rate, 1e-5))), (0.001, min(rate * 1.5, max(rate, 1e-2))))
    for kl, wanted in cases:
        adaptive = make(RandomWalk(8), learning_rate=rate, target_kl=0.01)
        before = adaptive.optimizer.learning_rate.clone()
        adaptive._adapt_learning_rate(torch.tensor(kl), torch.tensor(False))
        adaptive._adapt_learning_rate(torch.tensor(0.01), torch.tensor(True))
        assert torch.equal(adaptive.optimizer.learning_rate, before)
        adaptive._adapt_learning_rate(torch.tensor(kl), torch.tensor(True))
        assert float(adaptive.optimizer.learning_rate) == pytest.approx(wanted, rel=1e-5)


class Watched(PPO):
    """Keeps the KL divergence and the learning rate of each minibatch step."""

    def after_minibatch(self, number: int, metrics: Metrics) -> None:
        super().after_minibatch(number, metrics)
        seen = float(metrics["approx_kl"]), float(self.optimizer.learning_rate)
        self.seen = [*getattr(self, "seen", []), (number, *seen)]


def test_schedule_kl_minibatch_follows_each_minibatch_but_the_first() -> None:
    """Of which there are 2 in each of 4 epochs; the first one cannot see a change."""
    env, rate, target = RandomWalk(8), 1e-2, 0.01
    spaces = env.single_observation_space, env.single_action_space
    config = PPOConfig(
        horizon=8, minibatches=2, epochs=4, learning_rate=rate, schedule="kl_minibatch"
    )
    algorithm = Watched(config, *spaces, 8, torch.device("cpu"))
    run_updates(algorithm, env, 3)
    assert [number for number, _, _ in algorithm.seen] == [*range(8)] * 3
    changes = set()
    for number, kl, after in algorithm.seen:
        change = 1.0
        if number:
            change = 1.0 / 1.5 if kl > 2.0 * target else 1.5 if kl < 0.5 * target else 1.0
        rate = min(max(rate * change, 1e-5), 1e-2)
        changes.add(change)
        assert after == pytest.approx(rate, rel=1e-5)
    assert changes == {1.0, 1.5, 1.0 / 1.5}


def test_minibatches_that_are_not_finite_leave_the_rate() -> None:
    adaptive = make(RandomWalk(8), schedule="kl_minibatch", learning_rate=1e-3)
    for kl in (torch.nan, torch.inf):
        adaptive.after_minibatch(1, {"approx_kl": torch.tensor(kl)})
        assert float(adaptive.optimizer.learning_rate) == pytest.approx(1e-3, rel=1e-6)


def test_weights_begin_orthogonal_or_uniform() -> None:
    """A gain g makes singular values g; torch's own bound is 1/sqrt(inputs)."""
    env = RandomWalk(8)
    for init in ("orthogonal", "uniform"):
        network = make(env, network=NetworkConfig(hidden=(64, 48), init=init)).network
        layers = [layer for layer in network.modules() if isinstance(layer, Dense)]
        assert len(layers) == 4
        for layer in layers:
            gain = {network.actor: 0.01, network.critic: 1.0}.get(layer, 2.0**0.5)
            for weight, bias in zip(layer.weight.detach(), layer.bias.detach()):
                bound = weight.shape[1] ** -0.5
                if init == "orthogonal":
                    values = torch.linalg.svdvals(weight)
                    torch.testing.assert_close(values, torch.full_like(values, gain))
                    assert not bias.any()
                else:
                    assert weight.abs().max() <= bound
                    assert bias.abs().max() <= bound
                    if weight.numel() > 100:
                        assert weight.std() == pytest.approx(bound / 3.0**0.5, rel=0.15)


def test_entropy_bonus_raises_the_entropy() -> None:
    def std_after(coef: float) -> float:
        env = RandomWalk(16)
        return float(
            run_updates(
                make(env, entropy_coef=coef, learning_rate=1e-2, schedule="constant"), env, 10
            )["train/std"]
        )

    assert std_after(1.0) > std_after(0.0) + 0.05


def moments(x: torch.Tensor) -> list[float]:
    return [float(x.mean()), float(x.std(correction=0))]


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_advantages_are_normalised_per_batch_or_minibatch_or_not(network: NetworkConfig) -> None:
    env, found = RandomWalk(8), {}
    for kind in ("none", "batch", "minibatch"):
        algorithm = make(env, normalize_advantage=kind, network=network)
        buffer, _, _ = collect(
            algorithm, env, env.reset(seed=0)[0], algorithm.initial_policy_state(8)
        )
        data = algorithm.prepare(buffer)
        found[kind] = [batch.advantage for batch in algorithm.batches(data)]
    normal = pytest.approx([0.0, 1.0], abs=1e-5)
    assert moments(torch.cat(found["none"])) != normal
    assert moments(torch.cat(found["batch"])) == normal
    assert moments(found["batch"][0]) != normal
    assert all(moments(advantage) == normal for advantage in found["minibatch"])


# ---- a loss and a network of one's own ----


class WithTeacher(PPO):
    """Stays near the action 0.3: one more term in the loss, in five lines."""

    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(batch)
        output, _ = self.outputs(batch)
        teacher = (output - 0.3).square().mean()
        return loss + 100.0 * teacher, metrics | {"teacher": teacher}


def of_own(kind: type[PPO], env: VecEnv, **settings: object) -> PPO:
    config = PPOConfig(**{"horizon": 8, "minibatches": 2, **settings})  # type: ignore[arg-type]
    spaces = env.single_observation_space, env.single_action_space
    return kind(config, *spaces, env.num_envs, torch.device("cpu"))


@pytest.mark.parametrize("looks", [nullcontext, no_host_syncs])
@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_a_term_of_ones_own_is_learnt_and_logged(network: NetworkConfig, looks: Any) -> None:
    """On whatever device; nothing stands in for a loss that a subclass changes."""
    with looks():
        env = RandomWalk(8)
        algorithm = of_own(WithTeacher, env, network=network, learning_rate=1e-2)
        metrics = run_updates(algorithm, env, 15)
    assert float(metrics["train/teacher"]) < 0.01
    without = metrics["train/policy_gradient_loss"] + metrics["train/value_loss"]
    teacher = 100.0 * metrics["train/teacher"]
    torch.testing.assert_close(metrics["train/loss"], without + teacher, rtol=1e-4, atol=1e-4)


def test_a_loss_without_a_kl_divergence_cannot_set_the_rate_by_it() -> None:
    class Bare(PPO):
        def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
            return self.outputs(batch)[1].square().mean(), {}

    env = RandomWalk(8)
    metrics = run_updates(of_own(Bare, env, schedule="constant"), env, 1)
    assert "train/approx_kl" not in metrics
    assert float(metrics["train/loss"]) >= 0.0
    with pytest.raises(UsageError, match=r"schedule kl needs a metric approx_kl of Bare\.loss"):
        run_updates(of_own(Bare, env), env, 1)


class Own(torch.nn.Module):
    """Any module from observations to (the head's numbers, value)."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(num_inputs, 12), torch.nn.SiLU())
        self.norm = torch.nn.LayerNorm(12)
        self.ends = torch.nn.Linear(12, num_outputs + 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends = self.ends(self.norm(self.trunk(obs)))
        return ends[:, :-1], ends[:, -1]


class WithOwnNetwork(PPO):
    def make_networks(self) -> None:
        super().make_networks()
        self.network = Own(self.num_inputs, self.head.num_outputs)  # type: ignore[assignment]


def test_a_metric_of_ones_own_skips_no_step_but_a_loss_that_is_not_finite_does() -> None:
    class Noting(WithTeacher):
        def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
            loss, metrics = super().loss(batch)
            return loss * self.factor, metrics | {"nothing": torch.tensor(torch.nan)}

    env = RandomWalk(8)
    for factor, steps in ((1.0, 16), (torch.inf, 0)):
        algorithm = of_own(Noting, env)
        algorithm.factor = factor
        metrics = run_updates(algorithm, env, 2)
        assert bool(metrics["train/nothing"].isnan())
        assert int(algorithm.optimizer.state.step) == steps


@pytest.mark.parametrize(
    ("change", "returned"),
    [
        (
            lambda output, value: (output, value.unsqueeze(1)),
            r"a tensor of shape \(8, 2\), a tensor of shape \(8, 1\)",
        ),
        (
            lambda output, value: (torch.cat((output, output), 1), value),
            r"a tensor of shape \(8, 4\), a tensor of shape \(8,\)",
        ),
        (lambda output, value: output, r"a tensor of shape \(8, 2\)$"),
        (lambda output, value: (output, None), r"a tensor of shape \(8, 2\), nothing"),
    ],
)
def test_what_a_network_must_not_return_is_named(change: Any, returned: str) -> None:
    class Other(Own):
        def forward(self, obs: torch.Tensor) -> Any:
            return change(*super().forward(obs))

    class WithOther(PPO):
        def make_networks(self) -> None:
            super().make_networks()
            self.network = Other(self.num_inputs, 2)  # type: ignore[assignment]

    wanted = r"WithOther needs .* of shapes \(8, 2\) and \(8,\); Other returned " + returned
    with pytest.raises(UsageError, match=wanted):
        of_own(WithOther, RandomWalk(8)).act(torch.zeros(8, 3))


@pytest.mark.parametrize("looks", [nullcontext, no_host_syncs])
def test_a_network_of_ones_own_finds_the_values(looks: Any) -> None:
    with looks():
        env = AlternatingEnv(16)
        algorithm = of_own(WithOwnNetwork, env, gamma=0.9, learning_rate=5e-3, schedule="constant")
        run_updates(algorithm, env, 250)
    values = algorithm.value(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    assert values == pytest.approx([0.9 / 0.19, 1.0 / 0.19], abs=0.2)
    with pytest.raises(UsageError, match="WithOwnNetwork has no layers that compute in bf16"):
        algorithm.set_precision("bf16")


class Greedy(torch.nn.Module):
    def __init__(self, algorithm: PPO) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.algorithm.act(obs, explore=False).action


@pytest.mark.parametrize("kind", [PPO, WithOwnNetwork])
@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_traced_policy_is_the_policy(
    backend: str, kind: type[PPO], space: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function, and not the numbers it gave while it was traced, as those of a kernel would
    be: here Triton could not even run.
    """
    torch.manual_seed(0)
    env = RandomWalk(8)
    env.single_action_space = space  # type: ignore[assignment]
    algorithm = of_own(kind, env)
    run_updates(algorithm, env, 1)
    for parameter in algorithm.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)

    act, other = Greedy(algorithm), 3.0 * torch.randn(64, 3)
    expected = act(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        traced = torch.jit.trace(act, torch.randn(8, 3), check_trace=False)
    torch.testing.assert_close(traced(other), expected)
    assert len(expected.unique()) > 1


def test_sizes_and_spaces_that_do_not_fit_are_refused_by_name() -> None:
    env = RandomWalk(8)
    with pytest.raises(
        UsageError, match=r"num_envs \* horizon = 64 rows into minibatches = 5, which leaves 4 over"
    ):
        make(env, minibatches=5).make_buffer()
    with pytest.raises(UsageError, match=r"num_envs = 8 rows into minibatches = 3"):
        make(env, minibatches=3, network=GRU).make_buffer()
    single = {"minibatches": 64, "normalize_advantage": "minibatch"}
    with pytest.raises(
        UsageError, match=r"a single row has an advantage of 0: .*fewer minibatches or"
    ):
        make(env, **single).make_buffer()
    for name in ("ppo", "a2c"):
        single = {"horizon": 1, "minibatches": 1, "normalize_advantage": "batch"}
        with pytest.raises(UsageError, match=r"over each batch, .*take a longer horizon, more env"):
            make(RandomWalk(1), name, **single).make_buffer()
        make(RandomWalk(1), name, **single | {"normalize_advantage": "none"}).make_buffer()
        make(RandomWalk(2), name, **single).make_buffer()
    with pytest.raises(
        UsageError,
        match=r"PPO needs a Box of at least one number, .* action space, this one is Dict",
    ):
        make_algorithm(
            "ppo", PPOConfig(), env.single_observation_space, Dict({"a": Discrete(2)}), 8
        )
    with pytest.raises(
        UsageError,
        match=r"schedule is 'cosine'; it must be one of kl, kl_minibatch, linear, constant",
    ):
        PPOConfig(schedule="cosine")
    with pytest.raises(UsageError, match=r"epochs and minibatches must be 1"):
        A2CConfig(epochs=4)


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    env = RandomWalk(4)
    spaces = (env.single_observation_space, env.single_action_space)
    torch.manual_seed(1)
    first = make_algorithm("ppo", PPOConfig(), *spaces, 4, seed=5)
    torch.manual_seed(2)
    again, other = (
        make_algorithm("ppo", PPOConfig(), *spaces, 4, seed=5),
        make_algorithm("ppo", PPOConfig(), *spaces, 4, seed=6),
    )
    assert torch.equal(first.optimizer.flat, again.optimizer.flat)  # type: ignore[union-attr]
    assert not torch.equal(first.optimizer.flat, other.optimizer.flat)  # type: ignore[union-attr]


class NotZeroD(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().loss(batch)
        return loss.expand(2), metrics


class NoGradient(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return batch.returns.mean(), {}


class Elsewhere(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.ones((), requires_grad=True) * 2.0, {}


class WideMetric(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().loss(batch)
        return loss, metrics | {"wide": loss.detach().expand(3)}


class OnlyLoss(PPO):
    def loss(self, batch: Minibatch) -> torch.Tensor:  # type: ignore[override]
        return super().loss(batch)[0]


class ListOfMetrics(PPO):
    def loss(self, batch: Minibatch) -> Any:
        loss, metrics = super().loss(batch)
        return loss, [*metrics.values()]


class OwnStd(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().loss(batch)
        return loss, metrics | {"std": loss.detach()}


class NumberMetric(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().loss(batch)
        return loss, metrics | {"number": 0.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        (WideMetric, r"wanted a 0-d tensor as metric 'wide', got \(3,\)"),
        (NumberMetric, r"wanted a 0-d tensor as metric 'number', got float"),
        (OwnStd, r"PPO logs std itself, rename your metric"),
        (OnlyLoss, r"wanted \(loss, a dict of metrics\), got a Tensor"),
        (ListOfMetrics, r"wanted \(loss, a dict of metrics\), got \(Tensor, list\)"),
        (NotZeroD, r"wanted .*, got one of shape \(2,\): take its mean"),
        (NoGradient, r"wanted .*, got one that does not require grad"),
        (Elsewhere, r"wanted a loss that depends on a weight of Elsewhere"),
    ],
)
def test_what_is_no_loss_is_named_with_its_line(kind: type[PPO], got: str) -> None:
    env = RandomWalk(8)
    with pytest.raises(
        UsageError, match=rf"{kind.__name__}.loss(: | \(.*test_ppo.py:\d+\): ){got}"
    ):
        run_updates(of_own(kind, env, schedule="constant"), env, 1)
