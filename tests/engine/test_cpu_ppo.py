"""PPO by the C kernel against PPO as it is written, and for whom the kernel does not stand in."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpurl.algorithms.a2c import A2C, A2CConfig
from gpurl.algorithms.base import Metrics
from gpurl.algorithms.on_policy import OnPolicy
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.algorithms.pqn import PQN, PQNConfig
from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.cpu_ppo import PpoInC, cpu_ppo_obstacle
from gpurl.engine.fused_update import fused_update_obstacle
from gpurl.engine.obstacles import policy_obstacle
from gpurl.kernels import c_library
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES, ActorCritic, NetworkConfig
from gpurl.nn.distributions import Gaussian, TanhGaussian
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.parts import Part
from tests.tiny_envs import RandomWalk

has_kernel = pytest.mark.skipif(
    c_library.load().functions is None, reason=c_library.load().why or "built"
)
BOX = Box(-1.0, 1.0, (2,), np.float32)


def made(kind: type[PPO] = PPO, space: Any = BOX, **settings: Any) -> PPO:
    config = A2CConfig if issubclass(kind, A2C) else PPOConfig
    counts = {} if issubclass(kind, A2C) else {"minibatches": 2}
    torch.manual_seed(0)
    algorithm = kind(
        config(**{"horizon": 8, **counts, **settings}),
        RandomWalk(8).single_observation_space,
        space,
        8,
        torch.device("cpu"),
    )
    for parameter in algorithm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return algorithm


def rollouts(algorithm: PPO, learner: Any, has_gaps: bool, count: int = 2) -> Metrics:
    """Play and learn; the metrics of the last update."""
    env, metrics = RandomWalk(8), {}
    env.single_action_space = algorithm.action_space  # type: ignore[assignment]
    obs, _ = env.reset(seed=0)
    for _ in range(count):
        buffer = algorithm.make_buffer()
        while not buffer.is_full:
            decision = algorithm.act(obs)
            timestep = env.step(decision.action)
            if has_gaps:
                timestep.info["valid"] = (env.episode_length_buf + torch.arange(8)) % 5 != 0
            algorithm.record_step(buffer, obs, decision, timestep)
            obs = timestep.obs
        metrics = learner.learn(algorithm.prepare(buffer))
    return metrics


@has_kernel
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"network": NetworkConfig(hidden=(7,), activation="elu", shared=True)},
        {"network": NetworkConfig(hidden=(), activation="relu"), "schedule": "linear"},
        {
            "network": NetworkConfig(hidden=(9, 8), activation="relu"),
            "clip_range_value": 0.1,
            "normalize_advantage": "minibatch",
        },
        {"entropy_coef": 0.3, "max_grad_norm": 0.01, "initial_std": 7.0},
        {"schedule": "kl_minibatch", "minibatches": 2, "epochs": 3, "target_kl": 1e-3},
        {"normalize_obs": False, "normalize_value": False, "normalize_advantage": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("space", [BOX, Box(-3.0, 5.0, (2, 2), np.float32), Discrete(3)], ids=str)
@pytest.mark.parametrize("has_gaps", [False, True])
def test_it_learns_what_ppo_learns(has_gaps: bool, space: Any, settings: dict[str, Any]) -> None:
    """Weights, metrics, learning rate; a standard deviation above its limit comes back in both."""
    algorithm, other = (made(space=space, learning_rate=1e-2, **settings) for _ in range(2))
    engine = PpoInC(other)
    obs = torch.randn(5, 3)
    torch.testing.assert_close(engine.value(obs), algorithm.value(obs), rtol=1e-5, atol=1e-5)
    expected = rollouts(algorithm, algorithm, has_gaps)
    got = rollouts(other, engine, has_gaps)
    torch.testing.assert_close(other.optimizer.flat, algorithm.optimizer.flat, rtol=1e-3, atol=2e-5)
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(engine.value(obs), algorithm.value(obs), rtol=1e-3, atol=1e-3)


@has_kernel
def test_weights_in_shared_memory_are_followed() -> None:
    """`share_memory()`, or sending a policy to another process, moves its tensors."""
    algorithm, other = made(), made()
    engine = PpoInC(other)
    obs = torch.randn(5, 3)
    for part in (other.network, other.normalizer, other.value_normalizer):
        assert part is not None
        before = engine.value(obs)
        part.share_memory()
        torch.testing.assert_close(engine.value(obs), before, rtol=0, atol=0)
        expected, got = rollouts(algorithm, algorithm, False), rollouts(other, engine, False)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(engine.value(obs), other.value(obs), rtol=1e-3, atol=1e-3)
    assert other.optimizer.flat.is_shared()


@has_kernel
def test_it_learns_what_a2c_learns() -> None:
    algorithm, other = made(A2C), made(A2C)
    expected, got = rollouts(algorithm, algorithm, False), rollouts(other, PpoInC(other), False)
    torch.testing.assert_close(other.optimizer.flat, algorithm.optimizer.flat, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


# ---- for whom it does not stand in ----


class OwnLoss(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(batch)
        return loss, metrics


class OwnAct(PPO):
    def act(self, *arguments: Any, **named: Any) -> Any:
        return super().act(*arguments, **named)


class OwnSchedule(A2C):
    def schedule(self, progress: float, steps: int) -> None:
        """Nothing."""


class OwnParts(PPO):
    """Changes what no engine computes."""

    def parts(self) -> dict[str, Part]:
        return {}

    def end_learning(self) -> None:
        self.ended = True
        super().end_learning()


class OfOwnLoss(OwnLoss):
    """What it inherits is not PPO's either."""


class MyNetwork(ActorCritic):
    """Another function, perhaps."""


