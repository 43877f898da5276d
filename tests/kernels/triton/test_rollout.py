"""Rollouts by one kernel against the loop of the trainer, in torch: same random bits, same actions,
all that is stored.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.engine.persistent import PersistentRollout, persistent_obstacle
from gpurl.envs.registry import make_env
from gpurl.kernels import backend
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.env_step import TritonEnv
from gpurl.kernels.rollout import PolicyShape, rollout_obstacle
from gpurl.nn.actor_critic import ActorCritic, NetworkConfig
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_engine
from gpurl.run.trainer import Trainer
from tests.engines import running_state
from tests.kernels.triton.conftest import DEVICE

NUM_ENVS, HORIZON = 41, 7


def make_trainer(env: str, options: dict[str, Any], **changes: Any) -> Trainer:
    shape = {
        "num_envs": NUM_ENVS,
        "horizon": HORIZON,
        "minibatches": 1,
        "total_steps": 10_000,
        "network": {"hidden": [16, 32]},
    }
    settings = make_settings("ppo", env, **{**shape, **changes}, env_options=options)
    environments = make_env(env, NUM_ENVS, DEVICE, 0, max_episode_steps=9, **options)
    torch.manual_seed(1)
    model = make_algorithm(
        "ppo",
        settings.algorithm_config,
        environments.single_observation_space,
        environments.single_action_space,
        NUM_ENVS,
        DEVICE,
        seed=2,
    )
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))  # weights as training leaves them
    return Trainer(settings, make_engine(settings, model, environments), None, Path("unused"))


def played(
    env: str, options: dict[str, Any], rollout: str, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> dict[str, Any]:
    """Two rollouts, and what is left behind."""
    monkeypatch.setattr(backend, "choice", "triton" if rollout == "persistent" else "torch")
    with no_host_syncs():
        trainer = make_trainer(env, options, rollout=rollout, **changes)
        if trainer.algorithm.normalizer is not None:
            trainer.algorithm.normalizer.update(
                torch.randn(50, *trainer.env.single_observation_space.shape) * 3 + 1
            )
            trainer.algorithm.value_normalizer.update(torch.randn(50, 1) * 4 + 2)
        trainer.start()
        assert isinstance(trainer.engine, PersistentRollout) == (rollout == "persistent")
        rollouts = []
        for _ in range(2):
            trainer.engine.collect()
            assert trainer.engine.buffer.is_full
            columns = {
                name: column.clone() for name, column in trainer.engine.buffer.columns.items()
            }
            columns["final_value"] = trainer.algorithm.final_values(trainer.engine.buffer).clone()
            rollouts.append(columns)
            trainer.engine.buffer.clear()
        return {"rollouts": rollouts, **running_state(trainer.engine)}


CASES = [
    ("chasing", {}, {}),
    (
        "chasing",
        {"dim": 1, "discrete": True},
        {"network": {"hidden": [16], "activation": "relu", "shared": True}},
    ),
    ("cart_pole", {}, {"network": {"hidden": [16, 16, 16], "activation": "elu"}}),
    ("cart_pole", {"velocities": False}, {"normalize_obs": False, "normalize_value": False}),
    ("pendulum", {}, {"initial_std": 3.0, "num_envs": NUM_ENVS}),
]


@pytest.mark.parametrize(("env", "options", "changes"), CASES, ids=str)
def test_one_launch_plays_what_the_loop_plays(
    env: str, options: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, expected = (
        played(env, options, rollout, monkeypatch, **changes) for rollout in ("persistent", "steps")
    )
    for number, (one, other) in enumerate(zip(got["rollouts"], expected["rollouts"])):
        used = other["truncated"].clone()
        used[-1] = True
        other["final_value"] = torch.where(used, other["final_value"], 0.0)
        for name, column in one.items():
            torch.testing.assert_close(
                column,
                other[name],
                rtol=1e-4,
                atol=1e-4,
                msg=lambda text, name=name, n=number: f"{n} {name}: {text}",
            )
    got["random"], expected["random"] = (
        run["algorithm"]["training"]["random"]["action"] for run in (got, expected)
    )
    for name in ("env", "obs", "statistics", "random"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
    assert float(expected["statistics"]["newest"][2].sum()) > 20


def test_values_that_are_not_numbers_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that diverged gives NaN, which the guard then sees; nothing turns it into a
    number.
    """
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        for activation in ("tanh", "elu", "relu"):
            trainer = make_trainer(
                "pendulum", {}, network={"hidden": [16, 16], "activation": activation}
            )
            trainer.start()
            trainer.algorithm.network.trunk.layers[0].bias.data[:, :, 3] = torch.nan
            trainer.engine.collect()
            for name in ("action", "value", "final_value"):
                column = trainer.engine.buffer[name]
                assert bool(column[-1].isnan().all()), (activation, name)


