"""Proof without a GPU that nothing waits for one: whole iterations of every algorithm and of every
torch env under FakeTensorMode.

An algorithm meets an environment in shapes and kinds of actions only: each algorithm, and each
memory, takes one environment of every kind, PPO without a memory all of them.
Fake tensors have no values, so `.item()`, `if tensor:`, `nonzero` and boolean indexing raise there.
`no_host_syncs` takes the GPU's paths.
"""

from pathlib import Path
from typing import Any

import pytest
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpurl.algorithms import algorithm_names, make_algorithm, resolve_algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.algorithms.symmetry import Symmetry
from gpurl.envs.registry import env_names, env_options, make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.load import load_symmetry
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import make_engine
from gpurl.run.trainer import Trainer
from tests.small_runs import small_settings, some_demonstrations, takes

TORCH_ENVS = [name for name in env_names() if issubclass(resolve_env(name)[0], TorchEnv)]
VARIANTS = [(name, {}) for name in TORCH_ENVS]
VARIANTS += [
    (name, {"discrete": True})
    for name in TORCH_ENVS
    if "discrete" in env_options(resolve_env(name)[0])
]


OF_EACH_KIND = [("chasing", {}), ("cart_pole", {}), ("two_step_game", {})]
CASES = [
    (algorithm, name, options)
    for name, options in VARIANTS
    for env in [make_env(name, 1, "cpu", 0, **options)]
    for algorithm in algorithm_names()
    if takes(algorithm, env.single_action_space, env.num_agents)  # others are refused
    and (algorithm == "ppo" or (name, options) in OF_EACH_KIND)
]
# images, alone and beside numbers
CASES += [("ppo", "tests.picture_envs:Seen", {}), ("dqn", "catch", {}), ("pqn", "catch", {})]
CASES += [("sac", "catch", {}), ("td3", "tests.picture_envs:Pointing", {})]


def fake_trainer(settings: Settings) -> Trainer:
    env = make_env(settings.env, settings.train.num_envs, "cpu", 0, **settings.env_options)
    spaces = (env.single_observation_space, env.single_action_space)
    count, state_space = settings.train.num_envs, env.single_state_space
    model = make_algorithm(
        settings.algorithm, settings.algorithm_config, *spaces, count, state_space=state_space
    )
    load_symmetry(model, env)
    return Trainer(settings, make_engine(settings, model, env), None, Path("unused"))


@pytest.mark.parametrize(("algorithm", "env", "options"), CASES, ids=str)
@pytest.mark.parametrize("memory", ["none", *MEMORIES])
@pytest.mark.parametrize("nan", ["raise", "skip", "reset-envs"])
def test_an_iteration_never_looks_at_a_tensor(
    algorithm: str, env: str, options: dict[str, bool], memory: str, nan: str, tmp_path: Path
) -> None:
    if nan != "raise" and (env, options) != ("chasing", {}):
        pytest.skip("the env does not matter to --nan")
    if memory != "none" and env in TORCH_ENVS and (env, options) not in OF_EACH_KIND:
        pytest.skip("the env does not matter to a memory")
    shape = small_settings(algorithm)
    if memory != "none":
        if not issubclass(resolve_algorithm(algorithm), PPO):
            pytest.skip(f"{algorithm} has no memory")
        shape["network"] = shape["network"] | {"memory": memory}
    if algorithm == "bc":
        shape["dataset"] = some_demonstrations(tmp_path, make_env(env, 1, "cpu", 0, **options))
    settings = make_settings(
        algorithm, env, num_envs=8, horizon=3, nan=nan, env_options=options, **shape
    )
    with FakeTensorMode(), no_host_syncs():
        trainer = fake_trainer(settings)
        trainer.start()
        for _ in range(2):
            metrics = trainer.iterate()
        assert metrics
        assert all(value.dim() == 0 for value in metrics.values())
        assert trainer.steps == 8 * 3 * 2


OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("ppo", "tests.tiny_envs:HiddenAlternating", {}),
    ("ppo", "tests.tiny_envs:HiddenAlternating", {"network": {"memory": "gru", "hidden": [8]}}),
    ("flash_sac", "tests.tiny_envs:HiddenAlternating", {}),
    ("ppo", "catch", {"network": {"hidden": [8], "body": "bro", "encoder": "impala"}}),
    *(
        ("ppo", "pendulum", change)
        for change in (
            {"network": {"hidden": [8, 8], "layer_norm": True}},
            {"squash": True},
            {"normalize_advantage": "minibatch"},
            {"clip_range_value": 0.2},
            {"schedule": "linear"},
            {"distribution": "beta", "symmetry": "task", "symmetry_coef": 0.1},
            {"state_dependent_std": True, "std_type": "scalar", "bounds_coef": 0.1},
        )
    ),
    ("td3", "pendulum", {"symmetry": "task"}),
    ("dqn", "cart_pole", {"symmetry": "task"}),
    *(
        ("ddpg", "pendulum", change)
        for change in (
            {"noise": "ornstein_uhlenbeck"},
            {"noise": "ladder"},
            {"noise": "episode"},
            {"target_noise": 0.2},
        )
    ),
    *(
        ("sac", "pendulum", change)
        for change in (
            {"prioritized": True, "n_step": 3, "schedule": "linear"},
            {"fit_returns": 0.1, "normalize_obs": True, "storage": "bfloat16"},
            {"atoms": 11, "temperature": 0.2, "num_critics": 4, "target_subset": 2},
            {
                "critic_network": {"hidden": [8, 8], "body": "simba"},
                "actor_network": {"hidden": [8], "body": "bro"},
            },
        )
    ),
    *(
        ("dqn", "cart_pole", change)
        for change in (
            {"quantiles": 5, "num_critics": 2, "double": False, "target_interval": 3},
            {"epsilon_ladder": True, "prioritized": True},
            {"network": {"hidden": [8], "heads": 3, "dueling": True}},
            {"network": {"hidden": [8], "action_embedding": 4}},
        )
    ),
]


@pytest.mark.parametrize(("algorithm", "env", "change"), OPTIONS, ids=str)
def test_options_do_not_look_either(
    algorithm: str, env: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Symmetry, "_check", lambda *_: None)  # at the start, once
    settings = make_settings(
        algorithm, env, num_envs=8, horizon=2, **(small_settings(algorithm) | change)
    )
    with FakeTensorMode(), no_host_syncs():
        trainer = fake_trainer(settings)
        trainer.start()
        for _ in range(2):
            assert trainer.iterate()


def test_the_proof_can_fail() -> None:
    """Under the CPU's own code paths the same iteration does look, and the mode notices."""
    settings = make_settings("ppo", "chasing", num_envs=8, horizon=2, minibatches=1)
    with FakeTensorMode():
        with no_host_syncs():
            trainer = fake_trainer(settings)
            trainer.start()
        with pytest.raises(EnvError, match="step raised D") as caught:
            trainer.iterate()
    crash = caught.value.__cause__
    assert crash is not None
    assert isinstance(crash.__cause__, (DataDependentOutputException, DynamicOutputShapeException))


def test_every_algorithm_and_every_environment_is_there() -> None:
    assert {algorithm for algorithm, _, _ in CASES} == set(algorithm_names())
    pictures = {f"tests.picture_envs:{name}" for name in ("Seen", "Pointing")}
    assert {env for _, env, _ in CASES} == {*TORCH_ENVS, *pictures}


def test_settings_of_the_proof_are_real() -> None:
    """A misspelt setting would silently prove nothing."""
    with pytest.raises(UsageError):
        make_settings("ppo", "chasing", network={"memry": "gru"})
