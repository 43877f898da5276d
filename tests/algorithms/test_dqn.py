"""Whole updates of the DQN family against plain float64 ones by autograd and torch.optim; teams;
and actions of each kind of network.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.dqn import DQN, DQNConfig
from gpurl.api import train
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.run.settings import build

OBS, ACTIONS, ROWS, AGENTS = 4, 3, 16, 2
OBS_SPACE = Box(-np.inf, np.inf, (OBS,), np.float32)


def make(name: str = "dqn", **settings: Any) -> DQN:
    settings = {
        "batch_size": ROWS,
        "learning_starts": ROWS,
        "learning_rate": 1e-2,
        "tau": 0.1,
        "max_grad_norm": 5.0,
    } | settings
    network = {"hidden": [8, 8]} | settings.pop("network", {})
    config = build(config_class(resolve_algorithm(name)), settings | {"network": network})
    obs_space, action_space = OBS_SPACE, Discrete(ACTIONS)
    if name == "vdn":
        obs_space, action_space = (
            Box(-np.inf, np.inf, (AGENTS, OBS), np.float32),
            MultiDiscrete([ACTIONS] * AGENTS),
        )  # type: ignore[assignment]
    algorithm = make_algorithm(name, config, obs_space, action_space, 4, seed=3)
    assert isinstance(algorithm, DQN)
    return algorithm


def batch(seed: int, agents: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = (torch.randn(ROWS, agents * OBS, generator=generator) for _ in range(2))
    action = torch.randint(0, ACTIONS, (ROWS, agents), generator=generator).double()
    reward = torch.randn(ROWS, generator=generator) * 3
    discount = 0.9 * (torch.rand(ROWS, generator=generator) < 0.8)
    weight = torch.rand(ROWS, generator=generator) * (torch.rand(ROWS, generator=generator) < 0.9)
    rest = {"reward": reward, "discount": discount, "weight": weight}
    return {
        "obs": obs,
        "next_obs": next_obs,
        "action": action if agents > 1 else action[:, 0],
        **rest,
    }


class Plain:
    """DQN by loops and autograd, for plain networks of one kind of answer."""

    def __init__(self, algorithm: DQN) -> None:
        self.config, self.agents, self.width = (
            algorithm.config,
            algorithm.num_agents,
            algorithm.width,
        )
        self.weights = [p.detach().clone().requires_grad_() for p in algorithm.network.parameters()]
        self.target = [p.detach().clone() for p in algorithm.target.parameters()]
        self.optimizer = torch.optim.Adam(self.weights, lr=self.config.learning_rate)
        self.members, self.updates = self.config.num_critics, 0
        self.support = torch.linspace(
            self.config.v_min, self.config.v_max, max(self.config.atoms, 1)
        )

    def answers(self, weights: list[Tensor], obs: Tensor, member: int) -> Tensor:
        """[B, G, A, Z]"""
        x = obs.view(ROWS, self.agents, OBS)
        mine = [weight[member] for weight in weights]
        for weight, bias in zip(mine[0:-2:2], mine[1:-2:2]):
            x = torch.relu(functional.linear(x, weight, bias.squeeze(0)))
        return functional.linear(x, mine[-2], mine[-1].squeeze(0)).view(
            ROWS, self.agents, ACTIONS, self.width
        )

    def mean(self, answers: Tensor) -> Tensor:
        return answers.softmax(-1) @ self.support if self.config.atoms else answers.mean(-1)

    def update(self, data: dict[str, Tensor]) -> None:
        with torch.no_grad():
            next_answers = [
                self.answers(self.target, data["next_obs"], e) for e in range(self.members)
            ]
            online = torch.stack(
                [
                    self.mean(self.answers(self.weights, data["next_obs"], e))
                    for e in range(self.members)
                ]
            ).mean(0)
            least = torch.stack([self.mean(each) for each in next_answers]).min(0).values
            best = (online if self.config.double else least).argmax(-1)  # [B, G]
        action, losses = data["action"].long().view(ROWS, self.agents), []
        count = max(int((data["weight"] > 0).sum()), 1)
        for member in range(self.members):
            answers = self.answers(self.weights, data["obs"], member)
            for row in range(ROWS):
                taken = torch.stack([answers[row, g, action[row, g]] for g in range(self.agents)])
                options = [
                    torch.stack([each[row, g, best[row, g]] for g in range(self.agents)])
                    for each in next_answers
                ]
                losses.append(
                    data["weight"][row]
                    * self.loss(taken, options, data["reward"][row], data["discount"][row])
                    / count
                )
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm or 1e9)
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.config.target_interval == 0:
            self.target = [
                (1 - self.config.tau) * t + self.config.tau * w.detach()
                for t, w in zip(self.target, self.weights)
            ]

    def backed_up(self, reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
        if not self.config.rescale_values:
            return reward + discount * value
        root = (
            (1 + 4e-3 * (value.abs() + 1.001)).sqrt() - 1
        ) / 2e-3  # Pohlen et al. 2018, proposition A.2, as printed
        y = reward + discount * value.sign() * (root**2 - 1)
        return y.sign() * ((y.abs() + 1).sqrt() - 1) + 1e-3 * y

    def loss(
        self, taken: Tensor, options: list[Tensor], reward: Tensor, discount: Tensor
    ) -> Tensor:
        """taken, options: [G, Z] of this member, and of all target members."""
        if self.width == 1:
            error = taken.sum() - self.backed_up(
                reward, discount, min(each.sum() for each in options)
            )
            return (
                error**2
                if not self.config.huber
                else 0.5 * error**2
                if error.abs() <= 1
                else error.abs() - 0.5
            )
        chosen = min(options, key=lambda each: float(self.mean(each.view(1, 1, -1))))[0]
        if self.config.quantiles:
            total = torch.zeros(())
            for i in range(self.width):
                for value in chosen:
                    u = self.backed_up(reward, discount, value) - taken[0, i]
                    huber = 0.5 * u**2 if u.abs() <= 1 else u.abs() - 0.5
                    total = (
                        total
                        + abs((i + 0.5) / self.width - float(u.detach() < 0)) * huber / self.width
                    )
            return total
        projected, spacing = torch.zeros(self.width), self.support[1] - self.support[0]
        for share, value in zip(chosen.softmax(-1), self.support):
            place = (
                (reward + discount * value).clamp(self.support[0], self.support[-1])
                - self.support[0]
            ) / spacing
            low = int(place.floor().clamp(max=self.width - 2))
            projected[low] += share * (1 - (place - low))
            projected[low + 1] += share * (place - low)
        return -(projected * taken[0].log_softmax(-1)).sum()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dqn", {}),
    ("dqn", {"double": False, "huber": False, "max_grad_norm": None}),
    ("dqn", {"double": False, "num_critics": 2}),
    ("dqn", {"num_critics": 3, "tau": 1.0, "target_interval": 3}),
    ("dqn", {"tau": 0.5, "target_interval": 2}),
    ("dqn", {"atoms": 11, "v_min": -5.0, "v_max": 6.0}),
    ("dqn", {"atoms": 7, "num_critics": 2}),
    ("dqn", {"quantiles": 5}),
    ("dqn", {"quantiles": 4, "num_critics": 2, "double": False}),
    ("dqn", {"rescale_values": True, "num_critics": 2}),
    ("dqn", {"rescale_values": True, "quantiles": 3}),
    ("vdn", {}),
    ("vdn", {"double": False, "huber": False}),
]


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_updates_are_those_of_plain_formulas(name: str, settings: dict[str, Any]) -> None:
    algorithm = make(name, **copy.deepcopy(settings))
    plain = Plain(algorithm)
    for number in range(7):
        data = batch(number, algorithm.num_agents)
        algorithm.update_step(dict(data), number)
        plain.update(data)
    for ours, theirs in zip(algorithm.network.parameters(), plain.weights):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-7, atol=1e-9)
    for ours, theirs in zip(algorithm.target.parameters(), plain.target):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dqn", {"network": {"dueling": True}}),
        ("dqn", {"network": {"heads": 3}, "quantiles": 5}),
        ("dqn", {"network": {"action_embedding": 4}}),
        ("dqn", {"atoms": 5, "network": {"body": "simba", "hidden": [8]}}),
        ("rainbow", {}),
        ("vdn", {}),
    ],
    ids=str,
)
def test_a_fixed_batch_is_learnt(name: str, settings: dict[str, Any]) -> None:
    algorithm = make(name, learning_rate=3e-3, **settings)
    data = {key: value.float() for key, value in batch(0, algorithm.num_agents).items()} | {
        "discount": torch.zeros(ROWS)
    }
    data["weight"] = torch.ones(ROWS)
    errors = []
    for number in range(300):
        errors.append(float(algorithm.update_step(dict(data), number)["td_error"].mean()))
        algorithm.update_random.advance()
    assert np.mean(errors[-10:]) < 0.4 * errors[0]


class Counting(nn.Module):
    """A network that counts its steps in train mode."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBS, ACTIONS)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, noise: Any = None) -> Tensor:
        self.count.add_(float(self.training and torch.is_grad_enabled()))
        return self.layer(x)


