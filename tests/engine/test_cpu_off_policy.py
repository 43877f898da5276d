"""Off-policy updates by C against the same algorithms in Eager, and what C does not serve."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ddpg import DDPG
from gpurl.algorithms.dqn import DQN
from gpurl.algorithms.off_policy import Batch, OffPolicy
from gpurl.algorithms.sac import SAC
from gpurl.engine.choose import choose_engine
from gpurl.engine.cpu_off_policy import CpuOffPolicy, cpu_off_policy_obstacle
from gpurl.engine.eager import Eager
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import UsageError
from gpurl.guards.guards import Guards
from gpurl.kernels import c_library
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.replay import INVALID
from tests.engines import running_state
from tests.small_runs import assert_same, off_policy
from tests.tiny_envs import AlternatingEnv, RandomWalk

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason="no C library")


class Choices(RandomWalk):
    """A random walk whose actions are three numbers that do nothing."""

    single_action_space = AlternatingEnv.single_action_space


NETWORKS = {
    name: {"hidden": [9, 7], "activation": "elu"} for name in ("actor_network", "critic_network")
}
Q_NETWORK = {"network": {"hidden": [9, 7], "activation": "tanh"}}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("dqn", {"tau": 0.1}),
    ("dqn", {"double": False, "huber": False, "num_critics": 2, "n_step": 3, **Q_NETWORK}),
    ("dqn", {"num_critics": 3, "target_interval": 3, "tau": 1.0, "prioritized": True}),
    ("dqn", {"target_interval": 2, "tau": 0.5}),
    ("dqn", {"reward_scale": 0.1, "normalize_obs": True, "schedule": "linear"}),
    ("sac", {"tau": 0.1, "learning_rate": 1e-2}),
    ("sac", {"temperature": 0.3, "actor_aggregate": "mean", "target_aggregate": "mean"}),
    ("sac", {"policy_delay": 2, "num_critics": 1, "prioritized": True, **NETWORKS}),
    ("sac", {"actor_aggregate": "first", "weight_decay": 0.1, "max_grad_norm": 0.5}),
    (  # a temperature that falls to its limit
        "sac",
        {
            "initial_temperature": 1.6e-8,
            "temperature_learning_rate": 0.1,
            "target_entropy": -50.0,
        },
    ),
    ("redq", {"num_critics": 4, "policy_delay": 4, "normalize_obs": True}),
    ("ddpg", {"horizon": 2, "noise": "ornstein_uhlenbeck"}),
    ("ddpg", {"target_actor": False, "target_noise": 0.2, "num_critics": 3, **NETWORKS}),
    ("td3", {"actor_aggregate": "min", "n_step": 3, "prioritized": True, "storage": "bfloat16"}),
    ("td3", {"delay_targets": False, "schedule": "linear"}),
]


def make(name: str, **settings: Any) -> tuple[OffPolicy, TorchEnv]:
    env = (Choices if name in ("dqn", "rainbow") else RandomWalk)(8)
    torch.manual_seed(0)
    return off_policy(name, env, **settings), env


def engines(name: str, **settings: Any) -> tuple[Eager, Eager]:
    """(the engine that is chosen, Eager), begun alike."""
    algorithm, env = make(name, **settings)
    chosen, _ = choose_engine(algorithm, env, Guards("test", algorithm, env), graph="off")
    algorithm, env = make(name, **settings)
    eager = Eager(algorithm, env, Guards("test", algorithm, env))
    for engine in (chosen, eager):
        engine.begin(seed=0, staggered=True)
    return chosen, eager


def iterate(engine: Eager, iterations: int) -> Metrics:
    """The metrics of the last iteration."""
    metrics = Metrics()
    for number in range(iterations):
        metrics = engine.iterate(number / 10)
    return {name: value.clone() for name, value in metrics.items()}


def state_of(engine: Eager) -> dict[str, Any]:
    algorithm = engine.algorithm
    assert isinstance(algorithm, OffPolicy)
    return running_state(engine) | {"replay": algorithm.replay.state_dict()}


def assert_near(got: Any, expected: Any, at: str = "") -> None:
    """Numbers alike to rounding, all else the same."""
    if isinstance(expected, Tensor) and expected.is_floating_point():
        torch.testing.assert_close(
            got, expected, rtol=1e-5, atol=2e-6, equal_nan=True, msg=lambda text: f"{at}: {text}"
        )
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), at
        for name in expected:
            assert_near(got[name], expected[name], f"{at}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), at
        for number, (one, other) in enumerate(zip(got, expected)):
            assert_near(one, other, f"{at}[{number}]")
    else:
        assert_same(got, expected, at)


# ---- it is Eager ----


@needs_c
def test_other_limits_of_the_standard_deviation_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute of the class, which a subclass may change, and no method."""
    monkeypatch.setattr(SAC, "log_std_limits", (-0.4, 0.3))
    chosen, eager = engines("sac", learning_rate=1e-2)
    assert type(chosen) is CpuOffPolicy
    assert_near(iterate(chosen, 5), iterate(eager, 5))
    assert_near(state_of(chosen), state_of(eager))