def test_shapes_it_cannot_play_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    shape = PolicyShape((64, 64), "tanh", 2, False, False, None)
    env = make_env("chasing", 4, DEVICE)
    env.reset()
    in_triton = env.in_triton()

    def reason(env: TritonEnv = in_triton, **changes: Any) -> str:
        return rollout_obstacle(env, shape._replace(**changes))

    assert reason() == ""
    assert reason(sizes=()) == "it needs a hidden layer"
    assert (
        reason(sizes=(64, 48)) == "it takes layers of powers of two from 16 to 64 units, not of 48"
    )
    assert reason(sizes=(256, 64)).endswith("not of 256")
    assert reason(num_outputs=65) == "it takes 64 observations or outputs, not 65"
    assert reason(in_triton._replace(obs_width=66)) == "it takes 64 observations or outputs, not 66"
    assert (
        reason(in_triton._replace(states=(torch.zeros(4, 25),)))
        == "it takes environments of 24 numbers, not of 25"
    )


@pytest.mark.parametrize(
    ("env", "changes", "reason"),
    [
        ("acrobot", {}, "Acrobot has no Triton functions"),
        ("pendulum", {"squash": True}, "does not know TanhGaussian actions"),
        ("pendulum", {"network": {"memory": "gru"}}, "without memory"),
        ("pendulum", {"network": {"hidden": [24]}}, "not of 24"),
    ],
)
def test_where_there_is_none_a_line_says_why(
    env: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        for rollout in ("persistent", "auto"):
            trainer = make_trainer(env, {}, rollout=rollout, **changes)
            trainer.start()
            assert not isinstance(trainer.engine, PersistentRollout)
            assert [reason in note for note in trainer.engine.notes] == [True]


class OwnNetwork(ActorCritic):
    """Another function, perhaps."""


def test_what_is_not_ppos_own_policy_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        trainer = make_trainer("pendulum", {})
        trainer.start()
        assert persistent_obstacle(trainer.algorithm, trainer.env) == ""
        network = NetworkConfig(hidden=(16, 32))
        trainer.algorithm.network = OwnNetwork(network, 3, 1)
        expected = "it does not know the network OwnNetwork"
        assert persistent_obstacle(trainer.algorithm, trainer.env) == expected


@pytest.mark.parametrize("method", ["act", "value", "inputs", "_forward", "record_step", "loss"])
def test_a_subclass_that_acts_in_another_way_is_not_played(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The kernel would collect with PPO's policy and learn with the subclass's."""
    monkeypatch.setattr(backend, "choice", "triton")
    with no_host_syncs():
        trainer = make_trainer("pendulum", {})
        trainer.start()
        algorithm = trainer.algorithm
        algorithm.__class__ = type("MyPPO", (PPO,), {method: getattr(PPO, method)})
        algorithm.label = "MyPPO"
        expected = "" if method == "loss" else f"MyPPO overrides {method}"
        assert persistent_obstacle(algorithm, trainer.env) == expected