@has_kernel
def test_ppo_and_a2c_are_served() -> None:
    assert cpu_ppo_obstacle(made()) == ""
    assert cpu_ppo_obstacle(made(A2C)) == ""
    assert cpu_ppo_obstacle(made(OwnParts)) == ""
    assert cpu_ppo_obstacle(made(space=Discrete(3))) == ""


@pytest.mark.parametrize(
    ("kind", "method"),
    [(OwnLoss, "loss"), (OfOwnLoss, "loss"), (OwnAct, "act"), (OwnSchedule, "schedule")],
)
def test_what_a_subclass_changes_is_never_replaced(kind: type[PPO], method: str) -> None:
    assert cpu_ppo_obstacle(made(kind)) == f"{kind.__name__} overrides {method}"


def test_nor_what_is_changed_on_the_object() -> None:
    algorithm = made()
    algorithm.loss = lambda batch: PPO.loss(algorithm, batch)  # type: ignore[method-assign]
    assert cpu_ppo_obstacle(algorithm) == "PPO overrides loss"


@has_kernel
def test_what_the_kernel_does_not_know_is_named() -> None:
    assert cpu_ppo_obstacle(made(space=MultiDiscrete([2, 3]))).endswith("MultiCategorical actions")
    assert cpu_ppo_obstacle(made(squash=True)).endswith("TanhGaussian actions")
    assert cpu_ppo_obstacle(made(distribution="beta")).endswith("know Beta actions")
    assert cpu_ppo_obstacle(made(std_type="scalar")) == "it does not know std_type scalar"
    by_state = made(state_dependent_std=True)
    assert cpu_ppo_obstacle(by_state) == "it does not know state_dependent_std"
    assert cpu_ppo_obstacle(made(bounds_coef=0.1)) == "it does not know bounds_coef 0.1"
    for memory in MEMORIES:
        network = NetworkConfig(memory=memory)
        assert cpu_ppo_obstacle(made(network=network)) == "it computes policies without memory"
    for shape in ({"layer_norm": True}, {"body": "simba"}):
        obstacle = cpu_ppo_obstacle(made(network=NetworkConfig(**shape)))
        assert obstacle == "it does not know layer norms and residual blocks"
    smooth = NetworkConfig(activation="silu")
    assert cpu_ppo_obstacle(made(network=smooth)) == "it does not know activation silu"
    deep = NetworkConfig(hidden=(2,) * 40)
    expected = "it computes up to 64 hidden layers, this network has 80"
    assert cpu_ppo_obstacle(made(network=deep)) == expected
    precise = made()
    precise.set_precision("bf16")
    assert cpu_ppo_obstacle(precise) == "it computes in a higher precision than bf16"
    with no_host_syncs():
        assert cpu_ppo_obstacle(made()).startswith("it computes on a CPU, not on ")
    spaces = RandomWalk(8).single_observation_space, Discrete(3)
    pqn = PQN(PQNConfig(), *spaces, 8, torch.device("cpu"))
    assert cpu_ppo_obstacle(pqn) == "it is for PPO, not for PQN"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"distribution": "beta"}, "it does not know Beta actions"),
        ({"std_type": "scalar"}, "it does not know std_type scalar"),
        ({"state_dependent_std": True, "squash": True}, "it does not know state_dependent_std"),
        ({"bounds_coef": 0.1}, "it does not know bounds_coef 0.1"),
    ],
    ids=str,
)
def test_nor_do_the_kernels_of_a_gpu_know_it(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurl.engine.obstacles.use_triton", lambda tensor: True)
    assert fused_update_obstacle(made(**options)) == expected
    # the kernel that plays a rollout takes no part in the loss
    heads = (Gaussian, TanhGaussian)
    assert policy_obstacle(made(**options), heads) == ("" if "bounds_coef" in options else expected)


@has_kernel
def test_a_network_an_optimiser_or_weights_of_another_kind_are_named() -> None:
    algorithm = made()
    algorithm.network = MyNetwork(NetworkConfig(), 3, 2)
    assert cpu_ppo_obstacle(algorithm) == "it does not know the network MyNetwork"
    hooked = made()
    hooked.optimizer.reduce = torch.clone  # type: ignore[assignment, method-assign]
    assert cpu_ppo_obstacle(hooked) == "reduce of FlatAdam is replaced"
    frozen = made()
    frozen.network.actor.weight.requires_grad_(False)
    assert cpu_ppo_obstacle(frozen) == "some weights are frozen"


class Squared(Normalizer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square()


class Learns(OnPolicy):
    """Stands behind PPO in the order of classes, and in front of OnPolicy."""

    def max_batch_rows(self) -> int:
        return 7


class Mixed(PPO, Learns):
    pass


@has_kernel
def test_what_is_changed_inside_the_algorithm_is_seen() -> None:
    assert cpu_ppo_obstacle(made(Mixed)) == "Mixed overrides max_batch_rows"
    algorithm = made()
    algorithm.normalizer = Squared(3)
    assert cpu_ppo_obstacle(algorithm) == "it does not know the normaliser Squared"
    algorithm = made()
    algorithm.network.actor.activation = "tanh"
    assert cpu_ppo_obstacle(algorithm).startswith("it expects activation none")
    algorithm = made()
    algorithm.network.trunk.register_forward_hook(lambda *arguments: None)
    assert cpu_ppo_obstacle(algorithm) == "Sequential has hooks"
    algorithm = made()
    algorithm.head.ppo_loss = algorithm.head.ppo_loss  # type: ignore[method-assign]
    assert cpu_ppo_obstacle(algorithm) == "ppo_loss of Gaussian is replaced"


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURL_CPU_KERNEL", "0")
    c_library.load.cache_clear()
    try:
        assert cpu_ppo_obstacle(made()).startswith("it could not be built: ")
    finally:
        monkeypatch.undo()
        c_library.load.cache_clear()
