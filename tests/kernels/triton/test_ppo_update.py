"""PPO's fused minibatch steps against autograd on the same rollouts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.buffers.minibatches import Minibatch
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.fused_update import FusedUpdate, fused_update_obstacle
from gpurl.guards.guards import Guards
from gpurl.kernels import backend, ppo_update, ppo_wide_update
from gpurl.kernels.ppo_update import PpoUpdate
from gpurl.losses import ppo_loss
from gpurl.nn.actor_critic import NetworkConfig
from tests.kernels.triton.conftest import COMPILED_ON, DEVICE
from tests.tiny_envs import RandomWalk

NUM_ENVS = 27
BOX = Box(-1.0, 1.0, (2,), np.float32)
SPACES = {"gaussian": BOX, "squashed": BOX, "categorical": Discrete(3)}


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small tile as for a large one."""
    if COMPILED_ON is None:
        tiles = {16: (64, 4), 32: (64, 4), 64: (64, 8)}
        monkeypatch.setitem(ppo_update.TILES, "tf32x3", tiles)
        monkeypatch.setattr(PpoUpdate, "reduce_columns", 1024)


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the fused steps, which ask nobody."""
    monkeypatch.setattr(backend, "choice", "torch")


def made(head: str, kind: type[PPO] = PPO, **settings: Any) -> PPO:
    network = settings.pop("network", {"hidden": (16, 32)})
    defaults = {"horizon": 6, "minibatches": 2, "epochs": 2, "learning_rate": 3e-3}
    if settings.get("epochs") == 1:
        defaults["schedule"] = "constant"
    settings = defaults | {"squash": head == "squashed"} | settings
    torch.manual_seed(0)
    algorithm = kind(
        PPOConfig(**settings, network=NetworkConfig(**network)),
        RandomWalk(NUM_ENVS, DEVICE).single_observation_space,
        SPACES[head],
        NUM_ENVS,
        torch.device(DEVICE),
    )
    for parameter in algorithm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return algorithm


def played(algorithm: PPO) -> RolloutBuffer:
    env, buffer = RandomWalk(NUM_ENVS, DEVICE), algorithm.make_buffer()
    env.single_action_space = algorithm.action_space  # type: ignore[assignment]
    obs, _ = env.reset(seed=0)
    while not buffer.is_full:
        decision = algorithm.act(obs)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        obs = timestep.obs
    return buffer


def trained(algorithm: PPO, learner: Any, has_gaps: bool, iterations: int) -> list[Metrics]:
    """Play and learn; the metrics of each update."""
    env = RandomWalk(NUM_ENVS, DEVICE)
    env.single_action_space = algorithm.action_space  # type: ignore[assignment]
    obs, _ = env.reset(seed=0)
    metrics = []
    for _ in range(iterations):
        buffer = algorithm.make_buffer()
        while not buffer.is_full:
            decision = algorithm.act(obs)
            timestep = env.step(decision.action)
            if has_gaps:
                clock = env.episode_length_buf + torch.arange(NUM_ENVS)
                timestep.info["valid"] = clock % 5 != 0
            algorithm.record_step(buffer, obs, decision, timestep)
            obs = timestep.obs
        metrics.append(learner.learn(algorithm.prepare(buffer)))
    return metrics


def fused(algorithm: PPO) -> FusedUpdate:
    env = RandomWalk(NUM_ENVS, DEVICE)
    return FusedUpdate(algorithm, env, Guards("walk", algorithm, env, "raise"))


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_range_value": 0.05, "entropy_coef": 0.1, "max_grad_norm": 0.1},
        {"network": {"hidden": (16,), "activation": "elu", "shared": True}, "minibatches": 1},
        {"network": {"hidden": (20, 75), "activation": "elu"}, "clip_range_value": 0.05},
        {"network": {"hidden": (70,)}, "max_grad_norm": 0.1, "entropy_coef": 0.1},
        {
            "network": {"hidden": (16, 16, 32), "activation": "relu"},
            "normalize_advantage": "none",
            "normalize_value": False,
            "weight_decay": 0.1,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("head", SPACES)
def test_it_learns_what_autograd_learns(
    head: str, settings: dict[str, Any], has_gaps: bool
) -> None:
    """81 rows a minibatch, which no tile divides; weights, moments, metrics and learning rate after
    two updates.
    """
    algorithm, other = made(head, **settings), made(head, **settings)
    expected = trained(algorithm, algorithm, has_gaps, 2)
    got = trained(other, fused(other), has_gaps, 2)
    for one, two in zip(got, expected):
        assert one.keys() == two.keys()
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    for name in ("flat", "skipped"):
        torch.testing.assert_close(
            getattr(other.optimizer, name),
            getattr(algorithm.optimizer, name),
            rtol=1e-3,
            atol=2e-5,
        )
    torch.testing.assert_close(
        other.optimizer.state_dict(), algorithm.optimizer.state_dict(), rtol=1e-3, atol=1e-5
    )


def test_many_tiles_a_program_and_many_programs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of programs gives the same gradient; more than one block of their sums too."""
    monkeypatch.setitem(ppo_update.TILES, "tf32x3", {16: (16, 4)})
    monkeypatch.setattr(PpoUpdate, "reduce_columns", 64)
    results = []
    for processors in (1, 3, 90):
        monkeypatch.setattr(ppo_update, "PROCESSORS", processors)
        algorithm = made("gaussian", minibatches=1, epochs=1, network={"hidden": (16, 16)})
        trained(algorithm, fused(algorithm), True, 1)
        results.append(algorithm.optimizer.gradient.clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_any_split_of_the_sum_over_rows_gives_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for groups in (1, 2, 16):
        monkeypatch.setattr(ppo_wide_update, "GROUPS", groups)
        algorithm = made("gaussian", minibatches=1, epochs=1, network={"hidden": (70,)})
        trained(algorithm, fused(algorithm), True, 1)
        results.append(algorithm.optimizer.gradient.clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hidden", [(16, 32), (20, 75, 33)])
@pytest.mark.parametrize("clip_range_value", [None, 0.05])
@pytest.mark.parametrize("head", SPACES)
def test_the_gradient_is_that_of_float64(
    head: str, clip_range_value: float | None, hidden: tuple[int, ...]
) -> None:
    settings = {"minibatches": 1, "epochs": 1, "entropy_coef": 0.1, "network": {"hidden": hidden}}
    algorithm = made(head, **settings, clip_range_value=clip_range_value)
    network = copy.deepcopy(algorithm.network).double()
    policy = copy.deepcopy(algorithm.head).double()
    # the only minibatch of a rollout whose policy has moved since
    buffer, columns = played(algorithm), {}
    for parameter in (*algorithm.parameters(), *network.parameters(), *policy.parameters()):
        parameter.data *= 1.1
    packed = algorithm.prepare(buffer)
    for name, column in next(algorithm.minibatches.of_steps(packed["packed"])).items():
        columns[name] = column.double() if column.is_floating_point() else column
    batch = Minibatch(**columns)
    fused(algorithm).learn(packed)
    # autograd in float64
    output, value = network(batch.obs)
    log_prob, entropy = policy.log_prob_and_entropy(output, batch.action)
    loss, _ = ppo_loss(
        log_prob, value, entropy, batch, torch.tensor(0.2), torch.tensor(0.1), 1.0, clip_range_value
    )
    parameters = {f"network.{name}": each for name, each in network.named_parameters()}
    parameters |= {f"head.{name}": each for name, each in policy.named_parameters()}
    expected = torch.autograd.grad(loss, list(parameters.values()))
    parts = algorithm.optimizer.parts_of(algorithm.optimizer.gradient)
    assert parts.keys() == parameters.keys()
    for name, gradient in zip(parameters, expected):
        got = parts[name].view_as(gradient).double()
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("head", "units"), [("gaussian", 16), ("categorical", 16), ("squashed", 16), ("gaussian", 70)]
)
def test_ten_iterations_stay_near_autograd(head: str, units: int) -> None:
    """They begin with the same rollout; then rounding moves the actions too."""
    settings = {"minibatches": 1, "network": {"hidden": (units,)}}
    algorithm, other = made(head, **settings), made(head, **settings)
    start = algorithm.optimizer.flat.clone()
    trained(algorithm, algorithm, False, 10)
    trained(other, fused(other), False, 10)
    moved = (algorithm.optimizer.flat - start).norm()
    assert float((other.optimizer.flat - algorithm.optimizer.flat).norm() / moved) < 1e-3
    assert int(other.optimizer.state.step) == 20


def test_a_step_that_is_not_finite_is_skipped() -> None:
    algorithm, other = made("gaussian"), made("gaussian")
    for each in (algorithm, other):
        learner = fused(each) if each is other else each
        buffer = played(each)
        buffer["reward"][2, 5] = torch.inf
        before = each.optimizer.flat.clone()
        learner.learn(each.prepare(buffer))
        assert torch.equal(each.optimizer.flat, before)
    assert other.optimizer.skipped.counts.tolist() == algorithm.optimizer.skipped.counts.tolist()
    assert int(other.optimizer.skipped.counts[1]) == 4


# ---- for whom it does not stand in ----


class OwnLoss(PPO):
    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
        return super().loss(batch)


class OwnAct(PPO):
    def initial_policy_state(self, num_envs: int) -> Any:
        return super().initial_policy_state(num_envs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"network": {"hidden": (48,), "shared": True}},
            "it takes shared layers of 16, 32 or 64 units only",
        ),
        ({"network": {"hidden": (48,)}}, ""),
        ({"network": {"hidden": ()}}, "it needs a hidden layer"),
        ({"network": {"hidden": (16,), "layer_norm": True}}, "layer norms"),
        ({"network": {"memory": "gru"}}, "without memory"),
        ({"normalize_advantage": "minibatch"}, "the advantages of each minibatch"),
        ({"kind": OwnLoss}, "OwnLoss overrides loss"),
        ({"kind": OwnAct}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_whom_it_refuses(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = made("gaussian", **change)
    assert "Triton does not run on" in fused_update_obstacle(algorithm)
    monkeypatch.setattr(backend, "choice", "triton")
    obstacle = fused_update_obstacle(algorithm)
    assert reason in obstacle
    assert bool(reason) == bool(obstacle)


def test_an_optimiser_hook_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = made("gaussian")
    monkeypatch.setattr(backend, "choice", "triton")
    algorithm.optimizer.reduce = lambda gradient: None  # type: ignore[method-assign]
    assert fused_update_obstacle(algorithm) == "reduce of FlatAdam is replaced"
