"""Behaviour cloning: gradients against autograd, optima against closed forms, and settings that
cannot work.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn import functional

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.bc import BC, BCConfig
from gpurl.errors import UsageError
from gpurl.nn.action_scaler import ActionScaler
from gpurl.run.settings import build

OBS, ACTIONS, ROWS = 5, 2, 64
OBS_SPACE, ACTION_SPACE = (
    Box(-np.inf, np.inf, (OBS,), np.float32),
    Box(-1.0, 1.0, (ACTIONS,), np.float32),
)


def make(space: Any = ACTION_SPACE, num_obs: int = OBS, **settings: Any) -> BC:
    """By itself: no dataset is read, batches are given by hand."""
    obs_space = Box(-np.inf, np.inf, (num_obs,), np.float32)
    algorithm = make_algorithm("bc", build(BCConfig, settings), obs_space, space, 4, seed=3)
    assert isinstance(algorithm, BC)
    return algorithm


def fit(algorithm: BC, obs: Tensor, action: Tensor, steps: int, rate: float) -> float:
    """Steps over the whole of the data at a rate that falls to 0; returns the last loss."""
    batch = {"obs": obs, "action": action, "weight": torch.ones(len(obs))}
    for step in range(steps):
        algorithm.optimizers["actor"].learning_rate.fill_(rate * (1.0 - step / steps))
        metrics = algorithm.update_step(batch, 0)
    return float(metrics["actor_loss"])


# ---- gradients ----


def deterministic(output: Tensor, action: Tensor) -> Tensor:
    return functional.mse_loss(output.tanh(), action, reduction="none").mean(1)


def squashed(output: Tensor, action: Tensor) -> Tensor:
    mean, log_std = output.chunk(2, 1)
    return (
        -TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
        .log_prob(action)
        .sum(1)
    )


def chosen(output: Tensor, action: Tensor) -> Tensor:
    return functional.cross_entropy(
        output, action.long(), reduction="none"
    ) + 0.3 * output.square().mean(1)


def chosen_each(output: Tensor, action: Tensor) -> Tensor:
    parts = zip(output.split((3, 2), 1), action.long().unbind(1))
    return sum(
        functional.cross_entropy(*part, reduction="none") for part in parts
    ) + 0.3 * output.square().mean(1)


CASES = [
    (ACTION_SPACE, {"head": "deterministic"}, deterministic),
    (ACTION_SPACE, {"head": "squashed", "max_grad_norm": 0.5}, squashed),
    (Discrete(3), {"logit_penalty": 0.3}, chosen),
    (MultiDiscrete([3, 2]), {"logit_penalty": 0.3}, chosen_each),
]


@pytest.mark.parametrize(
    ("space", "settings", "loss"),
    CASES,
    ids=["deterministic", "squashed", "discrete", "multi-discrete"],
)
@pytest.mark.usefixtures("_in_float64")
def test_updates_are_those_of_autograd(
    space: Any, settings: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    algorithm = make(
        space,
        learning_rate=1e-2,
        actor_network={"hidden": [8, 8], "activation": "tanh"},
        **settings,
    )
    weights = [weight.detach().clone().requires_grad_() for weight in algorithm.actor.parameters()]
    optimizer, generator = torch.optim.Adam(weights, lr=1e-2), torch.Generator().manual_seed(0)
    for _ in range(8):
        obs = torch.randn(ROWS, OBS, generator=generator)
        weight = (torch.rand(ROWS, generator=generator) < 0.8).double()
        action = torch.rand(ROWS, ACTIONS, generator=generator) * 1.998 - 0.999
        if not isinstance(space, Box):
            action = (
                torch.rand(ROWS, ACTIONS, generator=generator) * torch.tensor([3.0, 2.0])
            ).floor()
            action = action if isinstance(space, MultiDiscrete) else action[:, 0]
        rows = algorithm.head.loss(algorithm.actor(obs).squeeze(0), action).detach()
        metrics = algorithm.update_step({"obs": obs, "action": action, "weight": weight}, 0)
        x = obs
        for layer, bias in zip(weights[0:-2:2], weights[1:-2:2]):
            x = functional.linear(x, layer[0], bias[0, 0]).tanh()
        expected = loss(functional.linear(x, weights[-2][0], weights[-1][0, 0]), action)
        optimizer.zero_grad()
        mean = (expected * weight).sum() / weight.sum()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, algorithm.config.max_grad_norm or 1e9)
        optimizer.step()
        torch.testing.assert_close(rows, expected.detach())
        torch.testing.assert_close(
            torch.stack((metrics["actor_loss"], metrics["grad_norm"])),
            torch.stack((mean, norm)).detach(),
        )
    for ours, theirs in zip(algorithm.actor.parameters(), weights):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-10)


# ---- optima that are known ----


@pytest.mark.usefixtures("_in_float64")
def test_a_linear_expert_with_noise_is_found_by_least_squares() -> None:
    """u = Wx + b +- s with both signs at every x: most likely are the least-squares solution for
    atanh(a) and the deviation s.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, OBS, generator=generator)
    weight, bias, noise = (
        torch.randn(OBS, ACTIONS, generator=generator) * 0.3,
        torch.tensor([0.2, -0.1]),
        torch.tensor([0.3, 0.1]),
    )
    u = torch.cat((x @ weight + bias + noise, x @ weight + bias - noise))
    obs = torch.cat((x, x))
    inputs = torch.cat((obs, torch.ones(len(obs), 1)), 1)
    solution = torch.linalg.lstsq(inputs, u).solution
    deviation = (u - inputs @ solution).square().mean(0).sqrt()
    algorithm = make(actor_network={"hidden": []}, head="squashed")
    fit(algorithm, obs, u.tanh(), 1500, 5e-2)
    output = algorithm.actor.forward(obs)[0].detach()
    torch.testing.assert_close(output[:, :ACTIONS], inputs @ solution, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        output[:, ACTIONS:], deviation.log().expand(len(obs), ACTIONS), rtol=0, atol=1e-4
    )


