"""Networks of one's own in off-policy algorithms: what replaces `self.network`, `self.actor` or
`self.critic` gets a target network, and another shape is named.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpurl import resume, train
from gpurl.algorithms import config_class
from gpurl.algorithms.dqn import DQN
from gpurl.algorithms.flash_sac import FlashSAC
from gpurl.algorithms.ppo import PPO
from gpurl.algorithms.pqn import PQN
from gpurl.algorithms.redq import REDQ
from gpurl.algorithms.sac import SAC
from gpurl.algorithms.td3 import TD3
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.export.run import export_run
from gpurl.nn.mlp import BodyConfig, make_network


class Own(nn.Module):
    """[B, D] -> [E, B, O]."""

    def __init__(self, num_inputs: int, count: int, num_outputs: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(num_inputs, num_outputs) for _ in range(count))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([member(rows) for member in self.members])


class OwnDQN(DQN):
    def make_networks(self) -> None:
        super().make_networks()
        self.network = Own(self.num_inputs, 1, self.num_actions)  # type: ignore[assignment]


class Plain(nn.Linear):
    """[B, D] -> [B, A], without an axis of networks."""


class PlainDQN(DQN):
    def make_networks(self) -> None:
        super().make_networks()
        self.network = Plain(self.num_inputs, self.num_actions)  # type: ignore[assignment]


class OtherActivation(DQN):
    """A network of gpurl's, of the same shapes."""

    def make_networks(self) -> None:
        super().make_networks()
        body = BodyConfig(hidden=self.config.network.hidden, activation="tanh")
        self.network = make_network(1, self.num_inputs, self.num_actions, body)


class OwnTarget(DQN):
    """Both, and a batch norm, whose statistics no look at the network may change."""

    def make_networks(self) -> None:
        super().make_networks()
        self.network, self.target = (  # type: ignore[assignment]
            nn.Sequential(nn.BatchNorm1d(self.num_inputs), Plain(self.num_inputs, self.num_actions))
            for _ in range(2)
        )
        self.own_target = self.target


class OwnPQN(PQN):
    def make_networks(self) -> None:
        super().make_networks()
        self.network = Own(self.num_inputs, 1, self.num_actions)  # type: ignore[assignment]


class OwnActorAndCritics(SAC):
    def make_networks(self) -> None:
        super().make_networks()
        self.actor = Own(self.num_inputs, 1, self.actor_outputs())  # type: ignore[assignment]
        self.critic = Own(self.num_inputs + self.num_actions, 2, 1)  # type: ignore[assignment]


class OwnActor(TD3):
    def make_networks(self) -> None:
        super().make_networks()
        self.actor = Own(self.num_inputs, 1, self.actor_outputs())  # type: ignore[assignment]


class Wider(DQN):
    """A network of gpurl's, of another size."""

    def make_networks(self) -> None:
        super().make_networks()
        body = BodyConfig(hidden=(24,))
        self.network = make_network(1, self.num_inputs, self.num_actions, body)


RUN: dict[str, Any] = {
    "num_envs": 8,
    "threads": 1,
    "device": "cpu",
    "quiet": True,
    "eval_episodes": 0,
}
REPLAY: dict[str, Any] = {"learning_starts": 16, "replay_size": 256, "batch_size": 8, "updates": 2}


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        (OwnDQN, "cart_pole"),
        (PlainDQN, "cart_pole"),
        (Wider, "cart_pole"),
        (OtherActivation, "cart_pole"),
        (OwnTarget, "cart_pole"),
        (OwnActorAndCritics, "pendulum"),
        (OwnActor, "pendulum"),
    ],
)
def test_a_network_of_ones_own_learns_with_a_target(kind: Any, env: str, tmp_path: Path) -> None:
    run = train(kind, env, run_dir=str(tmp_path), total_steps=400, **RUN, **REPLAY)
    algorithm = run.policy().algorithm
    pairs = [
        (getattr(algorithm, network), getattr(algorithm, target))
        for network, target in kind.target_networks.items()
    ]
    pairs = [(network, target) for network, target in pairs if target is not None]
    assert pairs
    for network, target in pairs:
        assert type(target) is type(network)
        weights = list(zip(target.parameters(), network.parameters(), strict=True))
        assert [one.shape for one in target.parameters()] == [
            one.shape for one in network.parameters()
        ]
        assert any(bool((one != other).any()) for one, other in weights)
        assert not {*target.parameters()} & {*network.parameters()}
    steps = int(resume(tmp_path, total_steps=800).policy().step)
    assert steps >= 800
    assert export_run(tmp_path, "onnx").difference is not None


