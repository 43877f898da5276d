"""PPO's fused minibatch steps beside autograd on the same rollouts: for the tests of both."""

import copy
import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.buffers.minibatches import Minibatch
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.engine.fused_update import FusedUpdate
from gpurl.envs.torch_env import State
from gpurl.guards.guards import Guards
from gpurl.losses import ppo_loss
from gpurl.nn.actor_critic import NetworkConfig
from tests.kernels.triton.conftest import DEVICE
from tests.tiny_envs import RandomWalk

NUM_ENVS = 27
HEADS = ("gaussian", "squashed", "categorical")


def made(head: str, kind: type[PPO] = PPO, inputs: int = 3, **settings: Any) -> PPO:
    """outputs: actions of a Box, 2 if not given, or of a Discrete space, 3."""
    outputs = settings.pop("outputs", 3 if head == "categorical" else 2)
    box = Box(-1.0, 1.0, (outputs,), np.float32)
    network = settings.pop("network", {"hidden": (16, 32)})
    defaults = {"horizon": 6, "minibatches": 2, "epochs": 2, "learning_rate": 3e-3}
    if settings.get("epochs") == 1:
        defaults["schedule"] = "constant"
    settings = defaults | {"squash": head == "squashed"} | settings
    torch.manual_seed(0)
    algorithm = kind(
        PPOConfig(**settings, network=NetworkConfig(**network)),
        Box(-np.inf, np.inf, (inputs,), np.float32),
        Discrete(outputs) if head == "categorical" else box,
        NUM_ENVS,
        torch.device(DEVICE),
    )
    for parameter in algorithm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return algorithm


class Walk(RandomWalk):
    """Of any number of observations, no two of them equal."""

    def observe(self, state: State) -> Tensor:
        x = super().observe(state)
        column = torch.arange(math.prod(self.single_observation_space.shape), device=x.device)
        return x[:, column % 3] * (1.0 - 0.01 * column) + 0.01 * column


def walk_of(algorithm: PPO) -> Walk:
    """An environment with the spaces of an algorithm."""
    spaces = {
        "single_observation_space": algorithm.observation_space,
        "single_action_space": algorithm.action_space,
    }
    return type("Spacious", (Walk,), spaces)(NUM_ENVS, DEVICE)


def played(algorithm: PPO) -> RolloutBuffer:
    env, buffer = walk_of(algorithm), algorithm.make_buffer()
    obs, _ = env.reset(seed=0)
    while not buffer.is_full:
        decision = algorithm.act(obs)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        obs = timestep.obs
    return buffer


def trained(algorithm: PPO, learner: Any, has_gaps: bool, iterations: int) -> list[Metrics]:
    """Play and learn; the metrics of each update."""
    env = walk_of(algorithm)
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
    env = walk_of(algorithm)
    return FusedUpdate(algorithm, env, Guards("walk", algorithm, env, "raise"))


def check_against_autograd(head: str, settings: dict[str, Any], has_gaps: bool) -> None:
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


def check_against_float64(
    head: str, clip_range_value: float | None, hidden: tuple[int, ...], **spaces: int
) -> None:
    """The gradient of one minibatch; spaces: `inputs` and `outputs` of `made`."""
    settings = {"minibatches": 1, "epochs": 1, "entropy_coef": 0.1, "network": {"hidden": hidden}}
    algorithm = made(head, **settings, **spaces, clip_range_value=clip_range_value)
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


def check_ten_iterations(head: str, units: int) -> None:
    """They begin with the same rollout; then rounding moves the actions too."""
    settings = {"minibatches": 1, "network": {"hidden": (units,)}}
    algorithm, other = made(head, **settings), made(head, **settings)
    start = algorithm.optimizer.flat.clone()
    trained(algorithm, algorithm, False, 10)
    trained(other, fused(other), False, 10)
    moved = (algorithm.optimizer.flat - start).norm()
    assert float((other.optimizer.flat - algorithm.optimizer.flat).norm() / moved) < 1e-3
    assert int(other.optimizer.state.step) == 20
