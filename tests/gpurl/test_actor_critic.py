"""Whole updates of the off-policy actor-critics against plain float64 ones by autograd and torch.optim, with the same weights and noise."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor
from torch.nn import functional

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.actor_critic import ActorCritic
from gpurl.config import build

OBS, ACTIONS, ROWS = 5, 2, 16
OBS_SPACE, ACTION_SPACE = Box(-np.inf, np.inf, (OBS,), np.float32), Box(-1.0, 1.0, (ACTIONS,), np.float32)


pytestmark = pytest.mark.usefixtures("_in_float64")


def make(name: str, **settings: Any) -> ActorCritic:
    settings = {"batch_size": ROWS, "learning_starts": ROWS, "learning_rate": 1e-2, "tau": 0.1} | settings
    network = {"hidden": [8, 8]}
    config = build(config_class(resolve_algorithm(name)), {"actor_network": network, "critic_network": network} | settings)
    algorithm = make_algorithm(name, config, OBS_SPACE, ACTION_SPACE, 4, seed=3)
    assert isinstance(algorithm, ActorCritic)
    return algorithm


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = (torch.randn(ROWS, OBS, generator=generator) for _ in range(2))
    action = torch.rand(ROWS, ACTIONS, generator=generator) * 2 - 1
    reward = torch.randn(ROWS, generator=generator)
    discount = 0.9 * (torch.rand(ROWS, generator=generator) < 0.8)
    weight = (torch.rand(ROWS, generator=generator) < 0.9).double()
    return {"obs": obs, "next_obs": next_obs, "action": action, "reward": reward, "discount": discount, "weight": weight}


class Reference:
    """The same algorithm as plain formulas, stepped by autograd."""

    def __init__(self, algorithm: ActorCritic) -> None:
        self.config: Any = algorithm.config
        parts = {"actor": algorithm.actor, "critic": algorithm.critic, "target_critic": algorithm.target_critic}
        if algorithm.target_actor is not None:
            parts["target_actor"] = algorithm.target_actor
        self.weights = {name: [p.detach().clone().requires_grad_() for p in part.parameters()] for name, part in parts.items()}
        self.log_temperature = torch.zeros((), requires_grad=True)
        rates = {"actor": algorithm.rate_of("actor"), "critic": algorithm.rate_of("critic")}
        self.optimizers = {name: torch.optim.Adam(self.weights[name], lr=rate) for name, rate in rates.items()}
        self.optimizers["temperature"] = torch.optim.Adam([self.log_temperature], lr=algorithm.rate_of("temperature"))
        self.update_random, self.choice_random = copy.deepcopy(algorithm.update_random), copy.deepcopy(algorithm.choice_random)

    def network(self, name: str, x: Tensor, member: int) -> Tensor:
        weights = [weight[member] for weight in self.weights[name]]
        for weight, bias in zip(weights[0:-2:2], weights[1:-2:2]):
            x = torch.relu(functional.linear(x, weight, bias.squeeze(0)))
        return functional.linear(x, weights[-2], weights[-1].squeeze(0))

    def values(self, name: str, obs: Tensor, action: Tensor) -> list[Tensor]:
        x = torch.cat((obs, action), 1)
        return [self.network(name, x, member).squeeze(1) for member in range(self.config.num_critics)]

    def noise(self) -> Tensor:
        return self.update_random.normal((ACTIONS,)).double()

    def step(self, name: str, loss: Tensor) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def follow(self, *names: str) -> None:
        with torch.no_grad():
            for name in names:
                for target, weight in zip(self.weights[f"target_{name}"], self.weights[name]):
                    target.copy_((1 - self.config.tau) * target + self.config.tau * weight)

    def regress(self, data: dict[str, Tensor], target: Tensor) -> None:
        share = data["weight"] / (data["weight"] > 0).sum()
        losses = [(share * (value - target) ** 2).sum() for value in self.values("critic", data["obs"], data["action"])]
        self.step("critic", torch.stack(losses).sum())

    def advance(self) -> None:
        self.update_random.advance()
        self.choice_random.advance()


class ReferenceTD3(Reference):
    def update(self, data: dict[str, Tensor], number: int) -> None:
        with torch.no_grad():
            action = self.network("target_actor", data["next_obs"], 0).tanh()
            if self.config.target_noise:
                noise = (self.noise() * self.config.target_noise).clamp(-self.config.target_noise_clip, self.config.target_noise_clip)
                action = (action + noise).clamp(-1, 1)
            value = torch.stack(self.values("target_critic", data["next_obs"], action)).min(0).values
            target = data["reward"] + data["discount"] * value
        self.regress(data, target)
        if (number + 1) % self.config.policy_delay == 0:
            action = self.network("actor", data["obs"], 0).tanh()
            self.step("actor", -self.values("critic", data["obs"], action)[0].mean())
            self.follow("actor")
        if not self.config.delay_targets or (number + 1) % self.config.policy_delay == 0:
            self.follow("critic")
        self.advance()


class ReferenceSAC(Reference):
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.network("actor", obs, 0).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        u = mean + std * self.noise()
        density = torch.distributions.Normal(mean, std).log_prob(u) - torch.log(1 - u.tanh() ** 2)
        return u.tanh(), density.sum(-1)

    def update(self, data: dict[str, Tensor], number: int) -> None:
        config = self.config
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            action, log_prob = self.act(data["next_obs"])
            values = torch.stack(self.values("target_critic", data["next_obs"], action))
            if config.target_subset is not None:
                drawn = self.choice_random.uniform(shape=(config.num_critics,))[0]
                values = values[drawn.argsort()[: config.target_subset]]
            target = data["reward"] + data["discount"] * (values.min(0).values - temperature * log_prob)
        self.regress(data, target)
        if (number + 1) % config.policy_delay == 0:
            action, log_prob = self.act(data["obs"])
            values = torch.stack(self.values("critic", data["obs"], action))
            value = values.mean(0) if config.actor_aggregate == "mean" else values.min(0).values
            self.step("actor", (temperature * log_prob - value).mean())
            self.step("temperature", -self.log_temperature * (log_prob.detach() - ACTIONS).mean())
        self.follow("critic")
        self.advance()


CASES = [
    ("ddpg", ReferenceTD3, {}),
    ("td3", ReferenceTD3, {"updates": 4}),
    ("td3", ReferenceTD3, {"updates": 4, "delay_targets": False}),
    ("td3", ReferenceTD3, {"updates": 4, "actor_learning_rate": 3e-3, "target_noise_clip": 0.1}),
    ("sac", ReferenceSAC, {}),
    ("redq", ReferenceSAC, {"num_critics": 5, "updates": 4, "policy_delay": 4}),
]


@pytest.mark.parametrize(("name", "reference", "settings"), CASES, ids=str)
def test_updates_are_those_of_plain_formulas(name: str, reference: Any, settings: dict[str, Any]) -> None:
    algorithm = make(name, **settings)
    plain = reference(algorithm)
    for number in range(8):
        data = batch(number)
        with torch.inference_mode():
            algorithm.learn_from(dict(data), number, wants_parts=True)
        algorithm.update_random.advance()
        algorithm.choice_random.advance()
        plain.update(data, number)
    for part, wanted in plain.weights.items():
        for ours, theirs in zip(getattr(algorithm, part).parameters(), wanted):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-10, msg=lambda text, part=part: f"{part}: {text}")
    if reference is ReferenceSAC:
        torch.testing.assert_close(algorithm.temperature.log.detach(), plain.log_temperature.detach(), rtol=1e-9, atol=1e-10)