class CountingDQN(DQN):
    def make_networks(self) -> None:
        super().make_networks()
        self.network, self.target = Counting(), Counting()  # type: ignore[assignment]


@pytest.mark.parametrize("interval", [1, 3, 4])
def test_buffers_of_the_target_follow_with_its_weights(interval: int) -> None:
    assert DQNConfig.updates == 8  # of which 4 is a divisor
    config = DQNConfig(batch_size=ROWS, double=False, tau=1.0, target_interval=interval)
    algorithm = CountingDQN(config, OBS_SPACE, Discrete(ACTIONS), 4, torch.device("cpu"))
    counts = []
    with algorithm.train_mode():
        for number in range(7):
            columns = {name: value.float() for name, value in batch(number).items()}
            algorithm.update_step(columns | {"action": columns["action"].long()}, number)
            counts.append(int(algorithm.target.count))
            assert counts[-1] != number + 1 or torch.equal(
                algorithm.target.layer.weight, algorithm.network.layer.weight
            )
    expected = [number - number % interval for number in range(1, 8)]
    assert counts == expected


def test_the_greedy_action_is_of_the_greatest_value_and_chance_takes_its_share() -> None:
    algorithm = make(num_critics=2)
    obs = torch.randn(4, OBS)
    values = algorithm.expected(algorithm.outputs(algorithm.network, obs)).mean(0)[:, 0]
    assert torch.equal(algorithm.act(obs, explore=False).action, values.argmax(-1))
    torch.testing.assert_close(algorithm.value(obs), values.amax(-1))
    algorithm.is_random = False
    algorithm.epsilon.fill_(0.3)
    actions = torch.stack([algorithm.act(obs).action for _ in range(2000)])
    share = (actions != values.argmax(-1)).float().mean()
    assert float(share) == pytest.approx(0.3 * (ACTIONS - 1) / ACTIONS, abs=0.02)


