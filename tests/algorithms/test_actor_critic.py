"""Whole updates of the off-policy actor-critics against plain float64 ones by autograd and
torch.optim, with the same weights and noise.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.nn import functional

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Metrics
from gpurl.algorithms.mod_sac import ModSAC
from gpurl.algorithms.off_policy import Batch
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.kernels import backend
from gpurl.nn import mlp
from gpurl.run.settings import build

OBS, ACTIONS, ROWS = 5, 2, 16
OBS_SPACE, ACTION_SPACE = (
    Box(-np.inf, np.inf, (OBS,), np.float32),
    Box(-1.0, 1.0, (ACTIONS,), np.float32),
)


def make(name: str, **settings: Any) -> OffPolicyActorCritic:
    settings = {
        "batch_size": ROWS,
        "learning_starts": ROWS,
        "learning_rate": 1e-2,
        "tau": 0.1,
    } | settings
    network = {"hidden": [8, 8], "layer_norm": False}
    config = build(
        config_class(resolve_algorithm(name)),
        {"actor_network": network, "critic_network": network} | settings,
    )
    space = Discrete(ACTIONS) if name == "discrete_sac" else ACTION_SPACE
    algorithm = make_algorithm(name, config, OBS_SPACE, space, 4, seed=3)
    assert isinstance(algorithm, OffPolicyActorCritic)
    return algorithm


def batch(seed: int, discrete: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = (torch.randn(ROWS, OBS, generator=generator) for _ in range(2))
    action = torch.rand(ROWS, ACTIONS, generator=generator) * 2 - 1
    reward, fit_return = (torch.randn(ROWS, generator=generator) for _ in range(2))
    discount = 0.9 * (torch.rand(ROWS, generator=generator) < 0.8)
    weight = (torch.rand(ROWS, generator=generator) < 0.9).double()
    columns = {
        "action": (action[:, 0] > 0).double() if discrete else action,
        "reward": reward,
        "fit_return": fit_return,
    }
    return {"obs": obs, "next_obs": next_obs, "discount": discount, "weight": weight} | columns


class Reference:
    """The same algorithm as plain formulas, stepped by autograd."""

    def __init__(self, algorithm: OffPolicyActorCritic) -> None:
        self.config: Any = algorithm.config
        parts = {
            "actor": algorithm.actor,
            "critic": algorithm.critic,
            "target_critic": algorithm.target_critic,
        }
        if algorithm.target_actor is not None:
            parts["target_actor"] = algorithm.target_actor
        self.weights = {
            name: [p.detach().clone().requires_grad_() for p in part.parameters()]
            for name, part in parts.items()
        }
        start = getattr(self.config, "temperature", None) or getattr(
            self.config, "initial_temperature", 1.0
        )
        self.log_temperature = torch.tensor(start).log().requires_grad_()
        rates = {
            name: getattr(self.config, f"{name}_learning_rate", None) or self.config.learning_rate
            for name in ("actor", "temperature")
        }
        decay = self.config.weight_decay
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "actor": torch.optim.AdamW(
                self.weights["actor"], lr=rates["actor"], weight_decay=decay
            ),
            "critic": torch.optim.AdamW(
                self.weights["critic"], lr=self.config.learning_rate, weight_decay=decay
            ),
            "temperature": torch.optim.Adam([self.log_temperature], lr=rates["temperature"]),
        }
        self.support = torch.linspace(
            self.config.v_min, self.config.v_max, max(self.config.atoms, 1)
        )
        self.update_random, self.choice_random = (
            copy.deepcopy(algorithm.update_random),
            copy.deepcopy(algorithm.choice_random),
        )

    def network(self, name: str, x: Tensor, member: int = 0) -> Tensor:
        weights = [weight[member] for weight in self.weights[name]]
        for weight, bias in zip(weights[0:-2:2], weights[1:-2:2]):
            x = torch.relu(functional.linear(x, weight, bias.squeeze(0)))
        return functional.linear(x, weights[-2], weights[-1].squeeze(0))

    def answers(self, name: str, *inputs: Tensor) -> list[Tensor]:
        """Of every critic [B, 1 or atoms], or [B, A] of few actions."""
        return [
            self.network(name, torch.cat(inputs, 1), member)
            for member in range(self.config.num_critics)
        ]

    def mean(self, answer: Tensor) -> Tensor:
        """[B, 1 or atoms] -> [B]"""
        return answer.softmax(1) @ self.support if self.config.atoms else answer.squeeze(1)

    def climbed(self, answers: list[Tensor]) -> Tensor:
        values = torch.stack(answers)
        return {"min": values.min(0).values, "mean": values.mean(0), "first": values[0]}[
            self.config.actor_aggregate
        ]

    def asked(self, answers: list[Tensor]) -> list[Tensor]:
        if self.config.target_subset is None:
            return answers
        drawn = self.choice_random.uniform(shape=(self.config.num_critics,))[0]
        return [answers[int(member)] for member in drawn.argsort()[: self.config.target_subset]]

    def target(self, data: dict[str, Tensor], answers: list[Tensor], bonus: Tensor) -> Tensor:
        """[B], or of atoms their shares [B, Z]: every next atom gives to those nearer to it than
        their distance.
        """
        if not self.config.atoms:
            values = torch.cat(answers, 1)
            value = (
                values.mean(1) if self.config.target_aggregate == "mean" else values.min(1).values
            )
            return data["reward"] + data["discount"] * (value + bonus)
        if self.config.target_aggregate == "mean":
            shares = torch.stack([answer.softmax(1) for answer in answers]).mean(0)
        else:
            least = [
                min(answers, key=lambda answer, row=row: float(self.mean(answer)[row]))[row]
                for row in range(ROWS)
            ]
            shares = torch.stack(least).softmax(1)
        moved = data["reward"][:, None] + data["discount"][:, None] * (
            self.support + bonus[:, None]
        )
        moved = moved.clamp(self.config.v_min, self.config.v_max)
        near = 1 - (moved[:, :, None] - self.support).abs() / (self.support[1] - self.support[0])
        return (shares[:, :, None] * near.clamp(min=0)).sum(1)

    def noise(self) -> Tensor:
        return self.update_random.normal((ACTIONS,)).double()

    def step(self, name: str, loss: Tensor) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()
        if self.config.max_grad_norm and name != "temperature":
            torch.nn.utils.clip_grad_norm_(self.weights[name], self.config.max_grad_norm)
        optimizer.step()

    def follow(self, *names: str) -> None:
        with torch.no_grad():
            for name in names:
                for target, weight in zip(self.weights[f"target_{name}"], self.weights[name]):
                    target.copy_((1 - self.config.tau) * target + self.config.tau * weight)

    def regress(self, data: dict[str, Tensor], target: Tensor, answers: list[Tensor]) -> float:
        self.counts = data["weight"] > 0  # rows that the actor learns from too
        share = data["weight"] / self.counts.sum()
        losses, fits = [], []
        for answer in answers:
            if self.config.atoms:
                losses.append(-(share[:, None] * target * answer.log_softmax(1)).sum())
            else:
                losses.append((share * (answer.squeeze(1) - target) ** 2).sum())
                fits.append(
                    self.config.fit_returns
                    * (share * (answer.squeeze(1) - data["fit_return"]) ** 2).sum()
                )
        self.step("critic", torch.stack(losses + fits).sum())
        return float(torch.stack(losses).detach().sum())

    def advance(self) -> None:
        self.update_random.advance()
        self.choice_random.advance()


class ReferenceTD3(Reference):
    def update(self, data: dict[str, Tensor], number: int) -> None:
        with torch.no_grad():
            action = self.network(
                "target_actor" if self.config.target_actor else "actor", data["next_obs"]
            ).tanh()
            if self.config.target_noise:
                noise = (self.noise() * self.config.target_noise).clamp(
                    -self.config.target_noise_clip, self.config.target_noise_clip
                )
                action = (action + noise).clamp(-1, 1)
            answers = self.asked(self.answers("target_critic", data["next_obs"], action))
            target = self.target(data, answers, torch.zeros(ROWS))
        self.regress(data, target, self.answers("critic", data["obs"], data["action"]))
        moves = (number + 1) % self.config.policy_delay == 0
        if moves:
            action = self.network("actor", data["obs"]).tanh()
            answers = [self.mean(answer) for answer in self.answers("critic", data["obs"], action)]
            self.step("actor", -self.climbed(answers)[self.counts].mean())
            if self.config.target_actor:
                self.follow("actor")
        if not self.config.delay_targets or moves:
            self.follow("critic")
        self.advance()


class ReferenceSAC(Reference):
    actor_of_target = "actor"
    reference_entropy = -float(ACTIONS)

    def act(self, name: str, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_std = self.network(name, obs).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        u = mean + std * self.noise()
        density = torch.distributions.Normal(mean, std).log_prob(u) - torch.log(1 - u.tanh() ** 2)
        return u.tanh(), density.sum(-1), log_std

    def update(self, data: dict[str, Tensor], number: int) -> None:
        with torch.no_grad():
            action, log_prob, _ = self.act(self.actor_of_target, data["next_obs"])
            answers = self.asked(self.answers("target_critic", data["next_obs"], action))
            target = self.target(data, answers, -self.log_temperature.exp() * log_prob)
        loss = self.regress(data, target, self.answers("critic", data["obs"], data["action"]))
        self.follow("critic")
        self.move(data["obs"], number, loss)
        self.advance()

    def move(self, obs: Tensor, number: int, loss: float) -> None:
        if (number + 1) % self.config.policy_delay == 0:
            cost, log_prob, _ = self.cost(obs)
            self.step("actor", cost)
            self.move_temperature(-log_prob.detach().mean())

    def cost(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        action, log_prob, log_std = self.act("actor", obs)
        answers = [self.mean(answer) for answer in self.answers("critic", obs, action)]
        cost = self.log_temperature.detach().exp() * log_prob - self.climbed(answers)
        return cost[self.counts].mean(), log_prob[self.counts], log_std[self.counts]

    def wanted_entropy(self) -> float:
        target = self.config.target_entropy
        return self.reference_entropy if target is None else target

    def move_temperature(self, entropy: Tensor) -> None:
        if self.config.temperature is None:
            self.step("temperature", self.log_temperature * (entropy - self.wanted_entropy()))


class ReferenceModSAC(ReferenceSAC):
    actor_of_target = "target_actor"
    loss_mean, moves = np.log(2.0) ** 0.5, 0

    def move(self, obs: Tensor, number: int, loss: float) -> None:
        self.loss_mean = 0.995 * self.loss_mean + 0.005 * loss / self.config.num_critics
        self.moves = 0 if number == 0 else self.moves
        cost, log_prob, log_std = self.cost(obs)
        if self.moves / (number + 1) < 1 / (2 - np.exp(-(self.loss_mean**2))):
            self.moves += 1
            self.step(
                "actor", cost + self.config.std_penalty * ((log_std - log_std.mean(0)) ** 2).mean()
            )
            self.follow("actor")
        self.move_temperature(-log_prob.detach().mean())
        if self.config.temperature is None:
            self.log_temperature.data.clamp_(-16, 2)


class ReferenceDiscreteSAC(ReferenceSAC):
    reference_entropy = 0.7 * float(np.log(ACTIONS))

    def unpaid(self) -> float:
        return self.wanted_entropy() if self.config.temperature is None else 0.0

    def update(self, data: dict[str, Tensor], number: int) -> None:
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=self.network("actor", data["next_obs"]))
            value = (
                torch.stack(self.asked(self.answers("target_critic", data["next_obs"])))
                .min(0)
                .values
            )
            target = data["reward"] + data["discount"] * (
                (policy.probs * value).sum(1) + temperature * (policy.entropy() - self.unpaid())
            )
        taken = data["action"].long()[:, None]
        self.regress(
            data,
            target,
            [answer.gather(1, taken) for answer in self.answers("critic", data["obs"])],
        )
        self.follow("critic")
        policy = torch.distributions.Categorical(logits=self.network("actor", data["obs"]))
        value = self.climbed(self.answers("critic", data["obs"])).detach()
        cost = -(policy.probs * value).sum(1) - temperature * policy.entropy()
        self.step("actor", cost[self.counts].mean())
        self.move_temperature(policy.entropy()[self.counts].detach().mean())
        self.advance()


FEW_ATOMS = {"atoms": 7, "v_min": -3.0, "v_max": 3.0}
CASES = [
    ("ddpg", ReferenceTD3, {"weight_decay": 0.1}),
    ("ddpg", ReferenceTD3, {"target_noise": 3.0, "target_noise_clip": 2.0, "target_actor": False}),
    ("ddpg", ReferenceTD3, {"fit_returns": 0.3, "horizon": 2, "max_grad_norm": 0.5}),
    ("td3", ReferenceTD3, {"updates": 4}),
    ("td3", ReferenceTD3, {"updates": 4, "delay_targets": False}),
    ("td3", ReferenceTD3, {"updates": 4, "actor_learning_rate": 3e-3, "target_noise_clip": 0.1}),
    ("td3", ReferenceTD3, {"updates": 4, **FEW_ATOMS}),
    ("fast_td3", ReferenceTD3, FEW_ATOMS),
    ("sac", ReferenceSAC, {}),
    ("sac", ReferenceSAC, {"temperature": 0.3, "target_aggregate": "mean"}),
    (
        "sac",
        ReferenceSAC,
        {"temperature_learning_rate": 3e-2, "target_entropy": -1.0, "initial_temperature": 0.2},
    ),
    ("redq", ReferenceSAC, {"num_critics": 5, "updates": 4, "policy_delay": 4}),
    ("redq", ReferenceSAC, {"num_critics": 4, "updates": 4, "policy_delay": 2, **FEW_ATOMS}),
    ("fast_sac", ReferenceSAC, {"initial_temperature": 0.5, **FEW_ATOMS}),
    ("mod_sac", ReferenceModSAC, {"updates": 4}),
    (
        "mod_sac",
        ReferenceModSAC,
        {
            "updates": 4,
            "initial_temperature": 7.3,
            "temperature_learning_rate": 0.1,
            "target_entropy": 50.0,
        },
    ),
    ("mod_sac", ReferenceModSAC, {"updates": 4, "temperature": 9.0}),
    ("discrete_sac", ReferenceDiscreteSAC, {}),
    ("discrete_sac", ReferenceDiscreteSAC, {"target_entropy": 0.3}),
    ("discrete_sac", ReferenceDiscreteSAC, {"temperature": 0.3}),
    (
        "discrete_sac",
        ReferenceDiscreteSAC,
        {"num_critics": 3, "target_subset": 2, "actor_aggregate": "mean", "max_grad_norm": 0.1},
    ),
]


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize(("name", "reference", "settings"), CASES, ids=str)
def test_updates_are_those_of_plain_formulas(
    name: str, reference: Any, settings: dict[str, Any]
) -> None:
    algorithm = make(name, **settings)
    plain = reference(algorithm)
    torch.testing.assert_close(
        plain.weights["target_critic"], plain.weights["critic"], rtol=0.0, atol=0.0
    )  # where it starts
    for step in range(8):
        data, number = batch(step, name == "discrete_sac"), step % algorithm.config.updates
        algorithm.update_step(dict(data), number)
        algorithm.update_random.advance()
        algorithm.choice_random.advance()
        plain.update(data, number)
    for part, expected in plain.weights.items():
        for ours, theirs in zip(getattr(algorithm, part).parameters(), expected):
            torch.testing.assert_close(
                ours.detach(),
                theirs.detach(),
                rtol=1e-7,
                atol=1e-9,
                msg=lambda text, part=part: f"{part}: {text}",
            )
    if isinstance(plain, ReferenceSAC):
        torch.testing.assert_close(
            algorithm.temperature.log.detach(), plain.log_temperature.detach(), rtol=1e-7, atol=1e-9
        )


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac", "redq", "mod_sac", "discrete_sac"])
def test_updates_in_c_are_those_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; without a compiler both are torch's."""
    in_c, in_torch = (
        make(name, updates=4, **({"policy_delay": 4} if name == "redq" else {})) for _ in range(2)
    )
    for step in range(8):
        data = {
            column: values.float() for column, values in batch(step, name == "discrete_sac").items()
        }
        for algorithm in (in_c, in_torch):
            with monkeypatch.context() as patch:
                for module in (mlp, backend) if algorithm is in_torch else ():
                    patch.setattr(module, "use_c", lambda tensor: False)
                algorithm.update_step(dict(data), step % 4)
            algorithm.update_random.advance()
            algorithm.choice_random.advance()
    for ours, theirs in zip(in_c.parameters(), in_torch.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_step_of_mod_sacs_actor_that_is_not_due_changes_nothing_and_counts_nothing() -> None:
    algorithm = make("mod_sac", updates=2)
    assert isinstance(algorithm, ModSAC)
    algorithm.loss_mean.fill_(10.0)  # useless critics: the actor is updated every second time
    data = {name: column.float() for name, column in batch(0, discrete=False).items()}
    assert algorithm.update_step(dict(data), 0)["actor_grad_norm"] > 0.0
    optimizer = algorithm.optimizers["actor"]
    weights = optimizer.flat.clone()
    assert algorithm.update_step(dict(data), 1)["actor_grad_norm"] == 0.0
    assert torch.equal(optimizer.flat, weights)
    assert optimizer.skipped.counts.tolist() == [1, 0, 0, 0, 0]  # one step, none skipped


def test_mod_sacs_reliability_does_not_depend_on_the_number_of_critics() -> None:
    data = {name: column.float() for name, column in batch(0, discrete=False).items()}
    one = make("mod_sac", num_critics=1)
    start = one.state_dict()
    values = []
    for count in (1, 2, 10):
        algorithm = make("mod_sac", num_critics=count)
        with torch.no_grad():  # all critics are the same
            for name, tensor in algorithm.state_dict().items():
                tensor.copy_(start[name].expand_as(tensor))
        values.append(float(algorithm.update_step(dict(data), 0)["reliability"]))
    assert abs(values[0] - 0.5) > 1e-3  # the loss moves it from where it begins
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


class Quiet(SAC):
    """An own term of the actor's loss: means far from 0 cost."""

    config: SACConfig

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().actor_loss(batch)
        cost = self.actor(batch["obs"]).squeeze(0)[:, :ACTIONS].square().mean()
        return loss + 100.0 * cost, metrics | {"cost": cost.detach()}


def test_a_subclass_adds_a_term_to_a_loss() -> None:
    config = build(SACConfig, {"batch_size": ROWS, "learning_starts": ROWS})
    algorithm = Quiet(config, OBS_SPACE, ACTION_SPACE, 4, torch.device("cpu"))
    data = {column: values.float() for column, values in batch(0, False).items()}
    costs = [float(algorithm.update_step(dict(data), 0)["cost"]) for _ in range(60)]
    assert costs[-1] < 0.1 * costs[0]


def test_the_actors_loss_asks_nothing_of_the_critics_weights() -> None:
    algorithm = make("td3")
    loss, _ = algorithm.actor_loss({name: value.float() for name, value in batch(0, False).items()})
    critics, actors = list(algorithm.critic.parameters()), list(algorithm.actor.parameters())
    assert all(
        each is None
        for each in torch.autograd.grad(loss, critics, retain_graph=True, allow_unused=True)
    )
    assert all(bool(each.any()) for each in torch.autograd.grad(loss, actors))
    assert all(each.requires_grad for each in critics)


def test_critics_that_are_drawn_compute_as_the_others_and_are_no_part_of_a_checkpoint() -> None:
    algorithm = make("redq")
    algorithm.set_precision("bf16")
    (drawn,) = algorithm._drawn_critics
    assert [layer.dtype for layer in drawn.layers] == [torch.bfloat16, torch.bfloat16, None]
    assert [tuple(parameter.shape[:1]) for parameter in drawn.parameters()] == [(2,)] * 6
    owned = {id(parameter) for parameter in algorithm.parameters()}
    assert not owned & {id(parameter) for parameter in drawn.parameters()}


class RandomFeatures(nn.Module):
    """Members [E] on features of their own that never learn: a frozen layer, and a buffer."""

    def __init__(self, network: nn.Module, count: int) -> None:
        super().__init__()
        self.network = network
        next(network.parameters()).requires_grad_(False)
        self.register_buffer("scale", torch.rand(count, 1, 1))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) * self.scale


