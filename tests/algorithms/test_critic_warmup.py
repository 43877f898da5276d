"""`critic_warmup`: at first only the critics learn, whatever engine computes; then all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.algorithms.ppo import PPO
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer as trainer_of
from gpurl.run.trainer import Trainer
from tests.engines import graph_level
from tests.fake_graphs import FakeGraphs
from tests.small_runs import assert_same, small_settings

CPU = torch.device("cpu")
WARM_UP = 3
PPO_SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"network": {"hidden": [8], "shared": True}},
    "gru": {"network": {"hidden": [8], "memory": "gru", "memory_size": 4}},
    "privileged": {},
    "trunk": {"network": {"trunk": "tests.algorithms.test_critic_warmup:Trunk"}},
}


class Trunk(torch.nn.Module):
    """A network of one's own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(shape[0], 6)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).tanh()


class OwnNetwork(PPO):
    """Whose weights are whose only its author knows."""

    def make_networks(self) -> None:
        super().make_networks()
        self.network = torch.nn.Linear(3, 2)  # type: ignore[assignment]


def make_trainer(name: str, env: str = "pendulum", backend: Any = None, **changes: Any) -> Trainer:
    settings: dict[str, Any] = small_settings(name) | {
        "num_envs": 8,
        "horizon": 8,
        "threads": 1,
        "learning_rate": 1e-3,
        "critic_warmup": WARM_UP,
    }
    settings |= {"weight_decay": 0.1} | changes
    trainer = trainer_of(make_settings(name, env, **settings), CPU, backend=backend)
    trainer.start()
    trainer.algorithm.actor_is_transferred = True  # as after init_from
    return trainer


def actor_of(algorithm: Any) -> dict[str, Tensor]:
    """What the actor consists of, the normaliser of what it reads too."""
    state = {name: value.clone() for name, value in algorithm.state_dict().items()}
    if not isinstance(algorithm, PPO):
        kept = ("actor.", "target_actor.", "temperature.", "normalizer.")
        return {name: value for name, value in state.items() if name.startswith(kept)}
    actor = {name: value for name, value in state.items() if not name.startswith("value_norm")}
    owned = [name for name in actor if ".critic" in name or name.startswith("network.trunks.1")]
    for name in owned:
        del actor[name]
    for name in actor:
        is_stacked = name.startswith("network.trunk.") and len(actor[name]) == 2
        actor[name] = actor[name][0] if is_stacked else actor[name]
        if name.startswith("normalizer.") and actor[name].dim():
            actor[name] = actor[name][: algorithm.num_inputs]
    actor.pop("normalizer.count", None)
    return actor


def critic_of(algorithm: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in algorithm.parts()["critic"].tensors]


@pytest.mark.parametrize("engine", ["fast", "eager"])
@pytest.mark.parametrize("shape", PPO_SHAPES)
def test_the_actor_of_ppo_stays_to_the_bit(
    shape: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "eager":
        monkeypatch.setattr("gpurl.engine.choose.cpu_ppo_obstacle", lambda algorithm: "not wanted")
    env = "tests.tiny_envs:HiddenAlternating" if shape == "privileged" else "pendulum"
    trainer = make_trainer("ppo", env, minibatches=2, **PPO_SHAPES[shape])
    algorithm: Any = trainer.algorithm
    if shape == "plain":
        assert trainer.engine.name == ("C" if engine == "fast" else "eager")
    trainer.iterate()  # the first one measures returns
    actor, critic = actor_of(algorithm), critic_of(algorithm)
    rate = float(algorithm.optimizer.learning_rate)
    for _ in range(WARM_UP - 1):
        trainer.iterate()
    assert_same(actor_of(algorithm), actor)
    assert any(not torch.equal(*pair) for pair in zip(critic_of(algorithm), critic))
    # schedule kl, which sees a policy that does not move, has left the rate alone
    assert float(algorithm.optimizer.learning_rate) == rate == pytest.approx(1e-3)
    trainer.iterate()
    moved = actor_of(algorithm)
    assert all(not torch.equal(moved[name], actor[name]) for name in actor if "weight" in name)


def test_the_first_step_of_the_actor_is_one_learning_rate_long() -> None:
    """Adam's first step is. Were its moments those of frozen weights, which are 0, its bias
    correction would enlarge the first steps up to 6 times.
    """
    trainer = make_trainer(
        "ppo", epochs=1, minibatches=1, schedule="constant", critic_warmup=60, weight_decay=0.0
    )
    algorithm: Any = trainer.algorithm
    for _ in range(60):
        trainer.iterate()
    before = actor_of(algorithm)["network.actor.weight"]
    trainer.iterate()
    step = (actor_of(algorithm)["network.actor.weight"] - before).abs()
    torch.testing.assert_close(step, torch.full_like(step, 1e-3), rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "mod_sac", "flash_sac", "redq", "fast_sac"])
def test_actors_of_replaying_algorithms_stay_too(name: str) -> None:
    trainer = make_trainer(name, learning_starts=200, horizon=2, normalize_obs=True)
    algorithm: Any = trainer.algorithm
    actor, critic = actor_of(algorithm), critic_of(algorithm)
    while algorithm.warms_critic:
        trainer.iterate()
        assert_same(actor_of(algorithm), actor)
    # iterations that fill the replay buffer are not counted
    assert trainer.steps == 8 * 2 * (13 + WARM_UP - 1)
    assert int(algorithm.optimizers["critic"].state.step) == WARM_UP * algorithm.config.updates
    assert any(not torch.equal(*pair) for pair in zip(critic_of(algorithm), critic))
    trainer.iterate()
    moved = actor_of(algorithm)
    has_moved = {key: not torch.equal(moved[key], actor[key]) for key in actor}
    assert all(moves for key, moves in has_moved.items() if "weight" in key)
    assert has_moved["normalizer.mean"]


@pytest.mark.parametrize("level", ["full", "policy"])
def test_graphs_are_captured_afterwards(level: str) -> None:
    changes: dict[str, Any] = {"minibatches": 2, "update": "autograd", "rollout": "steps"}
    with no_host_syncs():
        expected = make_trainer("ppo", graph="off", **changes)
        trainer = make_trainer("ppo", graph=level, backend=FakeGraphs(), **changes)
        for number in range(9):
            expected.iterate()
            trainer.iterate()
            assert_same(dict(trainer.algorithm.state_dict()), dict(expected.algorithm.state_dict()))
            assert (graph_level(trainer.engine) == "") == (number <= WARM_UP + 2), number
    assert graph_level(trainer.engine) == level, trainer.engine.notes


def test_a_network_that_does_not_say_whose_its_weights_are() -> None:
    name = "tests.algorithms.test_critic_warmup:OwnNetwork"
    with pytest.raises(UsageError, match=r"critic_warmup 3 needs to know .* network Linear"):
        make_trainer(name)
    with pytest.raises(UsageError, match="critic_warmup must be at least 0"):
        make_trainer("ppo", critic_warmup=-1)


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_observations_of_a_new_actor_are_measured(name: str) -> None:
    """Else its critic would learn from inputs that are others after the warm-up."""
    trainer = make_trainer(name, normalize_obs=True)
    learner: Any = trainer.algorithm
    learner.actor_is_transferred = False
    for _ in range(WARM_UP):
        trainer.iterate()
    assert learner.normalizer.mean.abs().min() > 0.0
