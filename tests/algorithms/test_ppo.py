"""PPO and A2C: known values, exact replay of what was acted, masked rows, and the settings that
must have an effect.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.a2c import A2CConfig
from gpurl.algorithms.base import episode_ends, restart_carry
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import UsageError
from gpurl.kernels.backend import host_may_look, no_host_looks
from gpurl.nn.networks import NetworkConfig
from gpurl.nn.normalizer import Normalizer
from tests.tiny_envs import AlternatingEnv, RandomWalk

GRU = NetworkConfig(hidden=(16,), memory="gru", memory_size=8)


def make(env: VecEnv, name: str = "ppo", **settings: object) -> PPO:
    config = (A2CConfig if name == "a2c" else PPOConfig)(
        **{"horizon": 8, "minibatches": 1 if name == "a2c" else 2, **settings}
    )
    return make_algorithm(
        name, config, env.single_observation_space, env.single_action_space, env.num_envs, "cpu", 0
    )


def collect(
    algorithm: PPO, env: VecEnv, obs: torch.Tensor, carry: tuple[torch.Tensor, ...]
) -> tuple[RolloutBuffer, torch.Tensor, tuple[torch.Tensor, ...]]:
    buffer = algorithm.make_buffer()
    while not algorithm.is_ready(buffer):
        decision = algorithm.act(obs, carry)
        timestep = env.step(decision.action)
        algorithm.record(buffer, obs, decision, timestep)
        carry = restart_carry(decision.carry, episode_ends(timestep))
        obs = timestep.obs
    return buffer, obs, carry


class RandomWalkWithGaps(RandomWalk):
    """Every fifth step of an environment is no transition."""

    def step(self, actions: torch.Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.info["valid"] = (self.episode_length_buf + torch.arange(self.num_envs)) % 5 != 0
        return timestep


def run_updates(algorithm: PPO, env: VecEnv, count: int) -> dict[str, torch.Tensor]:
    obs, _ = env.reset(seed=0)
    carry = algorithm.initial_carry(env.num_envs)
    metrics: dict[str, torch.Tensor] = {}
    for _ in range(count):
        buffer, obs, carry = collect(algorithm, env, obs, carry)
        metrics = algorithm.update(buffer)
    return metrics


@pytest.mark.parametrize(
    ("name", "normalize_value"), [("ppo", True), ("ppo", False), ("a2c", False)]
)
def test_truncation_is_not_termination(name: str, normalize_value: bool) -> None:
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
        network=NetworkConfig(hidden=(32,)),
        schedule="constant",
    )
    run_updates(algorithm, env, 250 if name == "ppo" else 700)
    assert float(algorithm.value(torch.tensor([[1.0, 0.0]]))) == pytest.approx(0.9 / 0.19, abs=0.15)
    assert float(algorithm.value(torch.tensor([[0.0, 1.0]]))) == pytest.approx(1.0 / 0.19, abs=0.15)


def test_with_a_memory_the_cut_off_state_is_valued_under_its_own_memory() -> None:
    """Not under the emptied one of the next episode, and not the next episode's first
    observation.
    """
    env = AlternatingEnv(4)
    algorithm = make(env, network=GRU, normalize_value=False)
    obs, _ = env.reset(seed=0)
    carry, buffer, seen = algorithm.initial_carry(4), algorithm.make_buffer(), 0
    while not algorithm.is_ready(buffer):
        decision = algorithm.act(obs, carry)
        timestep = env.step(decision.action)
        algorithm.record(buffer, obs, decision, timestep)
        if bool(timestep.truncated.all()):
            seen += 1
            recorded = buffer["final_value"][buffer.size - 1]
            torch.testing.assert_close(
                recorded, algorithm.value(timestep.info["final_obs"], decision.carry)
            )
            for wrong in (
                algorithm.value(timestep.info["final_obs"], algorithm.initial_carry(4)),
                algorithm.value(timestep.obs, decision.carry),
            ):
                assert float((recorded - wrong).abs().min()) > 1e-4
        carry, obs = restart_carry(decision.carry, episode_ends(timestep)), timestep.obs
    assert seen == 2


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_replaying_stored_observations_gives_the_acting_log_probabilities(memory: str) -> None:
    """Across episode ends, after the normaliser has moved and been frozen again."""
    env = RandomWalk(12)
    algorithm = make(env, horizon=20, network=dataclasses.replace(GRU, memory=memory))
    obs, _ = env.reset(seed=0)
    carry = algorithm.initial_carry(12)
    for _ in range(2):
        buffer, obs, carry = collect(algorithm, env, obs, carry)
        algorithm.update(buffer)
    buffer, obs, carry = collect(algorithm, env, obs, carry)
    assert int((buffer["terminated"] | buffer["truncated"]).sum()) > 20
    data, _ = algorithm._targets(buffer)
    if memory == "gru":
        start = torch.cat((torch.zeros(1, 12, dtype=torch.bool), buffer["ended"][:-1]))
        inputs = algorithm.network.memory.unroll(data["obs"], buffer["carry"][0], start)
    else:
        inputs = data["obs"]
    output, _, _ = algorithm.network(inputs.flatten(0, 1))
    log_prob = algorithm.head.log_prob(output, buffer["action"].flatten(0, 1)).unflatten(
        0, (20, 12)
    )
    assert float((log_prob - buffer["log_prob"]).detach().abs().max()) < 1e-6 * float(
        buffer["log_prob"].abs().max().clamp(min=1)
    )


@pytest.mark.parametrize("network", [NetworkConfig(), GRU, NetworkConfig(shared=True)])
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
        buffer, _, _ = collect(algorithm, env, obs, algorithm.initial_carry(8))
        if masked:
            buffer.columns["valid"] = torch.ones(8, 8, dtype=torch.bool)
            buffer.columns["valid"][5, 3] = False
        buffer["reward"][5, 3] = garbage
        if not algorithm.is_recurrent:
            buffer["obs"][5, 3] = garbage
        buffer["terminated"][4, 3] = True  # nothing bootstraps from the garbage
        algorithm.update(buffer)
        return algorithm.optimizer.flat.clone()

    clean = weights_after(0.0, True)
    assert torch.equal(clean, weights_after(1e6, True))
    assert not torch.equal(clean, weights_after(1e3, False))


def rollout_with_gaps(algorithm: PPO) -> RolloutBuffer:
    """A rollout in which every fifth row is no transition and holds 1000 as observation, reward and
    value.
    """
    env = RandomWalkWithGaps(8)
    buffer, _, _ = collect(algorithm, env, env.reset(seed=0)[0], algorithm.initial_carry(8))
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
    algorithm.update(buffer)
    assert algorithm.normalizer is not None
    assert_moments_of(algorithm.normalizer, buffer["obs"][buffer["valid"]])


@pytest.mark.parametrize("network", [NetworkConfig(), GRU])
def test_rows_that_are_not_valid_do_not_move_the_values_normaliser(network: NetworkConfig) -> None:
    """Under gamma 0 a row's return is its reward; that of a row that is not valid is its value."""
    algorithm = make(RandomWalk(8), gamma=0.0, network=network)
    buffer = rollout_with_gaps(algorithm)
    algorithm.update(buffer)
    assert algorithm.value_normalizer is not None
    assert_moments_of(algorithm.value_normalizer, buffer["reward"][buffer["valid"]].unsqueeze(1))