@needs_c
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sac", {}),
        ("sac", {"actor_aggregate": "mean"}),
        ("td3", {"actor_aggregate": "min"}),
        ("ddpg", {}),
    ],
    ids=str,
)
def test_no_actor_learns_from_rows_without_weight(name: str, settings: dict[str, Any]) -> None:
    """Such as the step in which an environment resets late."""
    chosen, eager = engines(name, learning_rate=1e-2, **settings)
    assert type(chosen) is CpuOffPolicy
    for engine in (chosen, eager):
        iterate(engine, 5)
        algorithm = engine.algorithm
        assert isinstance(algorithm, OffPolicy)
        algorithm.replay.ring.flags[::2].bitwise_or_(INVALID)
    assert_near(iterate(chosen, 5), iterate(eager, 5))
    assert_near(state_of(chosen), state_of(eager))


@needs_c
@pytest.mark.parametrize(("name", "settings"), SERVED, ids=str)
def test_it_gives_what_eager_gives(name: str, settings: dict[str, Any]) -> None:
    """Weights, targets, moments, random streams, replay priorities, metrics."""
    chosen, eager = engines(name, **settings)
    assert type(chosen) is CpuOffPolicy
    got, expected = iterate(chosen, 5), iterate(eager, 5)
    assert "train/n_updates" in expected
    assert_near(got, expected)
    assert list(got) == list(expected)
    assert_near(state_of(chosen), state_of(eager))


@needs_c
@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_it_skips_the_steps_that_eager_skips(name: str) -> None:
    """NaN rewards of one environment: steps on them change nothing, are counted, leave evidence."""
    both = engines(name, prioritized=True, batch_size=4, learning_starts=4)
    for engine in both:
        iterate(engine, 2)
        assert isinstance(engine.algorithm, OffPolicy)
        engine.algorithm.replay.ring.numbers[:, 3, 0] = torch.nan
        engine.guards.steps.counts = {}  # which would end the run
        iterate(engine, 3)
    chosen, eager = both
    assert_near(state_of(chosen), state_of(eager))
    for mine, other in zip(
        chosen.algorithm.optimizers.values(), eager.algorithm.optimizers.values()
    ):
        assert_near(list(mine.skipped), list(other.skipped))
    skipped = next(iter(chosen.algorithm.optimizers.values())).skipped
    assert 0 < int(skipped.counts[1]) < int(skipped.counts[0])


