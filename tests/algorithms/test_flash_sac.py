"""FlashSAC: its updates against plain formulas in float64, and every part against its law."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor
from torch.nn import functional

import gpurl
from gpurl.algorithms import make_algorithm
from gpurl.algorithms.flash_sac import FlashSAC, FlashSACConfig
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.run.settings import build
from tests.nn.test_unit_network import lengths
from tests.small_runs import off_policy, play, small_settings

OBS, ACTIONS, ROWS, WIDTH = 3, 2, 16, 4
OBS_SPACE = Box(-np.inf, np.inf, (OBS,), np.float32)
ACTION_SPACE = Box(-1.0, 1.0, (ACTIONS,), np.float32)


def make(**settings: Any) -> FlashSAC:
    small = {
        "batch_size": ROWS,
        "learning_starts": ROWS,
        "actor_network": {"hidden": [WIDTH]},
        "critic_network": {"hidden": [WIDTH]},
    }
    config = build(FlashSACConfig, small | settings)
    algorithm = make_algorithm("flash_sac", config, OBS_SPACE, ACTION_SPACE, 4)
    assert isinstance(algorithm, FlashSAC)
    return algorithm


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, ROWS, OBS, generator=generator) * 3.0 + 1.0
    return {
        "obs": obs,
        "next_obs": next_obs,
        "action": torch.rand(ROWS, ACTIONS, generator=generator) * 2.0 - 1.0,
        "reward": torch.randn(ROWS, generator=generator),
        "discount": 0.99 * (torch.rand(ROWS, generator=generator) > 0.2),
        "weight": torch.ones(ROWS),
    }


# ---- updates ----


class Plain:
    """The same updates: torch's batch norms, one critic after the other, and torch's Adam."""

    def __init__(self, algorithm: FlashSAC, rate: float) -> None:
        self.random = CounterRandom(algorithm.seed * 4 + 2, ROWS)
        self.config = algorithm.config
        self.target_entropy = algorithm.target_entropy
        self.parts = {
            name: {at: value.clone() for at, value in getattr(algorithm, name).state_dict().items()}
            for name in ("actor", "critic", "target_critic")
        }
        self.log_temperature = torch.tensor(math.log(algorithm.config.initial_temperature))
        self.adams = {}
        for name in ("actor", "critic"):
            trained = [
                value.requires_grad_()
                for at, value in self.parts[name].items()
                if "running" not in at
            ]
            self.adams[name] = torch.optim.Adam(trained, lr=rate)
        self.adams["temperature"] = torch.optim.Adam([self.log_temperature.requires_grad_()], rate)

    def network(self, name: str, x: Tensor, by_batch: bool, member: int = 0) -> Tensor:
        part = self.parts[name]

        def norm(x: Tensor, at: str) -> Tensor:
            running = (part[f"{at}.running_{what}"][member, 0] for what in ("mean", "variance"))
            gain, shift = (part[f"{at}.{what}"][member, 0] for what in ("gain", "shift"))
            return functional.batch_norm(x, *running, gain, shift, by_batch, 0.01, 1e-5)

        def dense(x: Tensor, at: str) -> Tensor:
            return x @ part[f"{at}.weight"][member].T

        x = dense(norm(x, "layers.0"), "layers.1")
        y = torch.relu(norm(dense(x, "layers.2.layers.0"), "layers.2.layers.1"))
        x = x + torch.relu(norm(dense(y, "layers.2.layers.2"), "layers.2.layers.3"))
        x = functional.rms_norm(x, (WIDTH,), part["layers.3.gain"][member, 0], 1e-6)
        return dense(x, "layers.4") + part["layers.4.bias"][member, 0]

    def sample(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = output.chunk(2, 1)
        std = (-10.0 + 6.0 * (1.0 + raw.tanh())).exp()
        u = mean + std * noise
        density = torch.distributions.Normal(mean, std).log_prob(u)
        slope = 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))
        return u.tanh(), (density - slope).sum(1)

    def step(self, name: str, loss: Tensor) -> None:
        adam = self.adams[name]
        adam.zero_grad()
        loss.backward()
        adam.step()
        if name == "temperature":
            return
        part = self.parts[name]
        with torch.no_grad():
            for at, value in part.items():
                if at.endswith("weight"):
                    value /= value.norm(dim=-1, keepdim=True)
                if at.endswith("gain"):
                    shift = part.get(at.replace("gain", "shift"), torch.zeros_like(value))
                    square = (value**2 + shift**2).sum(-1, keepdim=True) + 1e-8
                    factor = (value.shape[-1] / square).sqrt()
                    value *= factor
                    shift *= factor

    def update(self, data: dict[str, Tensor], updates_actor: bool) -> None:
        support = torch.linspace(-5.0, 5.0, 101)
        if updates_actor:
            both = torch.cat((data["obs"], data["next_obs"]))
            output = self.network("actor", both, by_batch=True)[:ROWS]
            action, log_prob = self.sample(output, self.random.normal((ACTIONS,)))
            inputs = torch.cat((data["obs"], action), 1)
            values = [
                self.network("critic", inputs, False, member).softmax(1) @ support
                for member in range(2)
            ]
            temperature = self.log_temperature.detach().exp()
            self.step("actor", (temperature * log_prob - torch.minimum(*values)).mean())
            gap = -log_prob.detach().mean() - self.target_entropy
            self.step("temperature", self.log_temperature.exp() * gap)
        # the critics
        with torch.no_grad():
            output = self.network("actor", data["next_obs"], by_batch=False)
            next_action, log_prob = self.sample(output, self.random.normal((ACTIONS,)))
            now = torch.cat((data["obs"], data["action"]), 1)
            inputs = torch.cat((now, torch.cat((data["next_obs"], next_action), 1)))
            outputs = [
                self.network("target_critic", inputs, True, member)[ROWS:].softmax(1)
                for member in range(2)
            ]
            first_is_less = outputs[0] @ support <= outputs[1] @ support
            shares = torch.where(first_is_less[:, None], *outputs)
            cost = self.log_temperature.exp() * log_prob
            moved = data["reward"][:, None] + data["discount"][:, None] * (support - cost[:, None])
            near = 1.0 - (moved.clamp(-5.0, 5.0)[:, :, None] - support).abs() / 0.1
            target = (shares[:, :, None] * near.clamp(min=0.0)).sum(1)
        losses = [
            -(target * self.network("critic", inputs, True, member)[:ROWS].log_softmax(1)).sum(1)
            for member in range(2)
        ]
        self.step("critic", losses[0].mean() + losses[1].mean())
        with torch.no_grad():
            for at, value in self.parts["target_critic"].items():
                if "running" not in at:
                    value += self.config.tau * (self.parts["critic"][at] - value)


@pytest.mark.usefixtures("_in_float64")
def test_updates_are_those_of_plain_formulas() -> None:
    algorithm = make(learning_rate=1e-3)
    plain = Plain(algorithm, 1e-3)
    for step in range(6):
        algorithm.update_step(batch(step), step % 2)
        plain.update(batch(step), step % 2 == 1)
        algorithm.update_random.advance()
        plain.random.advance()
        for network in (algorithm.actor, algorithm.critic):
            for name, length in lengths(network).items():
                torch.testing.assert_close(length, torch.ones_like(length), msg=name)
    for name, part in plain.parts.items():
        got = getattr(algorithm, name).state_dict()
        assert got.keys() == part.keys()
        for at, value in part.items():
            if name == "target_critic" and "running" in at:
                continue  # never read
            torch.testing.assert_close(
                got[at],
                value.detach(),
                rtol=1e-6,
                atol=1e-8,
                msg=lambda text, at=at, name=name: f"{name}.{at}: {text}",
            )
    torch.testing.assert_close(
        algorithm.temperature.log.detach(), plain.log_temperature.detach(), rtol=1e-7, atol=1e-9
    )


def test_a_skipped_step_changes_neither_weights_nor_target() -> None:
    algorithm = make()
    algorithm.update_step(batch(0), 1)
    parts = ("actor", "critic", "target_critic")
    before = {
        name: [parameter.detach().clone() for parameter in getattr(algorithm, name).parameters()]
        for name in parts
    }
    broken = batch(1)
    broken["reward"][3], broken["obs"][2, 1] = torch.nan, torch.inf
    algorithm.update_step(broken, 1)
    for name in parts:
        assert all(map(torch.equal, getattr(algorithm, name).parameters(), before[name]))
    assert all(value.isfinite().all() for value in algorithm.state_dict().values())


# ---- acting ----


def test_an_action_does_not_depend_on_other_environments() -> None:
    algorithm = make()
    for step in range(4):
        algorithm.update_step(batch(step), step % 2)
    obs = batch(9)["obs"][:4]
    together = algorithm.act(obs, explore=False).action
    alone = torch.cat([algorithm.act(row, explore=False).action for row in obs.split(1)])
    torch.testing.assert_close(together, alone)


def test_log_standard_deviations_are_between_their_limits() -> None:
    algorithm = make()
    last = algorithm.actor.layers[-2]
    last.bias.data[..., ACTIONS:] = torch.tensor([-50.0, 50.0])
    output = algorithm.actor(torch.zeros(1, OBS)).squeeze(0)
    torch.testing.assert_close(output[0, ACTIONS:], torch.tensor([-10.0, 2.0]))


# ---- settings ----


def test_the_target_entropy_is_that_of_normal_actions() -> None:
    expected = torch.distributions.Normal(0.0, 0.15).entropy() * ACTIONS
    assert make().target_entropy == pytest.approx(float(expected))
    assert make(target_entropy=-1.0).target_entropy == -1.0


def test_the_learning_rate_falls_along_a_cosine() -> None:
    algorithm = make(learning_rate=3e-4)
    algorithm.make_buffer()
    rates = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        algorithm.schedule(progress, 0)
        rates += [[float(each.learning_rate) for each in algorithm.optimizers.values()]]
    cosine = 0.5 * (1.0 + math.cos(math.pi / 4.0))
    expected = [3e-4, 1.5e-4 + 1.5e-4 * cosine, 2.25e-4, 1.5e-4]
    for row, rate in zip(rates, expected):
        assert row == pytest.approx([rate] * 3)


def test_rewards_are_scaled_by_the_returns_so_far() -> None:
    env = make_env("pendulum", 4, "cpu", 0)
    algorithm = off_policy("flash_sac", env, horizon=4, updates=2, policy_delay=2)
    assert isinstance(algorithm, FlashSAC)
    metrics = play(algorithm, env, 8)
    # of the actor too, which is updated every second time
    assert {"train/critic_loss", "train/actor_loss", "train/entropy"} <= metrics.keys()
    scaler = algorithm.reward_scaler
    assert scaler is not None
    assert float(scaler.count) == 8 * 4 * 4
    stored = algorithm.replay.ring.numbers[..., 0]
    reward = algorithm.sample_batch()["reward"] / scaler(torch.ones(()))
    assert all(bool((stored - value).abs().min() < 1e-4) for value in reward)
    # an episode that was cut off from outside is over
    assert bool((scaler.returned != 0.0).all())
    algorithm.mark_episode_break(torch.tensor([True, False, False, True]))
    assert (scaler.returned != 0.0).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_span": 0}, "noise_span must be at least 1, got 0"),
        ({"final_rate": 1.5}, "final_rate"),
        ({"v_min": -5.0, "v_max": -1.0}, "normalize_rewards brings returns within v_max"),
        ({"fit_returns": 0.1, "atoms": 0}, "fit_returns takes rewards as they are"),
        ({"actor_network": {"body": "simba"}}, "body"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(FlashSACConfig, settings)


def test_an_actor_goes_on_in_another_run_with_its_running_statistics(tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "run_dir": str(tmp_path / "first"),
        "num_envs": 8,
        "total_steps": 160,
        "eval_episodes": 0,
        "quiet": True,
        "device": "cpu",
        **small_settings("flash_sac"),
    }
    first = gpurl.train("flash_sac", "pendulum", **small)
    policy = gpurl.load(first.folder)
    small |= {"run_dir": str(tmp_path / "second"), "total_steps": 8, "learning_starts": 1000}
    second = gpurl.train("flash_sac", "pendulum", **(small | {"init_from": str(first.folder)}))
    obs = torch.randn(5, 3)
    assert torch.equal(policy.act(obs), gpurl.load(second.folder).act(obs))
    moved = [
        bool((value != 0.0).any())
        for name, value in policy.algorithm.state_dict().items()
        if name.startswith("actor.") and name.endswith("running_mean")
    ]
    assert len(moved) == 3
    assert all(moved)
    assert policy.act(obs[2]).shape == (1,)


def test_a_run_goes_on_with_another_number_of_environments(tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "num_envs": 8,
        "total_steps": 160,
        "eval_episodes": 0,
        "quiet": True,
        "device": "cpu",
        **small_settings("flash_sac"),
    }
    first = gpurl.train("flash_sac", "pendulum", **small)
    gpurl.resume(first.folder, num_envs=4, total_steps=320)
    policy = gpurl.load(first.folder).algorithm
    assert isinstance(policy, FlashSAC)
    assert policy.reward_scaler is not None
    # of both parts
    assert float(policy.reward_scaler.count) == 320