WRONG: dict[str, tuple[Any, str]] = {
    "wide": (lambda values: torch.cat((values, values), 2), r"a tensor of shape \(1, \d+, 4\)$"),
    "several": (lambda values: values.repeat(3, 1, 1), r"a tensor of shape \(3, \d+, 2\)$"),
    "tuple": (lambda values: (values, values), "a tuple of 2$"),
    "nothing": (lambda values: None, "nothing$"),
}


@pytest.mark.parametrize("base", [OwnDQN, OwnPQN])
@pytest.mark.parametrize("wrong", WRONG)
def test_another_shape_is_named(base: Any, wrong: str, tmp_path: Path) -> None:
    change, returned = WRONG[wrong]

    class Changed(Own):
        def forward(self, rows: Tensor) -> Any:
            return change(super().forward(rows))

    class Algorithm(base):
        def make_networks(self) -> None:
            super().make_networks()
            self.network = Changed(self.num_inputs, 1, self.num_actions)

    message = (
        r"Algorithm.network: wanted a tensor of shape \(1, \d+, 2\): networks, rows, outputs; "
    )
    message += f"Changed returned {returned}"
    with pytest.raises(UsageError, match=message):
        train(Algorithm, "cart_pole", run_dir=str(tmp_path), **RUN)


def test_a_target_of_the_same_function_is_a_copy_and_one_of_ones_own_is_kept() -> None:
    task = make_env("cart_pole", 4, "cpu", 0)
    spaces = task.single_observation_space, task.single_action_space
    other = OtherActivation(config_class(DQN)(), *spaces, 4, torch.device("cpu"))
    rows = torch.randn(5, 4)
    assert torch.equal(other.network(rows), other.target(rows))
    own = OwnTarget(config_class(DQN)(), *spaces, 4, torch.device("cpu"))
    assert own.target is own.own_target
    assert int(own.network.state_dict()["0.num_batches_tracked"]) == 0


class OwnCritics(REDQ):
    def make_networks(self) -> None:
        super().make_networks()
        count = self.config.num_critics
        self.critic = Own(self.num_inputs + self.num_actions, count, 1)  # type: ignore[assignment]


class OwnFlash(FlashSAC):
    def make_networks(self) -> None:
        super().make_networks()
        self.actor = Own(self.num_inputs, 1, self.actor_outputs())  # type: ignore[assignment]


def test_critics_of_ones_own_are_not_drawn(tmp_path: Path) -> None:
    settings = {"total_steps": 100, **RUN, **REPLAY}
    with pytest.raises(
        UsageError, match=r"OwnCritics\.critic is a Own, .* or set target_subset to"
    ):
        train(OwnCritics, "pendulum", run_dir=str(tmp_path / "a"), **settings)
    train(
        OwnCritics,
        "pendulum",
        run_dir=str(tmp_path / "b"),
        num_critics=5,
        target_subset=5,
        **settings,
    )


def test_weights_of_ones_own_have_any_length(tmp_path: Path) -> None:
    run = train(OwnFlash, "pendulum", run_dir=str(tmp_path), total_steps=100, **RUN, **REPLAY)
    assert run.policy().step >= 100


def test_networks_that_are_returned_are_no_attributes(tmp_path: Path) -> None:
    class Returns(PPO):
        def make_networks(self) -> Any:
            super().make_networks()
            return nn.Linear(3, 2)

    with pytest.raises(UsageError, match=r"Returns\.make_networks: wanted modules as attributes"):
        train(Returns, "cart_pole", run_dir=str(tmp_path), **RUN)