class FrozenFeatures(SAC):
    """SAC whose critics do not learn their first layer."""

    def make_critics(self, count: int) -> Any:
        return RandomFeatures(super().make_critics(count), count)


@pytest.mark.parametrize("settings", [{}, {"num_critics": 3, "target_subset": 2}])
def test_a_target_has_the_frozen_weights_and_the_buffers_of_its_network(
    settings: dict[str, Any],
) -> None:
    config = build(SACConfig, {"batch_size": ROWS, "tau": 0.1} | settings)
    algorithm = FrozenFeatures(config, OBS_SPACE, ACTION_SPACE, 4, torch.device("cpu"), seed=3)
    frozen = next(algorithm.critic.parameters())
    before = frozen.clone()
    first = {name: value.clone() for name, value in algorithm.target_critic.state_dict().items()}
    for name, value in algorithm.critic.state_dict().items():
        assert torch.equal(value, first[name]), name
    # the critics drawn for a target are some of the target critics
    inputs = torch.randn(ROWS, OBS + ACTIONS)
    with torch.no_grad():
        outputs = algorithm.target_critic(inputs)
        for drawn in algorithm.target_outputs(inputs):
            assert any(torch.allclose(drawn, each, rtol=0, atol=1e-7) for each in outputs)
    # an update averages what learns, and copies what a network counts or measures itself
    algorithm.critic.scale.mul_(2.0)
    algorithm.critic.calls.add_(5.0)
    algorithm.update_step({name: v.float() for name, v in batch(1, False).items()}, 0)
    assert torch.equal(frozen, before)
    assert torch.equal(algorithm.target_critic.scale, algorithm.critic.scale)
    assert algorithm.target_critic.calls == 5.0
    for name, target in algorithm.target_critic.named_parameters():
        weight = algorithm.critic.get_parameter(name)
        expected = first[name].lerp(weight, 0.1) if weight.requires_grad else weight
        torch.testing.assert_close(target, expected, rtol=0, atol=1e-7)