@needs_c
@pytest.mark.parametrize("name", ["dqn", "sac", "redq", "td3"])
def test_it_goes_on_bit_for_bit(name: str) -> None:
    """A fresh engine with the state of another one."""
    engine, _ = engines(name)
    iterate(engine, 3)
    resumed, _ = engines(name)
    source, copy = engine.algorithm, resumed.algorithm
    assert isinstance(source, OffPolicy)
    assert isinstance(copy, OffPolicy)
    saved = running_state(engine)
    copy.load_state_dict(saved["algorithm"]["model"])
    copy.load_extra_state(saved["algorithm"]["training"])
    copy.replay.load_state_dict(source.replay.state_dict())
    resumed.load_state_dict(saved)
    resumed.load_episodes(saved["env"], saved, seed=0)
    resumed.stored = engine.stored
    assert_same(iterate(engine, 3), iterate(resumed, 3))
    state, other = state_of(engine), state_of(resumed)
    del state["guards"], other["guards"]  # which count what a process did
    assert_same(state, other)


# ---- for whom it does not stand in ----


class OwnLoss(DQN):
    calls = 0

    def loss(self, batch: Batch) -> Any:
        type(self).calls += 1
        return super().loss(batch)


class OwnUpdate(SAC):
    def update_step(self, batch: Batch, number: int) -> Any:
        return super().update_step(batch, number)


class OfOwnUpdate(OwnUpdate):
    """What it inherits is not SAC's either."""


class OwnActorLoss(DDPG):
    def actor_loss(self, batch: Batch) -> Any:
        return super().actor_loss(batch)


def with_kind(kind: type[OffPolicy], name: str, **settings: Any) -> tuple[OffPolicy, TorchEnv]:
    """An algorithm of the class `kind`, with the settings of `name`."""
    algorithm, env = make(name, **settings)
    torch.manual_seed(0)
    spaces = env.single_observation_space, env.single_action_space
    return kind(algorithm.config, *spaces, 8, torch.device("cpu")), env


@pytest.mark.parametrize(
    ("kind", "name", "method"),
    [
        (OwnLoss, "dqn", "loss"),
        (OwnUpdate, "sac", "update_step"),
        (OfOwnUpdate, "sac", "update_step"),
        (OwnActorLoss, "td3", "actor_loss"),
    ],
)
def test_what_a_subclass_changes_is_never_replaced(
    kind: type[OffPolicy], name: str, method: str
) -> None:
    algorithm, env = with_kind(kind, name)
    expected = f"{kind.__name__} overrides {method}"
    assert cpu_off_policy_obstacle(algorithm) == expected
    engine, reasons = choose_engine(algorithm, env, Guards("test", algorithm, env), graph="off")
    assert type(engine) is Eager
    assert f"no C: {expected}" in reasons


def engine_of(kind: type[DQN], **settings: Any) -> Eager:
    """The engine that is chosen for a subclass of DQN, begun."""
    algorithm, env = with_kind(kind, "dqn", **settings)
    engine, _ = choose_engine(algorithm, env, Guards("test", algorithm, env), graph="off")
    engine.begin(seed=0, staggered=False)
    return engine


def test_an_own_loss_is_used() -> None:
    engine = engine_of(OwnLoss)
    iterate(engine, 2)
    assert isinstance(engine.algorithm, DQN)
    assert OwnLoss.calls == 2 * engine.algorithm.config.updates


class NoError(DQN):
    def loss(self, batch: Batch) -> Any:
        loss, metrics = super().loss(batch)
        del metrics["td_error"]
        return loss, metrics


def test_an_own_loss_without_errors_is_not_for_prioritised_replay() -> None:
    metrics = iterate(engine_of(NoError), 2)
    assert "train/loss" in metrics
    with pytest.raises(
        UsageError, match=r"wanted a \[B\] tensor 'td_error'.* of NoError, got loss"
    ):
        iterate(engine_of(NoError, prioritized=True), 2)


def test_nor_what_is_changed_on_the_object() -> None:
    algorithm, _ = make("sac")
    assert isinstance(algorithm, SAC)
    algorithm.critic_loss = lambda batch: SAC.critic_loss(algorithm, batch)  # type: ignore[method-assign]
    assert cpu_off_policy_obstacle(algorithm) == "SAC overrides critic_loss"