def test_single_numbers_are_seen_and_done() -> None:
    """Spaces of shape (): one number an environment, observed and acted, in both forms."""
    env = RandomWalk(8)
    env.single_action_space = Box(-2.0, 2.0, (), np.float32)
    env.single_observation_space = Box(-9.0, 9.0, (), np.float32)
    env.observe = lambda state: state["x"][:, 0]  # type: ignore[method-assign]
    actions = []
    for in_numpy in (True, False):
        algorithm = make(env)
        algorithm.host_network = algorithm.host_network if in_numpy else None
        run_updates(algorithm, env, 2)
        actions.append(algorithm.act(torch.linspace(-3.0, 3.0, 8)).action)
        assert actions[-1].shape == (8,)
        assert bool((actions[-1].abs() <= 2.0).all())
    torch.testing.assert_close(*actions, rtol=1e-3, atol=1e-3)


def test_an_algorithm_is_not_copied_apart() -> None:
    with pytest.raises(TypeError, match="PPO shares memory"):
        copy.deepcopy(make(RandomWalk(8)))


def test_final_value_by_rows_equals_final_value_by_mask() -> None:
    """The CPU computes values of truncated rows only, the GPU of all: advantages must not
    differ.
    """

    def advantage() -> torch.Tensor:
        env = RandomWalk(8)
        algorithm = make(env)
        obs, _ = env.reset(seed=0)
        env.stagger(torch.arange(8) % 7)  # cut off at different steps
        buffer, _, _ = collect(algorithm, env, obs, ())
        assert bool(buffer["truncated"].any())
        if host_may_look(buffer.device):  # nothing of an earlier step is left
            assert not bool(buffer["final_value"][:-1][~buffer["truncated"][:-1]].any())
        return algorithm._targets(buffer)[0]["advantage"]

    by_rows = advantage()
    with no_host_looks():
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"network": NetworkConfig(hidden=(7,), activation="elu", shared=True)},
        {"network": NetworkConfig(hidden=(), activation="relu")},
        {
            "network": NetworkConfig(hidden=(9, 8), activation="relu"),
            "clip_range_value": 0.1,
            "normalize_advantage": "minibatch",
        },
        {"entropy_coef": 0.3, "max_grad_norm": 0.01, "initial_std": 7.0},
        {
            "entropy_coef": 0.3,
            "squash": True,
            "normalize_obs": False,
            "normalize_value": False,
            "normalize_advantage": "minibatch",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("kind", [RandomWalk, RandomWalkWithGaps])
def test_small_batches_in_numpy_learn_what_torch_learns(
    kind: type, space: object, settings: dict[str, object]
) -> None:
    """The same updates with and without the numpy forms; a standard deviation above its limit must
    stay there in both.
    """
    if not isinstance(space, Box):
        settings = {name: value for name, value in settings.items() if name != "squash"}

    def run(in_numpy: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
        env = kind(8)
        env.single_action_space = space  # type: ignore[assignment]
        algorithm = make(env, learning_rate=1e-2, **settings)
        assert algorithm.host_network is not None
        if not in_numpy:
            algorithm.host_network = None
        metrics = run_updates(algorithm, env, 2)
        data = {"packed": torch.zeros(64, algorithm.minibatches.rows.width)}
        kinds = {
            type(column)
            for minibatch in algorithm._minibatches(data)
            for column in minibatch.values()
        }
        return algorithm.optimizer.flat, metrics, kinds == {np.ndarray}

    (flat, metrics, used), (wanted_flat, wanted, unused) = run(True), run(False)
    assert used
    assert not unused
    torch.testing.assert_close(flat, wanted_flat, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(metrics, wanted, rtol=1e-3, atol=1e-4)


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


def test_entropy_bonus_raises_the_entropy() -> None:
    def std_after(coef: float) -> float:
        env = RandomWalk(16)
        return float(
            run_updates(
                make(env, entropy_coef=coef, learning_rate=1e-2, schedule="constant"), env, 10
            )["train/std"]
        )

    assert std_after(1.0) > std_after(0.0) + 0.05


def test_advantages_are_normalised_per_batch_or_minibatch() -> None:
    env = RandomWalk(8)
    algorithm = make(env)
    obs, _ = env.reset(seed=0)
    buffer, _, _ = collect(algorithm, env, obs, ())
    raw = algorithm._targets(buffer)[0]["advantage"]
    by_minibatch = make(env, normalize_advantage="minibatch")
    for rows in (raw.flatten(), raw.view(8, 8)[:, :4]):  # of steps; of environments
        got = by_minibatch.minibatches.weighted({"advantage": rows})["advantage"]
        torch.testing.assert_close(
            torch.stack((got.mean(), got.std(correction=0))),
            torch.tensor([0.0, 1.0]),
            rtol=0,
            atol=1e-5,
        )
        valid = torch.arange(rows.numel()).view(rows.shape) < 20
        part = by_minibatch.minibatches.weighted({"advantage": rows, "valid": valid})
        torch.testing.assert_close(part["weight"][valid], torch.full((20,), 1 / 20))
        torch.testing.assert_close(
            part["advantage"][valid],
            by_minibatch.minibatches.weighted({"advantage": rows[valid]})["advantage"],
        )
    nothing = by_minibatch.minibatches.weighted(
        {"advantage": rows, "valid": torch.zeros_like(valid)}
    )
    assert not bool(nothing["weight"].any())
    assert bool(nothing["advantage"].isfinite().all())
    packed = algorithm.prepare(buffer)["packed"][:, algorithm.minibatches.rows.places["advantage"]]
    torch.testing.assert_close(
        torch.stack((packed.mean(), packed.std(correction=0))),
        torch.tensor([0.0, 1.0]),
        rtol=0,
        atol=1e-5,
    )


def test_sizes_and_spaces_that_do_not_fit_are_refused_by_name() -> None:
    env = RandomWalk(8)
    with pytest.raises(
        UsageError, match=r"num_envs \* horizon = 64 rows into minibatches = 5, which leaves 4 over"
    ):
        make(env, minibatches=5).make_buffer()
    with pytest.raises(UsageError, match=r"num_envs = 8 rows into minibatches = 3"):
        make(env, minibatches=3, network=GRU).make_buffer()
    with pytest.raises(
        UsageError,
        match=r"PPO needs a Box of at least one number, .* action space, this one is Dict",
    ):
        make_algorithm(
            "ppo", PPOConfig(), env.single_observation_space, Dict({"a": Discrete(2)}), 8
        )
    with pytest.raises(
        UsageError, match=r"schedule is 'cosine'; it must be one of kl, linear, constant"
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