def test_several_networks_act_by_their_mean() -> None:
    algorithm = make(num_critics=2)
    with torch.no_grad():
        for parameter in algorithm.network.parameters():
            parameter.zero_()
        *_, last = algorithm.network.parameters()  # the bias of the answers [E, 1, A]
        last.copy_(torch.tensor([[[5.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]]]))
    assert (
        algorithm.act(torch.zeros(4, OBS), explore=False).action.tolist() == [0] * 4
    )  # the least of both answers is 1, of action 1


@pytest.mark.parametrize("seed", range(5))
def test_a_team_of_sums_gets_seven(seed: int, tmp_path: Any) -> None:
    """In the two-step game sums of agents' values rank the safe 7 above the 8 that needs both: 6.5
    is what they make of it.
    """
    settings = {
        "num_envs": 32,
        "horizon": 2,
        "updates": 4,
        "batch_size": 256,
        "learning_starts": 512,
        "replay_size": 20_000,
    }
    settings |= {
        "epsilon_end": 1.0,
        "tau": 0.05,
        "learning_rate": 5e-3,
        "schedule": "linear",
        "huber": False,
        "network": {"hidden": [64]},
    }
    run = train(
        "vdn",
        "two_step_game",
        run_dir=str(tmp_path),
        quiet=True,
        device="cpu",
        seed=seed,
        total_steps=20_000,
        eval_episodes=32,
        **settings,
    )
    assert run.outcome.evaluation["eval/mean_reward"] == 7.0