Q_OBSTACLES: list[tuple[str, dict[str, Any], str]] = [
    ("dqn", {"atoms": 5}, "it knows critics of one number and their TD loss only, atoms is 5"),
    (
        "dqn",
        {"quantiles": 5},
        "it knows critics of one number and their TD loss only, quantiles is 5",
    ),
    ("dqn", {"rescale_values": True}, "it knows critics of one number and their TD loss only, "),
    ("dqn", {"network": {"dueling": True}}, "network has a layer Dueling, "),
    ("dqn", {"network": {"noisy": True}}, "network has a layer NoisyDense, "),
    ("dqn", {"network": {"heads": 2}}, "network has a layer ExpandToHeads, "),
    ("dqn", {"network": {"action_embedding": 2}}, "network has a layer ActionEmbedding, "),
    ("dqn", {"network": {"layer_norm": True}}, "network has layer_norm, "),
    ("dqn", {"network": {"activation": "gelu"}}, "network has activation gelu, "),
    ("rainbow", {}, "it knows critics of one number and their TD loss only, atoms is 51"),
    ("sac", {"atoms": 5}, "it knows critics of one number and their TD loss only, atoms is 5"),
    (
        "td3",
        {"fit_returns": 0.5, "horizon": 2},
        "it knows critics of one number and their TD loss only, fit_returns is 0.5",
    ),
    ("sac", {"critic_network": {"body": "simba"}}, "critic has a layer Residual, "),
    ("sac", {"actor_network": {"body": "bro"}}, "actor has layer_norm, "),
    ("sac", {"actor_network": {"hidden": [2] * 64}}, "actor has 65 layers, wanted at most 64"),
    ("mod_sac", {}, "ModSAC overrides "),
    ("flash_sac", {}, "FlashSAC overrides "),
    ("fast_td3", {}, "it knows critics of one number and their TD loss only, atoms is 101"),
]


@needs_c
@pytest.mark.parametrize(("name", "settings", "message"), Q_OBSTACLES, ids=str)
def test_what_c_does_not_know_is_named(name: str, settings: dict[str, Any], message: str) -> None:
    assert cpu_off_policy_obstacle(make(name, **settings)[0]).startswith(message)


def test_other_algorithms_are_named() -> None:
    env = AlternatingEnv(8)
    discrete = off_policy("sac", env)
    assert cpu_off_policy_obstacle(discrete).startswith("DiscreteSAC overrides ")


def bf16(algorithm: OffPolicy) -> None:
    algorithm.set_precision("bf16")


def frozen(algorithm: OffPolicy) -> None:
    assert isinstance(algorithm, OffPolicyActorCritic)
    next(algorithm.actor.parameters()).requires_grad_(False)


def hooked(algorithm: OffPolicy) -> None:
    algorithm.optimizers["actor"].reduce = torch.clone  # type: ignore[assignment, method-assign]


@needs_c
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bf16, "actor computes in torch.bfloat16, wanted float32"),
        (frozen, "some weights are frozen"),
        (hooked, "reduce of FlatAdam is replaced"),
    ],
)
def test_precision_weights_and_optimisers_of_another_kind_are_named(
    change: Callable[[OffPolicy], None], message: str
) -> None:
    algorithm, _ = make("sac")
    assert cpu_off_policy_obstacle(algorithm) == ""
    change(algorithm)
    assert cpu_off_policy_obstacle(algorithm) == message


@needs_c
def test_another_device_is_named() -> None:
    algorithm, _ = make("sac")
    with no_host_syncs():
        assert cpu_off_policy_obstacle(algorithm).startswith("it computes on a CPU, not on ")


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURL_CPU_KERNEL", "0")
    c_library.load.cache_clear()
    try:
        assert cpu_off_policy_obstacle(make("dqn")[0]).startswith("it could not be built: ")
    finally:
        monkeypatch.undo()
        c_library.load.cache_clear()
