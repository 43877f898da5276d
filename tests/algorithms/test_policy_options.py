"""PPO's options of continuous actions: they train in every precision, begin where they should, and
what they add to the loss is what was published.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.api import resume
from gpurl.buffers.minibatches import Minibatch
from gpurl.cli.settings import parse_train
from gpurl.envs.pendulum import Pendulum
from gpurl.errors import UsageError
from gpurl.nn.distributions import Beta
from tests.small_runs import small_run

OPTIONS: list[dict[str, Any]] = [
    {"std_type": "scalar"},
    {"state_dependent_std": True},
    {"state_dependent_std": True, "std_type": "scalar"},
    {"state_dependent_std": True, "squash": True},
    {"std_type": "scalar", "squash": True},
    {"distribution": "beta"},
    {"bounds_coef": 0.1},
]


def make(num_envs: int = 16, kind: type[PPO] = PPO, **settings: Any) -> tuple[PPO, Pendulum]:
    env = Pendulum(num_envs)
    torch.manual_seed(0)
    config = PPOConfig(**({"horizon": 8, "minibatches": 2} | settings))
    spaces = env.single_observation_space, env.single_action_space
    return kind(config, *spaces, num_envs, torch.device("cpu")), env


def rollout_data(algorithm: PPO, env: Pendulum) -> dict[str, torch.Tensor]:
    obs, _ = env.reset(seed=0)
    buffer = algorithm.make_buffer()
    while not buffer.is_full:
        decision = algorithm.act(obs)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        obs = timestep.obs
    return algorithm.prepare(buffer)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains_in_every_precision(options: dict[str, Any], precision: str) -> None:
    """The products of hidden layers are bf16; outputs, densities and losses stay float32, so the
    first minibatch finds the log-probabilities of acting.
    """
    algorithm, env = make(schedule="constant", **options)
    algorithm.set_precision(precision)
    data = rollout_data(algorithm, env)
    batch = next(algorithm.batches(data))
    output, value = algorithm.outputs(batch)
    assert output.dtype == value.dtype == torch.float32
    log_prob = algorithm.head.log_prob(output, batch.action)
    # bf16 has 8 bits: a minibatch is another matrix product than a step, and rounds as it
    torch.testing.assert_close(log_prob, batch.log_prob, atol=1e-4, rtol=1e-4)
    before = {name: value.clone() for name, value in algorithm.named_parameters()}
    with torch.enable_grad():
        metrics = algorithm.learn(data)
    assert all(bool(value.isfinite()) for value in metrics.values())
    for name, value in algorithm.named_parameters():
        assert value.dtype == torch.float32
        assert not torch.equal(value, before[name]), f"{name} has not moved"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_logged_deviation_begins_at_initial_std(options: dict[str, Any]) -> None:
    algorithm, env = make(learning_rate=1e-7, schedule="constant", initial_std=0.6, **options)
    std = float(algorithm.learn(rollout_data(algorithm, env))["train/std"])
    # Beta(1.693, 1.693) on [-1, 1]: 1 / sqrt(2 * 1.693 + 1)
    wanted = 0.4775 if isinstance(algorithm.head, Beta) else 0.6
    assert std == pytest.approx(wanted, abs=0.01)


class OwnLoss(PPO):
    """Regression to the returns, without the terms and metrics of PPO."""

    def loss(self, batch: Minibatch) -> tuple[torch.Tensor, Metrics]:
        output, value = self.outputs(batch)
        likelihood = self.head.log_prob(output, batch.action).mean()
        return (value - batch.returns).square().mean() - likelihood, {}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_own_loss_may_measure_no_deviation(options: dict[str, Any]) -> None:
    algorithm, env = make(kind=OwnLoss, schedule="constant", **options)
    metrics = algorithm.learn(rollout_data(algorithm, env))
    depends_on_state = isinstance(algorithm.head, Beta) or "state_dependent_std" in options
    assert ("train/std" in metrics) != depends_on_state


def test_the_bounds_loss_is_added_with_its_weight_and_pulls_means_back() -> None:
    algorithm, env = make(bounds_coef=0.5)
    with torch.no_grad():
        algorithm.network.actor.bias.fill_(2.1)  # 1 beyond the soft bound
        algorithm.network.actor.weight.zero_()
    batch = next(algorithm.batches(rollout_data(algorithm, env)))
    loss, metrics = algorithm.loss(batch)
    plain, _ = make()
    plain.load_state_dict(algorithm.state_dict())
    without = plain.loss(batch)[0]
    assert float(metrics["bounds_loss"]) == pytest.approx(1.0, rel=1e-5)
    assert float((loss - without).detach()) == pytest.approx(0.5, rel=1e-4)
    (gradient,) = torch.autograd.grad(loss, algorithm.network.actor.bias)
    (gradient_without,) = torch.autograd.grad(without, plain.network.actor.bias)
    assert float(gradient - gradient_without) == pytest.approx(0.5 * 2.0, rel=1e-4)
    # rows that are no transitions weigh nothing
    batch.weight = torch.zeros_like(batch.log_prob)
    batch.weight[0] = 1.0
    assert float(algorithm.loss(batch)[1]["bounds_loss"]) == pytest.approx(1.0, rel=1e-5)


def test_options_that_exclude_each_other_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="leave out squash, which is for distribution normal"):
        make(distribution="beta", squash=True)
    with pytest.raises(UsageError, match="Beta actions do not exceed: leave it out"):
        make(distribution="beta", bounds_coef=0.1)
    with pytest.raises(UsageError, match="bounds_coef must be at least 0"):
        make(bounds_coef=-1.0)
    with pytest.raises(UsageError, match="std_type is 'root'; it must be one of log, scalar"):
        make(std_type="root")
    for name in ("noise_std_type=scalar", "bounds_loss_coef=0.1"):  # of rsl_rl and rl_games
        with pytest.raises(UsageError, match=r"here it is --(std-type|bounds-coef)"):
            parse_train(["ppo", "chasing", name])


def test_a_resumed_run_continues_with_the_same_policy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"state_dependent_std": True, "std_type": "scalar"}
    small_run(tmp_path, 1, **options)
    assert resume(tmp_path, total_steps=256).outcome.steps == 256
    with pytest.raises(UsageError, match="std_type scalar, this run log; a resumed run keeps"):
        resume(tmp_path, std_type="log", total_steps=384)