def test_the_return_that_is_fitted_is_that_of_the_rollout_and_the_value_behind_it() -> None:
    """Summed backwards row by row; a value stands where time cut an episode off and at the end of
    the rollout, nothing where it ended.
    """
    algorithm = make("td3", fit_returns=0.1, horizon=4, reward_scale=0.5, gamma=0.9)
    buffer, obs = algorithm.make_buffer(), torch.randn(4, OBS)
    terminated, truncated = torch.zeros(2, 4, 4, dtype=torch.bool)
    terminated[1, 0] = truncated[2, 1] = truncated[3, 2] = terminated[3, 3] = True
    reward, final_obs = torch.randn(4, 4), torch.randn(4, 4, OBS)
    for t in range(4):
        timestep = Timestep(
            obs, reward[t], terminated[t], truncated[t], {"final_obs": final_obs[t]}
        )
        algorithm.record_step(buffer, obs, algorithm.act(obs), timestep)
    found = algorithm.compute_extra_columns(buffer)["fit_return"]
    for env in range(4):
        after = 0.0
        for t in reversed(range(4)):
            action = algorithm.act(final_obs[t], explore=False).action
            value = float(
                algorithm.critic.forward(torch.cat((final_obs[t], action), 1)).detach().mean(0)[env]
            )
            if terminated[t, env]:
                after = 0.0
            elif truncated[t, env] or t == 3:
                after = value
            after = 0.5 * float(reward[t, env]) + 0.9 * after
            assert float(found[t, env]) == pytest.approx(after, abs=1e-5)