@pytest.mark.parametrize(
    ("settings", "shape", "choices", "message"),
    [
        ({"atoms": 5}, (2, 3), [2, 2], "VDN sums values, not distributions"),
        ({"network": {"noisy": True}}, (2, 3), [2, 2], "leave out network.noisy"),
        (
            {},
            (2, 3),
            [2, 3],
            r"the same number for each agent, this one is MultiDiscrete\(\[2 3\]\)",
        ),
        ({}, (4,), [2, 2], "an observation of each of its 2 agents"),
        ({}, (3, 4), [2, 2], "an observation of each of its 2 agents"),
    ],
)
def test_teams_that_are_none_are_refused(
    settings: dict[str, Any], shape: tuple[int, ...], choices: list[int], message: str
) -> None:
    config = build(config_class(resolve_algorithm("vdn")), settings)
    with pytest.raises(UsageError, match=message):
        make_algorithm("vdn", config, Box(-1, 1, shape, np.float32), MultiDiscrete(choices), 4)


def test_a_team_is_paid_the_mean_of_its_agents_rewards() -> None:
    algorithm = make("vdn", horizon=1)
    buffer, obs, nobody = (
        algorithm.make_buffer(),
        torch.zeros(4, AGENTS, OBS),
        torch.zeros(4, dtype=torch.bool),
    )
    reward = torch.tensor([1.0, 2.0]).expand(4, AGENTS)
    algorithm.record_step(
        buffer, obs, algorithm.act(obs), Timestep(obs, reward, nobody, nobody, {"final_obs": obs})
    )
    assert buffer["reward"].tolist() == [[1.5] * 4]


def test_a_noisy_network_explores_by_its_noise_and_draws_anew_for_every_pass() -> None:
    algorithm = make("rainbow")
    obs = torch.randn(1, OBS).expand(4, OBS)
    assert len({*algorithm.act(obs, explore=False).action.tolist()}) == 1
    silent = make(network={"noisy": True, "noise_scale": 1e-6})  # and by no share of random actions
    silent.epsilon.fill_(1.0)
    best = silent.act(obs, explore=False).action
    assert all(torch.equal(silent.act(obs).action, best) for _ in range(50))
    assert len({int(action) for _ in range(50) for action in algorithm.act(obs).action}) > 1
    data, draws = {name: value.float() for name, value in batch(0).items()}, []
    network, random = algorithm.config.network, algorithm.update_random
    normal, passes, layers = (
        random.normal,
        3,
        4,
    )  # this state, the next one by target and network; two layers of two streams

    def counted(shape: tuple[int, ...]) -> Tensor:
        draws.append(normal(shape))
        return draws[-1]

    random.normal = counted  # type: ignore[method-assign]
    algorithm.update_step(data, 0)
    assert network.noisy
    assert len(draws) == passes * layers
    assert len({float(draw[0, 0]) for draw in draws}) == len(draws)