@pytest.mark.usefixtures("_in_float64")
def test_squared_error_goes_to_its_least() -> None:
    """tanh(Wx + b) against actions with noise: where Newton's method ends that knows nothing of
    this program.
    """
    generator = torch.Generator().manual_seed(2)
    obs = torch.randn(300, OBS, generator=generator)
    action = (
        (obs @ torch.randn(OBS, ACTIONS, generator=generator)).tanh()
        + 0.3 * torch.randn(300, ACTIONS, generator=generator)
    ).clamp(-1, 1)
    algorithm = make(actor_network={"hidden": []}, head="deterministic")
    fit(algorithm, obs, action, 1500, 1e-1)
    weights = torch.zeros(OBS + 1, ACTIONS, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        lr=1.0,
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (((obs @ weights[:OBS] + weights[OBS]).tanh() - action) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    ours = algorithm.actor.forward(obs)[0].detach()
    torch.testing.assert_close(
        ours, (obs @ weights[:OBS] + weights[OBS]).detach(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([4, 3])], ids=str)
@pytest.mark.usefixtures("_in_float64")
def test_cross_entropy_ends_at_the_conditional_entropy_of_the_data(space: Any) -> None:
    """H(action | obs) by counting, of independent choices its sum; each obs is one of six, so every
    distribution can be said.
    """
    generator, sizes = torch.Generator().manual_seed(3), (4, 3)
    state = torch.randint(6, (600,), generator=generator)
    chances = [torch.randn(6, size, generator=generator).softmax(1) for size in sizes]
    columns = [
        torch.multinomial(chance[state], 1, generator=generator).squeeze(1) for chance in chances
    ]
    columns = columns if isinstance(space, MultiDiscrete) else columns[:1]
    expected = 0.0
    for column, size in zip(columns, sizes):
        counts = torch.zeros(6, size).index_put_((state, column), torch.ones(600), accumulate=True)
        expected += float(
            torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1) @ counts.sum(1) / 600
        )
    algorithm = make(space, 6, actor_network={"hidden": []}, logit_penalty=0.0)
    action = (
        torch.stack(columns, 1).double()
        if isinstance(space, MultiDiscrete)
        else columns[0].double()
    )
    loss = fit(algorithm, functional.one_hot(state, 6).double(), action, 600, 5e-2)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert loss >= expected - 1e-12


def test_units_go_to_the_environment_and_back() -> None:
    low, high = (
        np.array([[-2.0, 0.0], [-1.0, 3.0]], np.float32),
        np.array([[2.0, 10.0], [1.0, 3.0]], np.float32),
    )
    box = ActionScaler(Box(low, high))
    action = torch.rand(7, 4) * 2 - 1
    there = box.to_env(action)
    assert there.shape == (7, 2, 2)
    back = box.from_env(there)
    torch.testing.assert_close(back[:, :3], action[:, :3])
    assert back[:, 3].tolist() == [0.0] * 7  # of a dimension with one action only


# ---- what is refused ----

SPACES: dict[str, Any] = {
    "box": ACTION_SPACE,
    "unbounded": Box(-np.inf, np.inf, (2,)),
    "late": Discrete(3, start=1),
}


@pytest.mark.parametrize(
    ("space", "settings", "message"),
    [
        (
            "box",
            {},
            "bc needs either a dataset or a teacher; got dataset None and teacher None",
        ),
        (
            "box",
            {"dataset": "a.npz", "teacher": "b"},
            "either a dataset or a teacher; got dataset a.npz and teacher b",
        ),
        (
            "box",
            {"dataset": "a.npz", "dagger": True},
            "dagger needs a teacher .* got dataset a.npz: give a teacher instead",
        ),
        ("box", {"dataset": "a.npz"}, "cannot read the dataset a.npz: .*No such file"),
        ("unbounded", {"dataset": "a.npz"}, "BC needs a bounded Box action space"),
        ("late", {"dataset": "a.npz"}, "BC numbers actions from 0"),
        ("box", {"n_step": 3}, "bc clones actions, so n_step 3 would have no .*: leave out n_step"),
        ("box", {"reward_scale": 0.1}, "reward_scale 0.1 .*: leave out reward_scale"),
        ("box", {"prioritized": True}, "prioritized True .*: leave out prioritized"),
        (
            "box",
            {"head": "normal"},
            "head is 'normal'; it must be one of squashed, deterministic, gaussian",
        ),
        ("box", {"logit_penalty": -1.0}, "logit_penalty must be at least 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(space: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(SPACES[space], **settings).make_buffer()


def test_the_sizes_of_a_replay_buffer_do_not_matter_to_a_dataset() -> None:
    small = {"learning_starts": 10, "replay_size": 20}
    assert make(dataset="a.npz", batch_size=8192, **small).config.batch_size == 8192
    with pytest.raises(UsageError, match="batch_size 8192 is more than learning_starts 10"):
        make(teacher=["a"], batch_size=8192, **small)
