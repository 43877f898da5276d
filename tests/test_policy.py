"""A policy by itself: its values are those of the memory that its actions left behind, and how it
draws.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import gpurl
from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.flash_sac import FlashSAC
from gpurl.algorithms.ppo import PPOConfig
from gpurl.api import train
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.nn.actor_critic import MEMORIES, NetworkConfig
from gpurl.policy import Policy
from tests.small_runs import ITERATION, small_run, small_settings
from tests.tiny_envs import RandomWalk


@pytest.mark.parametrize("memory", MEMORIES)
def test_value_is_under_the_memory_that_act_kept_until_reset(memory: str) -> None:
    """To ask for a value does not move the memory."""
    config = PPOConfig(network=NetworkConfig(hidden=(16,), memory=memory, memory_size=8))
    algorithm = make_algorithm(
        "ppo", config, RandomWalk.single_observation_space, RandomWalk.single_action_space, 16
    )
    policy, empty = Policy(algorithm, {}), algorithm.initial_policy_state(16)
    seen, obs = torch.full((16, 3), 3.0), torch.linspace(-3.0, 3.0, 48).view(16, 3)
    fresh, remembered = (
        algorithm.value(obs, empty),
        algorithm.value(obs, algorithm.act(seen, empty, explore=False).policy_state),
    )
    assert float((fresh - remembered).abs().max()) > 1e-3
    torch.testing.assert_close(policy.value(obs), fresh)
    policy.act(seen)
    for _ in range(2):
        torch.testing.assert_close(policy.value(obs), remembered)
    policy.reset()
    torch.testing.assert_close(policy.value(obs), fresh)
    policy.act(seen)
    with pytest.raises(UsageError, match=r"is of 16 episodes, got 5 observations; reset\(\)"):
        policy.value(obs[:5])


@pytest.mark.parametrize("name", ["sac", "td3", "dqn", "pqn", "flash_sac"])
def test_values_are_in_the_rewards_of_the_environment(name: str) -> None:
    """A reward of 1 in each step for ever, under gamma 0.5: the return is 2."""
    config = config_class(resolve_algorithm(name))(gamma=0.5, reward_scale=0.1)  # type: ignore[call-arg]
    obs_space, actions = RandomWalk.single_observation_space, Box(-1.0, 1.0, (1,), np.float32)
    action_space = Discrete(2) if name in ("dqn", "pqn") else actions
    algorithm = make_algorithm(name, config, obs_space, action_space, 4)
    reward = torch.ones(100, 4)
    scaled = 0.1 * reward
    if isinstance(algorithm, FlashSAC):
        assert algorithm.reward_scaler is not None
        algorithm.reward_scaler.record(10.0 * reward, torch.zeros(100, 4, dtype=torch.bool))
        scaled = algorithm.reward_scaler(scaled)
    learned = float(scaled[0, 0]) / (1.0 - 0.5)
    # a critic that has learned it
    algorithm.value = lambda obs, policy_state=(): torch.full((len(obs),), learned)  # type: ignore[method-assign]
    policy = Policy(algorithm, {})
    assert policy.value(np.zeros((3, 3))) == pytest.approx([2.0] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["sac", "td3", "dqn", "pqn"])
def test_a_loaded_policy_that_samples_explores_as_at_the_end_of_training(
    name: str, tmp_path: Path
) -> None:
    """Around what it would do, not by chance: its training got past the random steps."""
    env = "pendulum" if name in ("sac", "td3") else "cart_pole"
    settings = small_settings(name) | {
        "num_envs": 16,
        "horizon": 8,
        "total_steps": 256,
        "eval_episodes": 0,
        "quiet": True,
        "device": "cpu",
    }
    run = train(name, env, run_dir=str(tmp_path), **settings)
    policy, obs = gpurl.load(run.folder, num_envs=2000), make_env(env, 2000, "cpu", 0).reset()[0]
    with torch.no_grad():
        if name == "sac":
            policy.algorithm.actor.layers[-1].bias[0, 0, 1] = -9.0  # hardly any spread
        best, drawn = policy.act(obs), policy.act(obs, deterministic=False)
    if env == "cart_pole":
        assert float((best != drawn).float().mean()) == pytest.approx(
            0.05 / 2, abs=0.015
        )  # epsilon_end, half of it hits the best
    else:
        assert float((best - drawn).abs().mean()) < 0.4  # chance on [-2, 2] is about 1 away


def test_runs_and_policies_say_what_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = small_run(folder, 1, eval_episodes=4)
    mean = run.outcome.evaluation["eval/mean_reward"]
    assert repr(run).startswith(f"Run({folder}, return {mean:.2f} ± ")
    assert repr(run).endswith(f", {ITERATION} steps, total_steps)")
    assert repr(run.policy()) == f"Policy(ppo on pendulum, {ITERATION} steps, cpu)"


def test_odd_batches_and_devices(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1, env="cart_pole")
    policy = gpurl.load(run.folder, device="auto")
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    assert policy.act(obs[::-1]).tolist() == policy.act(obs)[::-1].tolist()
    with pytest.raises(UsageError, match=r"got \(0, 4\)"):
        policy.act(obs[:0])
    for name, message in (("gpu", "no device is called 'gpu'"), ("cuda:99", "does not exist")):
        with pytest.raises(UsageError, match=message):
            gpurl.load(run.folder, device=name)
