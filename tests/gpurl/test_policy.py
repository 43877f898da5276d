"""A policy by itself: its values are those of the memory that its actions left behind."""

import pytest
import torch

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.ppo import PPOConfig
from gpurl.errors import UsageError
from gpurl.networks import NetworkConfig
from gpurl.policy import Policy
from tests.tiny_envs import RandomWalk


def test_value_is_under_the_memory_that_act_kept_until_reset() -> None:
    """To ask for a value does not move the memory."""
    config = PPOConfig(network=NetworkConfig(hidden=(16,), memory="gru", memory_size=8))
    algorithm = make_algorithm("ppo", config, RandomWalk.single_observation_space, RandomWalk.single_action_space, 16)
    policy, empty = Policy(algorithm, {}), algorithm.initial_carry(16)
    seen, obs = torch.full((16, 3), 3.0), torch.linspace(-3.0, 3.0, 48).view(16, 3)
    fresh, remembered = algorithm.value(obs, empty), algorithm.value(obs, algorithm.act(seen, empty, explore=False).carry)
    assert float((fresh - remembered).abs().max()) > 1e-3
    torch.testing.assert_close(policy.value(obs), fresh)
    policy.act(seen)
    for _ in range(2):
        torch.testing.assert_close(policy.value(obs), remembered)
    policy.reset()
    torch.testing.assert_close(policy.value(obs), fresh)
    policy.act(seen)
    with pytest.raises(UsageError, match=r"remembers 16 episodes, got 5 observations; reset\(\)"):
        policy.value(obs[:5])
