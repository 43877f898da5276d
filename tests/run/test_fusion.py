"""Model fusion: the mean of agents, their optimisers and normalisers."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.base import Algorithm
from gpurl.envs.registry import make_env
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.reward_scaler import RewardScaler
from gpurl.run.fusion import fuse, mean_state
from gpurl.run.settings import build
from tests.small_runs import assert_same, play, small_settings

ALGORITHMS = ["ppo", "dqn", "sac", "flash_sac"]


def trained(name: str, seed: int, iterations: int = 3) -> Algorithm:
    env = make_env("cart_pole" if name == "dqn" else "pendulum", 8, "cpu", seed)
    values: dict[str, Any] = small_settings(name) | {"normalize_obs": True, "horizon": 4}
    config = build(config_class(resolve_algorithm(name)), values)
    spaces = env.single_observation_space, env.single_action_space
    algorithm = make_algorithm(name, config, *spaces, 8, seed=seed)
    play(algorithm, env, iterations)
    return algorithm


def test_the_mean_of_states_by_hand() -> None:
    states = [
        {"a": torch.tensor([1.0, 3.0]), "step": {"n": torch.tensor(4), "on": torch.tensor(True)}},
        {"a": torch.tensor([2.0, -3.0]), "step": {"n": torch.tensor(7), "on": torch.tensor(True)}},
        {"a": torch.tensor([6.0, 3.0]), "step": {"n": torch.tensor(9), "on": torch.tensor(False)}},
    ]
    mean = mean_state(states)
    assert mean["a"].tolist() == [3.0, 1.0]
    assert mean["step"]["n"].tolist() == 7  # 20 / 3
    assert mean["step"]["on"].tolist() is True
    assert mean["a"].dtype == torch.float32
    assert mean["step"]["n"].dtype == torch.int64


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_fused_agent_is_the_mean_of_its_sources(name: str) -> None:
    sources, target = [trained(name, seed) for seed in (1, 2, 3)], trained(name, 9, 2)
    streams = {key: each.state_dict() for key, each in target.random_streams.items()}
    streams = {key: {n: x.clone() for n, x in each.items()} for key, each in streams.items()}
    fuse(target, sources)
    statistics = {
        f"{key}.{own}"
        for key, module in target.named_modules()
        if isinstance(module, Normalizer)
        for own in module.state_dict()
    }
    for key, value in target.state_dict().items():
        if key in statistics or not value.is_floating_point():
            continue
        expected = np.mean([each.state_dict()[key].double().numpy() for each in sources], 0)
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-7, err_msg=key)
    # Adam, in the memory that steps read
    for key, optimizer in target.optimizers.items():
        for part in ("exp_avg", "exp_avg_sq", "learning_rate", "step"):
            parts = [each.optimizers[key].state_dict()[part].double() for each in sources]
            expected = torch.stack(parts).mean(0)
            found = optimizer.state_dict()[part].double()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    # the target's own
    for key, each in target.random_streams.items():
        assert_same(each.state_dict(), streams[key])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_agents_that_are_equal_stay_as_they_are(name: str) -> None:
    """The mean of an agent with itself, into itself too, is that agent; only the counts of rows
    are those of both.
    """
    source = trained(name, 1)
    before = {key: value.clone() for key, value in source.state_dict().items()}
    fuse(source, [source, source])
    for key, value in source.state_dict().items():
        factor = 2.0 if key.endswith("count") and key.split(".")[-2:] else 1.0
        if key.endswith("num_batches_tracked"):
            factor = 1.0
        torch.testing.assert_close(value.double(), before[key].double() * factor, rtol=1e-6, atol=0)


def test_the_order_of_sources_does_not_matter() -> None:
    sources = [trained("ppo", seed) for seed in (1, 2, 3)]
    one, other = trained("ppo", 9, 1), trained("ppo", 9, 1)
    fuse(one, sources)
    fuse(other, sources[::-1])
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=1e-6, atol=1e-9)


def test_normalisers_get_the_moments_of_all_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(count, 3, generator=generator) * scale + shift)
        for count, scale, shift in ((5, 1.0, 0.0), (200, 3.0, 10.0), (40, 0.1, -4.0))
    ]
    parts, whole = [Normalizer(3) for _ in rows], Normalizer(3)
    for part, own in zip(parts, rows):
        part.update(own)
    whole.update(torch.cat(rows))
    merged = Normalizer(3)
    merged.merge([each.state_dict() for each in (*parts, Normalizer(3))])  # one has seen none
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[key], value, rtol=1e-6, atol=1e-9)
    # none has seen any
    fresh = Normalizer(3)
    fresh.merge([Normalizer(3).state_dict()] * 2)
    assert_same(dict(fresh.state_dict()), dict(Normalizer(3).state_dict()))
    scalers = [RewardScaler(2, 0.9, 5.0) for _ in range(3)]
    for scaler, largest in zip(scalers, (1.0, 7.0, 3.0)):
        scaler.largest.fill_(largest)
    scalers[0].merge([each.state_dict() for each in scalers])
    assert float(scalers[0].largest) == 7.0


def test_a_mean_of_two_seeds_is_not_a_mean_of_policies() -> None:
    """What a soup must refuse: hidden units of two seeds in another order compute the same, their
    mean does not.
    """
    box = Box(-1.0, 1.0, (4,), np.float32)
    config = build(config_class(resolve_algorithm("ppo")), {"network": {"hidden": [16]}})
    one = make_algorithm("ppo", config, box, Discrete(2), 8, seed=0)
    other = make_algorithm("ppo", config, box, Discrete(2), 8, seed=0)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(order, torch.arange(16))
    obs = torch.rand(32, 4) - 0.5
    with torch.no_grad():
        for parameter in other.parameters():
            if 16 in parameter.shape:
                axis = parameter.shape.index(16)
                parameter.copy_(parameter.index_select(axis, order))
        expected = one.value(obs)
        torch.testing.assert_close(other.value(obs), expected, rtol=1e-4, atol=1e-6)
        fuse(other, [one, other])
        assert float((other.value(obs) - expected).abs().max()) > 0.01
