"""Whole iterations of training through the kernels against the same in torch: what a GPU runs is
what the references say.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms import make_algorithm
from gpurl.engine.stacked import StackedPopulation
from gpurl.envs.registry import make_env
from gpurl.kernels import (
    adam,
    backend,
    finite,
    gae,
    moments,
    newest_episodes,
    pack_rows,
    permutation,
    ppo_loss,
    random,
    replay,
    sample,
)
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_engine, make_population
from gpurl.run.trainer import Trainer
from tests.engines import running_state
from tests.kernels.triton.conftest import DEVICE, Counted


def trained(
    choice: str, env: str, iterations: int, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> dict[str, Any]:
    """The state of a run after a few iterations."""
    monkeypatch.setattr(backend, "choice", choice)
    shape = {
        "num_envs": 40,
        "horizon": 4,
        "epochs": 2,
        "minibatches": 2,
        "total_steps": 1000,
        "network": {"hidden": [16, 16]},
    }
    settings = make_settings("ppo", env, **{**shape, "schedule": "constant", **changes})
    with no_host_syncs():
        environments = make_env(env, 40, DEVICE, 0, max_episode_steps=6)
        torch.manual_seed(0)
        model = make_algorithm(
            "ppo",
            settings.algorithm_config,
            environments.single_observation_space,
            environments.single_action_space,
            40,
            DEVICE,
        )
        trainer = Trainer(
            settings, make_engine(settings, model, environments), None, Path("unused")
        )
        trainer.start()
        for _ in range(iterations):
            metrics = trainer.iterate()
        return running_state(trainer.engine) | {"metrics": metrics}


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("chasing", {"entropy_coef": 0.01}),
        ("cart_pole", {"entropy_coef": 0.01, "normalize_advantage": "minibatch"}),
        ("pendulum", {"clip_range_value": 0.2, "normalize_obs": False, "max_grad_norm": None}),
        (
            "pendulum",
            {"squash": True, "network": {"hidden": [8], "shared": True, "activation": "elu"}},
        ),
    ],
    ids=str,
)
def test_kernels_train_as_torch_does(
    env: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, expected = (
        trained(choice, env, 2, monkeypatch, **changes) for choice in ("triton", "torch")
    )
    rates = [run["algorithm"]["training"].pop("rate_settings") for run in (got, expected)]
    assert rates[0] == rates[1]  # words and no tensors
    for name in ("algorithm", "obs", "env", "statistics"):
        torch.testing.assert_close(got[name], expected[name], rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(got["metrics"], expected["metrics"], rtol=2e-3, atol=2e-4)
    assert bool(expected["statistics"]["newest"][2].any())


SHAPES: dict[str, dict[str, Any]] = {
    "ppo": {"horizon": 4, "epochs": 2, "minibatches": 2, "network": {"hidden": [16, 16]}},
    "sac": {"horizon": 2, "updates": 2, "batch_size": 16, "learning_starts": 16},
}


# of each algorithm: kernels that all members launch at once
KERNELS: dict[str, list[tuple[Any, str]]] = {
    "ppo": [
        (sample, "sample"),
        (finite, "find"),
        (newest_episodes, "keep_newest"),
        (moments, "merge_moments"),
        (moments, "normalize"),
        (gae, "gae"),
        (pack_rows, "pack_rows"),
        (permutation, "gather_rows"),
        (ppo_loss, "ppo_loss"),
    ],
    "sac": [
        (random, "random"),
        (replay, "replay_sample"),
        (finite, "find"),
        (newest_episodes, "keep_newest"),
    ],
}


def population(
    choice: str, algorithm: str, differing: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """The metrics of each iteration of three members side by side, as is the default on a GPU."""
    monkeypatch.setattr(backend, "choice", choice)
    values = {"learning_rate": [1e-3, 3e-3, 1e-2], "gamma": [0.9, 0.95, 0.99]}[differing]
    shape = {"num_envs": 8, "total_steps": 1000, "member": {differing: values}, "graph": "off"}
    shape |= SHAPES[algorithm]
    settings = make_settings(algorithm, "pendulum", population=3, **shape)
    with no_host_syncs():
        env = make_env("pendulum", 24, DEVICE, 0, max_episode_steps=6)
        spaces = env.single_observation_space, env.single_action_space
        algorithms = [
            make_algorithm(algorithm, config, *spaces, 8, DEVICE, seed=k)
            for k, config in enumerate(settings.member_configs())
        ]
        engine = make_population(settings, algorithms, env)
        engine.begin(0, staggered=True)
        return [{**engine.iterate(0.1 * number)} for number in range(4)]


@pytest.mark.parametrize(
    ("algorithm", "steps", "differing"),
    [("ppo", 4, "learning_rate"), ("sac", 2 * 3, "learning_rate"), ("sac", 2 * 3, "gamma")],
)
def test_a_stacked_population_steps_and_draws_by_kernels(
    algorithm: str, steps: int, differing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members in one launch, from the second iteration that learns on; a discount of each is no
    argument of the kernel that samples.
    """
    expected = population("torch", algorithm, differing, monkeypatch)
    grids = dict[str, list[Any]]()
    for module, name in ((adam, "norm"), *KERNELS[algorithm]):
        kernel, grids[name] = getattr(module, f"{name}_kernel"), []
        monkeypatch.setattr(module, f"{name}_kernel", Counted(kernel, grids[name]))
    got = population("triton", algorithm, differing, monkeypatch)
    assert [members for _, members in grids.pop("norm")] == [1] * 3 * steps + [3] * 3 * steps
    if differing == "gamma":
        assert {members for _, members in grids.pop("replay_sample")} == {1}
    assert {name: {grid[-1] for grid in of_kernel} for name, of_kernel in grids.items()} == {
        name: {1, 3} for name in grids
    }
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("stack", ["auto", "on"])
def test_deterministic_members_are_in_turn_unless_a_stack_is_asked_for(stack: str) -> None:
    """A resumed stack is equal up to rounding, and priorities have no fixed order in it."""
    settings = make_settings(
        "ppo", "pendulum", population=2, num_envs=8, deterministic=True, stack=stack, graph="off"
    )
    with no_host_syncs():
        env = make_env("pendulum", 16, DEVICE, 0)
        spaces = env.single_observation_space, env.single_action_space
        algorithms = [
            make_algorithm("ppo", config, *spaces, 8, DEVICE, seed=k)
            for k, config in enumerate(settings.member_configs())
        ]
        engine = make_population(settings, algorithms, env)
    assert isinstance(engine, StackedPopulation) == (stack == "on")
    assert ("no stack of members: deterministic" in engine.notes[0]) == (stack == "auto")