def test_deterministic_actors_explore_by_noise_and_stochastic_ones_by_their_own() -> None:
    obs = torch.zeros(4, OBS)
    for name, settings, std in (
        ("ddpg", {"noise_std": 0.03}, 0.03),
        ("td3", {"noise": "ladder", "noise_std_range": [0.01, 0.04]}, None),
    ):
        algorithm = make(name, **settings)
        algorithm.is_random = False
        best = algorithm.act(obs, explore=False).action
        noise = torch.stack([algorithm.act(obs).action - best for _ in range(1000)])
        expected = torch.full((4,), std) if std else torch.linspace(0.01, 0.04, 4)
        torch.testing.assert_close(noise.std((0, 2)), expected, rtol=0.1, atol=0.0)
    algorithm = make("sac")
    algorithm.is_random = False
    drawn = torch.stack([algorithm.act(obs).action for _ in range(2000)]).atanh()
    mean, log_std = algorithm.actor.forward(obs)[0].detach().chunk(2, -1)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0.0, atol=0.1)
    torch.testing.assert_close(drawn.std(0), log_std.exp(), rtol=0.1, atol=0.0)


def test_few_actions_are_numbered_from_zero() -> None:
    config = build(config_class(resolve_algorithm("sac")), {})
    with pytest.raises(
        UsageError,
        match=r"DiscreteSAC numbers actions from 0, this space is Discrete\(3, start=1\)",
    ):
        make_algorithm("sac", config, OBS_SPACE, Discrete(3, start=1), 4)
